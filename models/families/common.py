"""What all families' configs share: sizes, ids, and the rule that layer types follow."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.models.attention_kind import GroupedQueryAttention
from jaxserve.models.config_reader import ConfigReader
from jaxserve.models.mlp_kind import GatedMlp
from jaxserve.models.rope import MAX_POSITION, flat_rope
from jaxserve.models.spec import LayerGroup, LayerSpec, ModelSpec

_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

MAX_LAYERS = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes that other parts of a config are read by."""

    num_layers: int
    head_dim: int
    max_position: int


def read_sizes(config: ConfigReader) -> Sizes:
    """Layers, head dim and context length. Without ``head_dim`` the heads share the width."""
    width = config.integer("hidden_size", low=1, high=2**17)
    num_heads = config.integer("num_attention_heads", low=1, high=1024)
    if not config.has("head_dim") and width % num_heads:
        raise config.error("num_attention_heads", f"must divide hidden_size = {width} where no head_dim is given")
    head_dim = config.integer("head_dim", low=2, high=1024, default=width // num_heads)
    if head_dim % 2:
        raise config.error("head_dim" if config.has("head_dim") else "hidden_size", f"makes a head dim of {head_dim}; it must be even")
    return Sizes(
        num_layers=config.integer("num_hidden_layers", low=1, high=MAX_LAYERS),
        head_dim=head_dim,
        max_position=config.integer("max_position_embeddings", low=1, high=MAX_POSITION),
    )


def read_decoder(
    config: ConfigReader,
    family: str,
    *,
    activation_key: str = "hidden_act",
    tied: bool = False,
    layers: Sequence[LayerSpec] | None = None,
    attention: Mapping[str, Any] | None = None,
    mlp: Mapping[str, Any] | None = None,
    **differences: Any,
) -> ModelSpec:
    """A spec from the keys that all families share, its layers all of one kind.

    Args:
        config: The whole config.
        family: Name of the family.
        activation_key: Where the family keeps its activation.
        tied: What the family means when it does not say.
        layers: What differs from layer to layer; without it no layer has a window.
        attention: Fields of the kind of attention that the family sets itself.
        mlp: The same of the kind of MLP.
        differences: The same of the spec; ``ropes`` of one kind are the default.
    """
    sizes = read_sizes(config)
    num_heads = config.integer("num_attention_heads", low=1, high=1024)
    num_kv_heads = config.integer("num_key_value_heads", low=1, high=1024, default=num_heads)
    if num_heads % num_kv_heads:
        raise config.error("num_key_value_heads", f"must divide num_attention_heads = {num_heads}")
    vocab_size = config.integer("vocab_size", low=1, high=2**22)
    bos_token_ids = config.token_ids("bos_token_id", vocab_size=vocab_size)
    if len(bos_token_ids) > 1:
        raise config.error("bos_token_id", "must be one token id")
    max_position = sizes.max_position
    if "ropes" not in differences:
        rope, max_position = flat_rope(config, head_dim=sizes.head_dim, max_position=max_position)
        differences["ropes"] = (rope,)
    heads: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": sizes.head_dim, "scale": sizes.head_dim**-0.5}
    gated: dict[str, Any] = {
        "width": config.integer("intermediate_size", low=1, high=2**20), "activation": config.choice(activation_key, _ACTIVATIONS),
    }  # fmt: skip
    group = LayerGroup.uniform(
        GroupedQueryAttention(**(heads | dict(attention or {}))), GatedMlp(**(gated | dict(mlp or {}))), tuple(layers or [LayerSpec()] * sizes.num_layers)
    )
    fields: dict[str, Any] = {
        "family": family,
        "vocab_size": vocab_size,
        "width": config.integer("hidden_size", low=1, high=2**17),
        "groups": (group,),
        "max_position": max_position,
        "norm_eps": config.number("rms_norm_eps", low=1e-12, high=1.0),
        "tied": config.flag("tie_word_embeddings", default=tied),
        "bos_token_id": bos_token_ids[0] if bos_token_ids else None,
        "eos_token_ids": config.token_ids("eos_token_id", vocab_size=vocab_size),
    }
    return ModelSpec(**(fields | differences))


def read_layer_types(config: ConfigReader, num_layers: int, default: Sequence[bool]) -> tuple[bool, ...]:
    """Which layers are local: ``layer_types`` where it is given, else the family's own rule."""
    names = config.strings("layer_types")
    if names is None:
        return tuple(default)
    kinds = {"full_attention": False, "sliding_attention": True}
    unknown = [name for name in names if name not in kinds]
    if unknown:
        raise config.error("layer_types", f"holds {unknown[0]!r}; supported: {', '.join(kinds)}")
    if len(names) != num_layers:
        raise config.error("layer_types", f"has {len(names)} entries; num_hidden_layers = {num_layers}")
    return tuple(kinds[name] for name in names)


def read_window(config: ConfigReader, default: int | None) -> int | None:
    """``sliding_window`` in tokens; null is no window."""
    if config.is_null("sliding_window"):
        return None
    return config.integer("sliding_window", low=1, high=MAX_POSITION, default=default)

"""The specification of a decoder in plain numbers. ``models/hf_config.py`` makes it from a Hugging Face config; everything else reads it. No arrays here."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxserve.models.attention_kind import AttentionKind
from jaxserve.models.mlp_kind import MlpKind


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """The rotary embedding of one kind of layer.

    Args:
        inv_freq: The ``H / 2`` inverse frequencies in radians for each token, with every scaling rule applied.
        attention_factor: Factor of cosines and sines (YaRN and LongRoPE; else 1).
    """

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """The numbers that may differ between layers of one kind. Since they are only numbers, the layers share one compiled body.

    Args:
        window: Number of tokens that a token sees: itself and the ``window - 1`` tokens before it; ``None`` for all.
        rope: Index of the rotary embedding in ``ModelSpec.ropes``.
    """

    window: int | None = None
    rope: int = 0

    def seen(self, context: float) -> float:
        """The number of tokens that a token at the end of ``context`` tokens sees."""
        return context if self.window is None else min(context, self.window)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerKind:
    """The kind of a layer, which decides its parameters and its computation. Layers of one kind share a compiled body.

    Args:
        attention: The kind of its attention.
        mlp: The kind of its MLP.
    """

    attention: AttentionKind
    mlp: MlpKind


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """A group of consecutive layers that run as one loop. The body of the loop, the unit, has one layer or several.

    Args:
        unit: The kind of each layer of the unit.
        layers: The layers in order, a whole number of units.
    """

    unit: tuple[LayerKind, ...]
    layers: tuple[LayerSpec, ...]

    def __post_init__(self) -> None:
        assert self.layers and len(self.layers) % len(self.unit) == 0, f"{len(self.layers)} layers are no whole number of units of {len(self.unit)}"

    @classmethod
    def uniform(cls, attention: AttentionKind, mlp: MlpKind, layers: tuple[LayerSpec, ...]) -> LayerGroup:
        """A group whose layers are all of one kind."""
        return cls(unit=(LayerKind(attention=attention, mlp=mlp),), layers=layers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stack:
    """The layers of a group that have the same place in its unit. They are of one kind, and in the form ``scan`` their parameters are stacked arrays.

    Args:
        kind: The kind of these layers.
        layers: Their indices in the model.
    """

    kind: LayerKind
    layers: range


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The specification of a decoder-only transformer. Letters are those of ``jaxserve.dims``.

    Args:
        family: Name of the family.
        vocab_size: V, the size of the vocabulary in the checkpoint.
        width: D, the width of the residual stream.
        groups: The layers, in order. All have the same kind of attention, because they share one page table and one pool.
        max_position: The model's context length in tokens.
        norm_eps: Added to the mean square in every RMSNorm.
        ropes: The kinds of rotary embedding that layers refer to.
        post_norms: Whether each block's output gets a second RMSNorm before the residual sum (Gemma).
        norm_offset: Number added to every norm weight (1 in Gemma, whose weights are stored minus one).
        embedding_scale: Factor of the embeddings, rounded to the model's dtype first, as in the original.
        tied: Whether the output head is the embedding.
        final_soft_cap: The c in ``c * tanh(x / c)``, which is applied to output logits; ``None`` for none.
        bos_token_id: Id of the token that begins a sequence; ``None`` if the model has none.
        eos_token_ids: Ids of the tokens that end a generation.
    """

    family: str
    vocab_size: int
    width: int
    groups: tuple[LayerGroup, ...]
    max_position: int
    norm_eps: float
    ropes: tuple[RopeSpec, ...]
    post_norms: bool = False
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    tied: bool = False
    final_soft_cap: float | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert len({kind.attention for group in self.groups for kind in group.unit}) == 1, "one pool holds one kind of attention"

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The layers of all groups, in order."""
        return tuple(layer for group in self.groups for layer in group.layers)

    @property
    def num_layers(self) -> int:
        """L, the number of layers."""
        return sum(len(group.layers) for group in self.groups)

    @property
    def attention(self) -> AttentionKind:
        """The kind of attention that all layers have."""
        return self.groups[0].unit[0].attention

    @property
    def stacks(self) -> tuple[tuple[Stack, ...], ...]:
        """The stacks of each group, one for each place of its unit."""
        stacks: list[tuple[Stack, ...]] = []
        start = 0
        for group in self.groups:
            stop = start + len(group.layers)
            stacks.append(tuple(Stack(kind=kind, layers=range(start + place, stop, len(group.unit))) for place, kind in enumerate(group.unit)))
            start = stop
        return tuple(stacks)

    def with_attention(self, **changes: Any) -> ModelSpec:
        """The specification with some fields of its kind of attention changed."""
        attention = dataclasses.replace(self.attention, **changes)
        groups = (dataclasses.replace(group, unit=tuple(dataclasses.replace(kind, attention=attention) for kind in group.unit)) for group in self.groups)
        return dataclasses.replace(self, groups=tuple(groups))

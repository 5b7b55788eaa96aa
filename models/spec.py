"""What a decoder is, as plain numbers: built by ``models/hf_config.py`` from a Hugging Face config, read by everything else. No arrays here."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxserve.models.attention_kind import AttentionKind
from jaxserve.models.mlp_kind import MlpKind


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary embedding of one kind of layer.

    Args:
        inv_freq: ``H / 2`` inverse frequencies in radians a token, every scaling rule already applied.
        attention_factor: Multiplies cos and sin (YaRN and LongRoPE; else 1).
    """

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """What may differ from layer to layer of one kind. These are numbers, so the layers share one compiled body.

    Args:
        window: A token sees itself and the ``window - 1`` tokens before it; ``None`` sees all.
        rope: Index into ``ModelSpec.ropes``.
    """

    window: int | None = None
    rope: int = 0

    def seen(self, context: float) -> float:
        """How many tokens a token at the end of ``context`` tokens sees."""
        return context if self.window is None else min(context, self.window)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerKind:
    """What decides the parameters and the computation of a layer: layers of one kind share a compiled body.

    Args:
        attention: The kind of its attention.
        mlp: The kind of its MLP.
    """

    attention: AttentionKind
    mlp: MlpKind


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Consecutive layers that run as one loop, whose body is a unit of one layer or several, one after the other.

    Args:
        unit: The kind of each layer of the unit.
        layers: One entry a layer, in order: a whole number of units.
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
    """The layers that stand at one place of a group's unit. They are of one kind, and a scan has their parameters as stacked arrays.

    Args:
        kind: Theirs.
        layers: Their indices in the model.
    """

    kind: LayerKind
    layers: range


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer. Letters are those of ``jaxserve.dims``.

    Args:
        family: Registry name of the family.
        vocab_size: V, as the checkpoint has it.
        width: D.
        groups: The layers, in order. All have the same kind of attention: they share one page table and one pool.
        max_position: The model's context length in tokens.
        norm_eps: Added to the mean square in every RMSNorm.
        ropes: The kinds of rotary embedding that layers refer to.
        post_norms: A second RMSNorm on each block's output before the residual sum (Gemma).
        norm_offset: Added to every norm weight (1 in Gemma, whose weights are stored minus one).
        embedding_scale: Multiplies the embeddings; rounded to the model dtype first, as the original does.
        tied: Whether the output head is the embedding.
        final_soft_cap: ``c * tanh(x / c)`` on output logits.
        bos_token_id: Put before a prompt by the tokenizer, where the model has one.
        eos_token_ids: Any of these ends a generation.
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
        """One entry a layer."""
        return tuple(layer for group in self.groups for layer in group.layers)

    @property
    def num_layers(self) -> int:
        """L."""
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
        """The same model with other fields of its kind of attention."""
        attention = dataclasses.replace(self.attention, **changes)
        groups = (dataclasses.replace(group, unit=tuple(dataclasses.replace(kind, attention=attention) for kind in group.unit)) for group in self.groups)
        return dataclasses.replace(self, groups=tuple(groups))

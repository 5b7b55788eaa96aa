"""What a parameter is: its shape, logical axes, initial values and the checkpoint tensors that fill it, declared once. Plain numbers, no arrays."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal

Init = Literal["normal", "zeros", "ones"]

Parts = Callable[[str], int]
"""Into how many parts a logical axis is split over devices."""

FULL = slice(None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """One checkpoint tensor's place in a parameter. The tensor, in row-major order, fills ``param[into]``: a reshape, never a transpose.

    Args:
        name: Hugging Face tensor name; ``{layer}`` stands for the layer index.
        shape: The tensor's shape in the checkpoint.
        into: Index of the destination in one layer's parameter, one slice an axis; the first axes select, so leading rows of the tensor are leading rows there.
        repeat: How often each leading row block of the tensor (one KV head) stands in the destination, side by side.
    """

    name: str
    shape: tuple[int, ...]
    into: tuple[slice, ...]
    repeat: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """One parameter: the weight of a product, or a vector (a norm, a bias) that is added or multiplied.

    Weights are stored ``[out…, in…]`` and contracted over their last axes (5 to 20% faster on CPU, and the checkpoint's own order).

    Args:
        shape: Of one layer's, for a parameter of layers; else of the whole.
        axes: The logical axis of each dimension: a name that sharding rules map to mesh axes, or ``None``.
        init: For random values: ``normal`` has standard deviation ``fan_in ** -0.5``.
        pieces: Checkpoint tensors that together fill it exactly once.
        num_in_axes: How many of the last axes a product sums over; 0 for a vector.
        layers: The layers that each have one of their own; ``None`` for what stands around the layers. Set where the model is put together.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Init
    pieces: tuple[Piece, ...]
    num_in_axes: int = 0
    layers: range | None = None

    @property
    def is_weight(self) -> bool:
        """Whether rows are multiplied with it."""
        return self.num_in_axes > 0

    @property
    def per_layer(self) -> bool:
        """Whether layers have one each: stacked ``[layers, *shape]``, or arrays of their own."""
        return self.layers is not None

    @property
    def indices(self) -> Sequence[int]:
        """The layers that have one; a single 0 for what is not a layer's."""
        return (0,) if self.layers is None else self.layers

    @property
    def fan_in(self) -> int:
        """How many inputs an output of a weight sums over."""
        return math.prod(self.shape[-self.num_in_axes :])

    def array_shape(self, layer: int | None) -> tuple[int, ...]:
        """The shape of the array that holds one layer's, or with ``None`` those of all its layers (or the one that is not a layer's)."""
        return self.shape if self.layers is None or layer is not None else (len(self.layers), *self.shape)

    def part(self, parts: Parts | None = None) -> tuple[int, ...]:
        """The shape of a device's part of one of them; without ``parts`` nothing is split."""
        if parts is None:
            return self.shape
        return tuple(size // (parts(axis) if axis else 1) for size, axis in zip(self.shape, self.axes, strict=True))

    def num_values(self, parts: Parts | None = None) -> int:
        """Values that a device holds, all layers together."""
        return len(self.indices) * math.prod(self.part(parts))

    def num_bytes(self, value_bytes: int, parts: Parts | None = None) -> int:
        """Bytes that a device holds, all layers together, with ``value_bytes`` a value of the model's dtype."""
        return self.num_values(parts) * value_bytes

    def flops(self, parts: Parts | None = None) -> float:
        """FLOPs of a device for each row that is multiplied with it, all layers together: a multiplication and an addition a value."""
        return 2.0 * self.num_values(parts) if self.is_weight else 0.0

    def row_values(self, parts: Parts | None = None) -> int:
        """Inputs and outputs of a device for each row that is multiplied with it, all layers together."""
        part, num_out_axes = self.part(parts), len(self.shape) - self.num_in_axes
        return len(self.indices) * (math.prod(part[:num_out_axes]) + math.prod(part[num_out_axes:])) if self.is_weight else 0


def whole(name: str, shape: tuple[int, ...], checkpoint_shape: tuple[int, ...] | None = None) -> tuple[Piece, ...]:
    """The pieces of a parameter that one checkpoint tensor fills, of another shape there where one is given."""
    return (Piece(name=name, shape=checkpoint_shape or shape, into=(FULL,) * len(shape)),)


def vector(name: str, size: int, init: Init) -> ParamSpec:
    """A parameter of one axis that no rule splits: a norm's weight, or the bias of a product whose output is whole on every device."""
    return ParamSpec(shape=(size,), axes=(None,), init=init, pieces=whole(name, (size,)))

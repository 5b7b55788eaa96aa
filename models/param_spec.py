"""The declaration of a parameter: its shape, logical axes, initial values and the checkpoint tensors that fill it. Plain numbers, no arrays."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal

Init = Literal["normal", "zeros", "ones"]

Parts = Callable[[str], int]
"""Function that gives the number of parts into which a logical axis is split over devices."""

FULL = slice(None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """One checkpoint tensor and its place in a parameter. The tensor fills ``param[into]`` in row-major order, which is a reshape, never a transpose.

    Args:
        name: Hugging Face's name of the tensor, in which ``{layer}`` stands for the layer's index.
        shape: Shape of the tensor in the checkpoint.
        into: Index of the destination in one layer's parameter, one slice for each axis. Only the first axes select a part, so that leading rows of the tensor
            are leading rows there.
        repeat: How often each leading block of rows of the tensor (one KV head) is repeated in the destination, side by side.
    """

    name: str
    shape: tuple[int, ...]
    into: tuple[slice, ...]
    repeat: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """The declaration of one parameter: a weight of a product, or a vector (a norm's weight or a bias) that is added or multiplied.

    Weights are stored ``[out…, in…]`` and products sum over their last axes, which is 5 to 20% faster on CPU and the checkpoint's own order.

    Args:
        shape: Shape of one layer's parameter, or of the parameter itself if it belongs to no layer.
        axes: The logical axis of each dimension, a name that sharding rules map to mesh axes; ``None`` for a dimension without one.
        init: Kind of random values: ``normal`` has standard deviation ``fan_in ** -0.5``.
        pieces: Checkpoint tensors that together fill it exactly once.
        num_in_axes: Number of last axes that a product sums over; 0 for a vector.
        layers: Indices of the layers that each have this parameter; ``None`` if it belongs to no layer. ``models.params`` sets it.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Init
    pieces: tuple[Piece, ...]
    num_in_axes: int = 0
    layers: range | None = None

    @property
    def is_weight(self) -> bool:
        """Whether the parameter is a weight, with which rows are multiplied."""
        return self.num_in_axes > 0

    @property
    def per_layer(self) -> bool:
        """Whether layers have this parameter each, as one stacked array ``[layers, *shape]`` or as arrays of their own."""
        return self.layers is not None

    @property
    def indices(self) -> Sequence[int]:
        """The indices of the layers that have this parameter; a single 0 if it belongs to no layer."""
        return (0,) if self.layers is None else self.layers

    @property
    def fan_in(self) -> int:
        """The number of inputs over which an output of a weight sums."""
        return math.prod(self.shape[-self.num_in_axes :])

    def array_shape(self, layer: int | None) -> tuple[int, ...]:
        """The shape of the array of one layer's parameter; with ``None``, that of the stacked array of all its layers, or of a parameter of no layer."""
        return self.shape if self.layers is None or layer is not None else (len(self.layers), *self.shape)

    def part(self, parts: Parts | None = None) -> tuple[int, ...]:
        """The shape of a device's part of one layer's parameter; without ``parts`` nothing is split."""
        if parts is None:
            return self.shape
        return tuple(size // (parts(axis) if axis else 1) for size, axis in zip(self.shape, self.axes, strict=True))

    def num_values(self, parts: Parts | None = None) -> int:
        """Number of values that a device holds, for all layers together."""
        return len(self.indices) * math.prod(self.part(parts))

    def num_bytes(self, value_bytes: int, parts: Parts | None = None) -> int:
        """Bytes that a device holds, for all layers together, if a value of the model's dtype takes ``value_bytes``."""
        return self.num_values(parts) * value_bytes

    def flops(self, parts: Parts | None = None) -> float:
        """FLOPs of a device for each row that is multiplied with the weight, for all layers together: two for each value. 0 for a vector."""
        return 2.0 * self.num_values(parts) if self.is_weight else 0.0

    def row_values(self, parts: Parts | None = None) -> int:
        """Number of inputs and outputs of a device for each row that is multiplied with the weight, for all layers together. 0 for a vector."""
        part, num_out_axes = self.part(parts), len(self.shape) - self.num_in_axes
        return len(self.indices) * (math.prod(part[:num_out_axes]) + math.prod(part[num_out_axes:])) if self.is_weight else 0


def whole(name: str, shape: tuple[int, ...], checkpoint_shape: tuple[int, ...] | None = None) -> tuple[Piece, ...]:
    """The pieces of a parameter that one checkpoint tensor fills. ``checkpoint_shape`` is the tensor's shape if it differs from the parameter's."""
    return (Piece(name=name, shape=checkpoint_shape or shape, into=(FULL,) * len(shape)),)


def vector(name: str, size: int, init: Init) -> ParamSpec:
    """The declaration of a parameter with one axis that is never split: a norm's weight, or the bias of a product whose output every device has whole."""
    return ParamSpec(shape=(size,), axes=(None,), init=init, pieces=whole(name, (size,)))

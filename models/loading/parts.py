"""Arrays made part by part: each device gets its own, and the host holds one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jaxserve.models.loading.pieces import Box

ALIGNMENT = 64
"""XLA:CPU takes over a numpy buffer without a copy only at this alignment."""


def local_parts(shape: tuple[int, ...], sharding: Sharding | None) -> dict[tuple[tuple[int, int], ...], list[Any]]:
    """The parts of an array that this process needs, each as (start, stop) of every axis, and the devices that hold it.

    Args:
        shape: Of the whole array.
        sharding: ``None`` is all of it on jax's default device.
    """
    if sharding is None:
        return {tuple((0, size) for size in shape): [None]}
    parts: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        parts.setdefault(tuple(cut.indices(size)[:2] for cut, size in zip(index, shape, strict=True)), []).append(device)
    return parts


def num_local_values(shape: tuple[int, ...], sharding: Sharding | None) -> int:
    """How many values this process fills in: a part that several devices hold counts once."""
    return sum(int(np.prod(_shape(part), dtype=np.int64)) for part in local_parts(shape, sharding))


def make_array(shape: tuple[int, ...], dtype: Any, sharding: Sharding | None, fill: Callable[[np.ndarray, Box], None]) -> jax.Array:
    """An array whose parts ``fill`` writes into buffers. On CPU the array takes over the buffers, also one of several devices.

    Args:
        shape: Of the whole array.
        dtype: Of the array.
        sharding: Where its parts go; ``None`` is all of it on jax's default device.
        fill: Called with an uninitialised buffer and the part that it stands for.
    """

    def place() -> Iterator[jax.Array]:
        for part, devices in local_parts(shape, sharding).items():
            buffer = _aligned_buffer(_shape(part), dtype)
            fill(buffer, tuple(slice(start, stop) for start, stop in part))
            # One buffer at a time: its transfers must end before the next is filled.
            yield from jax.block_until_ready([jax.device_put(buffer, device, may_alias=True) for device in devices])

    arrays = list(place())
    return arrays[0] if sharding is None else jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _shape(part: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in part)


def _aligned_buffer(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    raw = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + num_bytes].view(dtype).reshape(shape)

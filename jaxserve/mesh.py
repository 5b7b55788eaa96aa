"""The device mesh and what lies where on it. Sharding rules are data of the configuration; this turns them into jax's shardings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.config import MeshConfig, ShardingConfig
from jaxserve.errors import ConfigError

DATA, MODEL = "data", "model"
AXES = (DATA, MODEL)

EACH_RANK = PartitionSpec(DATA)
"""The data ranks' arrays, one after the other along their first axis."""
EACH_DEVICE = PartitionSpec(AXES)
"""The devices' arrays, one after the other along their first axis."""
REPLICATED = PartitionSpec()


class MeshShape(NamedTuple):
    """How many ranks each axis has."""

    data: int = 1
    model: int = 1

    @property
    def size(self) -> int:
        """Devices."""
        return self.data * self.model

    def __str__(self) -> str:
        return f"data={self.data},model={self.model}"


def parse_mesh(text: str) -> dict[str, int]:
    """Reads ``data=2,model=4``; either part may be missing.

    Raises:
        ConfigError: Anything else: an axis unknown or twice, a number that is none or below 1.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, separator, number = (piece.strip() for piece in part.partition("="))
        if axis not in AXES:
            raise ConfigError(f"mesh {text!r} has an axis {axis!r}; allowed are {' and '.join(AXES)}, as in data=2,model=4")
        if axis in sizes:
            raise ConfigError(f"mesh {text!r} has the axis {axis!r} twice")
        if not separator or not number.isascii() or not number.isdigit() or int(number) < 1:
            raise ConfigError(f"mesh {text!r}: {axis} is {number!r}; must be a whole number, at least 1")
        sizes[axis] = int(number)
    return sizes


def choose_mesh_shape(config: MeshConfig, num_devices: int, *, is_cpu: bool) -> MeshShape:
    """The mesh that a configuration asks for on this machine.

    Raises:
        ConfigError: It needs more devices than there are.
    """
    data = config.data or 1
    model = config.model or (1 if is_cpu else max(1, num_devices // data))
    shape = MeshShape(data, model)
    if shape.size > num_devices:
        hint = "; XLA_FLAGS=--xla_force_host_platform_device_count=N makes N devices of one CPU" if is_cpu else ""
        raise ConfigError(f"the mesh {shape} needs {shape.size} devices; there {'is' if num_devices == 1 else 'are'} {num_devices}{hint}")
    return shape


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh and the rules for what is split over it. Hashable.

    Args:
        mesh: Axes ``data`` and ``model``.
        rules: Logical axis -> mesh axes.
    """

    mesh: Mesh
    rules: ShardingConfig

    @property
    def shape(self) -> MeshShape:
        return MeshShape(self.mesh.shape[DATA], self.mesh.shape[MODEL])

    @property
    def is_single_device(self) -> bool:
        return self.mesh.size == 1

    def mesh_axes(self, logical_axis: str | None) -> tuple[str, ...]:
        """The mesh axes that a logical axis is split over; empty for ``None``."""
        return () if logical_axis is None else tuple(getattr(self.rules, logical_axis) or ())

    def num_parts(self, logical_axis: str | None) -> int:
        """Into how many parts a logical axis is split."""
        return math.prod(self.mesh.shape[axis] for axis in self.mesh_axes(logical_axis))

    def model_axis(self, logical_axis: str) -> str | None:
        """``MODEL`` where the work along a logical axis is split over several model ranks, else ``None``: every model rank does all of it."""
        return MODEL if self.shape.model > 1 and MODEL in self.mesh_axes(logical_axis) else None

    def spec(self, axes: Sequence[str | None]) -> PartitionSpec:
        """The partition of an array with these logical axes."""
        return PartitionSpec(*(self.mesh_axes(axis) or None for axis in axes))

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    def tracing(self) -> AbstractContextManager[Any]:
        """The context to trace in: what asks for the device it is traced for is told the mesh's, real or only compiled for."""
        return jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh)

    def map_devices(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """``function`` run by each device on its own parts. On a mesh of one device that is the function itself."""
        if self.is_single_device:
            return function
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def make_layout(shape: MeshShape, rules: ShardingConfig, devices: Sequence[Any] | None = None) -> Layout:
    """A layout over the first ``shape.size`` devices.

    Args:
        shape: Of the mesh.
        rules: Sharding rules.
        devices: Of one kind; ``None`` takes jax's. Real ones, or those of a topology that is only compiled for.
    """
    chosen = np.array((jax.devices() if devices is None else devices)[: shape.size], dtype=object)
    return Layout(Mesh(chosen.reshape(shape), AXES), rules)

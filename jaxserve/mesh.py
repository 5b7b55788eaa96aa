"""The device mesh and what lies where on it: the meaning of the sharding rules (``sharding_rules``) as jax's shardings."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.config import ShardingConfig
from jaxserve.mesh_axes import DATA, MESH_AXES, MODEL, axis_names
from jaxserve.mesh_shape import MeshShape
from jaxserve.sharding_rules import ShardingRules

EACH_RANK = PartitionSpec(DATA)
"""The data ranks' arrays, one after the other along their first axis."""
EACH_DEVICE = PartitionSpec(axis_names(MESH_AXES))
"""The devices' arrays, one after the other along their first axis."""
REPLICATED = PartitionSpec()


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh and the rules for what is split over it. Hashable.

    Args:
        mesh: jax's mesh; its axes are those of ``rules.mesh``, in the same order.
        rules: What is split over which axes.
    """

    mesh: Mesh
    rules: ShardingRules

    @property
    def shape(self) -> MeshShape:
        """How many ranks each axis has."""
        return self.rules.mesh

    @property
    def is_single_device(self) -> bool:
        return self.mesh.size == 1

    @functools.cached_property
    def is_multi_process(self) -> bool:
        return len({device.process_index for device in self.mesh.devices.flat}) > 1

    def model_axis(self, logical_axis: str) -> str | None:
        """``MODEL`` where the work along a logical axis is split over several model ranks, else ``None``: every model rank does all of it."""
        return MODEL if self.rules.parts_over(logical_axis, MODEL) > 1 else None

    def spec(self, axes: Sequence[str | None]) -> PartitionSpec:
        """The partition of an array with these logical axes."""
        return PartitionSpec(*(self.rules.mesh_axes(axis) or None for axis in axes))

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    def from_host(self, array: np.ndarray, spec: PartitionSpec) -> Any:
        """An argument of a compiled program from an array that every process has. One process hands numpy over as it is, which is fastest."""
        if not self.is_multi_process:
            return array
        return jax.make_array_from_callback(array.shape, self.sharding(spec), lambda part: array[part])

    def tracing(self) -> AbstractContextManager[Any]:
        """The context to trace in: what asks for the device it is traced for is told the mesh's, real or only compiled for."""
        return jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh)

    def map_devices(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """``function`` run by each device on its own parts. On a mesh of one device that is the function itself."""
        if self.is_single_device:
            return function
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def make_layout(shape: MeshShape, sharding: ShardingConfig, devices: Sequence[Any] | None = None) -> Layout:
    """A layout over the first ``shape.size`` devices.

    Args:
        shape: Of the mesh.
        sharding: The sharding rules, as the configuration gives them.
        devices: Of one kind; ``None`` takes jax's. Real ones, or those of a topology that is only compiled for.
    """
    chosen = np.array((jax.devices() if devices is None else devices)[: shape.size], dtype=object)
    return Layout(Mesh(chosen.reshape(tuple(shape.values())), tuple(shape)), ShardingRules(sharding, shape))

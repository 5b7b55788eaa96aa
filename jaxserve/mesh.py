"""The device mesh, and the sharding rules (``sharding_rules``) as jax's shardings on it."""

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
"""Partition of an array that is made of one part for each data rank, concatenated along the first axis."""
EACH_DEVICE = PartitionSpec(axis_names(MESH_AXES))
"""Partition of an array that is made of one part for each device, concatenated along the first axis."""
REPLICATED = PartitionSpec()


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh of devices and the sharding rules on it. Hashable.

    Args:
        mesh: jax's mesh, whose axes are those of ``rules.mesh``, in the same order.
        rules: The sharding rules: which logical axis is split over which mesh axes.
    """

    mesh: Mesh
    rules: ShardingRules

    @property
    def shape(self) -> MeshShape:
        """The shape of the mesh: how many ranks each axis has."""
        return self.rules.mesh

    @property
    def is_single_device(self) -> bool:
        return self.mesh.size == 1

    @functools.cached_property
    def is_multi_process(self) -> bool:
        return len({device.process_index for device in self.mesh.devices.flat}) > 1

    def model_axis(self, logical_axis: str) -> str | None:
        """``MODEL`` if the work along a logical axis is split over several model ranks; ``None`` if every model rank does all of it."""
        return MODEL if self.rules.parts_over(logical_axis, MODEL) > 1 else None

    def spec(self, axes: Sequence[str | None]) -> PartitionSpec:
        """The partition of an array with these logical axes."""
        return PartitionSpec(*(self.rules.mesh_axes(axis) or None for axis in axes))

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    def from_host(self, array: np.ndarray, spec: PartitionSpec) -> Any:
        """An argument for a compiled program, from a host array that every process has. A single process passes the numpy array itself, which is fastest."""
        if not self.is_multi_process:
            return array
        return jax.make_array_from_callback(array.shape, self.sharding(spec), lambda part: array[part])

    def tracing(self) -> AbstractContextManager[Any]:
        """A context to trace in. Code that asks for which device it is traced (``kernels_pallas.target``) gets the mesh's, real or only compiled for."""
        return jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh)

    def map_devices(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """A function that runs ``function`` on each device with the device's own parts; on a mesh of one device, ``function`` itself.

        Args:
            function: Function of one device's parts.
            in_specs: Partitions of the arguments, as for ``jax.shard_map``.
            out_specs: Partitions of the results.
        """
        if self.is_single_device:
            return function
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def make_layout(shape: MeshShape, sharding: ShardingConfig, devices: Sequence[Any] | None = None) -> Layout:
    """A layout over the first ``shape.size`` devices.

    Args:
        shape: Shape of the mesh.
        sharding: The sharding rules, as the configuration gives them.
        devices: Devices of one kind, real ones or those of a topology that is only compiled for; ``None`` takes jax's devices.
    """
    chosen = np.array((jax.devices() if devices is None else devices)[: shape.size], dtype=object)
    return Layout(Mesh(chosen.reshape(tuple(shape.values())), tuple(shape)), ShardingRules(sharding, shape))

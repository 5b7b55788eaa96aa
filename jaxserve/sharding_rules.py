"""The sharding rules of a configuration, applied to a mesh. All shardings, checks, byte counts and plans get them from here. Imports no jax."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.config import ShardingConfig
from jaxserve.mesh_shape import MeshShape

LogicalAxes = Sequence[str | None]
"""The logical axis of each dimension of an array; ``None`` for a dimension that has no rule and is never split."""


class Collision(NamedTuple):
    """Two logical axes of one array that are both split over the same mesh axis."""

    first: str
    second: str
    mesh_axis: str


class Misfit(NamedTuple):
    """A dimension that does not divide into as many parts as the rule of its logical axis asks for."""

    logical: str
    size: int


@dataclasses.dataclass(frozen=True)
class ShardingRules:
    """The sharding rules, applied to a mesh of some shape.

    Args:
        config: The rules: for each logical axis, the mesh axes that it is split over.
        mesh: Shape of the mesh.
    """

    config: ShardingConfig
    mesh: MeshShape

    def mesh_axes(self, logical: str | None) -> tuple[str, ...]:
        """The mesh axes that a logical axis is split over, in the order of the rule; empty for ``None``."""
        return () if logical is None else tuple(getattr(self.config, logical) or ())

    def num_parts(self, logical: str | None) -> int:
        """The number of parts into which a logical axis is split by all mesh axes together; 1 for ``None``."""
        return math.prod(self.mesh[axis] for axis in self.mesh_axes(logical))

    def parts_over(self, logical: str | None, mesh_axis: str) -> int:
        """The number of parts into which one mesh axis splits a logical axis; 1 if the rule does not name it."""
        return self.mesh[mesh_axis] if mesh_axis in self.mesh_axes(logical) else 1

    @property
    def splits_anything(self) -> bool:
        """Whether any logical axis is split. If none is, every device has all parameters."""
        return any(self.num_parts(field.name) > 1 for field in dataclasses.fields(self.config))

    def collision(self, axes: LogicalAxes) -> Collision | None:
        """The first case in which an array with these axes would be split twice over the same mesh axis, whatever its size; ``None`` if there is none."""
        split_by: dict[str, str] = {}
        for logical in filter(None, axes):
            for mesh_axis in self.mesh_axes(logical):
                if mesh_axis in split_by:
                    return Collision(split_by[mesh_axis], logical, mesh_axis)
                split_by[mesh_axis] = logical
        return None

    def misfit(self, shape: Sequence[int], axes: LogicalAxes) -> Misfit | None:
        """The first dimension of an array whose size does not divide into its parts; ``None`` if there is none."""
        for size, logical in zip(shape, axes, strict=True):
            if logical is not None and size % self.num_parts(logical):
                return Misfit(logical, size)
        return None

"""What the sharding rules of a configuration mean on a mesh. Their one reader: shardings, checks, byte counts and plans ask it. Imports no jax."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.config import ShardingConfig
from jaxserve.mesh_shape import MeshShape

LogicalAxes = Sequence[str | None]
"""The logical axis of each dimension of an array; ``None`` for one that no rule names and that is never split."""


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
    """The sharding rules on a mesh.

    Args:
        config: The rules: each logical axis and the mesh axes that it is split over.
        mesh: Sizes of the mesh's axes.
    """

    config: ShardingConfig
    mesh: MeshShape

    def mesh_axes(self, logical: str | None) -> tuple[str, ...]:
        """The mesh axes that a logical axis is split over, in the order of the rule; empty for ``None``."""
        return () if logical is None else tuple(getattr(self.config, logical) or ())

    def num_parts(self, logical: str | None) -> int:
        """Into how many parts a logical axis is split over all mesh axes together; 1 for ``None``."""
        return math.prod(self.mesh[axis] for axis in self.mesh_axes(logical))

    def parts_over(self, logical: str | None, mesh_axis: str) -> int:
        """Into how many parts one mesh axis splits a logical axis; 1 where the rule does not name it."""
        return self.mesh[mesh_axis] if mesh_axis in self.mesh_axes(logical) else 1

    @property
    def splits_anything(self) -> bool:
        """Whether any logical axis has more than one part: on data ranks alone each has all of every parameter."""
        return any(self.num_parts(field.name) > 1 for field in dataclasses.fields(self.config))

    def collision(self, axes: LogicalAxes) -> Collision | None:
        """The first mesh axis over which an array would be split twice, whatever its size."""
        split_by: dict[str, str] = {}
        for logical in filter(None, axes):
            for mesh_axis in self.mesh_axes(logical):
                if mesh_axis in split_by:
                    return Collision(split_by[mesh_axis], logical, mesh_axis)
                split_by[mesh_axis] = logical
        return None

    def misfit(self, shape: Sequence[int], axes: LogicalAxes) -> Misfit | None:
        """The first dimension of an array that does not divide into its parts."""
        for size, logical in zip(shape, axes, strict=True):
            if logical is not None and size % self.num_parts(logical):
                return Misfit(logical, size)
        return None

"""The axes of the device mesh as one table, which configuration, command line, meshes and sharding rules read.

A new axis is a row here and a field, its size, in ``MeshConfig``.
"""

from __future__ import annotations

import dataclasses

DATA, MODEL = "data", "model"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshAxis:
    """One axis of the device mesh.

    Args:
        name: As configurations, sharding rules and messages write it.
        meaning: What each rank along the axis has; completes "each data rank has …".
        takes_rest: Whether the axis, where its size is not given, takes the devices that the other axes leave. Any other axis then has one rank.
    """

    name: str
    meaning: str
    takes_rest: bool = False


MESH_AXES = (
    MeshAxis(name=DATA, meaning="its own sequences and pages"),
    MeshAxis(name=MODEL, meaning="a part of every layer", takes_rest=True),
)
"""Every axis, in the order in which devices are numbered, the last one fastest. ``data`` stays the first: the devices of a data rank are neighbours. Messages
name ``data`` and ``model`` of every mesh, another axis only where it has more than one rank."""


def axis_names(axes: tuple[MeshAxis, ...]) -> tuple[str, ...]:
    """The names of a table's axes, in its order."""
    return tuple(axis.name for axis in axes)

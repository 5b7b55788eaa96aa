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
        name: Name of the axis in configurations, sharding rules and messages.
        meaning: What each rank along the axis has; completes "each data rank has …".
        takes_rest: Whether the axis takes the devices that the other axes leave, if its size is not given. Any other axis without a size has one rank.
    """

    name: str
    meaning: str
    takes_rest: bool = False


MESH_AXES = (
    MeshAxis(name=DATA, meaning="its own sequences and pages"),
    MeshAxis(name=MODEL, meaning="a part of every layer", takes_rest=True),
)
"""All axes, in the order in which devices are numbered, the last one fastest. ``data`` must stay the first, so that the devices of a data rank are neighbours.
Messages always name ``data`` and ``model``, and another axis only if it has more than one rank."""


def axis_names(axes: tuple[MeshAxis, ...]) -> tuple[str, ...]:
    """The names of a table's axes, in its order."""
    return tuple(axis.name for axis in axes)

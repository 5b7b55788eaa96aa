"""The shape of the device mesh: how it is written as text, and which one a configuration asks for. Imports no jax."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from jaxserve.config import MeshConfig
from jaxserve.errors import ConfigError
from jaxserve.mesh_axes import DATA, MESH_AXES, MODEL, MeshAxis, axis_names


class MeshShape(Mapping[str, int]):
    """The shape of a mesh: a mapping from each axis to its number of ranks, in the order of the table of axes. Immutable and hashable.

    Args:
        data: Size of the axis ``data``, ``>= 1`` like all sizes.
        model: Size of the axis ``model``.
        axes: The table of axes.
        others: Sizes of further axes, by name; an axis that is not named has one rank.

    Raises:
        TypeError: The table does not have one of the axes.
    """

    __slots__ = ("_axes", "_sizes")

    def __init__(self, data: int = 1, model: int = 1, *, axes: tuple[MeshAxis, ...] = MESH_AXES, **others: int) -> None:
        if unknown := others.keys() - set(axis_names(axes)):
            raise TypeError(f"a mesh has no axis {', '.join(sorted(unknown))}")
        given = {DATA: data, MODEL: model} | others
        self._axes = axes
        self._sizes = {name: given.get(name, 1) for name in axis_names(axes)}

    def __getitem__(self, axis: str) -> int:
        return self._sizes[axis]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def __hash__(self) -> int:
        return hash(tuple(self._sizes.items()))

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self.items() if size > 1 or axis in (DATA, MODEL))

    def __repr__(self) -> str:
        return f"MeshShape({self})"

    @property
    def data(self) -> int:
        """Number of data ranks, each with its own sequences and pages."""
        return self[DATA]

    @property
    def model(self) -> int:
        """Number of model ranks, each with a part of every layer."""
        return self[MODEL]

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.values())

    def resized(self, axis: str, size: int) -> MeshShape:
        """The shape with another size of one axis."""
        return MeshShape(axes=self._axes, **{**self, axis: size})


def parse_mesh(text: str, axes: tuple[MeshAxis, ...] = MESH_AXES) -> dict[str, int]:
    """The sizes of axes from a text such as ``data=2,model=4``, which need not name all axes.

    Raises:
        ConfigError: The text has another form, names an axis that is unknown or named twice, or gives a size that is not a whole number ``>= 1``.
    """
    names = axis_names(axes)
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, separator, number = (piece.strip() for piece in part.partition("="))
        if axis not in names:
            raise ConfigError(f"mesh {text!r} has an axis {axis!r}; allowed are {', '.join(names[:-1])} and {names[-1]}, as in data=2,model=4")
        if axis in sizes:
            raise ConfigError(f"mesh {text!r} has the axis {axis!r} twice")
        if not separator or not number.isascii() or not number.isdigit() or int(number) < 1:
            raise ConfigError(f"mesh {text!r}: {axis} is {number!r}; must be a whole number, at least 1")
        sizes[axis] = int(number)
    return sizes


def configured_sizes(config: MeshConfig, axes: tuple[MeshAxis, ...] = MESH_AXES) -> dict[str, int]:
    """The sizes of the axes that a configuration sets; axes that it leaves open are missing."""
    return {name: size for name in axis_names(axes) if (size := getattr(config, name)) is not None}


def complete_mesh(sizes: Mapping[str, int], num_devices: int, axes: tuple[MeshAxis, ...] = MESH_AXES) -> MeshShape:
    """The shape of a mesh for which some sizes are given.

    Args:
        sizes: The given sizes by axis, from :func:`parse_mesh` or :func:`configured_sizes`.
        num_devices: Number of devices that the axis that takes the rest may fill. The mesh is larger if the given sizes ask for more.
        axes: The table of axes.
    """
    rest = max(1, num_devices // math.prod(sizes.values()))
    open_sizes = {axis.name: rest if axis.takes_rest else 1 for axis in axes if axis.name not in sizes}
    return MeshShape(axes=axes, **sizes, **open_sizes)


def choose_mesh_shape(config: MeshConfig, num_devices: int, *, is_cpu: bool, axes: tuple[MeshAxis, ...] = MESH_AXES) -> MeshShape:
    """The shape of the mesh that a configuration asks for on this machine. On a CPU, axes whose size is not given have one rank.

    Raises:
        ConfigError: The mesh needs more devices than there are.
    """
    shape = complete_mesh(configured_sizes(config, axes), 1 if is_cpu else num_devices, axes)
    if shape.size > num_devices:
        hint = "; XLA_FLAGS=--xla_force_host_platform_device_count=N makes N devices of one CPU" if is_cpu else ""
        raise ConfigError(f"the mesh {shape} needs {shape.size} devices; there {'is' if num_devices == 1 else 'are'} {num_devices}{hint}")
    return shape

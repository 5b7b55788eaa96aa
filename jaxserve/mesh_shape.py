"""The shape of the device mesh: how it is written, and which one a configuration asks for. Imports no jax."""

from __future__ import annotations

from typing import NamedTuple

from jaxserve.config import MeshConfig
from jaxserve.errors import ConfigError

DATA, MODEL = "data", "model"
AXES = (DATA, MODEL)


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

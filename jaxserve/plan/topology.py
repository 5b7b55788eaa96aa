"""A topology such as ``v6e:2x4`` or ``h200:8``: how many chips of which kind, joined how. What plans and programs are made for. Imports no jax."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping

from jaxserve.errors import ConfigError
from jaxserve.kernels_pallas.chips import CHIPS, CHIPS_BY_NAME, Chip
from jaxserve.mesh_shape import MeshShape, complete_mesh


@dataclasses.dataclass(frozen=True)
class Topology:
    """Chips of one kind, joined: what a layout is planned and programs are compiled for. Its ``str`` is jax's name of the topology.

    Args:
        chip: Their kind.
        grid: The sides of a TPU slice, such as ``2x4``, or the number of GPUs in one NVLink domain.
    """

    chip: Chip
    grid: str

    @property
    def num_chips(self) -> int:
        return math.prod(int(side) for side in self.grid.split("x"))

    @property
    def num_devices(self) -> int:
        """Devices as jax counts them: a chip may show two."""
        return self.num_chips * self.chip.devices_per_chip

    def __str__(self) -> str:
        return f"{self.chip.name}:{self.grid}"

    def chips_of(self, mesh: MeshShape) -> int:
        """Chips that a mesh over the first devices takes."""
        return math.ceil(mesh.size / self.chip.devices_per_chip)

    def mesh(self, sizes: Mapping[str, int]) -> MeshShape:
        """A mesh of which sizes may be missing: ``model`` is then what the other axes leave, any other axis 1.

        Raises:
            ConfigError: It needs more devices than there are.
        """
        mesh = complete_mesh(sizes, self.num_devices)
        if mesh.size > self.num_devices:
            per_chip = f" ({self.num_chips} chips of {self.chip.devices_per_chip} devices)" if self.chip.devices_per_chip > 1 else ""
            raise ConfigError(f"the mesh {mesh} needs {mesh.size} devices; {self} has {self.num_devices}{per_chip}")
        return mesh

    def all_meshes(self) -> list[MeshShape]:
        """Every mesh that takes all devices, model axis longest first."""
        devices = self.num_devices
        return [MeshShape(data, devices // data) for data in range(1, devices + 1) if devices % data == 0]


def parse_topology(text: str) -> Topology:
    """Reads ``CHIP:TOPOLOGY``. A TPU's topology is a grid or a number of chips, a GPU's a number of chips; without one it is one chip.

    Raises:
        ConfigError: An unknown chip, or a topology in which that chip does not come. The message lists those that exist.
    """
    name, separator, topology = text.strip().lower().partition(":")
    chip = CHIPS_BY_NAME.get(name)
    if chip is None:
        near = difflib.get_close_matches(name, CHIPS_BY_NAME, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"unknown chip {name!r} in {text!r}{hint}; known: {', '.join(chip.name for chip in CHIPS)}")
    wanted = topology if separator else "1"
    ascending = sorted(chip.topologies, key=lambda shape: Topology(chip, shape).num_chips)
    for known in ascending:
        if wanted == known or wanted == str(Topology(chip, known).num_chips):
            return Topology(chip, known)
    if not separator:
        return Topology(chip, chip.topologies[0])
    kind = "grids" if chip.platform == "tpu" else "GPUs joined by NVLink:"
    raise ConfigError(f"{name} does not come as {topology!r}; {kind} {', '.join(ascending)}")

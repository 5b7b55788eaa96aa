"""What stood around a measurement in this process: the device, the program, and how busy others kept the machine."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from jaxserve.bench.compare import NOISY_CORES
from jaxserve.bench.processes import cpu_use, read_cpu
from jaxserve.bench.report import environment


@dataclasses.dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Of one measurement.

    Args:
        device: As jax names it.
        num_devices: Of the mesh.
        jax_version: The version of jax.
        others: Cores that other processes used meanwhile, on average; ``None`` where the machine does not tell.
    """

    device: str
    num_devices: int
    jax_version: str
    others: float | None

    def notes(self) -> list[str]:
        """What makes the figures less than they seem."""
        if self.others is None or self.others <= NOISY_CORES:
            return []
        return [f"other processes used {self.others:.1f} cores meanwhile: these figures measure them as well"]

    def to_json(self) -> dict[str, Any]:
        """Fields of a report."""
        device = {"device": self.device, "num_devices": self.num_devices, "jax": self.jax_version}
        return {"cores_others": self.others, "environment": environment() | device}


class Watch:
    """Notes how busy this machine is from now on."""

    def __init__(self) -> None:
        self._before = read_cpu([os.getpid()])

    def others(self) -> float | None:
        """Cores that processes other than this one and its children have used since then."""
        after = read_cpu([os.getpid()])
        return None if self._before is None or after is None else cpu_use(self._before, after).others


def surroundings(watch: Watch, num_devices: int) -> Surroundings:
    """Imports jax, whose first device is named."""
    import jax

    return Surroundings(device=jax.devices()[0].device_kind, num_devices=num_devices, jax_version=jax.__version__, others=watch.others())

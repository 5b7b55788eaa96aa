"""What stood around a measurement in this process: the device, the program, and how busy others kept the machine."""

# pyright: basic
# jax is not typed strictly.
from __future__ import annotations

import dataclasses
import os
from typing import Any

from jaxserve.bench.load.compare import NOISY_CORES
from jaxserve.bench.load.processes import cpu_use, read_cpu
from jaxserve.bench.report.report import environment


@dataclasses.dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Of one measurement.

    Args:
        device: See :func:`readable_device`.
        jax_version: The version of jax.
        others: Cores that other processes used meanwhile, on average; ``None`` where the machine does not tell.
    """

    device: str
    jax_version: str
    others: float | None

    def notes(self) -> list[str]:
        """What makes the figures less than they seem."""
        if self.others is None or self.others <= NOISY_CORES:
            return []
        return [f"other processes used {self.others:.1f} cores meanwhile: these figures measure them as well"]

    def to_json(self) -> dict[str, Any]:
        """Fields of a report."""
        return {"cores_others": self.others, "environment": environment() | {"device": self.device, "jax": self.jax_version}}


class Watch:
    """Notes how busy this machine is from now on."""

    def __init__(self) -> None:
        self._before = read_cpu([os.getpid()])

    def others(self) -> float | None:
        """Cores that processes other than this one and its children have used since then."""
        after = read_cpu([os.getpid()])
        return None if self._before is None or after is None else cpu_use(self._before, after).others


def surroundings(watch: Watch) -> Surroundings:
    """What stood around everything since ``watch`` was made. Imports jax."""
    import jax

    return Surroundings(device=device_name(), jax_version=jax.__version__, others=watch.others())


def device_name() -> str:
    """Of the first device. Imports jax."""
    import jax

    return readable_device(jax.devices()[0].device_kind)


def readable_device(kind: str) -> str:
    """The chip as jax names it, or the processor, which jax calls ``cpu``."""
    return environment()["cpu"] or kind if kind == "cpu" else kind

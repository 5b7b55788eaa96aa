"""Which device a kernel is traced for, and which chip of the table that is."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax

from jaxserve.kernels_pallas.chips import CHIPS, Chip


@dataclasses.dataclass(frozen=True)
class Target:
    """The device a program is compiled for.

    Args:
        platform: As jax names it.
        device_kind: As the device calls itself.
    """

    platform: Literal["cpu", "gpu", "tpu"]
    device_kind: str


def current_target() -> Target:
    """The device of the abstract mesh in use (compiling for a chip that is not here), else the default device."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        device = jax.config.jax_default_device or jax.devices()[0]
        if isinstance(device, str):
            device = jax.devices(device)[0]
    platform = device.platform if device.platform in ("cpu", "tpu") else "gpu"
    return Target(platform, device.device_kind)


_SMALLEST = {"tpu": "v4", "gpu": "a100"}


def find_chip(target: Target, platform: Literal["gpu", "tpu"]) -> Chip:
    """Facts of the target's chip. A chip that the table does not hold, or an interpreter on CPU, gets those of the smallest one of ``platform``."""
    kind = target.device_kind.lower()
    if target.platform == platform:
        matches = [chip for chip in CHIPS if chip.platform == platform and chip.kind in kind]
        if matches:
            return max(matches, key=lambda chip: len(chip.kind))  # "tpu v5" is a part of "tpu v5 lite".
    return next(chip for chip in CHIPS if chip.name == _SMALLEST[platform])

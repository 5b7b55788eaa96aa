"""Which device a kernel is traced for, and the facts about chips that tile sizes follow from."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax

MIB = 2**20


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """Facts about one accelerator, as one jax device sees it.

    Args:
        name: Short name, as ``--target`` takes it.
        platform: ``tpu`` or ``gpu``.
        kind: A part of the device kind, lower case, that tells it from the others.
        fast_memory_bytes: VMEM of a TPU core, or shared memory that one GPU block can use.
        num_cores: Streaming multiprocessors of a GPU, tensor cores of a TPU device.
        bytes_per_s: Peak memory bandwidth.
        flops_per_s: Peak dense bfloat16.
        native_float8: Whether e4m3 can be converted by an instruction.
    """

    name: str
    platform: Literal["gpu", "tpu"]
    kind: str
    fast_memory_bytes: int
    num_cores: int
    bytes_per_s: float
    flops_per_s: float
    native_float8: bool


# TPU: jax's own table (jax.experimental.pallas.tpu.get_tpu_info, per core) and Google Cloud's TPU pages, read 2026-11.
# GPU: NVIDIA's data sheets and the CUDA C++ programming guide's table of compute capabilities (227 KiB a block from 9.0, 163 KiB on 8.0).
CHIPS: tuple[Chip, ...] = (
    Chip(name="v4", platform="tpu", kind="tpu v4", fast_memory_bytes=16 * MIB, num_cores=1, bytes_per_s=0.615e12, flops_per_s=137e12, native_float8=False),
    Chip(
        name="v5e", platform="tpu", kind="tpu v5 lite", fast_memory_bytes=128 * MIB, num_cores=1, bytes_per_s=0.82e12, flops_per_s=197e12, native_float8=False
    ),
    Chip(name="v5p", platform="tpu", kind="tpu v5", fast_memory_bytes=64 * MIB, num_cores=1, bytes_per_s=2.46e12, flops_per_s=459e12, native_float8=False),
    Chip(name="v6e", platform="tpu", kind="tpu v6 lite", fast_memory_bytes=128 * MIB, num_cores=1, bytes_per_s=1.64e12, flops_per_s=918e12, native_float8=True),
    Chip(name="tpu7x", platform="tpu", kind="tpu7x", fast_memory_bytes=64 * MIB, num_cores=1, bytes_per_s=3.7e12, flops_per_s=1155e12, native_float8=True),
    Chip(name="a100", platform="gpu", kind="a100", fast_memory_bytes=163 * 1024, num_cores=108, bytes_per_s=2.04e12, flops_per_s=312e12, native_float8=False),
    Chip(name="h100", platform="gpu", kind="h100", fast_memory_bytes=227 * 1024, num_cores=132, bytes_per_s=3.35e12, flops_per_s=989e12, native_float8=True),
    Chip(name="h200", platform="gpu", kind="h200", fast_memory_bytes=227 * 1024, num_cores=132, bytes_per_s=4.8e12, flops_per_s=989e12, native_float8=True),
    Chip(name="b200", platform="gpu", kind="b200", fast_memory_bytes=227 * 1024, num_cores=148, bytes_per_s=8.0e12, flops_per_s=2250e12, native_float8=True),
)

_SMALLEST = {"tpu": "v4", "gpu": "a100"}


def find_chip(target: Target, platform: Literal["gpu", "tpu"]) -> Chip:
    """Facts of the target's chip. A chip that the table does not hold, or an interpreter on CPU, gets those of the smallest one of ``platform``."""
    kind = target.device_kind.lower()
    if target.platform == platform:
        matches = [chip for chip in CHIPS if chip.platform == platform and chip.kind in kind]
        if matches:
            return max(matches, key=lambda chip: len(chip.kind))  # "tpu v5" is a part of "tpu v5 lite".
    return next(chip for chip in CHIPS if chip.name == _SMALLEST[platform])

"""The one table of chips: what kernels, compilers and plans need to know of each, with its source. Imports no jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

KIB, MIB, GIB = 2**10, 2**20, 2**30
_TERA = 10**12
_JAX_SHARE = 0.75
"""Of a GPU's memory, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise (docs.jax.dev, GPU memory allocation)."""

Platform = Literal["gpu", "tpu"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Links:
    """How a chip's devices reach those of other chips.

    Args:
        kind: ``torus``: each chip has links to its neighbours in a grid. ``switch``: every chip reaches every other at full speed.
        bytes_per_s: In one direction: of one link of a torus, of all links of a chip at a switch.
        num_links: Links of a chip.
        start_s: Time that any collective takes beyond its hops and its bytes.
        hop_s: Time of one hop of a ring, whatever its size.
    """

    kind: Literal["torus", "switch"]
    bytes_per_s: float
    num_links: int
    start_s: float
    hop_s: float

    @property
    def ring_bytes_per_s(self) -> float:
        """What a chip sends in a ring: both directions of one torus axis at once, or all it has at a switch."""
        return 2 * self.bytes_per_s if self.kind == "torus" else self.bytes_per_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuUnits:
    """What XLA and Triton are told of a GPU, beyond the facts of :class:`Chip`.

    Args:
        name: As the driver names the device.
        capability: Compute capability, major and minor.
        accelerated: Whether the ``a`` feature set exists (9.0 and later).
        fp32_lanes: FMA lanes of a multiprocessor.
        scalar_ghz: Boost clock.
        tensor_ghz: Clock at which the data sheet's tensor throughput holds.
        tensor_fma: Dense bfloat16 FMAs a clock of one of the four tensor cores; float32 (TF32) has half, 8-bit types twice as many.
        fp64_fma: The same for float64.
        shared_bytes: Shared memory of a multiprocessor.
        l2_bytes: Level 2 cache.
    """

    name: str
    capability: tuple[int, int]
    accelerated: bool
    fp32_lanes: int
    scalar_ghz: float
    tensor_ghz: float
    tensor_fma: int
    fp64_fma: int
    shared_bytes: int
    l2_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """Facts about one accelerator, as one jax device sees it: of a chip that shows two devices, each has half.

    Args:
        name: Short name, as users write it.
        platform: ``tpu`` or ``gpu``.
        kind: A part of the device kind, lower case, that tells it from the others.
        devices_per_chip: Devices that jax sees of one chip.
        memory_bytes: Device memory.
        usable_bytes: What a program may take of it: on TPU what XLA's compiler says when it runs out, on GPU the share that jax reserves.
        bytes_per_s: Its peak bandwidth.
        flops_by_dtype: Peak dense FLOP/s of matrix products by operand dtype; a dtype that is not there runs as bfloat16.
        fast_memory_bytes: VMEM of a TPU core, or shared memory that one GPU block can use.
        num_cores: Streaming multiprocessors of a GPU, tensor cores of a TPU device.
        native_float8: Whether e4m3 can be converted by an instruction.
        links: To other chips; of the whole chip, which its devices share.
        topologies: Shapes in which chips are sold: grids of a TPU, counts in one NVLink domain of a GPU. The smallest that compiles comes first.
        source: Where the figures are from.
        gpu: The rest that compilers for GPUs ask for.
    """

    name: str
    platform: Platform
    kind: str
    devices_per_chip: int = 1
    memory_bytes: int
    usable_bytes: int
    bytes_per_s: float
    flops_by_dtype: Mapping[str, float] = dataclasses.field(hash=False)
    fast_memory_bytes: int
    num_cores: int
    native_float8: bool
    links: Links
    topologies: tuple[str, ...]
    source: str
    gpu: GpuUnits | None = None

    @property
    def flops_per_s(self) -> float:
        """Peak dense bfloat16."""
        return self.flops_by_dtype["bfloat16"]

    def peak_flops_per_s(self, dtype: str) -> float:
        """Peak dense FLOP/s of products of a dtype."""
        return self.flops_by_dtype.get(dtype, self.flops_per_s)


_GRIDS_2D = ("2x2", "1x1", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_GRIDS_3D = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")
_NVLINK_COUNTS = tuple(str(count) for count in range(1, 9))


def _ici(bytes_per_s: float, num_links: int) -> Links:
    # About 1 us a hop: "How To Scale Your Model" (jax-ml.github.io/scaling-book), section on sharded matrices.
    return Links(kind="torus", bytes_per_s=bytes_per_s, num_links=num_links, start_s=0.0, hop_s=1e-6)


def _nvlink(bytes_per_s: float, num_links: int) -> Links:
    # Start and hop of a ring over NVLink with the LL protocol: the latency tables of NCCL 2.19 to 2.21, src/graph/tuning.cc.
    return Links(kind="switch", bytes_per_s=bytes_per_s, num_links=num_links, start_s=6.6e-6, hop_s=0.6e-6)


def _tpu(
    name: str, kind: str, *, tera: Mapping[str, float], memory_gib: int, usable_gib: float, bytes_per_s: float, vmem_mib: int, float8: bool, links: Links,
    grids: tuple[str, ...], source: str, devices_per_chip: int = 1, num_cores: int = 1,
) -> Chip:  # fmt: skip
    """A TPU from the figures of a whole chip, but for what is usable, which is a device's."""
    return Chip(
        name=name, platform="tpu", kind=kind, devices_per_chip=devices_per_chip, memory_bytes=memory_gib * GIB // devices_per_chip,
        usable_bytes=int(usable_gib * GIB),
        bytes_per_s=bytes_per_s / devices_per_chip, flops_by_dtype={dtype: value * _TERA / devices_per_chip for dtype, value in tera.items()},
        fast_memory_bytes=vmem_mib * MIB, num_cores=num_cores, native_float8=float8, links=links, topologies=grids, source=source,
    )  # fmt: skip


# Usable: the compile-time out-of-memory errors of libtpu 0.0.50. VMEM: jax's own table (jax.experimental.pallas.tpu.get_tpu_info, per core).
# Links: the page's bidirectional bandwidth of a chip, halved, over its ports.
_V4_PAPER = "cloud.google.com/tpu/docs/v4; links: Jouppi et al., ISCA 2023, arXiv 2304.01433, table 4"
_TPUS = (
    _tpu(
        "v4", "tpu v4", tera={"bfloat16": 275, "int8": 275}, memory_gib=32, usable_gib=15.25, bytes_per_s=1.2e12, vmem_mib=16, float8=False,
        links=_ici(50e9, 6), grids=_GRIDS_3D, source=_V4_PAPER, devices_per_chip=2,
    ),
    _tpu(
        "v5e", "tpu v5 lite", tera={"bfloat16": 197, "int8": 393}, memory_gib=16, usable_gib=15.75, bytes_per_s=0.819e12, vmem_mib=128, float8=False,
        links=_ici(50e9, 4), grids=_GRIDS_2D, source="cloud.google.com/tpu/docs/v5e",
    ),
    _tpu(
        "v5p", "tpu v5", tera={"bfloat16": 459, "int8": 918}, memory_gib=96, usable_gib=95.73, bytes_per_s=2.765e12, vmem_mib=64, float8=False,
        links=_ici(100e9, 6), grids=_GRIDS_3D, source="cloud.google.com/tpu/docs/v5p; int8: cloud.google.com/blog, TPU v5p, 2023-12",
        num_cores=2,
    ),
    _tpu(
        "v6e", "tpu v6 lite", tera={"bfloat16": 918, "int8": 1836, "float8_e4m3fn": 918}, memory_gib=32, usable_gib=31.24, bytes_per_s=1.638e12, vmem_mib=128,
        float8=True, links=_ici(100e9, 4), grids=_GRIDS_2D, source="cloud.google.com/tpu/docs/v6e",
    ),
    _tpu(
        "tpu7x", "tpu7x", tera={"bfloat16": 2307, "float8_e4m3fn": 4614}, memory_gib=192, usable_gib=94.74, bytes_per_s=7.38e12, vmem_mib=64, float8=True,
        links=_ici(100e9, 6), grids=_GRIDS_3D, source="cloud.google.com/tpu/docs/tpu7x", devices_per_chip=2,
    ),
)  # fmt: skip


def _gpu(
    name: str, *, tera: Mapping[str, float], memory_bytes: int, bytes_per_s: float, block_bytes: int, num_cores: int, float8: bool, links: Links,
    source: str, units: GpuUnits,
) -> Chip:  # fmt: skip
    return Chip(
        name=name, platform="gpu", kind=name, memory_bytes=memory_bytes, usable_bytes=int(_JAX_SHARE * memory_bytes), bytes_per_s=bytes_per_s,
        flops_by_dtype={dtype: value * _TERA for dtype, value in tera.items()}, fast_memory_bytes=block_bytes, num_cores=num_cores, native_float8=float8,
        links=links, topologies=_NVLINK_COUNTS, source=source, gpu=units,
    )  # fmt: skip


# Shared memory: the CUDA programming guide's table of compute capabilities. FLOP/s without sparsity; float32 is TF32.
_HOPPER = {"bfloat16": 989, "float32": 494, "int8": 1979, "float8_e4m3fn": 1979}
_H100 = GpuUnits(
    name="NVIDIA H100 80GB HBM3", capability=(9, 0), accelerated=True, fp32_lanes=128, scalar_ghz=1.98, tensor_ghz=1.83, tensor_fma=512, fp64_fma=32,
    shared_bytes=233472, l2_bytes=50 * MIB,
)  # fmt: skip
_GPUS = (
    _gpu(
        "a100", tera={"bfloat16": 312, "float32": 156, "int8": 624}, memory_bytes=85_094_825_984, bytes_per_s=2.039e12, block_bytes=163 * KIB,
        num_cores=108, float8=False, links=_nvlink(300e9, 12), source="NVIDIA A100 80GB SXM data sheet; GA100 white paper",
        units=GpuUnits(
            name="NVIDIA A100-SXM4-80GB", capability=(8, 0), accelerated=False, fp32_lanes=64, scalar_ghz=1.41, tensor_ghz=1.41, tensor_fma=256,
            fp64_fma=16, shared_bytes=167936, l2_bytes=40 * MIB,
        ),
    ),
    _gpu(
        "h100", tera=_HOPPER, memory_bytes=85_045_870_592, bytes_per_s=3.35e12, block_bytes=227 * KIB, num_cores=132, float8=True,
        links=_nvlink(450e9, 18), source="NVIDIA H100 SXM data sheet; GH100 white paper", units=_H100,
    ),
    _gpu(
        "h200", tera=_HOPPER, memory_bytes=151_397_597_184, bytes_per_s=4.8e12, block_bytes=227 * KIB, num_cores=132, float8=True,
        links=_nvlink(450e9, 18), source="NVIDIA H200 SXM data sheet; GH100 white paper", units=dataclasses.replace(_H100, name="NVIDIA H200"),
    ),
    _gpu(
        "b200", tera={"bfloat16": 2250, "float32": 1100, "int8": 4500, "float8_e4m3fn": 4500}, memory_bytes=191_501_434_880, bytes_per_s=8.0e12,
        block_bytes=227 * KIB, num_cores=148, float8=True, links=_nvlink(900e9, 18), source="NVIDIA HGX B200 data sheet; Blackwell architecture brief",
        units=GpuUnits(
            name="NVIDIA B200", capability=(10, 0), accelerated=True, fp32_lanes=128, scalar_ghz=1.965, tensor_ghz=1.857, tensor_fma=1024, fp64_fma=16,
            shared_bytes=233472, l2_bytes=126 * MIB,
        ),
    ),
)  # fmt: skip

CHIPS: tuple[Chip, ...] = _TPUS + _GPUS
"""Every chip that is known. Read 2026-11."""

CHIPS_BY_NAME: Mapping[str, Chip] = {chip.name: chip for chip in CHIPS}

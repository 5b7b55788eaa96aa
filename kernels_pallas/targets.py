"""The chips that kernels are compiled for without having them: topology names, descriptions for XLA, and what must be installed. Imports no jax."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

TPU_TOPOLOGIES: Mapping[str, str] = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
"""Smallest topology of each TPU that the compiler accepts, by target name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """What XLA and Triton are told of a GPU.

    Args:
        name: As the driver names the device.
        capability: Compute capability, major and minor.
        accelerated: Whether the ``a`` feature set exists (9.0 and later).
        num_cores: Streaming multiprocessors.
        fp32_lanes: FMA lanes of a multiprocessor.
        scalar_ghz: Boost clock.
        tensor_ghz: Clock at which the data sheet's tensor throughput holds.
        tensor_fma: Dense bfloat16 FMAs a clock of one of the four tensor cores; float32 (TF32) has half, 8-bit types twice as many.
        fp64_fma: The same for float64.
        has_float8: Whether tensor cores take float8.
        shared_bytes: Shared memory of a multiprocessor.
        shared_block_bytes: Most that one block can use.
        l2_bytes: Level 2 cache.
        memory_bytes: Device memory.
        bytes_per_s: Peak memory bandwidth.
        links: NVLink links.
    """

    name: str
    capability: tuple[int, int]
    accelerated: bool
    num_cores: int
    fp32_lanes: int
    scalar_ghz: float
    tensor_ghz: float
    tensor_fma: int
    fp64_fma: int
    has_float8: bool
    shared_bytes: int
    shared_block_bytes: int
    l2_bytes: int
    memory_bytes: int
    bytes_per_s: int
    links: int


# NVIDIA's data sheets and architecture papers (A100: GA100 paper; H100, H200: GH100 paper; B200: Blackwell brief), and the CUDA programming guide's
# table of compute capabilities for shared memory. Read 2026-11.
GPU_FACTS: Mapping[str, GpuFacts] = {
    "a100": GpuFacts(
        name="NVIDIA A100-SXM4-80GB", capability=(8, 0), accelerated=False, num_cores=108, fp32_lanes=64, scalar_ghz=1.41, tensor_ghz=1.41, tensor_fma=256,
        fp64_fma=16, has_float8=False, shared_bytes=167936, shared_block_bytes=166912, l2_bytes=40 * 2**20, memory_bytes=85_094_825_984,
        bytes_per_s=2_039_000_000_000, links=12,
    ),
    "h100": GpuFacts(
        name="NVIDIA H100 80GB HBM3", capability=(9, 0), accelerated=True, num_cores=132, fp32_lanes=128, scalar_ghz=1.98, tensor_ghz=1.83, tensor_fma=512,
        fp64_fma=32, has_float8=True, shared_bytes=233472, shared_block_bytes=232448, l2_bytes=50 * 2**20, memory_bytes=85_045_870_592,
        bytes_per_s=3_350_000_000_000, links=18,
    ),
    "h200": GpuFacts(
        name="NVIDIA H200", capability=(9, 0), accelerated=True, num_cores=132, fp32_lanes=128, scalar_ghz=1.98, tensor_ghz=1.83, tensor_fma=512,
        fp64_fma=32, has_float8=True, shared_bytes=233472, shared_block_bytes=232448, l2_bytes=50 * 2**20, memory_bytes=151_397_597_184,
        bytes_per_s=4_800_000_000_000, links=18,
    ),
    "b200": GpuFacts(
        name="NVIDIA B200", capability=(10, 0), accelerated=True, num_cores=148, fp32_lanes=128, scalar_ghz=1.965, tensor_ghz=1.857, tensor_fma=1024,
        fp64_fma=16, has_float8=True, shared_bytes=233472, shared_block_bytes=232448, l2_bytes=126 * 2**20, memory_bytes=191_501_434_880,
        bytes_per_s=8_000_000_000_000, links=18,
    ),
}  # fmt: skip

TARGETS: tuple[str, ...] = (*TPU_TOPOLOGIES, *GPU_FACTS)
"""Every target name."""

# XLA's primitive types, the keys of a rate table.
_S8, _F16, _F32, _F64, _BF16, _F8E5M2, _F8E4M3 = 2, 10, 11, 12, 16, 19, 20


def gpu_config(name: str) -> str:
    """A GPU as ``stream_executor.GpuTargetConfigProto`` in text form, for ``topologies.get_topology_desc(target_config=...)``."""
    gpu = GPU_FACTS[name]
    major, minor = gpu.capability
    version = f"{major}.{minor}{'a' if gpu.accelerated else ''}"

    def rates(rows: list[tuple[int, float, int, int]]) -> str:
        return " ".join(
            f"rate_infos {{ key: {key} value {{ clock_rate_ghz: {ghz} units_per_core: {units} ops_per_clock: {ops} }} }}" for key, ghz, units, ops in rows
        )

    scalar = [(_F16, gpu.scalar_ghz, gpu.fp32_lanes, 2), (_F32, gpu.scalar_ghz, gpu.fp32_lanes, 1), (_F64, gpu.scalar_ghz, gpu.fp32_lanes // 2, 1)]
    scalar.append((_BF16, gpu.scalar_ghz, gpu.fp32_lanes, 2))
    fma, ghz = gpu.tensor_fma, gpu.tensor_ghz
    matrix = [(_S8, ghz, 4, 2 * fma), (_F16, ghz, 4, fma), (_F32, ghz, 4, fma // 2), (_F64, gpu.scalar_ghz, 4, gpu.fp64_fma), (_BF16, ghz, 4, fma)]
    if gpu.has_float8:
        matrix += [(_F8E5M2, ghz, 4, 2 * fma), (_F8E4M3, ghz, 4, 2 * fma)]
    feature = " feature_extension: ACCELERATED_FEATURES" if gpu.accelerated else ""
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: {gpu.num_cores} fpus_per_core: {gpu.fp32_lanes}
  shared_memory_per_block: 49152 shared_memory_per_core: {gpu.shared_bytes} shared_memory_per_block_optin: {gpu.shared_block_bytes}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: {gpu.bytes_per_s} l2_cache_size: {gpu.l2_bytes} clock_rate_ghz: {gpu.scalar_ghz} device_memory_size: {gpu.memory_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor}{feature} }}
  scalar_unit_description {{ {rates(scalar)} }} matrix_unit_description {{ {rates(matrix)} }}
  device_vendor: "NVIDIA Corporation" platform_version: "Compute Capability {version}" device_address_bits: 64
  pcie_bandwidth: 34359738368 ecc_enabled: true name: "{gpu.name}"
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
  device_interconnect_info {{ active_links: {gpu.links} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{gpu.name}"
"""


def missing(target: str) -> str | None:
    """What to install to compile for a target here, or ``None`` if nothing is missing."""
    if target in TPU_TOPOLOGIES:
        return None if importlib.util.find_spec("libtpu") else 'libtpu is not installed: pip install "jaxserve[aot-tpu]"'
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        return 'jax\'s CUDA plugin is not installed: pip install "jaxserve[aot-gpu]"'
    if _ptxas() is None:
        return "ptxas is not installed: pip install nvidia-cuda-nvcc nvidia-nvvm (in one call), or put a CUDA toolkit on PATH"
    return None


def _ptxas() -> Path | None:
    """The assembler: of a toolkit on PATH, else of NVIDIA's wheels."""
    found = shutil.which("ptxas")
    if found:
        return Path(found)
    wheels = Path(sysconfig.get_path("purelib")) / "nvidia"
    return next(iter(sorted(wheels.glob("*/bin/ptxas"))), None)


def environment(target: str) -> dict[str, str]:
    """Environment of a process that compiles for ``target``. One GPU target a process: a kernel for one chip was once taken for another's."""
    variables = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": ""}
    if target in TPU_TOPOLOGIES:
        return variables | {
            "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v6e-4", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        }  # fmt: skip
    ptxas = _ptxas()
    variables["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    if ptxas is not None and shutil.which("ptxas") is None:
        variables["PATH"] = f"{ptxas.parent}{os.pathsep}{variables.get('PATH', '')}"
        variables["XLA_FLAGS"] = f"{variables.get('XLA_FLAGS', '')} --xla_gpu_cuda_data_dir={ptxas.parent.parent}".strip()
    return variables


def command(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module of ours in a process of its own."""
    return [sys.executable, "-m", module, *arguments]

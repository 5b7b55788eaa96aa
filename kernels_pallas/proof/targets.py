"""The targets: chips that need not be present to compile for. Their topologies, descriptions for XLA, and what must be installed. Imports no jax."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from jaxserve.kernels_pallas.chips import CHIPS, CHIPS_BY_NAME

TPU_TOPOLOGIES: Mapping[str, str] = {chip.name: f"{chip.name}:{chip.topologies[0]}" for chip in CHIPS if chip.platform == "tpu"}
"""The smallest topology of each TPU that kernels are compiled for, by target name."""

TARGETS: tuple[str, ...] = tuple(chip.name for chip in CHIPS)
"""Every target name."""

# XLA's primitive types, the keys of a rate table.
_S8, _F16, _F32, _F64, _BF16, _F8E5M2, _F8E4M3 = 2, 10, 11, 12, 16, 19, 20


def gpu_config(name: str) -> str:
    """The description of a GPU as ``stream_executor.GpuTargetConfigProto`` in text form, for ``topologies.get_topology_desc(target_config=...)``."""
    chip = CHIPS_BY_NAME[name]
    gpu = chip.gpu
    assert gpu is not None, f"{name} is no GPU"
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
    if chip.native_float8:
        matrix += [(_F8E5M2, ghz, 4, 2 * fma), (_F8E4M3, ghz, 4, 2 * fma)]
    feature = " feature_extension: ACCELERATED_FEATURES" if gpu.accelerated else ""
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: {chip.num_cores} fpus_per_core: {gpu.fp32_lanes}
  shared_memory_per_block: 49152 shared_memory_per_core: {gpu.shared_bytes} shared_memory_per_block_optin: {chip.fast_memory_bytes}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: {chip.bytes_per_s:.0f} l2_cache_size: {gpu.l2_bytes} clock_rate_ghz: {gpu.scalar_ghz} device_memory_size: {chip.memory_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor}{feature} }}
  scalar_unit_description {{ {rates(scalar)} }} matrix_unit_description {{ {rates(matrix)} }}
  device_vendor: "NVIDIA Corporation" platform_version: "Compute Capability {version}" device_address_bits: 64
  pcie_bandwidth: 34359738368 ecc_enabled: true name: "{gpu.name}"
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
  device_interconnect_info {{ active_links: {chip.links.num_links} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{gpu.name}"
"""


def missing(target: str) -> str | None:
    """What must still be installed to compile for a target, in words; ``None`` if nothing is missing."""
    if target in TPU_TOPOLOGIES:
        return None if importlib.util.find_spec("libtpu") else 'libtpu is not installed: pip install "jaxserve[aot-tpu]"'
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        return 'jax\'s CUDA plugin is not installed: pip install "jaxserve[aot-gpu]"'
    if _ptxas() is None:
        return "ptxas is not installed: pip install nvidia-cuda-nvcc nvidia-nvvm (in one call), or put a CUDA toolkit on PATH"
    return None


def _ptxas() -> Path | None:
    """Path of the assembler ptxas from a CUDA toolkit on PATH, else from NVIDIA's wheels; ``None`` if there is none."""
    found = shutil.which("ptxas")
    if found:
        return Path(found)
    wheels = Path(sysconfig.get_path("purelib")) / "nvidia"
    return next(iter(sorted(wheels.glob("*/bin/ptxas"))), None)


def environment(target: str) -> dict[str, str]:
    """The environment of a process that compiles for ``target``. Each GPU target needs a process of its own: one chip's kernel was once taken for another's."""
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

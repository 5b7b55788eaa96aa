"""How large the KV pool is and what fits into it. The pool's layout belongs to the attention implementation."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.config import CacheConfig
from jaxserve.errors import ConfigError
from jaxserve.kernels_pallas.ragged_paged_attention.api import Implementation, KVPool, PoolShape
from jaxserve.models.spec import ModelSpec

CPU_MEMORY_FRACTION = 0.1
"""Default share of a host's free memory: the host has other things to do."""
ACCELERATOR_MEMORY_FRACTION = 0.9


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolPlan:
    """A sized pool.

    Args:
        shape: Its logical shape.
        attention: The implementation of attention that lays it out.
        page_bytes: Bytes of one page, all layers, keys and values.
    """

    shape: PoolShape
    attention: Implementation
    page_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.shape.num_pages * self.page_bytes

    @property
    def num_slots(self) -> int:
        """Tokens that the pool holds."""
        return self.shape.num_pages * self.shape.page_size

    def abstract(self) -> KVPool:
        """The pool's arrays, as ``jax.ShapeDtypeStruct``."""
        return self.attention.init_pool(self.shape)

    def allocate(self) -> KVPool:
        """A pool of zeros."""
        return jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), self.abstract())


def plan_pool(
    spec: ModelSpec, config: CacheConfig, *, attention: Implementation, dtype: Any, table_width: int, max_num_seqs: int, free_bytes: int, is_cpu: bool
) -> PoolPlan:
    """Sizes the pool: ``num_pages`` as configured, else what the memory fraction buys, at most what all sequences at full length need.

    Args:
        spec: The model.
        config: The cache section.
        attention: The implementation of attention, whose layout may pad.
        dtype: Of keys and values.
        table_width: Pages of the longest sequence.
        max_num_seqs: Sequence slots.
        free_bytes: Memory that is free now, the weights being loaded.
        is_cpu: Whether that memory is the host's.

    Raises:
        ConfigError: The pool does not fit, or no page fits.
    """

    def shape(num_pages: int) -> PoolShape:
        return PoolShape(
            num_layers=spec.num_layers, num_pages=num_pages, page_size=config.page_size, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, dtype=dtype
        )

    page_bytes = sum(math.prod(array.shape) * array.dtype.itemsize for array in jax.tree.leaves(attention.init_pool(shape(1))))
    num_pages = config.num_pages
    if num_pages is None:
        fraction = config.memory_fraction or (CPU_MEMORY_FRACTION if is_cpu else ACCELERATOR_MEMORY_FRACTION)
        num_pages = min(int(free_bytes * fraction) // page_bytes, max_num_seqs * table_width)
        if num_pages < 1:
            raise ConfigError(
                f"cache.memory_fraction={fraction:g} of {free_bytes / 2**20:.0f} MiB free holds no page of {page_bytes / 2**20:.1f} MiB; "
                f"use a smaller cache.page_size, a larger fraction, or a smaller model"
            )
    elif num_pages * page_bytes > free_bytes:
        raise ConfigError(
            f"cache.num_pages={num_pages} takes {num_pages * page_bytes / 2**30:.2f} GiB, {free_bytes / 2**30:.2f} GiB are free; at most {free_bytes // page_bytes} fit"
        )
    return PoolPlan(shape=shape(num_pages), attention=attention, page_bytes=page_bytes)


def free_memory(device: jax.Device) -> int:
    """Free bytes of a device: its own where it tells, the host's otherwise (within the limit of the process's control group)."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats["bytes_in_use"])
    return min(_available_on_host(), _left_in_cgroup())


def _available_on_host() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("this host does not tell its free memory; set cache.num_pages")


def _left_in_cgroup() -> int:
    limit, usage = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    try:
        return int(limit.read_text()) - int(usage.read_text())
    except (OSError, ValueError):  # No control group, or one without a limit ("max").
        return 2**63 - 1

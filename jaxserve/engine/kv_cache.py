"""How large the KV pool is and what fits into it. The pool's layout belongs to the attention implementation."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.config import CacheConfig
from jaxserve.engine.memory import Memory
from jaxserve.errors import ConfigError
from jaxserve.kernels_pallas.ragged_paged_attention.api import Implementation, KVPool, PoolShape
from jaxserve.models.spec import ModelSpec

CPU_MEMORY_FRACTION = 0.1
"""Default share of a host's memory: the host has other things to do."""
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
    spec: ModelSpec,
    config: CacheConfig,
    *,
    attention: Implementation,
    dtype: Any,
    table_width: int,
    max_num_seqs: int,
    memory: Memory,
    is_cpu: bool,
) -> PoolPlan:
    """Sizes the pool: ``num_pages`` as configured, else what the memory fraction buys, at most what all sequences at full length need.

    The size is a shape of the compiled programs, so it must not follow the moment's free memory: two starts would share no program on disk. The
    fraction is of all memory, capped by what is free, and on a host, where that varies, the count of pages is cut to three significant bits.

    Args:
        spec: The model.
        config: The cache section.
        attention: The implementation of attention, which lays the pool out.
        dtype: Of keys and values.
        table_width: Pages of the longest sequence.
        max_num_seqs: Sequence slots.
        memory: Of the device, the weights being loaded.
        is_cpu: Whether that memory is the host's.

    Raises:
        ConfigError: The pool does not fit, or no page fits.
    """

    def shape(num_pages: int) -> PoolShape:
        return PoolShape(
            num_layers=spec.num_layers, num_pages=num_pages, page_size=config.page_size, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, dtype=dtype
        )

    page_bytes = sum(math.prod(array.shape) * jnp.dtype(array.dtype).itemsize for array in jax.tree.leaves(attention.init_pool(shape(1))))
    num_pages = config.num_pages
    if num_pages is None:
        fraction = config.memory_fraction or (CPU_MEMORY_FRACTION if is_cpu else ACCELERATOR_MEMORY_FRACTION)
        budget_bytes = int(min(memory.total_bytes * fraction, memory.free_bytes * ACCELERATOR_MEMORY_FRACTION))
        affordable = budget_bytes // page_bytes
        num_pages = min(_three_bits(affordable) if is_cpu else affordable, max_num_seqs * table_width)
        if num_pages < 1:
            raise ConfigError(
                f"cache.memory_fraction={fraction:g} of {memory.total_bytes / 2**20:.0f} MiB ({memory.free_bytes / 2**20:.0f} MiB free) holds no page of "
                f"{page_bytes / 2**20:.1f} MiB; use a smaller cache.page_size, a larger fraction, or a smaller model"
            )
    elif num_pages * page_bytes > memory.free_bytes:
        raise ConfigError(
            f"cache.num_pages={num_pages} takes {num_pages * page_bytes / 2**30:.2f} GiB, {memory.free_bytes / 2**30:.2f} GiB are free; "
            f"at most {memory.free_bytes // page_bytes} fit"
        )
    return PoolPlan(shape=shape(num_pages), attention=attention, page_bytes=page_bytes)


def _three_bits(number: int) -> int:
    """The largest integer of three significant bits that is not above ``number``."""
    shift = max(0, number.bit_length() - 3)
    return number >> shift << shift

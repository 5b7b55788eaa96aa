"""How large the KV pool is and what fits into it. What it keeps of a token is for the model's kind of attention to say, its layout for the implementation."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.config import CacheConfig
from jaxserve.engine.programs.memory import Memory
from jaxserve.errors import ConfigError
from jaxserve.kernels_pallas.ragged_paged_attention.api import Implementation, KVPool, PoolShape
from jaxserve.mesh import EACH_DEVICE, Layout
from jaxserve.models.spec import ModelSpec

CPU_MEMORY_FRACTION = 0.1
"""Default share of a host's memory: the host has other things to do."""
ACCELERATOR_MEMORY_FRACTION = 0.9
ACCELERATOR_SWAP_GIB = 4.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolPlan:
    """A sized pool. Each device holds its own part: the pages of its data rank, the KV heads of its model rank.

    Args:
        shape: The logical shape of a device's part.
        attention: The implementation of attention that lays it out.
        page_bytes: Bytes of one page on one device, all layers, keys and values.
        layout: The mesh.
    """

    shape: PoolShape
    attention: Implementation
    page_bytes: int
    layout: Layout

    @property
    def device_bytes(self) -> int:
        """Bytes of a device's part."""
        return self.shape.num_pages * self.page_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens that all data ranks together hold."""
        return self.layout.shape.data * self.shape.num_pages * self.shape.page_size

    def abstract(self) -> KVPool:
        """The devices' arrays, one after the other along the first axis, as ``jax.ShapeDtypeStruct``."""
        return abstract_pool(self.attention, self.shape, self.layout)

    @property
    def page_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of each array of the pool, the shape of one layer's page: a run of rows, then the array's other axes."""
        return tuple((self.shape.page_rows(array.shape[0]), *array.shape[1:]) for array in jax.tree.leaves(self.attention.init_pool(self.shape)))

    def allocate(self) -> KVPool:
        """A pool of zeros."""
        abstract = self.abstract()
        shardings = jax.tree.map(lambda array: array.sharding, abstract)
        return jax.jit(lambda: jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), abstract), out_shardings=shardings)()


def abstract_pool(attention: Implementation, shape: PoolShape, layout: Layout) -> KVPool:
    """The pool of all devices as abstract arrays with their shardings, given the shape of one device's part."""
    sharding = layout.sharding(EACH_DEVICE)

    def stacked(part: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((layout.mesh.size * part.shape[0], *part.shape[1:]), part.dtype, sharding=sharding)

    return jax.tree.map(stacked, attention.init_pool(shape))


def device_pool_shape(spec: ModelSpec, layout: Layout, *, num_pages: int, page_size: int, dtype: Any) -> PoolShape:
    """The shape of a device's part of a pool with ``num_pages`` pages a data rank."""
    num_parts = layout.shape.model if layout.model_axis(spec.attention.pool_axis) else 1
    return spec.attention.pool_shape(num_layers=spec.num_layers, num_pages=num_pages, page_size=page_size, dtype=dtype, num_parts=num_parts)


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
    layout: Layout,
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
        max_num_seqs: Sequence slots of a rank.
        memory: Of a device, the weights being loaded.
        is_cpu: Whether that memory is the host's, which all devices share.
        layout: The mesh.

    Raises:
        ConfigError: The pool does not fit, or no page fits.
    """

    def shape(num_pages: int) -> PoolShape:
        return device_pool_shape(spec, layout, num_pages=num_pages, page_size=config.page_size, dtype=dtype)

    page_bytes = sum(math.prod(array.shape) * jnp.dtype(array.dtype).itemsize for array in jax.tree.leaves(attention.init_pool(shape(1))))
    sharers = layout.mesh.size if is_cpu else 1
    num_pages = config.num_pages
    if num_pages is None:
        fraction = config.memory_fraction or (CPU_MEMORY_FRACTION if is_cpu else ACCELERATOR_MEMORY_FRACTION)
        budget_bytes = int(min(memory.total_bytes * fraction, memory.free_bytes * ACCELERATOR_MEMORY_FRACTION))
        affordable = budget_bytes // sharers // page_bytes
        num_pages = min(_three_bits(affordable) if is_cpu else affordable, max_num_seqs * table_width)
        if num_pages < 1:
            raise ConfigError(
                f"cache.memory_fraction={fraction:g} of {memory.total_bytes / 2**20:.0f} MiB ({memory.free_bytes / 2**20:.0f} MiB free) holds no page of "
                f"{page_bytes / 2**20:.1f} MiB; use a smaller cache.page_size, a larger fraction, or a smaller model"
            )
    elif num_pages * page_bytes * sharers > memory.free_bytes:
        raise ConfigError(
            f"cache.num_pages={num_pages} takes {num_pages * page_bytes * sharers / 2**30:.2f} GiB, {memory.free_bytes / 2**30:.2f} GiB are free; "
            f"at most {memory.free_bytes // sharers // page_bytes} fit"
        )
    return PoolPlan(shape=shape(num_pages), attention=attention, page_bytes=page_bytes, layout=layout)


def num_host_pages(plan: PoolPlan, config: CacheConfig, *, is_cpu: bool) -> int:
    """Pages of each data rank that the host memory for swaps holds, at most as many as the pool has."""
    gib = (0.0 if is_cpu else ACCELERATOR_SWAP_GIB) if config.swap_gib is None else config.swap_gib
    return min(int(gib * 2**30) // (plan.page_bytes * plan.layout.mesh.size), plan.shape.num_pages)


def _three_bits(number: int) -> int:
    """The largest integer of three significant bits that is not above ``number``."""
    shift = max(0, number.bit_length() - 3)
    return number >> shift << shift

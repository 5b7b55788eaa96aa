"""The size of the KV pool. What it holds for a token is decided by the model's kind of attention, and its layout by the implementation of attention."""

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
"""Default fraction of a host's memory that the pool takes. It is small, as the host needs memory for other things."""
ACCELERATOR_MEMORY_FRACTION = 0.9
ACCELERATOR_SWAP_GIB = 4.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolPlan:
    """The plan of a pool of known size. Each device holds its own part: the pages of its data rank, with the KV heads of its model rank.

    Args:
        shape: The logical shape of a device's part.
        attention: The implementation of attention, which decides the pool's layout.
        page_bytes: Bytes of one page on one device, for all layers, keys and values together.
        layout: The mesh and the sharding rules.
    """

    shape: PoolShape
    attention: Implementation
    page_bytes: int
    layout: Layout

    @property
    def device_bytes(self) -> int:
        """Bytes of a device's part of the pool."""
        return self.shape.num_pages * self.page_bytes

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the pools of all data ranks together hold."""
        return self.layout.shape.data * self.shape.num_pages * self.shape.page_size

    def abstract(self) -> KVPool:
        """The pool as ``jax.ShapeDtypeStruct``, with the devices' arrays concatenated along the first axis."""
        return abstract_pool(self.attention, self.shape, self.layout)

    @property
    def page_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of one layer's page in each array of the pool: its number of rows, then the array's other axes."""
        return tuple((self.shape.page_rows(array.shape[0]), *array.shape[1:]) for array in jax.tree.leaves(self.attention.init_pool(self.shape)))

    def allocate(self) -> KVPool:
        """A new pool of zeros on the devices."""
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
    """The shape of a device's part of a pool that has ``num_pages`` pages for each data rank."""
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
    """The plan of the pool: with ``num_pages`` as configured, else as many pages as the memory fraction allows, at most those of all sequences at full length.

    The size is a shape of the compiled programs. It must not follow the memory that happens to be free, or two starts would share no program on disk. So the
    fraction is taken of all memory, capped by what is free, and on a host, where that varies, the number of pages is cut to three significant bits.

    Args:
        spec: The model's specification.
        config: The cache section of the configuration.
        attention: The implementation of attention, which decides the pool's layout.
        dtype: Dtype of keys and values.
        table_width: Pages of the longest sequence.
        max_num_seqs: Sequence slots of a data rank.
        memory: Memory of a device on which the weights are loaded already.
        is_cpu: Whether that memory is the host's, which all devices share.
        layout: The mesh and the sharding rules.

    Raises:
        ConfigError: The configured pool does not fit into memory, or not even one page fits.
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
    """The number of host pages of each data rank that the configured memory for swaps holds, at most as many as the pool has pages."""
    gib = (0.0 if is_cpu else ACCELERATOR_SWAP_GIB) if config.swap_gib is None else config.swap_gib
    return min(int(gib * 2**30) // (plan.page_bytes * plan.layout.mesh.size), plan.shape.num_pages)


def _three_bits(number: int) -> int:
    """The largest integer up to ``number`` whose binary form has at most three significant bits."""
    shift = max(0, number.bit_length() - 3)
    return number >> shift << shift

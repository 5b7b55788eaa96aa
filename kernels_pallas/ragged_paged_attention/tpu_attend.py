"""What the TPU decode and prefill kernels share: fetching blocks of pages, and one block's step of the online softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from jaxserve.kernels_pallas.ragged_paged_attention.contract import MASKED


class Span(NamedTuple):
    """The pages that a work item reads: ``num_pages`` of them from the row's page ``first_page`` on, and the row's context length."""

    first_page: Array
    num_pages: Array
    context_len: Array


def span(first_key: Array, last_key: Array, context_len: Array, page_size: int) -> Span:
    """The pages of keys ``first_key .. last_key - 1``; a negative ``first_key`` is 0."""
    first_page = lax.div(jnp.maximum(first_key, 0), page_size)
    return Span(first_page, lax.div(last_key + page_size - 1, page_size) - first_page, context_len)


class PageReader:
    """Double-buffered copies of blocks of pages from HBM. Lives only while tracing.

    Args:
        pool_ref: ``[L*P, K, Z, W]`` in HBM.
        buffer: ``[2, block_pages, K, Z, W]`` in VMEM: two sides, one copied to while the other is read.
        semaphores: One DMA semaphore a side.
        layer_page: First page of the layer in the pool.
    """

    def __init__(self, pool_ref: Any, buffer: Any, semaphores: Any, layer_page: Array) -> None:
        self.pool_ref, self.buffer, self.semaphores, self.layer_page = pool_ref, buffer, semaphores, layer_page
        self.block_pages = buffer.shape[1]
        self.page_size = buffer.shape[3]

    def num_blocks(self, pages: Span) -> Array:
        """Blocks of a span."""
        return lax.div(pages.num_pages + self.block_pages - 1, self.block_pages)

    def start(self, table_ref: Any, pages: Span, block: Array, side: Array) -> None:
        """Starts copying a block; ``table_ref`` is the row's page table, ``[1, M]`` in SMEM."""
        self._each_page(table_ref, pages, block, side, lambda copy: copy.start())

    def wait(self, table_ref: Any, pages: Span, block: Array, side: Array) -> None:
        """Waits for a block, then clears what must not reach a product: rows past the context, and pages that were not copied.

        They may hold NaN, another sequence's or nobody's, and zero times NaN is NaN.
        """
        self._each_page(table_ref, pages, block, side, lambda copy: copy.wait())
        count = self._count(pages, block)

        @pl.when(block == self.num_blocks(pages) - 1)
        def _() -> None:
            zeros = jnp.zeros(self.buffer.shape[3:], self.buffer.dtype)

            def clear(page: Array, _: None) -> None:
                for head in range(self.buffer.shape[2]):
                    self.buffer[side, page, head] = zeros

            lax.fori_loop(count, self.block_pages, clear, None)
            last = count - 1
            valid = pages.context_len - (pages.first_page + block * self.block_pages + last) * self.page_size

            @pl.when(valid < self.page_size)
            def _() -> None:
                row = lax.broadcasted_iota(jnp.int32, self.buffer.shape[3:], 0)

                def mask(head: Array, _: None) -> None:
                    old = self.buffer[side, last, head]
                    wide = old.astype(jnp.int32 if jnp.issubdtype(old.dtype, jnp.integer) else jnp.float32)
                    self.buffer[side, last, head] = jnp.where(row < valid, wide, 0).astype(old.dtype)

                lax.fori_loop(0, self.buffer.shape[2], mask, None)

    def keys_and_values(self, side: Array, head: Array, dtype: Any) -> Array:
        """One head's rows of a block, ``[block_pages * Z, W]``."""
        rows = self.buffer[side, :, head]
        packing = 4 // rows.dtype.itemsize
        if self.page_size % (8 * packing):  # Merging pages is free only where a page is a whole number of registers.
            rows = rows.astype(jnp.float32)
        return rows.reshape(-1, rows.shape[-1]).astype(dtype)

    def first_key(self, pages: Span, block: Array) -> Array:
        """Position of a block's first key."""
        return (pages.first_page + block * self.block_pages) * self.page_size

    def _count(self, pages: Span, block: Array) -> Array:
        return jnp.minimum(pages.num_pages - block * self.block_pages, self.block_pages)

    def _each_page(self, table_ref: Any, pages: Span, block: Array, side: Array, act: Callable[[Any], None]) -> None:
        first = pages.first_page + block * self.block_pages

        def one(index: Array, _: None) -> None:
            page = self.layer_page + table_ref[0, first + index]
            act(pltpu.make_async_copy(self.pool_ref.at[page], self.buffer.at[side, index], self.semaphores.at[side]))

        lax.fori_loop(0, self._count(pages, block), one, None)


class Accumulators(NamedTuple):
    """Running maximum and sum ``[K, R, 128]`` (equal in all lanes) and unnormalised output ``[K, R, w]``, float32, in VMEM."""

    maximum: Any
    total: Any
    output: Any


def accumulator_scratch(num_kv_heads: int, rows: int, width: int) -> tuple[Any, ...]:
    """Scratch memory of :class:`Accumulators`."""
    return (
        pltpu.VMEM((num_kv_heads, rows, 128), jnp.float32),
        pltpu.VMEM((num_kv_heads, rows, 128), jnp.float32),
        pltpu.VMEM((num_kv_heads, rows, width), jnp.float32),
    )


def start_softmax(accumulators: Accumulators, head: Array, sinks: Array | None) -> None:
    """Empties one head's accumulators; a sink is a first key with logit ``sinks`` (``[R, 128]``) and no value."""
    shape = accumulators.maximum.shape[1:]
    accumulators.output[head] = jnp.zeros(accumulators.output.shape[1:], jnp.float32)
    accumulators.maximum[head] = jnp.full(shape, MASKED, jnp.float32) if sinks is None else sinks
    accumulators.total[head] = jnp.full(shape, 0.0 if sinks is None else 1.0, jnp.float32)


def softmax_step(
    accumulators: Accumulators, head: Array, q: Array, rows: Array, visible: Array, scale: Array, soft_cap: float | None, half: int
) -> None:  # fmt: skip
    """Adds one block of keys to one head's accumulators.

    Args:
        accumulators: Of all heads.
        head: Which.
        q: ``[R, w]``.
        rows: Keys and values side by side, ``[keys, W]``, in the dtype of ``q``.
        visible: ``[R, keys]`` or ``[1, keys]``.
        scale: Of the products; the head's key scale is in it.
        soft_cap: As the op's.
        half: Lanes of a key. 64: the whole row is the operand of both products, ``q`` being zero over the values.
    """
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    keys, values = (rows, rows) if half < 128 else (rows[:, :half], rows[:, half:])
    logits = lax.dot_general(q, keys, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32) * scale
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits * (1 / soft_cap))
    logits = jnp.where(visible, logits, MASKED)
    old_maximum = accumulators.maximum[head][:, :1]
    maximum = jnp.maximum(old_maximum, jnp.max(logits, axis=1, keepdims=True))
    weights = jnp.exp(logits - maximum)
    correction = jnp.exp(old_maximum - maximum)
    total = accumulators.total[head][:, :1] * correction + jnp.sum(weights, axis=1, keepdims=True)
    product = lax.dot_general(weights.astype(q.dtype), values, (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)
    accumulators.output[head] = accumulators.output[head] * correction + product
    accumulators.maximum[head] = jnp.broadcast_to(maximum, accumulators.maximum.shape[1:])
    accumulators.total[head] = jnp.broadcast_to(total, accumulators.total.shape[1:])


def finish_softmax(accumulators: Accumulators, head: Array, scale: Array) -> Array:
    """One head's output, ``[R, w]`` float32; ``scale`` is the head's value scale."""
    return accumulators.output[head] / accumulators.total[head][:, :1] * scale


def for_heads(num_heads: int, in_line: int, body: Callable[[Any], None]) -> None:
    """Runs ``body`` for each head, up to ``in_line`` of them in line: short bodies overlap, long ones only cost compile time."""
    in_line = next(size for size in range(min(in_line, num_heads), 0, -1) if num_heads % size == 0)

    def group(index: Array, _: None) -> None:
        for offset in range(in_line):
            body(index * in_line + offset)

    lax.fori_loop(0, num_heads // in_line, group, None)


def smem_row(index_map: Callable[..., Any], width: int) -> pl.BlockSpec:
    """One row of a ``[B, 1, M]`` table in SMEM: a table of many long rows does not fit there."""
    return pl.BlockSpec((None, 1, width), index_map, memory_space=pltpu.SMEM)


def hbm() -> pl.BlockSpec:
    """An array that stays in HBM and is copied by hand."""
    return pl.BlockSpec(memory_space=pl.ANY)

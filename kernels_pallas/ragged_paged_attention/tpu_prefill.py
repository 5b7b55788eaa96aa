"""The TPU prefill kernel: rows with any number of new tokens, a block of queries of one row at a time. The pool already holds the new keys and values."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int32

from jaxserve.dims import round_up
from jaxserve.kernels_pallas.ragged_paged_attention.contract import Problem, RaggedBatch
from jaxserve.kernels_pallas.ragged_paged_attention.tpu_attend import (
    Accumulators,
    PageReader,
    Span,
    accumulator_scratch,
    finish_softmax,
    for_heads,
    hbm,
    smem_row,
    softmax_step,
    span,
    start_softmax,
)  # fmt: skip
from jaxserve.kernels_pallas.ragged_paged_attention.tpu_layout import WRITE_ROWS, half_width, product_width
from jaxserve.kernels_pallas.ragged_paged_attention.tpu_tiles import Tiles, vmem_limit


class PrefillWork(NamedTuple):
    """Work items of the prefill kernel: one for each block of queries of a row. Entries from ``num_items`` on are unused.

    Queries are moved to an axis ``A`` on which each row starts at a whole tile, since a copy can start nowhere else.

    Attributes:
        rows_I: Row of each item.
        offsets_I: First query of the item, within the row's new tokens.
        places_I: Where that query is on the axis A.
        num_items_1: How many items there are.
        sources_A: The token at each place; T where there is none.
        places_T: The place of each token; any for those that are not here.
    """

    rows_I: Int32[Array, "I"]
    offsets_I: Int32[Array, "I"]
    places_I: Int32[Array, "I"]
    num_items_1: Int32[Array, "1"]
    sources_A: Int32[Array, "A"]
    places_T: Int32[Array, "T"]


def plan_prefill(batch: RaggedBatch, num_tokens: int, query_block: int) -> PrefillWork:
    """Splits the rows after the decodes into items."""
    B = batch.context_lens_B.shape[0]
    row = jnp.arange(B, dtype=jnp.int32)
    lens_B = jnp.where((row >= batch.counts_2[0]) & (row < batch.counts_2[1]), jnp.diff(batch.query_starts_B1), 0)
    padded_B = (lens_B + WRITE_ROWS - 1) // WRITE_ROWS * WRITE_ROWS
    places_B = jnp.cumsum(padded_B) - padded_B
    item_ends_B = jnp.cumsum((lens_B + query_block - 1) // query_block)
    item = jnp.arange(min(num_tokens, num_tokens // query_block + B), dtype=jnp.int32)
    rows_I = jnp.minimum(jnp.searchsorted(item_ends_B, item, side="right"), B - 1).astype(jnp.int32)
    first_item_B = item_ends_B - (lens_B + query_block - 1) // query_block
    offsets_I = (item - first_item_B[rows_I]) * query_block
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row_T = jnp.clip(jnp.searchsorted(batch.query_starts_B1, token, side="right") - 1, 0, B - 1)
    mine_T = (token - batch.query_starts_B1[row_T]) < lens_B[row_T]
    width = round_up(num_tokens + (WRITE_ROWS - 1) * min(B, num_tokens), WRITE_ROWS) + query_block
    places_T = jnp.where(mine_T, places_B[row_T] + token - batch.query_starts_B1[row_T], width)
    sources_A = jnp.full(width, num_tokens, jnp.int32).at[places_T].set(token, mode="drop")
    return PrefillWork(rows_I, offsets_I, places_B[rows_I] + offsets_I, item_ends_B[-1:], sources_A, jnp.minimum(places_T, width - 1))


def prefill(
    q_KGAW: Array, pool: Array, scalars_4: Array, context_lens_B: Array, query_lens_B: Array, table_BM: Array, work: PrefillWork, scales_2K: Array,
    sinks_KG1: Array | None, *, problem: Problem, tiles: Tiles, soft_cap: float | None, interpret: Any,
) -> Array:  # fmt: skip
    """Attention of the rows after the decodes.

    Algorithm: FlashAttention-2 (arXiv:2307.08691) over pages: a grid step is a work item, ``tiles.query_block`` queries of one row and all heads,
    and walks the keys from the first query's window to the last query in blocks of pages. The next block of keys and the next item's queries
    are copied while this one is worked on. Queries of one key head are one operand of ``G * query_block`` rows.

    Bytes: the pages of a row up to an item's last query, once an item: ``sum(context) * K * 2 * half_width * itemsize``; queries and output once.
    FLOPs: ``4 * w * N`` for each query and each key of the blocks it walks. Tile memory: ``tpu_tiles.prefill_bytes``.

    Args:
        q_KGAW: Queries on the axis A.
        pool: ``[L*P, K, Z, W]``.
        scalars_4: First page of the layer, window, number of decodes, number of rows.
        context_lens_B: Of each row.
        query_lens_B: New tokens of each row.
        table_BM: Pages of each row.
        work: The items.
        scales_2K: For each key head, the factor of its products and of its output.
        sinks_KG1: Or ``None``.
        problem: Static shape.
        tiles: Tile sizes.
        soft_cap: Or ``None``.
        interpret: As ``pl.pallas_call`` takes it.

    Returns:
        Output ``[K, G, A, w]``, undefined in places that no token has.
    """
    K, G, _, w = q_KGAW.shape
    block, M, num_items = tiles.query_block, table_BM.shape[1], work.rows_I.shape[0]
    page_shape = (K, problem.pool.page_size, 2 * half_width(problem.pool.head_dim))

    def table_row(item: Array, _scalars: Any, _lens: Any, _queries: Any, rows: Any, *_: Any) -> tuple[Any, ...]:
        return rows[item], 0, 0

    def next_table_row(item: Array, _scalars: Any, _lens: Any, _queries: Any, rows: Any, *_: Any) -> tuple[Any, ...]:
        return rows[jnp.minimum(item + 1, num_items - 1)], 0, 0

    in_specs = [smem_row(table_row, M), smem_row(next_table_row, M), pl.BlockSpec(memory_space=pltpu.SMEM), hbm(), hbm()]
    operands = [table_BM[:, None], table_BM[:, None], scales_2K, q_KGAW, pool]
    if sinks_KG1 is not None:
        in_specs.append(pl.BlockSpec((K, G, 128), lambda *_: (0, 0, 0)))
        operands.append(jnp.broadcast_to(sinks_KG1, (K, G, 128)))
    prefetched = (scalars_4, context_lens_B, query_lens_B, work.rows_I, work.offsets_I, work.places_I, work.num_items_1)
    return pl.pallas_call(
        functools.partial(_kernel, soft_cap=soft_cap, has_sinks=sinks_KG1 is not None, half=half_width(problem.pool.head_dim)),
        out_shape=jax.ShapeDtypeStruct(q_KGAW.shape, q_KGAW.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched), grid=(num_items,), in_specs=in_specs, out_specs=hbm(),
            scratch_shapes=(
                pltpu.VMEM((2, tiles.block_pages, *page_shape), pool.dtype), pltpu.SemaphoreType.DMA((2,)), pltpu.SMEM((1,), jnp.int32),
                pltpu.VMEM((2, K, G, block, w), q_KGAW.dtype), pltpu.SemaphoreType.DMA((2,)),
                pltpu.VMEM((K, G, block, w), q_KGAW.dtype), pltpu.SemaphoreType.DMA,
                *accumulator_scratch(K, G * block, w),
            ),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=vmem_limit(problem)),
        cost_estimate=cost(problem, tiles), interpret=interpret, name="ragged_paged_prefill",
    )(*prefetched, *operands)  # fmt: skip


def cost(problem: Problem, tiles: Tiles) -> pl.CostEstimate:
    """Bytes and operations of a call in which all tokens are the last ones of a full page table."""
    w, K, N, T = product_width(problem.pool.head_dim), problem.pool.num_kv_heads, problem.num_heads, problem.num_tokens
    row_bytes = 2 * half_width(problem.pool.head_dim) * jnp.dtype(problem.pool.dtype).itemsize
    items = -(-T // tiles.query_block)
    return pl.CostEstimate(
        flops=4 * T * problem.max_context * N * w,
        bytes_accessed=items * problem.max_context * K * row_bytes + 2 * T * N * w * jnp.dtype(problem.q_dtype).itemsize,
        transcendentals=T * problem.max_context * N,
    )


def _kernel(*all_refs: Any, soft_cap: float | None, has_sinks: bool, half: int) -> None:
    scalars, context_lens, query_lens, rows, offsets, places, num_items_ref, *refs = all_refs
    table, next_table, scales, q_ref, pool_ref, *refs = refs
    sinks_ref = refs.pop(0) if has_sinks else None
    o_ref, buffer, semaphores, side_ref, q_buffer, q_semaphores, o_buffer, o_semaphore, *refs = refs
    accumulators = Accumulators(*refs)
    item, window, num_items = pl.program_id(0), scalars[1], num_items_ref[0]
    reader = PageReader(pool_ref, buffer, semaphores, scalars[0])
    _, num_heads, group_size, block_size, width = q_buffer.shape
    num_rows = group_size * block_size

    def first_position(i: Array) -> Array:
        return context_lens[rows[i]] - query_lens[rows[i]] + offsets[i]

    def pages_of(i: Array) -> Span:
        length, first = context_lens[rows[i]], first_position(i)
        return span(first - window + 1, jnp.minimum(length, first + block_size), length, reader.page_size)

    def on_axis(i: Array) -> Any:
        return pl.ds(pl.multiple_of(places[i], WRITE_ROWS), block_size)

    def queries(i: Array) -> Any:
        side = lax.rem(i, 2)
        return pltpu.make_async_copy(q_ref.at[:, :, on_axis(i), :], q_buffer.at[side], q_semaphores.at[side])

    def output(i: Array) -> Any:
        return pltpu.make_async_copy(o_buffer, o_ref.at[:, :, on_axis(i), :], o_semaphore)

    @pl.when((item == 0) & (num_items > 0))
    def _() -> None:
        side_ref[0] = 0
        queries(item).start()
        reader.start(table, pages_of(item), jnp.int32(0), jnp.int32(0))

    @pl.when(item < num_items)
    def _() -> None:
        pl.when(item + 1 < num_items)(lambda: queries(item + 1).start())
        queries(item).wait()
        pages = pages_of(item)
        num_blocks = reader.num_blocks(pages)
        q_side = lax.rem(item, 2)

        def start(head: Array) -> None:
            sinks = None
            if sinks_ref is not None:
                sinks = jnp.broadcast_to(sinks_ref[head][:, None, :], (group_size, block_size, 128)).reshape(num_rows, 128)
            start_softmax(accumulators, head, sinks)

        for_heads(num_heads, 1, start)

        def step(block: Array, _: None) -> None:
            side = side_ref[0]

            @pl.when(block + 1 < num_blocks)
            def _() -> None:
                reader.start(table, pages, block + 1, 1 - side)

            @pl.when((block + 1 == num_blocks) & (item + 1 < num_items))
            def _() -> None:
                reader.start(next_table, pages_of(item + 1), jnp.int32(0), 1 - side)

            reader.wait(table, pages, block, side)
            shape = (num_rows, reader.block_pages * reader.page_size)
            key = reader.first_key(pages, block) + lax.broadcasted_iota(jnp.int32, shape, 1)
            query = first_position(item) + lax.rem(lax.broadcasted_iota(jnp.int32, shape, 0), block_size)
            visible = (key <= query) & (key > query - window) & (key < pages.context_len)

            def one_head(head: Any) -> None:
                q = q_buffer[q_side, head].reshape(num_rows, width)
                softmax_step(accumulators, head, q, reader.keys_and_values(side, head, q.dtype), visible, scales[0, head], soft_cap, half)

            for_heads(num_heads, 1, one_head)
            side_ref[0] = 1 - side

        lax.fori_loop(0, num_blocks, step, None)
        # The rows after a row's last query are the next row's places: its own item writes them later, hence one output copy at a time.
        pl.when(item > 0)(lambda: output(item - 1).wait())

        def finish(head: Array) -> None:
            o_buffer[head] = finish_softmax(accumulators, head, scales[1, head]).reshape(group_size, block_size, width).astype(o_buffer.dtype)

        for_heads(num_heads, 1, finish)
        output(item).start()
        pl.when(item == num_items - 1)(lambda: output(item).wait())

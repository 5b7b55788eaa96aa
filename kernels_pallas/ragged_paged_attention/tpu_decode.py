"""The TPU decode kernel: writes all new keys and values of a step, then attends for the rows with one new token."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from jaxserve.kernels_pallas.ragged_paged_attention.contract import Problem
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
from jaxserve.kernels_pallas.ragged_paged_attention.tpu_layout import half_width, product_width
from jaxserve.kernels_pallas.ragged_paged_attention.tpu_tiles import Tiles, decode_rows, vmem_limit
from jaxserve.kernels_pallas.ragged_paged_attention.tpu_write import Windows, write_scratch, write_windows


def decode(
    q_BKRW: Array, new_KTW: Array, pool: Array, scalars_4: Array, context_lens_B: Array, table_BM: Array, windows: Windows, scales_2K: Array,
    sinks_KR1: Array | None, *, problem: Problem, tiles: Tiles, soft_cap: float | None, interpret: Any, write_phase: Any = write_windows,
) -> tuple[Array, Array]:  # fmt: skip
    """Attention of the first ``num_decodes`` rows, after the new tokens of all rows have been written to the pool.

    Algorithm: FlashAttention-2's online softmax (arXiv:2307.08691) over pages (PagedAttention, arXiv:2309.06180); one grid step a row, its keys
    in blocks of ``tiles.block_pages`` pages. The next block, also that of the next row, is copied while this one is worked on.

    Bytes: every live page of a row once, ``context * K * 2 * half_width * itemsize``; queries and output; for each written tile of 8 rows three tiles
    of traffic. FLOPs: ``4 * context * N * w`` a row. Tile memory: ``tpu_tiles.decode_bytes``. ``cost`` is exactly this for full page tables.

    Args:
        q_BKRW: Queries of the first tokens, a row each, G padded to R.
        new_KTW: New keys and values as the pool stores them.
        pool: ``[L*P, K, Z, W]``; updated in place.
        scalars_4: First page of the layer, window, number of decodes, number of rows.
        context_lens_B: Of each row.
        table_BM: Pages of each row.
        windows: Where new rows go.
        scales_2K: For each key head, the factor of its products and of its output.
        sinks_KR1: Or ``None``.
        problem: Static shape.
        tiles: Tile sizes.
        soft_cap: Or ``None``.
        interpret: As ``pl.pallas_call`` takes it.
        write_phase: The write phase; tests put broken ones here.

    Returns:
        Output ``[B, K, R, w]``, undefined for other rows, and the pool.
    """
    B, K, R, w = q_BKRW.shape
    page_shape = (K, problem.pool.page_size, 2 * half_width(problem.pool.head_dim))
    M = table_BM.shape[1]

    def live(b: Array, scalars: Any, *_: Any) -> Array:
        return jnp.clip(b, 0, jnp.maximum(scalars[2] - 1, 0))  # Rows without work keep the last block: nothing is copied for them.

    def row_block(b: Array, *prefetched: Any) -> tuple[Any, ...]:
        return live(b, *prefetched), 0, 0, 0

    def table_row(b: Array, *prefetched: Any) -> tuple[Any, ...]:
        return live(b, *prefetched), 0, 0

    def next_table_row(b: Array, *prefetched: Any) -> tuple[Any, ...]:
        return live(b + 1, *prefetched), 0, 0

    in_specs = [
        smem_row(table_row, M), smem_row(next_table_row, M), pl.BlockSpec(memory_space=pltpu.SMEM),
        pl.BlockSpec((1, K, R, w), row_block), hbm(), hbm(),
    ]  # fmt: skip
    operands = [table_BM[:, None], table_BM[:, None], scales_2K, q_BKRW, new_KTW, pool]
    if sinks_KR1 is not None:
        in_specs.append(pl.BlockSpec((K, R, 128), lambda *_: (0, 0, 0)))
        operands.append(jnp.broadcast_to(sinks_KR1, (K, R, 128)))
    prefetched = (scalars_4, context_lens_B, *windows)
    pool_position = len(prefetched) + 5
    return pl.pallas_call(
        functools.partial(_kernel, soft_cap=soft_cap, has_sinks=sinks_KR1 is not None, half=half_width(problem.pool.head_dim), write_phase=write_phase),
        out_shape=(jax.ShapeDtypeStruct(q_BKRW.shape, q_BKRW.dtype), jax.ShapeDtypeStruct(pool.shape, pool.dtype)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched), grid=(B,), in_specs=in_specs, out_specs=(pl.BlockSpec((1, K, R, w), row_block), hbm()),
            scratch_shapes=(
                pltpu.VMEM((2, tiles.block_pages, *page_shape), pool.dtype), pltpu.SemaphoreType.DMA((2,)), pltpu.SMEM((1,), jnp.int32),
                *accumulator_scratch(K, R, w), *write_scratch(tiles.write_buffers, K, page_shape[2], pool.dtype),
            ),
        ),
        input_output_aliases={pool_position: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=vmem_limit(problem)),
        cost_estimate=cost(problem), interpret=interpret, name="ragged_paged_decode",
    )(*prefetched, *operands)  # fmt: skip


def cost(problem: Problem) -> pl.CostEstimate:
    """Bytes and operations of a call in which every row fills its page table."""
    w, K, N, B = product_width(problem.pool.head_dim), problem.pool.num_kv_heads, problem.num_heads, problem.num_rows
    row_bytes = 2 * half_width(problem.pool.head_dim) * jnp.dtype(problem.pool.dtype).itemsize
    keys = B * problem.max_context
    queries = 2 * B * K * decode_rows(problem) * w * jnp.dtype(problem.q_dtype).itemsize
    written = 3 * 8 * min(problem.num_tokens, problem.num_tokens // 8 + 2 * B) * K * row_bytes
    return pl.CostEstimate(flops=4 * keys * N * w, bytes_accessed=keys * K * row_bytes + queries + written, transcendentals=keys * N)


def _kernel(*all_refs: Any, soft_cap: float | None, has_sinks: bool, half: int, write_phase: Any) -> None:
    scalars, context_lens, *refs = all_refs
    windows, refs = Windows(*refs[:5]), refs[5:]
    table, next_table, scales, q_ref, new_ref, _, *refs = refs
    sinks_ref = refs.pop(0) if has_sinks else None
    o_ref, pool_ref, buffer, semaphores, side_ref, *refs = refs
    accumulators, write_buffers = Accumulators(*refs[:3]), refs[3:]
    row, window, num_decodes, num_heads = pl.program_id(0), scalars[1], scalars[2], q_ref.shape[1]
    reader = PageReader(pool_ref, buffer, semaphores, scalars[0])

    def pages_of(b: Array) -> Span:
        length = context_lens[b]
        return span(length - window, length, length, reader.page_size)

    @pl.when(row == 0)
    def _() -> None:
        write_phase(windows, scalars[0], new_ref, pool_ref, write_buffers)

        @pl.when(num_decodes > 0)
        def _() -> None:
            side_ref[0] = 0
            reader.start(table, pages_of(jnp.int32(0)), jnp.int32(0), jnp.int32(0))

    @pl.when(row < num_decodes)
    def _() -> None:
        pages = pages_of(row)
        num_blocks = reader.num_blocks(pages)
        for_heads(num_heads, 1, lambda head: start_softmax(accumulators, head, None if sinks_ref is None else sinks_ref[head]))

        def step(block: Array, _: None) -> None:
            side = side_ref[0]

            @pl.when(block + 1 < num_blocks)
            def _() -> None:
                reader.start(table, pages, block + 1, 1 - side)

            @pl.when((block + 1 == num_blocks) & (row + 1 < num_decodes))
            def _() -> None:
                reader.start(next_table, pages_of(row + 1), jnp.int32(0), 1 - side)

            reader.wait(table, pages, block, side)
            keys = reader.block_pages * reader.page_size
            position = reader.first_key(pages, block) + lax.broadcasted_iota(jnp.int32, (1, keys), 1)
            visible = (position < pages.context_len) & (position >= pages.context_len - window)

            def one_head(head: Any) -> None:
                q = q_ref[0, head]
                softmax_step(accumulators, head, q, reader.keys_and_values(side, head, q.dtype), visible, scales[0, head], soft_cap, half)

            for_heads(num_heads, 4, one_head)
            side_ref[0] = 1 - side

        lax.fori_loop(0, num_blocks, step, None)

        def finish(head: Array) -> None:
            o_ref[0, head] = finish_softmax(accumulators, head, scales[1, head]).astype(o_ref.dtype)

        for_heads(num_heads, 1, finish)

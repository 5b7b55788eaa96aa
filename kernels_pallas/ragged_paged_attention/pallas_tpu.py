"""Ragged paged attention on TPU: a Mosaic kernel for the write and the decodes, one for prefill, and the XLA code that lays out their operands."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxserve.dims import round_up
from jaxserve.kernels_pallas.ragged_paged_attention import tpu_layout
from jaxserve.kernels_pallas.ragged_paged_attention.contract import KERNEL_PAGE_SIZES, Implementation, KVPool, KVScales, Problem, RaggedBatch, quantise
from jaxserve.kernels_pallas.ragged_paged_attention.tpu_decode import decode
from jaxserve.kernels_pallas.ragged_paged_attention.tpu_layout import WRITE_ROWS, half_width, product_width
from jaxserve.kernels_pallas.ragged_paged_attention.tpu_prefill import PrefillWork, plan_prefill, prefill
from jaxserve.kernels_pallas.ragged_paged_attention.tpu_tiles import Tiles, choose_tiles, decode_rows
from jaxserve.kernels_pallas.ragged_paged_attention.tpu_write import Windows, plan_windows, write_windows

_SMEM_WORDS = 128 * 1024
"""Scalars of one call, four bytes each, that are kept to half of the 1 MiB of SMEM."""


class Work(NamedTuple):
    """What every layer needs of the batch."""

    windows: Windows
    prefill: PrefillWork | None
    live_T: Array
    query_lens_B: Int32[Array, "B"]


def make_implementation(*, interpret: Any = None, tiles: Tiles | None = None, write_phase: Any = write_windows) -> Implementation:
    """The implementation ``pallas_tpu``.

    Args:
        interpret: As ``pl.pallas_call`` takes it; ``None`` compiles for a TPU and interprets (fast, unchecked) elsewhere.
        tiles: Tile sizes; ``None`` chooses them.
        write_phase: Writes new rows; tests put broken ones here.
    """
    options = {"interpret": interpret, "tiles": tiles}
    return Implementation(
        name="pallas_tpu", init_pool=tpu_layout.init_pool, prepare=functools.partial(_prepare, tiles=tiles),
        attend=functools.partial(_attend, write_phase=write_phase, **options), refusal=refusal, pack=tpu_layout.pack, unpack=tpu_layout.unpack,
    )  # fmt: skip


def refusal(problem: Problem) -> str | None:
    """Why a problem cannot be served."""
    if problem.pool.page_size not in KERNEL_PAGE_SIZES:
        return f"page size {problem.pool.page_size}; it takes {KERNEL_PAGE_SIZES}"
    scalars = 4 * problem.table_width + 4 * min(problem.num_tokens, problem.num_tokens // WRITE_ROWS + 2 * problem.num_rows) + 5 * problem.num_rows
    if scalars > _SMEM_WORDS:
        return f"its tables of {scalars} numbers do not fit into scalar memory, which takes {_SMEM_WORDS}; use larger pages or smaller buckets"
    if problem.target.platform == "gpu":
        return "it needs a TPU"
    return None


def _prepare(batch: RaggedBatch, problem: Problem, *, tiles: Tiles | None) -> Work:
    tiles = tiles or choose_tiles(problem)
    windows = plan_windows(batch.entries_T, problem.num_rows, problem.pool.num_pages * problem.pool.page_size)
    items = None if problem.decode_only else plan_prefill(batch, problem.num_tokens, tiles.query_block)
    live_T = jnp.arange(problem.num_tokens) < batch.query_starts_B1[batch.counts_2[1]]
    return Work(windows, items, live_T, jnp.diff(batch.query_starts_B1))


def _attend(
    q_TNH: Array, k_TKH: Array, v_TKH: Array, pool: KVPool, batch: RaggedBatch, work: Work, *, problem: Problem, layer: Any, window: Any, scale: float,
    soft_cap: float | None, sinks_N: Array | None, kv_scales: KVScales | None, interpret: Any, tiles: Tiles | None, write_phase: Any,
) -> tuple[Array, KVPool]:  # fmt: skip
    tiles = tiles or choose_tiles(problem)
    interpret = problem.target.platform != "tpu" if interpret is None else interpret
    shape, T, B, G = problem.pool, problem.num_tokens, problem.num_rows, problem.group_size
    K, H, half, w = shape.num_kv_heads, shape.head_dim, half_width(shape.head_dim), product_width(shape.head_dim)
    ones_K = jnp.ones(K, jnp.float32)
    scales_2K = jnp.stack([ones_K * scale, ones_K]) * (jnp.stack(kv_scales) if kv_scales else 1.0)
    scalars_4 = jnp.stack([jnp.asarray(x, jnp.int32) for x in (layer * shape.num_pages, window, batch.counts_2[0], batch.counts_2[1])])
    sinks_KG1 = None if sinks_N is None else sinks_N.astype(jnp.float32).reshape(K, G, 1)

    new_TKW = tpu_layout.fuse(quantise(k_TKH, kv_scales and kv_scales.k_K, shape.dtype), quantise(v_TKH, kv_scales and kv_scales.v_K, shape.dtype))
    new_KTW = jnp.pad(new_TKW.transpose(1, 0, 2), ((0, 0), (0, round_up(T, WRITE_ROWS) + WRITE_ROWS - T), (0, 0)))
    q_TKGW = jnp.pad(q_TNH.reshape(T, K, G, H), ((0, 0), (0, 0), (0, 0), (0, w - H)))
    R = decode_rows(problem)
    q_BKRW = jnp.pad(q_TKGW[:B], ((0, max(B - T, 0)), (0, 0), (0, R - G), (0, 0)))
    sinks_KR1 = None if sinks_KG1 is None else jnp.pad(sinks_KG1, ((0, 0), (0, R - G), (0, 0)))
    o_BKRW, rows = decode(
        q_BKRW, new_KTW, pool.k, scalars_4, batch.context_lens_B, batch.page_table_BM, work.windows, scales_2K, sinks_KR1,
        problem=problem, tiles=tiles, soft_cap=soft_cap, interpret=interpret, write_phase=write_phase,
    )  # fmt: skip
    out_TKGW = jnp.pad(o_BKRW[:T, :, :G], ((0, max(T - B, 0)), (0, 0), (0, 0), (0, 0)))
    if work.prefill is not None:
        padded = jnp.pad(q_TKGW, ((0, 1), (0, 0), (0, 0), (0, 0)))
        o_KGAW = prefill(
            padded[work.prefill.sources_A].transpose(1, 2, 0, 3), rows, scalars_4, batch.context_lens_B, work.query_lens_B, batch.page_table_BM,
            work.prefill, scales_2K, sinks_KG1, problem=problem, tiles=tiles, soft_cap=soft_cap, interpret=interpret,
        )  # fmt: skip
        chunks_TKGW = o_KGAW.transpose(2, 0, 1, 3)[work.prefill.places_T]
        out_TKGW = jnp.where((jnp.arange(T) < batch.counts_2[0])[:, None, None, None], out_TKGW, chunks_TKGW)
    offset = half if half < w else 0  # With 64-lane halves the product has the values' part after the keys' part.
    out_TNH = jnp.where(work.live_T[:, None, None, None], out_TKGW[..., offset : offset + H], 0).reshape(q_TNH.shape)
    return out_TNH, KVPool(rows, None)

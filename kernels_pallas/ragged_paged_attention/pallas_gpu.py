"""Ragged paged attention on NVIDIA GPUs: the Pallas Triton kernels, the scatter of new keys and values, and the pool's layout."""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxserve.kernels_pallas.ragged_paged_attention.contract import (
    KERNEL_PAGE_SIZES,
    Implementation,
    KVPool,
    KVScales,
    PoolShape,
    Problem,
    RaggedBatch,
    abstract_array,
    byte_dtype,
    pack_apart,
    quantise,
    unpack_apart,
)
from jaxserve.kernels_pallas.ragged_paged_attention.gpu_kernels import PrefillWork, decode, merge, plan_prefill, prefill
from jaxserve.kernels_pallas.ragged_paged_attention.gpu_tiles import Tiles, choose_tiles, query_block

# jax 0.11 and newer announce the end of this backend whenever a kernel is lowered. It stays behind this op's interface; no other warning is dropped.
warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning)


class Work(NamedTuple):
    """What every layer needs of the batch."""

    prefill: PrefillWork | None
    live_T: Array


def make_implementation(*, interpret: bool | None = None, tiles: Tiles | None = None) -> Implementation:
    """The implementation ``pallas_gpu``.

    Args:
        interpret: Run in Pallas's interpreter; ``None`` compiles for a GPU and interprets elsewhere.
        tiles: Tile sizes; ``None`` chooses them.
    """
    return Implementation(
        name="pallas_gpu", init_pool=init_pool, prepare=functools.partial(_prepare, tiles=tiles),
        attend=functools.partial(_attend, interpret=interpret, tiles=tiles), refusal=refusal, pack=functools.partial(pack_apart, init_pool),
        unpack=unpack_apart,
    )  # fmt: skip


def init_pool(shape: PoolShape) -> KVPool:
    """``[L*P*Z, K, H]`` each for keys and values. float8 is stored as uint8: Triton for chips before 9.0 has no such type, and jax 0.10 aborts on it."""
    entries = shape.num_layers * shape.num_pages * shape.page_size
    array = abstract_array((entries, shape.num_kv_heads, shape.head_dim), byte_dtype(shape.dtype))
    return KVPool(array, array)


def refusal(problem: Problem) -> str | None:
    """Why a problem cannot be served."""
    if problem.pool.page_size not in KERNEL_PAGE_SIZES:
        return f"page size {problem.pool.page_size}; it takes {KERNEL_PAGE_SIZES}"
    pool = problem.pool
    elements = math.prod(init_pool(pool).k.shape)
    if jnp.dtype(pool.dtype).itemsize == 1 and 2**31 < elements <= 2**32:
        return f"an array of {elements} one-byte keys: Pallas Triton counts elements in 32 bits up to 4 GiB and overflows; take at most 2 GiB or more than 4"
    if pool.num_layers * pool.num_pages * pool.page_size >= 2**31:
        return f"{pool.num_layers * pool.num_pages * pool.page_size} entries; entry numbers have 31 bits"
    if problem.target.platform == "tpu":
        return "it needs an NVIDIA GPU"
    return None


def _prepare(batch: RaggedBatch, problem: Problem, *, tiles: Tiles | None) -> Work:
    block = query_block(problem, tiles or choose_tiles(problem))
    live_T = jnp.arange(problem.num_tokens) < batch.query_starts_B1[batch.counts_2[1]]
    return Work(None if problem.decode_only else plan_prefill(batch, problem.num_tokens, block), live_T)


def _attend(
    q_TNH: Array, k_TKH: Array, v_TKH: Array, pool: KVPool, batch: RaggedBatch, work: Work, *, problem: Problem, layer: Any, window: Any, scale: float,
    soft_cap: float | None, sinks_N: Array | None, kv_scales: KVScales | None, interpret: bool | None, tiles: Tiles | None,
) -> tuple[Array, KVPool]:  # fmt: skip
    tiles = tiles or choose_tiles(problem)
    interpret = problem.target.platform != "gpu" if interpret is None else interpret
    shape, T, B = problem.pool, problem.num_tokens, problem.num_rows
    entries_per_layer = shape.num_pages * shape.page_size
    first_entry = jnp.asarray(layer * entries_per_layer, jnp.int32)
    ones_K = jnp.ones(shape.num_kv_heads, jnp.float32)
    scales_2K = jnp.stack([ones_K * scale, ones_K]) * (jnp.stack(kv_scales) if kv_scales else 1.0)
    scalars_4 = jnp.stack([first_entry, *(jnp.asarray(x, jnp.int32) for x in (window, batch.counts_2[0], batch.counts_2[1]))])
    sinks_N = None if sinks_N is None else sinks_N.astype(jnp.float32)
    k, v = _write(k_TKH, v_TKH, pool, batch, shape, first_entry, kv_scales)
    parts = decode(
        q_TNH, k, v, scalars_4, batch.context_lens_B, batch.page_table_BM, scales_2K,
        problem=problem, tiles=tiles, soft_cap=soft_cap, interpret=interpret,
    )  # fmt: skip
    out_TNH = merge(*parts, sinks_N)[:T].astype(q_TNH.dtype)
    out_TNH = jnp.pad(out_TNH, ((0, max(T - B, 0)), (0, 0), (0, 0)))
    if work.prefill is not None:
        chunks_TNH = prefill(
            q_TNH, k, v, scalars_4, batch.context_lens_B, batch.query_starts_B1, batch.page_table_BM, work.prefill, scales_2K, sinks_N,
            problem=problem, tiles=tiles, soft_cap=soft_cap, interpret=interpret,
        )  # fmt: skip
        out_TNH = jnp.where((jnp.arange(T) < batch.counts_2[0])[:, None, None], out_TNH, chunks_TNH)
    return jnp.where(work.live_T[:, None, None], out_TNH, 0), KVPool(k, v)


def _write(
    k_TKH: Array, v_TKH: Array, pool: KVPool, batch: RaggedBatch, shape: PoolShape, first_entry: Array, kv_scales: KVScales | None
) -> tuple[Array, Array]:
    """One scatter of rows each, in place: blocks of a GPU kernel run in any order, so a kernel that also reads could not write first."""
    limit = shape.num_pages * shape.page_size
    entries_T = jnp.where(batch.entries_T < limit, batch.entries_T + first_entry, jnp.iinfo(jnp.int32).max)

    def write(array: Array, new_TKH: Array, scale_K: Array | None) -> Array:
        rows = lax.bitcast_convert_type(quantise(new_TKH, scale_K, shape.dtype), array.dtype)
        return array.at[entries_T].set(rows, mode="drop")

    assert pool.v is not None
    return write(pool.k, k_TKH, kv_scales and kv_scales.k_K), write(pool.v, v_TKH, kv_scales and kv_scales.v_K)

"""Ragged paged attention as its definition, in plain XLA: the oracle that every other implementation is compared with. Slow, and simple on purpose."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxserve.kernels_pallas.ragged_paged_attention.contract import (
    Implementation,
    KVPool,
    KVScales,
    PoolShape,
    Problem,
    RaggedBatch,
    abstract_array,
    pack_apart,
    quantise,
    unpack_apart,
)


def init_pool(shape: PoolShape) -> KVPool:
    """The logical layout itself, ``[L*P, Z, K, H]`` each for keys and values."""
    array = abstract_array((shape.num_layers * shape.num_pages, shape.page_size, shape.num_kv_heads, shape.head_dim), shape.dtype)
    return KVPool(array, array)


def prepare(batch: RaggedBatch, problem: Problem) -> Int32[Array, "T"]:
    """The row of each packed token; padding gets the last row."""
    tokens = jnp.arange(problem.num_tokens)
    rows = jnp.searchsorted(batch.query_starts_B1, tokens, side="right").astype(jnp.int32) - 1
    return jnp.clip(rows, 0, problem.num_rows - 1)


def attend(
    q_TNH: Float[Array, "T N H"],
    k_TKH: Float[Array, "T K H"],
    v_TKH: Float[Array, "T K H"],
    pool: KVPool,
    batch: RaggedBatch,
    work: Int32[Array, "T"],
    *,
    problem: Problem,
    layer: int | Int32[Array, ""],
    window: int | Int32[Array, ""],
    scale: float,
    soft_cap: float | None = None,
    sinks_N: Float[Array, "N"] | None = None,
    kv_scales: KVScales | None = None,
) -> tuple[Float[Array, "T N H"], KVPool]:
    """One token at a time, in float32: ``softmax(cap(scale * q @ k.T)) @ v`` over the whole page-table row, masked."""
    shape, G = problem.pool, problem.group_size
    K, H, Z = shape.num_kv_heads, shape.head_dim, shape.page_size
    entries_per_layer = shape.num_pages * Z
    entries = jnp.where(batch.entries_T < entries_per_layer, batch.entries_T + layer * entries_per_layer, jnp.iinfo(jnp.int32).max)

    def write(array: Array, new: Array, head_scales: Array | None) -> Array:
        return array.reshape(-1, K, H).at[entries].set(quantise(new, head_scales, array.dtype), mode="drop").reshape(array.shape)

    assert pool.v is not None
    arrays = write(pool.k, k_TKH, kv_scales and kv_scales.k_K), write(pool.v, v_TKH, kv_scales and kv_scales.v_K)
    keys = jnp.arange(problem.max_context)

    def one(token: tuple[Array, Array, Array]) -> Array:
        q_NH, row, position = token
        pages = batch.page_table_BM[row] + layer * shape.num_pages
        k_SKH, v_SKH = (array[pages].reshape(-1, K, H).astype(jnp.float32) for array in arrays)
        if kv_scales is not None:
            k_SKH, v_SKH = k_SKH * kv_scales.k_K[:, None], v_SKH * kv_scales.v_K[:, None]
        visible_S = (keys <= position) & (keys > position - window)
        v_SKH = jnp.where(visible_S[:, None, None], v_SKH, 0)  # Entries that nobody wrote may hold NaN.
        q_KGH = q_NH.astype(jnp.float32).reshape(K, G, H)
        logits_KGS = jnp.einsum("kgh,skh->kgs", q_KGH, k_SKH, precision=lax.Precision.HIGHEST) * scale
        if soft_cap is not None:
            logits_KGS = soft_cap * jnp.tanh(logits_KGS / soft_cap)
        logits_KGS = jnp.where(visible_S, logits_KGS, -jnp.inf)
        if sinks_N is not None:
            sinks_KG1 = sinks_N.astype(jnp.float32).reshape(K, G, 1)
            logits_KGS = jnp.concatenate([logits_KGS, sinks_KG1], axis=-1)
        weights_KGS = jax.nn.softmax(logits_KGS, axis=-1)[..., : keys.shape[0]]
        return jnp.einsum("kgs,skh->kgh", weights_KGS, v_SKH, precision=lax.Precision.HIGHEST).reshape(q_NH.shape)

    out_TNH = lax.map(one, (q_TNH, work, batch.positions_T))
    live_T = jnp.arange(problem.num_tokens) < batch.query_starts_B1[batch.counts_2[1]]
    return jnp.where(live_T[:, None, None], out_TNH, 0).astype(q_TNH.dtype), KVPool(*arrays)


def _refusal(problem: Problem) -> Any:
    del problem


IMPLEMENTATION = Implementation(
    name="reference", init_pool=init_pool, prepare=prepare, attend=attend, refusal=_refusal, pack=functools.partial(pack_apart, init_pool), unpack=unpack_apart
)  # fmt: skip

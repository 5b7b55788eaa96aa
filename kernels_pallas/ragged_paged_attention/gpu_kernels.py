"""The GPU kernels in Pallas Triton: split-KV decode with a merge, and prefill. The pool already holds the new keys and values."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Int32

from jaxserve.kernels_pallas.ragged_paged_attention.contract import MASKED, Problem, RaggedBatch
from jaxserve.kernels_pallas.ragged_paged_attention.gpu_tiles import Tiles, decode_rows, power_of_two, query_block
from jaxserve.kernels_pallas.target import find_chip


class PrefillWork(NamedTuple):
    """Work items of the prefill kernel: one for each block of queries of a row. Entries from ``num_items`` on are unused.

    Attributes:
        rows_I: Row of each item.
        offsets_I: First query of the item, within the row's new tokens.
        num_items_1: How many items there are.
    """

    rows_I: Int32[Array, "I"]
    offsets_I: Int32[Array, "I"]
    num_items_1: Int32[Array, "1"]


def plan_prefill(batch: RaggedBatch, num_tokens: int, block: int) -> PrefillWork:
    """Splits the rows after the decodes into items of at most ``block`` tokens."""
    B = batch.context_lens_B.shape[0]
    row = jnp.arange(B, dtype=jnp.int32)
    lens_B = jnp.where((row >= batch.counts_2[0]) & (row < batch.counts_2[1]), jnp.diff(batch.query_starts_B1), 0)
    items_B = (lens_B + block - 1) // block
    ends_B = jnp.cumsum(items_B)
    item = jnp.arange(min(num_tokens, num_tokens // block + B), dtype=jnp.int32)
    rows_I = jnp.minimum(jnp.searchsorted(ends_B, item, side="right"), B - 1).astype(jnp.int32)
    return PrefillWork(rows_I, (item - (ends_B - items_B)[rows_I]) * block, ends_B[-1:])


class _Keys(NamedTuple):
    """How a program reads one head's keys and values. Lives only while tracing."""

    k_ref: Any
    v_ref: Any
    table_ref: Any
    first_entry: Array
    row: Array
    head: Array
    problem: Problem

    def load(self, position_S: Array, end: Array) -> tuple[Array, Array]:
        """Keys and values ``[S, H]`` of positions below ``end``, zero elsewhere, in the queries' dtype."""
        pool = self.problem.pool
        valid_S = position_S < end
        pages_S = plt.load(self.table_ref.at[self.row, position_S // pool.page_size], mask=valid_S, other=0)
        entries_S = self.first_entry + pages_S * pool.page_size + position_S % pool.page_size
        lane_H = jnp.arange(power_of_two(pool.head_dim))
        mask = valid_S[:, None] & (lane_H < pool.head_dim)[None, :]

        def load(ref: Any) -> Array:
            return _decode(plt.load(ref.at[entries_S[:, None], self.head, lane_H[None, :]], mask=mask, other=0), self.problem)

        return load(self.k_ref), load(self.v_ref)


def _decode(x: Array, problem: Problem) -> Array:
    """Stored values as the dtype of the queries. float8 is stored as uint8."""
    if jnp.dtype(problem.pool.dtype) != jnp.float8_e4m3fn:
        return x.astype(problem.q_dtype)
    if problem.target.platform != "gpu" or find_chip(problem.target, "gpu").native_float8:
        return lax.bitcast_convert_type(x, jnp.float8_e4m3fn).astype(problem.q_dtype)
    # The bits of e4m3, moved to where float16 has them, are the value times 2**-8 (exponent bias 7 against 15); subnormals come out right.
    bits = x.astype(jnp.int16)
    half = lax.bitcast_convert_type(((bits & 0x80) << 8) | ((bits & 0x7F) << 7), jnp.float16)
    return (half.astype(jnp.float32) * 256.0).astype(problem.q_dtype)


class _Softmax(NamedTuple):
    """Online softmax of R rows: maximum and sum ``[R]``, unnormalised output ``[R, H]``."""

    maximum_R: Array
    total_R: Array
    output_RH: Array


def _attend(q_RH: Array, keys: _Keys, first: Array, last: Array, end: Array, block: int, scale: Array, soft_cap: float | None, visible: Any) -> _Softmax:
    """FlashAttention-2 over keys ``first .. last - 1`` in steps of ``block``; ``visible(position_S)`` masks, ``end`` is the context length."""
    precision = lax.Precision.HIGHEST if q_RH.dtype == jnp.float32 else None
    start = _Softmax(jnp.full(q_RH.shape[0], MASKED, jnp.float32), jnp.zeros(q_RH.shape[0], jnp.float32), jnp.zeros(q_RH.shape, jnp.float32))

    def step(index: Array, state: _Softmax) -> _Softmax:
        position_S = first + index * block + jnp.arange(block)
        k_SH, v_SH = keys.load(position_S, jnp.minimum(last, end))
        logits = lax.dot_general(q_RH, k_SH, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32) * scale
        if soft_cap is not None:
            logits = soft_cap * jnp.tanh(logits / soft_cap)
        logits = jnp.where(visible(position_S), logits, MASKED)
        maximum = jnp.maximum(state.maximum_R, jnp.max(logits, axis=1))
        weights = jnp.exp(logits - maximum[:, None])
        correction = jnp.exp(state.maximum_R - maximum)
        product = lax.dot_general(weights.astype(q_RH.dtype), v_SH, (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)
        return _Softmax(maximum, state.total_R * correction + jnp.sum(weights, axis=1), state.output_RH * correction[:, None] + product)

    return lax.fori_loop(0, (jnp.maximum(last - first, 0) + block - 1) // block, step, start)


def decode(
    q_TNH: Array, k: Array, v: Array, scalars_4: Array, context_lens_B: Array, table_BM: Array, scales_2K: Array,
    *, problem: Problem, tiles: Tiles, soft_cap: float | None, interpret: Any,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Partial attention of the first ``num_decodes`` rows, a program for each row, key head and part of the context.

    Algorithm: FlashDecoding (Dao et al. 2023, "Flash-Decoding for long-context inference"): each part is a FlashAttention-2 pass
    (arXiv:2307.08691) over pages (arXiv:2309.06180); :func:`merge` combines parts by their log-sum-exp. Parts follow the row's own length.

    Bytes: keys and values of a row's (windowed) context once, ``context * K * 2H * itemsize``; ``num_splits * N * (H + 2) * 4`` of partial
    results a row, written and read. FLOPs: ``4 * context * N * H`` (rows padded to 16). Shared memory: ``gpu_tiles.decode_bytes``.

    Args:
        q_TNH: Queries; row b's is token b.
        k: ``[L*P*Z, K, H]``.
        v: The same.
        scalars_4: First entry of the layer, window, number of decodes, number of rows.
        context_lens_B: Of each row.
        table_BM: Pages of each row.
        scales_2K: For each key head, the factor of its products and of its output.
        problem: Static shape.
        tiles: Tile sizes.
        soft_cap: Or ``None``.
        interpret: As ``pl.pallas_call`` takes it.

    Returns:
        For each row, part and head: the unnormalised output ``[B, C, N, H]``, its maximum logit and sum ``[B, C, N]``, float32.
    """
    B, N, C = problem.num_rows, problem.num_heads, tiles.num_splits
    K, H = problem.pool.num_kv_heads, problem.pool.head_dim
    keys = B * problem.max_context
    kernel = pl.pallas_call(
        functools.partial(_decode_kernel, problem=problem, tiles=tiles, soft_cap=soft_cap),
        grid=(B, K, C),
        out_shape=(
            jax.ShapeDtypeStruct((B, C, N, H), jnp.float32), jax.ShapeDtypeStruct((B, C, N), jnp.float32), jax.ShapeDtypeStruct((B, C, N), jnp.float32),
        ),
        compiler_params=plt.CompilerParams(num_warps=tiles.decode_warps, num_stages=tiles.decode_stages),
        cost_estimate=pl.CostEstimate(
            flops=4 * keys * N * H, transcendentals=keys * N,
            bytes_accessed=keys * K * 2 * H * jnp.dtype(problem.pool.dtype).itemsize + B * N * (H * jnp.dtype(problem.q_dtype).itemsize + C * (H + 2) * 4),
        ),
        interpret=interpret, name="ragged_paged_decode",
    )  # fmt: skip
    return kernel(q_TNH, k, v, scalars_4, context_lens_B, table_BM, scales_2K)


def _decode_kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, scalars_ref: Any, lens_ref: Any, table_ref: Any, scales_ref: Any, o_ref: Any, maximum_ref: Any, total_ref: Any,
    *, problem: Problem, tiles: Tiles, soft_cap: float | None,
) -> None:  # fmt: skip
    row, head, part = (pl.program_id(axis) for axis in range(3))
    G, H, R, block = problem.group_size, problem.pool.head_dim, decode_rows(problem), tiles.decode_keys
    window = scalars_ref[1]
    length = jnp.where(row < scalars_ref[2], lens_ref[row], 0)
    begin = jnp.maximum(length - window, 0) // block * block
    part_keys = (length - begin + tiles.num_splits * block - 1) // (tiles.num_splits * block) * block
    first = begin + part * part_keys
    index_R, lane_H = jnp.arange(R), jnp.arange(power_of_two(H))
    mask = (index_R < G)[:, None] & (lane_H < H)[None, :]
    token = jnp.minimum(row, q_ref.shape[0] - 1)
    q_RH = plt.load(q_ref.at[token, (head * G + jnp.minimum(index_R, G - 1))[:, None], lane_H[None, :]], mask=mask, other=0)
    keys = _Keys(k_ref, v_ref, table_ref, scalars_ref[0], row, head, problem)

    def visible(position_S: Array) -> Array:
        return ((position_S < length) & (position_S >= length - window))[None, :]

    last = jnp.minimum(first + part_keys, length)
    state = _attend(q_RH, keys, first, last, length, block, scales_ref[0, head], soft_cap, visible)
    heads_R = head * G + index_R
    plt.store(o_ref.at[row, part, heads_R[:, None], lane_H[None, :]], state.output_RH * scales_ref[1, head], mask=mask)
    plt.store(maximum_ref.at[row, part, heads_R], state.maximum_R, mask=index_R < G)
    plt.store(total_ref.at[row, part, heads_R], state.total_R, mask=index_R < G)


def merge(partial_BCNH: Array, maximum_BCN: Array, total_BCN: Array, sinks_N: Array | None) -> Array:
    """Combines the parts of each row by their log-sum-exp: ``[B, N, H]`` float32, zero for a row that has none. A sink is one more part without values."""
    maximum_BN = maximum_BCN.max(axis=1)
    if sinks_N is not None:
        maximum_BN = jnp.maximum(maximum_BN, sinks_N)
    # A part that saw nothing has maximum MASKED: its weight is zero unless all are such.
    weights_BCN = jnp.exp(maximum_BCN - maximum_BN[:, None])
    total_BN = (weights_BCN * total_BCN).sum(axis=1)
    if sinks_N is not None:
        total_BN = total_BN + jnp.exp(sinks_N - maximum_BN)
    output_BNH = (weights_BCN[..., None] * partial_BCNH).sum(axis=1)
    return output_BNH / jnp.where(total_BN == 0, 1, total_BN)[..., None]


def prefill(
    q_TNH: Array, k: Array, v: Array, scalars_4: Array, context_lens_B: Array, query_starts_B1: Array, table_BM: Array, work: PrefillWork, scales_2K: Array,
    sinks_N: Array | None, *, problem: Problem, tiles: Tiles, soft_cap: float | None, interpret: Any,
) -> Array:  # fmt: skip
    """Attention of the rows after the decodes, a program for each work item and key head.

    Algorithm: FlashAttention-2 (arXiv:2307.08691) over pages; the G query heads of a key head share a program, ``tokens x G`` rows.
    Bytes: keys and values up to an item's last query, once an item; queries and output once. FLOPs: ``4 * H * N`` for each query and key.
    Shared memory: ``gpu_tiles.prefill_bytes``.

    Args:
        q_TNH: Queries.
        k: ``[L*P*Z, K, H]``.
        v: The same.
        scalars_4: First entry of the layer, window, number of decodes, number of rows.
        context_lens_B: Of each row.
        query_starts_B1: Of the batch.
        table_BM: Pages of each row.
        work: The items.
        scales_2K: For each key head, the factor of its products and of its output.
        sinks_N: Or ``None``.
        problem: Static shape.
        tiles: Tile sizes.
        soft_cap: Or ``None``.
        interpret: As ``pl.pallas_call`` takes it.

    Returns:
        Output ``[T, N, H]``, undefined for tokens of other rows.
    """
    T, N, K, H = problem.num_tokens, problem.num_heads, problem.pool.num_kv_heads, problem.pool.head_dim
    keys = T * problem.max_context
    items = -(-T // query_block(problem, tiles))
    kernel = pl.pallas_call(
        functools.partial(_prefill_kernel, problem=problem, tiles=tiles, soft_cap=soft_cap, has_sinks=sinks_N is not None),
        grid=(work.rows_I.shape[0], K),
        out_shape=jax.ShapeDtypeStruct(q_TNH.shape, q_TNH.dtype),
        compiler_params=plt.CompilerParams(num_warps=tiles.prefill_warps, num_stages=tiles.prefill_stages),
        cost_estimate=pl.CostEstimate(
            flops=4 * keys * N * H, transcendentals=keys * N,
            bytes_accessed=items * problem.max_context * K * 2 * H * jnp.dtype(problem.pool.dtype).itemsize + 2 * q_TNH.size * q_TNH.dtype.itemsize,
        ),
        interpret=interpret, name="ragged_paged_prefill",
    )  # fmt: skip
    sinks = () if sinks_N is None else (sinks_N,)
    return kernel(q_TNH, k, v, scalars_4, context_lens_B, query_starts_B1, table_BM, *work, scales_2K, *sinks)


def _prefill_kernel(*all_refs: Any, problem: Problem, tiles: Tiles, soft_cap: float | None, has_sinks: bool) -> None:
    q_ref, k_ref, v_ref, scalars_ref, lens_ref, starts_ref, table_ref, rows_ref, offsets_ref, num_items_ref, scales_ref, *refs = all_refs
    sinks_ref = refs.pop(0) if has_sinks else None
    (o_ref,) = refs
    item, head = pl.program_id(0), pl.program_id(1)
    G, H, R = problem.group_size, problem.pool.head_dim, tiles.prefill_rows
    tokens, block = query_block(problem, tiles), tiles.prefill_keys
    row, offset = rows_ref[item], offsets_ref[item]
    start, window, length = starts_ref[row], scalars_ref[1], lens_ref[row]
    new = starts_ref[row + 1] - start
    live_tokens = jnp.where(item < num_items_ref[0], jnp.minimum(new - offset, tokens), 0)
    index_R, lane_H = jnp.arange(R), jnp.arange(power_of_two(H))
    token_R = index_R // G
    live_R = token_R < live_tokens
    mask = live_R[:, None] & (lane_H < H)[None, :]
    where = ((start + offset + token_R)[:, None], (head * G + index_R % G)[:, None], lane_H[None, :])
    q_RH = plt.load(q_ref.at[where], mask=mask, other=0)
    first_position = length - new + offset
    position_R = first_position + token_R
    keys = _Keys(k_ref, v_ref, table_ref, scalars_ref[0], row, head, problem)

    def visible(position_S: Array) -> Array:
        return (position_S[None, :] <= position_R[:, None]) & (position_S[None, :] > position_R[:, None] - window)

    first = jnp.maximum(first_position - window + 1, 0) // block * block
    last = jnp.where(live_tokens > 0, first_position + live_tokens, first)
    state = _attend(q_RH, keys, first, last, length, block, scales_ref[0, head], soft_cap, visible)
    output_RH, total_R = state.output_RH, state.total_R
    if sinks_ref is not None:
        sinks_R = plt.load(sinks_ref.at[head * G + index_R % G])
        maximum_R = jnp.maximum(state.maximum_R, sinks_R)
        correction_R = jnp.exp(state.maximum_R - maximum_R)
        output_RH, total_R = output_RH * correction_R[:, None], total_R * correction_R + jnp.exp(sinks_R - maximum_R)
    output_RH = output_RH / jnp.where(total_R == 0, 1, total_R)[:, None] * scales_ref[1, head]
    plt.store(o_ref.at[where], output_RH.astype(o_ref.dtype), mask=mask)

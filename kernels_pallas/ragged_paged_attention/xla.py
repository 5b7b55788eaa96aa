"""Ragged paged attention in plain XLA, written for speed on CPU: the embedded default, and the fallback everywhere. Never gathers a whole context.

Online softmax over blocks of keys (Milakov & Gimelshein 2018, arXiv:1805.02867; FlashAttention-2, arXiv:2307.08691) on paged keys
and values (PagedAttention, arXiv:2309.06180). Loop bounds are data: a step pays for its own contexts, not for the page table's width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxserve.dims import ceil_div, round_up
from jaxserve.kernels_pallas.ragged_paged_attention.contract import (
    MASKED,
    KVPool,
    KVScales,
    PoolShape,
    RaggedBatch,
    abstract_array,
    byte_dtype,
    is_quantised,
    quantise,
)
from jaxserve.kernels_pallas.row_sum import row_sum

KEY_BLOCK = 256
"""Keys of one online-softmax block. 128 to 256 measured 5 to 20% apart on two cores; larger blocks waste short contexts."""
DECODE_GROUP = 16
"""Decoding sequences of one batched product; a group loops to its own longest context."""
QUERY_BLOCKS = (128, 32)
"""Query rows of one prefill product, at most and at least; in a step of fewer tokens at most as many times the second as it has. A chunk takes blocks of the
larger size, and for its remainder what is cheaper."""


class QueryBlocks(NamedTuple):
    """Prefill work in blocks of one size: for each block its batch row and its first query within the row. Entries from ``num_blocks`` on are unused."""

    rows: Int32[Array, "I"]
    offsets: Int32[Array, "I"]
    num_blocks: Int32[Array, ""]


class Work(NamedTuple):
    """What every layer of a step needs of the batch, computed once a step: a pytree of small arrays."""

    query_blocks: tuple[QueryBlocks, ...]


def init_pool(shape: PoolShape) -> KVPool:
    """The pool as abstract arrays, ``[L*P, Z*K*H]`` each for keys and values.

    Two dimensions, a page a row: XLA's CPU gather runs on one thread and took 12.5 ms from this shape against 34 from ``[L*P, Z, K, H]``.
    """
    rows = (shape.num_layers * shape.num_pages, shape.page_size * shape.num_kv_heads * shape.head_dim)
    array = abstract_array(rows, byte_dtype(shape.dtype))
    return KVPool(array, array)


def prepare(batch: RaggedBatch, num_tokens: int, *, decode_only: bool = False) -> Work:
    """Splits the batch's prefill chunks into query blocks; outside the layer scan, since no layer changes it.

    Args:
        batch: The step's batch.
        num_tokens: T.
        decode_only: The caller's promise that no row has more than one token: prefill is then left out of the program.
    """
    if decode_only:
        return Work(())
    num_rows = batch.context_lens_B.shape[0]
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    query_lens = jnp.where((rows >= batch.counts_2[0]) & (rows < batch.counts_2[1]), jnp.diff(batch.query_starts_B1), 0)
    sizes = _query_block_sizes(num_tokens)
    blocks = []
    starts = jnp.zeros_like(query_lens)
    for size, smaller in zip(sizes, (*sizes[1:], None), strict=True):
        rest = query_lens - starts
        counts = rest // size if smaller else -(-rest // size)
        if smaller:  # A remainder above half a block costs less as one padded block than as several small ones.
            counts = counts + (rest % size > size // 2)
        ends = jnp.cumsum(counts)
        index = jnp.arange(ceil_div(num_tokens, size) + min(num_rows, num_tokens), dtype=jnp.int32)
        row = jnp.minimum(jnp.searchsorted(ends, index, side="right"), num_rows - 1).astype(jnp.int32)
        offsets = starts[row] + (index - (ends - counts)[row]) * size
        blocks.append(QueryBlocks(row, offsets, ends[-1]))
        starts = jnp.minimum(starts + counts * size, query_lens)
    return Work(tuple(blocks))


def attend(
    q_TNH: Float[Array, "T N H"],
    k_TKH: Float[Array, "T K H"],
    v_TKH: Float[Array, "T K H"],
    pool: KVPool,
    batch: RaggedBatch,
    work: Work,
    *,
    layer: int | Int32[Array, ""],
    window: int | Int32[Array, ""],
    num_pages: int,
    page_size: int,
    scale: float,
    soft_cap: float | None = None,
    sinks_N: Float[Array, "N"] | None = None,
    kv_scales: KVScales | None = None,
) -> tuple[Float[Array, "T N H"], KVPool]:
    """Writes the new keys and values to the pool, then attends. See ``api.ragged_paged_attention`` for the contract.

    Bytes moved: each live page once for every group of ``DECODE_GROUP`` decodes or query block that reads it, and copied once by the gather.
    """
    layer = jnp.asarray(layer, jnp.int32)
    pool = _write(k_TKH, v_TKH, pool, batch, layer, num_pages, page_size, kv_scales)
    reader = _Reader(pool, batch, layer, jnp.asarray(window, jnp.int32), num_pages, page_size, k_TKH.shape[1], q_TNH, scale, soft_cap, sinks_N)
    num_tokens = q_TNH.shape[0]
    padding = max(_query_block_sizes(num_tokens)[0], reader.decode_group)
    q_scaled = q_TNH if kv_scales is None else _scale_heads(q_TNH, kv_scales.k_K)
    q_padded = jnp.pad(q_scaled, ((0, padding), (0, 0), (0, 0))).astype(reader.dtype)
    out = reader.decode(q_padded, jnp.zeros_like(q_padded))
    for size, blocks in zip(_query_block_sizes(num_tokens), work.query_blocks, strict=False):  # None for a decode-only step.
        out = reader.prefill(q_padded, out, blocks, size)
    out_TNH = out[:num_tokens] if kv_scales is None else _scale_heads(out[:num_tokens], kv_scales.v_K)
    return out_TNH.astype(q_TNH.dtype), pool


def _scale_heads(x_TNH: Array, scale_K: Array) -> Array:
    """Each query head times the scale of its key head."""
    return (x_TNH * jnp.repeat(scale_K, x_TNH.shape[1] // scale_K.shape[0])[:, None]).astype(x_TNH.dtype)


def _query_block_sizes(num_tokens: int) -> tuple[int, ...]:
    largest, smallest = QUERY_BLOCKS
    if num_tokens < 2 * smallest:
        return (min(smallest, round_up(num_tokens, 2)),)
    return min(largest, num_tokens // smallest * smallest), smallest


def _write(
    k_TKH: Array, v_TKH: Array, pool: KVPool, batch: RaggedBatch, layer: Array, num_pages: int, page_size: int, kv_scales: KVScales | None
) -> KVPool:  # fmt: skip
    """One scatter of rows each; the reshapes are bitcasts, so the donated pool is updated in place.

    What is not finite is written as 0. A stale entry has weight 0, and 0 times NaN would carry one request's overflow into the next owner of its page.
    """
    entries_per_layer = num_pages * page_size
    entries = jnp.where(batch.entries_T < entries_per_layer, batch.entries_T + layer * entries_per_layer, jnp.iinfo(jnp.int32).max)
    dtype = _stored_dtype(pool)

    def write(array: Array, new_TKH: Array, scale_K: Array | None) -> Array:
        rows = array.reshape(-1, new_TKH.shape[1] * new_TKH.shape[2])
        new_rows = quantise(new_TKH, scale_K, dtype).reshape(new_TKH.shape[0], -1)
        new_rows = lax.bitcast_convert_type(jnp.where(jnp.isfinite(new_rows), new_rows, 0), array.dtype)
        rows = rows.at[entries].set(new_rows, mode="drop")
        return rows.reshape(array.shape)

    assert pool.v is not None
    return KVPool(write(pool.k, k_TKH, kv_scales and kv_scales.k_K), write(pool.v, v_TKH, kv_scales and kv_scales.v_K))


def _stored_dtype(pool: KVPool) -> Any:
    """The dtype of the values in a pool, see ``contract.byte_dtype``."""
    return jnp.dtype(jnp.float8_e4m3fn) if pool.k.dtype == jnp.uint8 else pool.k.dtype


class _Reader:
    """Attention over one layer of the pool, for decodes and for prefill blocks. Lives only while tracing."""

    def __init__(
        self, pool: KVPool, batch: RaggedBatch, layer: Array, window: Array, num_pages: int, page_size: int, num_kv_heads: int,
        q_TNH: Array, scale: float, soft_cap: float | None, sinks_N: Array | None,
    ) -> None:  # fmt: skip
        _, self.N, self.H = q_TNH.shape
        self.K, self.G = num_kv_heads, self.N // num_kv_heads
        assert pool.v is not None
        self.arrays, self.batch, self.window, self.scale, self.soft_cap = (pool.k, pool.v), batch, window, scale, soft_cap
        self.stored_dtype = _stored_dtype(pool)
        self.dtype = q_TNH.dtype if is_quantised(self.stored_dtype) else self.stored_dtype
        self.sinks_N = None if sinks_N is None else sinks_N.astype(jnp.float32)
        self.pages_per_block = max(1, KEY_BLOCK // page_size)
        self.block = self.pages_per_block * page_size
        num_rows, table_width = batch.page_table_BM.shape
        self.decode_group = min(num_rows, DECODE_GROUP)
        row_padding = round_up(num_rows, self.decode_group) - num_rows
        column_padding = round_up(table_width, self.pages_per_block) - table_width
        self.table = jnp.pad(batch.page_table_BM, ((0, row_padding), (0, column_padding))) + layer * num_pages
        self.context_lens = jnp.pad(batch.context_lens_B, (0, row_padding))

    def decode(self, q_padded: Array, out: Array) -> Array:
        """The first ``counts[0]`` rows. One product a sequence: queries are padded with zeros to all KV heads, so that keys need no transpose."""
        g, K, G, H = self.decode_group, self.K, self.G, self.H

        def group(i: Array, out: Array) -> Array:
            lens = lax.dynamic_slice_in_dim(self.context_lens, i * g, g)
            table = lax.dynamic_slice_in_dim(self.table, i * g, g)
            live = i * g + jnp.arange(g) < self.batch.counts_2[0]
            lens = jnp.where(live, lens, 0)
            first = jnp.where(live, jnp.maximum(lens - self.window, 0), jnp.iinfo(jnp.int32).max)
            q = lax.dynamic_slice_in_dim(q_padded, i * g, g).reshape(g, K, G, 1, H)
            q = (q * jnp.eye(K, dtype=q.dtype)[None, :, None, :, None]).reshape(g, self.N, K * H)

            def scores_and_values(j: Array) -> tuple[Array, Array]:
                k, v = (self._gather(array, table, j).reshape(g, self.block, K * H) for array in self.arrays)
                position = j * self.block + jnp.arange(self.block)
                visible = (position < lens[:, None]) & (position >= (lens - self.window)[:, None])
                return self._logits(jnp.einsum("bnc,bsc->bns", q, k, preferred_element_type=jnp.float32), visible[:, None, :]), v

            def weigh(p: Array, v: Array) -> Array:
                return jnp.einsum("bns,bsc->bnc", p.astype(v.dtype), v, preferred_element_type=jnp.float32)

            o, total = self._softmax(jnp.min(first) // self.block, -(-jnp.max(lens) // self.block), (g, self.N), K * H, self.sinks_N, scores_and_values, weigh)
            o = o.reshape(g, K, G, K, H)
            own = jnp.stack([o[:, head, :, head] for head in range(K)], axis=1).reshape(g, self.N, H)
            own = jnp.where(live[:, None, None], own / total[..., None], 0)
            return lax.dynamic_update_slice_in_dim(out, own.astype(out.dtype), i * g, 0)

        return lax.fori_loop(0, -(-self.batch.counts_2[0] // g), group, out)

    def prefill(self, q_padded: Array, out: Array, blocks: QueryBlocks, size: int) -> Array:
        """Chunks of two or more tokens, ``size`` queries of one sequence at a time. Rows past a chunk's end belong to others and keep what they hold.

        Keys and values are cut into heads and stacked: XLA's CPU transpose to the same array made both products 1.6 times slower.
        """
        K, G, H = self.K, self.G, self.H
        sinks = None if self.sinks_N is None else jnp.repeat(self.sinks_N.reshape(K, G), size, axis=1)

        def block(i: Array, out: Array) -> Array:
            row, offset = blocks.rows[i], blocks.offsets[i]
            start, end = self.batch.query_starts_B1[row], self.batch.query_starts_B1[row + 1]
            context_len = self.context_lens[row]
            index = start + offset
            query_position = context_len - (end - start) + offset + jnp.arange(size)
            q = lax.dynamic_slice_in_dim(q_padded, index, size).reshape(size, K, G, H).transpose(1, 2, 0, 3).reshape(K, G * size, H)
            table = lax.dynamic_slice_in_dim(self.table, row, 1)

            def scores_and_values(j: Array) -> tuple[Array, Array]:
                k, v = (jnp.stack(jnp.split(self._gather(array, table, j).reshape(self.block, K * H), K, axis=1)) for array in self.arrays)
                position = j * self.block + jnp.arange(self.block)
                visible = (position <= query_position[:, None]) & (position > (query_position - self.window)[:, None])
                return self._logits(jnp.einsum("kqh,ksh->kqs", q, k, preferred_element_type=jnp.float32), jnp.tile(visible, (G, 1))[None]), v

            def weigh(p: Array, v: Array) -> Array:
                return jnp.einsum("kqs,ksh->kqh", p.astype(v.dtype), v, preferred_element_type=jnp.float32)

            first = jnp.maximum(query_position[0] - self.window + 1, 0) // self.block
            last = -(-jnp.minimum(context_len, query_position[-1] + 1) // self.block)
            o, total = self._softmax(first, last, (K, G * size), H, sinks, scores_and_values, weigh)
            o = (o / total[..., None]).reshape(K, G, size, H).transpose(2, 0, 1, 3).reshape(size, self.N, H)
            mine = (index + jnp.arange(size) < end)[:, None, None]
            o = jnp.where(mine, o.astype(out.dtype), lax.dynamic_slice_in_dim(out, index, size))
            return lax.dynamic_update_slice_in_dim(out, o, index, 0)

        return lax.fori_loop(0, blocks.num_blocks, block, out)

    def _gather(self, array: Array, table: Array, j: Array) -> Array:
        pages = lax.dynamic_slice_in_dim(table, j * self.pages_per_block, self.pages_per_block, axis=1)
        rows = array.at[pages.reshape(-1)].get(mode="promise_in_bounds")
        return lax.bitcast_convert_type(rows, self.stored_dtype).astype(self.dtype)

    def _logits(self, products: Array, visible: Array) -> Array:
        logits = products * self.scale
        if self.soft_cap is not None:
            logits = self.soft_cap * jnp.tanh(logits / self.soft_cap)
        return jnp.where(visible, logits, MASKED)

    def _softmax(self, first: Array, last: Array, rows: tuple[int, int], width: int, sinks: Array | None, scores_and_values, weigh) -> tuple[Array, Array]:
        """Unnormalised weighted values ``[*rows, width]`` and the normaliser ``[*rows]`` over key blocks ``first .. last-1``.

        A block that a row does not see at all adds weight at the maximum -1e30, which the first visible key multiplies by exp(-inf) = 0.
        """
        if sinks is None:
            start = (jnp.full(rows, MASKED), jnp.zeros(rows))
        else:  # A sink is a key with logit ``sinks`` and no value.
            start = (jnp.broadcast_to(sinks, rows), jnp.ones(rows))

        def body(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            maximum, total, acc = carry
            logits, v = scores_and_values(j)
            new_maximum = jnp.maximum(maximum, logits.max(-1))
            p = jnp.exp(logits - new_maximum[..., None])
            correction = jnp.exp(maximum - new_maximum)
            return new_maximum, total * correction + row_sum(p)[..., 0], acc * correction[..., None] + weigh(p, v)

        _, total, acc = lax.fori_loop(first, last, body, (*start, jnp.zeros((*rows, width))))
        return acc, total

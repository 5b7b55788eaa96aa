"""The write phase of the TPU kernel: new keys and values into the paged pool, by read-modify-write of one tile of rows at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int32

from jaxserve.kernels_pallas.ragged_paged_attention.tpu_layout import WRITE_ROWS


class Windows(NamedTuple):
    """The tiles of rows that the new tokens fall into, in order of token. Entries from ``num_windows`` on are unused.

    Attributes:
        entries_W: Entry of the tile's first row, in one layer.
        tokens_W: Packed index of the first new token in it.
        rows_W: The row of that token in the tile.
        counts_W: New tokens in it, consecutive.
        num_windows_1: How many tiles there are.
    """

    entries_W: Int32[Array, "W"]
    tokens_W: Int32[Array, "W"]
    rows_W: Int32[Array, "W"]
    counts_W: Int32[Array, "W"]
    num_windows_1: Int32[Array, "1"]


def plan_windows(entries_T: Int32[Array, "T"], num_rows: int, num_entries: int) -> Windows:
    """Groups tokens by the tile that their entry is in. A row of n tokens touches at most ``(n - 1) // 8 + 2`` tiles, and never more than n."""
    T = entries_T.shape[0]
    width = min(T, T // WRITE_ROWS + 2 * num_rows)
    live = entries_T < num_entries
    previous = jnp.concatenate([jnp.full(1, -2, jnp.int32), entries_T[:-1]])
    first = live & ((entries_T % WRITE_ROWS == 0) | (entries_T != previous + 1))
    window = jnp.cumsum(first.astype(jnp.int32)) - 1
    tokens = jnp.zeros(width, jnp.int32).at[jnp.where(first, window, width)].set(jnp.arange(T, dtype=jnp.int32), mode="drop")
    counts = jnp.zeros(width, jnp.int32).at[jnp.where(live, window, width)].add(1, mode="drop")
    entries = entries_T[tokens]
    rows = entries % WRITE_ROWS
    return Windows(entries - rows, tokens, rows, counts, first.sum(dtype=jnp.int32)[None])


def write_scratch(num_buffers: int, num_kv_heads: int, row_width: int, dtype: Any) -> tuple[Any, ...]:
    """Scratch memory of :func:`write_windows`: new rows, tiles of the pool, and a semaphore a buffer for reads and for writes."""
    return (
        pltpu.VMEM((num_buffers, num_kv_heads, 2 * WRITE_ROWS, row_width), dtype),
        pltpu.VMEM((num_buffers, num_kv_heads, WRITE_ROWS, row_width), dtype),
        pltpu.SemaphoreType.DMA((num_buffers,)),
        pltpu.SemaphoreType.DMA((num_buffers,)),
    )


def write_windows(windows: Any, first_page: Array, new_ref: Any, pool_ref: Any, scratch: Any) -> None:
    """Merges the new rows into the pool and waits until they are there.

    A row of 16-bit or 8-bit values shares its 32-bit words with its neighbours, so a copy cannot address it alone: the tile of 8 rows is read,
    merged in VMEM and written back. Half of the buffers are being read ahead while the other half are being written.

    Args:
        windows: Refs of :class:`Windows` in SMEM.
        first_page: First page of the layer in the pool.
        new_ref: New rows ``[K, T', W]`` in HBM, in the pool's dtype; ``T'`` is a whole number of tiles, with one to spare.
        pool_ref: ``[L*P, K, Z, W]`` in HBM.
        scratch: Refs of :func:`write_scratch`.
    """
    new_buffer, pool_buffer, read_semaphores, write_semaphores = scratch
    num_buffers, num_kv_heads, page_size = new_buffer.shape[0], new_buffer.shape[1], pool_ref.shape[2]
    ahead = num_buffers // 2
    num_windows = windows.num_windows_1[0]

    def tile(w: Array) -> Any:
        entry = windows.entries_W[w]
        row = pl.multiple_of(lax.rem(entry, page_size), WRITE_ROWS)
        return pool_ref.at[first_page + lax.div(entry, page_size), :, pl.ds(row, WRITE_ROWS), :]

    def reads(w: Array) -> tuple[Any, Any, Array]:
        """The copies of a window, and whether its tokens reach into the second tile of new rows."""
        buffer, token = lax.rem(w, num_buffers), windows.tokens_W[w]
        first = pl.multiple_of(lax.div(token, WRITE_ROWS) * WRITE_ROWS, WRITE_ROWS)
        semaphore = read_semaphores.at[buffer]
        halves = [
            pltpu.make_async_copy(
                new_ref.at[:, pl.ds(pl.multiple_of(first + half * WRITE_ROWS, WRITE_ROWS), WRITE_ROWS), :],
                new_buffer.at[buffer, :, pl.ds(half * WRITE_ROWS, WRITE_ROWS), :],
                semaphore,
            )
            for half in range(2)
        ]
        old = pltpu.make_async_copy(tile(w), pool_buffer.at[buffer], semaphore)
        return (old, halves[0]), halves[1], lax.rem(token, WRITE_ROWS) + windows.counts_W[w] > WRITE_ROWS

    def start_reads(w: Array) -> None:
        always, second, needed = reads(w)
        for copy in always:
            copy.start()
        pl.when(needed)(second.start)

    def wait_reads(w: Array) -> None:
        always, second, needed = reads(w)
        for copy in always:
            copy.wait()
        pl.when(needed)(second.wait)

    def write(w: Array) -> Any:
        buffer = lax.rem(w, num_buffers)
        return pltpu.make_async_copy(pool_buffer.at[buffer], tile(w), write_semaphores.at[buffer])

    def merge(w: Array) -> None:
        buffer, first_row = lax.rem(w, num_buffers), windows.rows_W[w]
        shift = lax.rem(first_row - lax.rem(windows.tokens_W[w], WRITE_ROWS) + 2 * WRITE_ROWS, 2 * WRITE_ROWS)
        row = lax.broadcasted_iota(jnp.int32, (WRITE_ROWS, new_buffer.shape[3]), 0)
        is_new = (row >= first_row) & (row < first_row + windows.counts_W[w])

        def one_head(head: Array, _: None) -> None:
            new = pltpu.roll(_widen(new_buffer[buffer, head]), shift, axis=0)[:WRITE_ROWS]
            old = pool_buffer[buffer, head]
            pool_buffer[buffer, head] = jnp.where(is_new, new, _widen(old)).astype(old.dtype)

        lax.fori_loop(0, num_kv_heads, one_head, None)

    for w in range(ahead):
        pl.when(w < num_windows)(lambda w=w: start_reads(jnp.int32(w)))

    def step(w: Array, _: None) -> None:
        @pl.when(w + ahead < num_windows)
        def _() -> None:
            pl.when(w >= ahead)(lambda: write(w - ahead).wait())  # It holds the buffer that the read below fills.
            start_reads(w + ahead)

        wait_reads(w)
        merge(w)
        write(w).start()

    lax.fori_loop(0, num_windows, step, None)
    lax.fori_loop(jnp.maximum(num_windows - 2 * ahead, 0), num_windows, lambda w, _: write(w).wait(), None)


def _widen(x: Array) -> Array:
    """To 32 bits, which rotate by a dynamic number of rows; exact, as is the way back."""
    return x.astype(jnp.int32 if jnp.issubdtype(x.dtype, jnp.integer) else jnp.float32)

"""Tile sizes of the TPU kernels, from memory limits alone; ``tuned_*.json`` overrides them. And the memory that they take, byte by byte."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from jaxserve.dims import ceil_div, round_up
from jaxserve.kernels_pallas.chips import MIB
from jaxserve.kernels_pallas.ragged_paged_attention import tuned
from jaxserve.kernels_pallas.ragged_paged_attention.contract import Problem
from jaxserve.kernels_pallas.ragged_paged_attention.tpu_layout import LANES, WRITE_ROWS, half_width, product_width
from jaxserve.kernels_pallas.target import find_chip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """Sizes that change speed and memory, never results.

    Args:
        block_pages: Pages of one block of keys, fetched together and worked on together.
        query_block: Tokens of one prefill work item; a multiple of 16.
        write_buffers: Windows of new keys and values in flight; even.
    """

    block_pages: int
    query_block: int
    write_buffers: int


def decode_rows(problem: Problem) -> int:
    """Rows of a decode's queries for one key head: G, padded to whole registers."""
    return round_up(problem.group_size, 8)


def _row_bytes(problem: Problem) -> int:
    return 2 * half_width(problem.pool.head_dim) * jnp.dtype(problem.pool.dtype).itemsize


def write_bytes(problem: Problem, tiles: Tiles) -> int:
    """VMEM of the write phase: for each window in flight its own rows and two tiles of new ones, of all key heads."""
    return tiles.write_buffers * problem.pool.num_kv_heads * 3 * WRITE_ROWS * _row_bytes(problem)


def decode_bytes(problem: Problem, tiles: Tiles) -> int:
    """VMEM of the decode kernel.

    ``2 * keys * K * row`` (double-buffered pages) + ``4 * K * R * w * 4`` (queries and output, each pipelined twice; accumulator) +
    ``K * R * 3 * 128 * 4`` (maximum, sum, sinks) + per-head temporaries ``keys * row_f32 + 4 * R * keys * 4``, with ``keys = block_pages * Z``.
    """
    K, R, w = problem.pool.num_kv_heads, decode_rows(problem), product_width(problem.pool.head_dim)
    keys = tiles.block_pages * problem.pool.page_size
    pages = 2 * keys * K * _row_bytes(problem)
    rows = 5 * K * R * w * 4 + 3 * K * R * LANES * 4
    temporaries = keys * 2 * half_width(problem.pool.head_dim) * 4 + 4 * R * keys * 4
    return pages + rows + temporaries + write_bytes(problem, tiles)


def prefill_bytes(problem: Problem, tiles: Tiles) -> int:
    """VMEM of the prefill kernel: as :func:`decode_bytes` with ``R = G * query_block`` rows; queries double-buffered, one output buffer."""
    K, R, w = problem.pool.num_kv_heads, problem.group_size * tiles.query_block, product_width(problem.pool.head_dim)
    keys, q_size = tiles.block_pages * problem.pool.page_size, jnp.dtype(problem.q_dtype).itemsize
    pages = 2 * keys * K * _row_bytes(problem)
    rows = K * R * w * (3 * q_size + 4) + 2 * K * R * LANES * 4 + problem.num_heads * LANES * 4
    temporaries = keys * 2 * half_width(problem.pool.head_dim) * 4 + 4 * R * keys * 4 + 2 * R * w * 4
    return pages + rows + temporaries + write_bytes(problem, tiles)


def vmem_limit(problem: Problem) -> int:
    """VMEM that the kernels ask for: three quarters of the chip's, the rest being XLA's own."""
    return find_chip(problem.target, "tpu").fast_memory_bytes * 3 // 4


def fast_memory_bytes(problem: Problem) -> int:
    """VMEM of the larger kernel with the chosen tiles."""
    tiles = choose_tiles(problem)
    return decode_bytes(problem, tiles) if problem.decode_only else max(decode_bytes(problem, tiles), prefill_bytes(problem, tiles))


def choose_tiles(problem: Problem) -> Tiles:
    """The tiles of a problem: tuned ones where a file for the chip has them, else the largest that fit.

    Keys in a block: at most 512 (fewer for a short table), so that one block is a few microseconds of copying.
    Queries in a block: about 512 rows a key head, past the ridge of every chip here, and no more tokens than the bucket has.
    """
    chip, Z = find_chip(problem.target, "tpu"), problem.pool.page_size
    budget = min(vmem_limit(problem) * 3 // 4, 24 * MIB)
    block_pages = max(1, min(512 // Z, problem.table_width))
    query_block = min(max(16, 512 // problem.group_size // 16 * 16), 128, round_up(problem.num_tokens, 16))
    write_buffers = 8

    def size(pages: int, queries: int, buffers: int) -> int:
        tiles = Tiles(block_pages=pages, query_block=queries, write_buffers=buffers)
        return max(decode_bytes(problem, tiles), 0 if problem.decode_only else prefill_bytes(problem, tiles))

    while size(block_pages, query_block, write_buffers) > budget:
        if block_pages * Z > 128:
            block_pages = ceil_div(block_pages, 2)
        elif query_block > 16:
            query_block = max(16, query_block // 2 // 16 * 16)
        elif write_buffers > 2:
            write_buffers //= 2
        elif block_pages > 1:
            block_pages = ceil_div(block_pages, 2)
        else:
            break
    tiles = Tiles(block_pages=block_pages, query_block=query_block, write_buffers=write_buffers)
    return dataclasses.replace(tiles, **tuned.look_up("pallas_tpu", chip.name, problem))

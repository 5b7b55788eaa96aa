"""Tile sizes of the GPU kernels, from shared memory and the number of multiprocessors; ``tuned_*.json`` overrides them."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from jaxserve.dims import ceil_div
from jaxserve.kernels_pallas.ragged_paged_attention import tuned
from jaxserve.kernels_pallas.ragged_paged_attention.contract import Problem
from jaxserve.kernels_pallas.target import find_chip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """Sizes that change speed and memory, and results only in the last bits. All but the splits are powers of two, as Triton wants.

    Args:
        decode_keys: Keys of one step of the decode kernel; at least 16.
        decode_warps: Warps of a program of it.
        decode_stages: Depth of its software pipeline.
        num_splits: Parts that a decode's context is cut into.
        prefill_rows: Query rows (tokens x G) of a prefill work item; at least 16.
        prefill_keys: Keys of one step of the prefill kernel.
        prefill_warps: Warps of a program of it.
        prefill_stages: Depth of its software pipeline.
    """

    decode_keys: int = 64
    decode_warps: int = 4
    decode_stages: int = 3
    num_splits: int
    prefill_rows: int
    prefill_keys: int = 64
    prefill_warps: int = 8
    prefill_stages: int = 2


def power_of_two(n: int) -> int:
    """The smallest power of two that is ``>= n``."""
    return 1 << max(n - 1, 0).bit_length()


def decode_rows(problem: Problem) -> int:
    """Query rows of one decode program: G, padded to what a tensor core takes."""
    return max(16, power_of_two(problem.group_size))


def query_block(problem: Problem, tiles: Tiles) -> int:
    """Tokens of a prefill work item."""
    return tiles.prefill_rows // problem.group_size


def decode_bytes(problem: Problem, tiles: Tiles) -> int:
    """Shared memory of a program of the decode kernel."""
    return _shared_bytes(problem, decode_rows(problem), tiles.decode_keys, tiles.decode_stages)


def prefill_bytes(problem: Problem, tiles: Tiles) -> int:
    """Shared memory of a program of the prefill kernel."""
    return _shared_bytes(problem, tiles.prefill_rows, tiles.prefill_keys, tiles.prefill_stages)


def _shared_bytes(problem: Problem, rows: int, keys: int, stages: int) -> int:
    """``stages * keys * 2H * max(itemsize, q)`` of keys and values in flight + ``rows * H * q`` of queries + ``rows * keys * q`` of weights.

    H is padded to a power of two; q are the bytes of a query's element.
    """
    H, q_size = power_of_two(problem.pool.head_dim), jnp.dtype(problem.q_dtype).itemsize
    return stages * keys * 2 * H * max(jnp.dtype(problem.pool.dtype).itemsize, q_size) + rows * H * q_size + rows * keys * q_size


def fast_memory_bytes(problem: Problem) -> int:
    """Shared memory of the larger kernel with the chosen tiles."""
    tiles = choose_tiles(problem)
    return decode_bytes(problem, tiles) if problem.decode_only else max(decode_bytes(problem, tiles), prefill_bytes(problem, tiles))


def choose_tiles(problem: Problem) -> Tiles:
    """The tiles of a problem: tuned ones where a file for the chip has them, else the largest that fit half of a multiprocessor's shared memory.

    Splits: enough for two programs a multiprocessor when all of the bucket's rows are long, and no part shorter than 256 keys of the longest context.
    """
    chip = find_chip(problem.target, "gpu")
    programs = problem.num_rows * problem.pool.num_kv_heads
    num_splits = max(1, min(ceil_div(2 * chip.num_cores, programs), ceil_div(problem.max_context, 256), 64))
    prefill_rows = max(64 if power_of_two(problem.pool.head_dim) > 128 else 128, power_of_two(problem.group_size))
    tiles, budget = Tiles(num_splits=num_splits, prefill_rows=prefill_rows), chip.fast_memory_bytes // 2
    while decode_bytes(problem, tiles) > budget and tiles.decode_keys > 16:
        tiles = dataclasses.replace(tiles, decode_keys=tiles.decode_keys // 2)
    while prefill_bytes(problem, tiles) > budget and tiles.prefill_keys > 16:
        tiles = dataclasses.replace(tiles, prefill_keys=tiles.prefill_keys // 2)
    return dataclasses.replace(tiles, **tuned.look_up("pallas_gpu", chip.name, problem))

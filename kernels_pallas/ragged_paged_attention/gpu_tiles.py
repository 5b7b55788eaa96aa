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
        num_splits: Parts that a decode's context is cut into.
        prefill_rows: Query rows (tokens x G) of a prefill work item; at least 16.
        prefill_keys: Keys of one step of the prefill kernel.
        num_warps: Of a block.
        num_stages: Depth of the software pipeline.
    """

    decode_keys: int
    num_splits: int
    prefill_rows: int
    prefill_keys: int
    num_warps: int
    num_stages: int


def power_of_two(n: int) -> int:
    """The smallest power of two that is ``>= n``."""
    return 1 << max(n - 1, 0).bit_length()


def decode_rows(problem: Problem) -> int:
    """Query rows of one decode program: G, padded to what a tensor core takes."""
    return max(16, power_of_two(problem.group_size))


def query_block(problem: Problem, tiles: Tiles) -> int:
    """Tokens of a prefill work item."""
    return tiles.prefill_rows // problem.group_size


def shared_bytes(problem: Problem, rows: int, keys: int, stages: int) -> int:
    """Shared memory of a program: ``stages * keys * 2H * itemsize`` (keys and values in flight) + ``rows * H * 2`` of queries and as much for the weights.

    H is padded to a power of two.
    """
    H, q_size = power_of_two(problem.pool.head_dim), jnp.dtype(problem.q_dtype).itemsize
    return stages * keys * 2 * H * max(jnp.dtype(problem.pool.dtype).itemsize, q_size) + rows * H * q_size + rows * keys * q_size


def fast_memory_bytes(problem: Problem) -> int:
    """Shared memory of the larger kernel with the chosen tiles."""
    tiles = choose_tiles(problem)
    decode = shared_bytes(problem, decode_rows(problem), tiles.decode_keys, tiles.num_stages)
    return decode if problem.decode_only else max(decode, shared_bytes(problem, tiles.prefill_rows, tiles.prefill_keys, tiles.num_stages))


def choose_tiles(problem: Problem) -> Tiles:
    """The tiles of a problem: tuned ones where a file for the chip has them, else the largest that fit half of a multiprocessor's shared memory.

    Splits: enough for two programs a multiprocessor when all rows are long, and no part shorter than 256 keys of the longest context.
    """
    chip = find_chip(problem.target, "gpu")
    found = tuned.look_up("pallas_gpu", chip.name, problem)
    if found is not None:
        return Tiles(**found)
    budget = chip.fast_memory_bytes // 2
    decode_keys, prefill_keys, stages = 64, 64, 3
    prefill_rows = max(64 if power_of_two(problem.pool.head_dim) > 128 else 128, power_of_two(problem.group_size))
    while shared_bytes(problem, decode_rows(problem), decode_keys, stages) > budget and decode_keys > 16:
        decode_keys //= 2
    while shared_bytes(problem, prefill_rows, prefill_keys, stages) > budget and prefill_keys > 16:
        prefill_keys //= 2
    programs = problem.num_rows * problem.pool.num_kv_heads
    num_splits = max(1, min(ceil_div(2 * chip.num_cores, programs), ceil_div(problem.max_context, 256), 64))
    return Tiles(
        decode_keys=decode_keys, num_splits=num_splits, prefill_rows=prefill_rows, prefill_keys=prefill_keys, num_warps=4, num_stages=stages
    )  # fmt: skip

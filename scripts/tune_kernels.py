"""Finds the fastest tile sizes of the attention kernels on the device at hand and writes them beside the kernels, for checking in.

    python -m scripts.tune_kernels --heads 32,8,128 --page-size 16 --dtype bfloat16
    python -m scripts.tune_kernels --heads 32,8,128 --page-size 16 --rows 4 --tokens 2048

Runs on a TPU or an NVIDIA GPU. Each candidate must agree with the chosen default before its time counts. ``--dry-run`` runs one candidate anywhere, in
the interpreter, and writes nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.dims import ceil_div
from jaxserve.kernels_pallas import ragged_paged_attention as package
from jaxserve.kernels_pallas.ragged_paged_attention import gpu_tiles, pallas_gpu, pallas_tpu, tpu_tiles, tuned
from jaxserve.kernels_pallas.ragged_paged_attention.api import NO_WINDOW, Implementation, PoolShape, Problem, RaggedBatch, make_problem, ragged_paged_attention
from jaxserve.kernels_pallas.target import current_target, find_chip

CONTEXTS = (1024, 8192)
"""Context lengths that a candidate is timed at; the sum counts."""


def grid(problem: Problem, platform: str) -> dict[str, tuple[int, ...]]:
    """What to try of each size that the time of the problem hangs on. The splits of a GPU's decode do not count: they follow from rows and context."""
    if platform == "tpu":
        pages = tuple(max(1, keys // problem.pool.page_size) for keys in (128, 256, 512, 1024))
        return {"block_pages": pages} | ({} if problem.decode_only else {"query_block": (16, 32, 64, 128)})
    if problem.decode_only:
        return {"decode_keys": (32, 64, 128), "decode_warps": (4, 8), "decode_stages": (2, 3, 4)}
    return {"prefill_rows": (64, 128), "prefill_keys": (32, 64, 128), "prefill_warps": (4, 8), "prefill_stages": (2, 3, 4)}


def candidates(problem: Problem, platform: str) -> Iterator[tuple[dict[str, int], Any]]:
    """The sizes that are varied and the tiles with them: the default first, then all others that fit."""
    default: Any = (gpu_tiles if platform == "gpu" else tpu_tiles).choose_tiles(problem)
    values = grid(problem, platform)
    for sizes in dict.fromkeys([tuple(getattr(default, name) for name in values), *itertools.product(*values.values())]):
        fields = dict(zip(values, sizes, strict=True))
        tiles = dataclasses.replace(default, **fields)
        if tiles == default or (gpu_fits if platform == "gpu" else tpu_fits)(problem, tiles):
            yield fields, tiles


def gpu_fits(problem: Problem, tiles: Any) -> bool:
    """Whether a work item has a token and both kernels their shared memory."""
    limit = find_chip(problem.target, "gpu").fast_memory_bytes
    return tiles.prefill_rows >= problem.group_size and max(gpu_tiles.decode_bytes(problem, tiles), gpu_tiles.prefill_bytes(problem, tiles)) <= limit


def tpu_fits(problem: Problem, tiles: Any) -> bool:
    """Whether both kernels have their VMEM."""
    return max(tpu_tiles.decode_bytes(problem, tiles), tpu_tiles.prefill_bytes(problem, tiles)) <= tpu_tiles.vmem_limit(problem)


def seconds_of(implementation: Implementation, problem: Problem, context: int, *, calls: int) -> tuple[float, np.ndarray]:
    """Time of one call on a full batch of ``context`` tokens a row, and its output."""
    shape, B, T = problem.pool, problem.num_rows, problem.num_tokens
    new = T // B
    width, pages = problem.table_width, ceil_div(context, shape.page_size)
    rng = np.random.default_rng(0)
    table = np.zeros((B, width), np.int32)
    table[:, :pages] = rng.permutation(shape.num_pages)[: B * pages].reshape(B, pages)
    positions = np.tile(np.arange(context - new, context), B).astype(np.int32)
    entries = table[np.repeat(np.arange(B), new), positions // shape.page_size] * shape.page_size + positions % shape.page_size
    counts = np.array([B if new == 1 else 0, B], np.int32)
    batch = RaggedBatch(np.full(B, context, np.int32), np.arange(0, T + 1, new, dtype=np.int32), table, entries.astype(np.int32), positions, counts)
    q, k, v = (jnp.asarray(rng.standard_normal((T, heads, shape.head_dim)), problem.q_dtype) for heads in (problem.num_heads, *[shape.num_kv_heads] * 2))
    pool = jax.tree.map(lambda array: jnp.ones(array.shape, array.dtype), implementation.init_pool(shape))

    def call(pool: Any, q: Any, batch: Any) -> Any:
        return ragged_paged_attention(
            q, k, v, pool, batch, shape=shape, layer=0, window=NO_WINDOW, scale=shape.head_dim**-0.5, decode_only=problem.decode_only,
            implementation=implementation,
        )  # fmt: skip

    compiled = jax.jit(call, donate_argnums=0).lower(pool, q, batch).compile()
    out, pool = jax.block_until_ready(compiled(pool, q, batch))
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(calls):
            latest, pool = compiled(pool, q, batch)
        jax.block_until_ready(latest)
        best = min(best, (time.perf_counter() - start) / calls)
    return best, np.asarray(out, np.float32)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", default="32,8,128", help="N,K,H")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16", help="of queries")
    parser.add_argument("--kv-dtype", default="bfloat16", help="of the pool")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="equal to rows: tunes decode; more: tunes mixed steps")
    parser.add_argument("--dry-run", action="store_true", help="one candidate at a small context, nothing written")
    options = parser.parse_args()
    target = current_target()
    if target.platform == "cpu" and not options.dry_run:
        parser.error("there is no accelerator here; --dry-run runs one candidate in the interpreter")
    platform = "gpu" if target.platform == "gpu" else "tpu"
    N, K, H = (int(number) for number in options.heads.split(","))
    contexts = (64,) if options.dry_run else CONTEXTS
    width = ceil_div(max(contexts), options.page_size)
    shape = PoolShape(
        num_layers=1, num_pages=options.rows * width, page_size=options.page_size, num_kv_heads=K, head_dim=H, dtype=jnp.dtype(options.kv_dtype)
    )  # fmt: skip
    problem = make_problem(
        num_tokens=options.tokens, num_rows=options.rows, table_width=width, num_heads=N, shape=shape, q_dtype=jnp.dtype(options.dtype),
        decode_only=options.tokens == options.rows,
    )  # fmt: skip
    make = pallas_gpu.make_implementation if platform == "gpu" else pallas_tpu.make_implementation
    best: tuple[float, dict[str, int]] | None = None
    expected: list[np.ndarray] | None = None
    for fields, tiles in itertools.islice(candidates(problem, platform), 1 if options.dry_run else None):
        try:
            measured = [seconds_of(make(tiles=tiles), problem, context, calls=1 if options.dry_run else 20) for context in contexts]
        except Exception as error:  # A candidate that does not compile is no candidate.
            print(f"{fields}: {type(error).__name__}: {str(error)[:100]}", flush=True)
            continue
        outputs = [output for _, output in measured]
        expected = expected or outputs
        wrong = max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(outputs, expected, strict=True))
        total = sum(seconds for seconds, _ in measured)
        print(f"{total * 1e6:10.1f} us  {fields}{'' if wrong < 1e-2 else f'  WRONG by {wrong:.1e}'}", flush=True)
        if wrong < 1e-2 and (best is None or total < best[0]):
            best = (total, fields)
    if best is None:
        print("no candidate ran")
        return 1
    if not options.dry_run:
        chip = find_chip(target, platform).name
        path = Path(package.__path__[0]) / tuned.file_name(f"pallas_{platform}", chip)
        content = json.loads(path.read_text("utf-8")) if path.is_file() else {"tiles": {}}
        content |= {"device": target.device_kind, "jax": jax.__version__, "date": date.today().isoformat()}
        content["tiles"][tuned.key(problem, prefill=not problem.decode_only)] = best[1]
        path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", "utf-8")
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

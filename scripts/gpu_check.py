"""Checks and measures the attention kernels on a borrowed NVIDIA GPU, from the root of the repository, without an install.

Needs Python 3.11 or newer with jax (and its CUDA plugin), flax, numpy, jaxtyping and rich. Fetches nothing. On a machine without a GPU it runs in a
reduced form, in the interpreter, so that it is known to work before a device is at hand; its times then mean nothing.

    python -m scripts.gpu_check            # all of it, under six minutes on one H200
    python -m scripts.gpu_check --parts correctness,decode

One table on stdout, one JSON object as the last line. Exit 0 only if every result agrees with the reference.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config import ShardingConfig
from jaxserve.dims import ceil_div
from jaxserve.engine.programs.plan import lower_bucket, pool_of_size
from jaxserve.engine.step.batch import packed_batch
from jaxserve.engine.step.buckets import Bucket
from jaxserve.engine.step.function import abstract_carry
from jaxserve.kernels_pallas.ragged_paged_attention.api import (
    IMPLEMENTATIONS,
    NO_WINDOW,
    PoolShape,
    RaggedBatch,
    choose_implementation,
    make_problem,
    ragged_paged_attention,
)  # fmt: skip
from jaxserve.kernels_pallas.ragged_paged_attention.proof import comparison
from jaxserve.kernels_pallas.ragged_paged_attention.shapes import CASES
from jaxserve.kernels_pallas.target import current_target, find_chip
from jaxserve.mesh import make_layout
from jaxserve.mesh_shape import MeshShape
from jaxserve.models.hf_config import spec_from_config
from jaxserve.models.model import build_model

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "models" / "llama-3.1-8b.json"
NAME = "pallas_gpu"
HEADS = {"llama-8b": (32, 8, 128), "llama-70b-tp8": (8, 1, 128), "qwen3-32b": (64, 8, 128)}
"""N, K and H of the head shapes to measure."""
PAGE_SIZE = 16
POOL_LIMIT_BYTES = 64 * 2**30
"""Of one measurement's keys and values."""


@dataclasses.dataclass
class Row:
    """One line of the table."""

    part: str
    name: str
    ms: float | None = None
    value: float | None = None
    unit: str = ""
    ok: bool = True
    note: str = ""

    def print(self) -> None:
        ms = "" if self.ms is None else f"{self.ms:10.3f} ms"
        value = "" if self.value is None else f"{self.value:10.3f} {self.unit}"
        print(f"{'ok' if self.ok else 'FAIL':4} {self.part:12} {self.name:40} {ms:>14} {value:24} {self.note}", flush=True)


def measure(function: Callable[[Any], Any], state: Any, *, calls: int) -> tuple[float, Any]:
    """Seconds of one call: many are queued before one wait, so that dispatch is hidden; the best of three rounds.

    Args:
        function: ``state -> state``, jitted, its argument donated.
        state: What the first call takes.
        calls: In one round.
    """
    state = jax.block_until_ready(function(state))
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(calls):
            state = function(state)
        jax.block_until_ready(state)
        best = min(best, (time.perf_counter() - start) / calls)
    return best, state


def copy_bandwidth(on_gpu: bool) -> tuple[Row, float]:
    """Bytes a second of a large copy (read and write), which the kernels are compared with."""
    size = 2**30 if on_gpu else 2**22
    step = jax.jit(lambda x: x + jnp.bfloat16(1), donate_argnums=0)
    seconds, _ = measure(step, jnp.zeros(size, jnp.bfloat16), calls=20 if on_gpu else 2)
    rate = 2 * size * 2 / seconds
    return Row("copy", f"{size * 2 / 2**20:.0f} MiB read and written", seconds * 1e3, rate / 1e12, "TB/s"), rate


def correctness(on_gpu: bool) -> Iterator[Row]:
    """Every shared case on the device against the reference there."""
    cases = CASES if on_gpu else tuple(case for case in CASES if case.name in ("mixed", "fp8_decode_page_8", "sinks"))
    for case in cases:
        start = time.perf_counter()
        try:
            found = comparison.compare(IMPLEMENTATIONS[NAME], case)
        except Exception as error:  # One broken case must not hide the others.
            yield Row("correctness", case.name, ok=False, note=f"{type(error).__name__}: {str(error)[:200]}")
            continue
        milliseconds = (time.perf_counter() - start) * 1e3
        yield Row("correctness", case.name, milliseconds, found.error, "rel. norm", found.held, "" if comparison.held else str(found))


def full_batch(rows: int, new: int, context: int, width: int, num_pages: int) -> RaggedBatch:
    """``rows`` sequences of ``context`` tokens, the last ``new`` of them in this step, on pages scattered over the pool."""
    rng = np.random.default_rng(0)
    pages = ceil_div(context, PAGE_SIZE)
    table = np.zeros((rows, width), np.int32)
    table[:, :pages] = rng.permutation(num_pages)[: rows * pages].reshape(rows, pages)
    positions = np.tile(np.arange(context - new, context), rows).astype(np.int32)
    row = np.repeat(np.arange(rows), new)
    entries = (table[row, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE).astype(np.int32)
    counts = np.array([rows if new == 1 else 0, rows], np.int32)
    starts = np.arange(0, rows * new + 1, new, dtype=np.int32)
    return RaggedBatch(*(jnp.asarray(x) for x in (np.full(rows, context, np.int32), starts, table, entries, positions, counts)))


def attention_call(heads: tuple[int, int, int], rows: int, new: int, context: int) -> tuple[Callable[[Any], Any], Any]:
    """A jitted call of the op on a full batch, and its first state."""
    N, K, H = heads
    width = ceil_div(context, PAGE_SIZE)
    shape = PoolShape(num_layers=1, num_pages=rows * width, page_size=PAGE_SIZE, num_kv_heads=K, head_dim=H, dtype=jnp.bfloat16)
    batch = full_batch(rows, new, context, width, shape.num_pages)
    problem = make_problem(
        num_tokens=rows * new, num_rows=rows, table_width=width, num_heads=N, shape=shape, q_dtype=jnp.bfloat16, decode_only=new == 1
    )  # fmt: skip
    implementation = choose_implementation(NAME, problem)
    key = jax.random.key(0)
    k, v = (jax.random.normal(key, (rows * new, K, H), jnp.bfloat16) for _ in range(2))
    q = jax.random.normal(key, (rows * new, N, H), jnp.bfloat16)
    work = jax.jit(implementation.prepare, static_argnums=1)(batch, problem)
    pool = jax.tree.map(lambda array: jnp.full(array.shape, 0.25, array.dtype), implementation.init_pool(shape))

    @jax.jit
    def call(q: Any, pool: Any, k: Any, v: Any, batch: Any, work: Any) -> Any:
        return ragged_paged_attention(
            q, k, v, pool, batch, work, shape=shape, layer=0, window=NO_WINDOW, scale=H**-0.5, decode_only=new == 1, implementation=implementation
        )  # fmt: skip

    donating = jax.jit(lambda state: call(*state, k, v, batch, work), donate_argnums=0)
    return donating, (q, pool)


def decode_bandwidth(on_gpu: bool, copy_rate: float) -> Iterator[Row]:
    """Key and value bytes a second of decode, as a share of the copy."""
    sizes = [(b, c) for b in (1, 8, 64, 256) for c in (1024, 8192, 32768)] if on_gpu else [(2, 64)]
    for name, heads in HEADS.items() if on_gpu else [("tiny", (4, 2, 64))]:
        for rows, context in sizes:
            num_bytes = rows * context * heads[1] * heads[2] * 2 * 2
            label = f"{name} batch {rows} context {context}"
            if num_bytes > POOL_LIMIT_BYTES:
                yield Row("decode", label, note=f"left out: {num_bytes / 2**30:.0f} GiB of keys and values")
                continue
            function, state = attention_call(heads, rows, 1, context)
            seconds, state = measure(function, state, calls=20 if on_gpu else 1)
            del state
            yield Row("decode", label, seconds * 1e3, num_bytes / seconds / copy_rate, "of copy", note=f"{num_bytes / seconds / 1e12:.2f} TB/s")


def prefill_flops(on_gpu: bool) -> Iterator[Row]:
    """Products of prefill a second, as a share of the chip's peak."""
    chip = find_chip(current_target(), "gpu")
    sizes = [(1, 2048, 2048), (1, 2048, 16384), (4, 512, 4096)] if on_gpu else [(1, 32, 64)]
    for name, heads in HEADS.items() if on_gpu else [("tiny", (4, 2, 64))]:
        for rows, new, context in sizes:
            function, state = attention_call(heads, rows, new, context)
            seconds, state = measure(function, state, calls=10 if on_gpu else 1)
            del state
            seen = rows * (new * (context - new) + new * (new + 1) / 2)
            flops = 4 * seen * heads[0] * heads[2]
            share = flops / seconds / chip.flops_per_s
            yield Row("prefill", f"{name} {rows} x {new} of {context}", seconds * 1e3, share, "of peak", note=f"{flops / seconds / 1e12:.1f} TFLOP/s")


def engine_steps(on_gpu: bool, copy_rate: float) -> Iterator[Row]:
    """Whole decode steps of an 8B model with random weights, against the time that reading weights, keys and values takes at the rate of the copy."""
    config = json.loads(CONFIG.read_text())
    if not on_gpu:
        config |= {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        config |= {"vocab_size": 512, "bos_token_id": 1, "eos_token_id": 2}
    spec = spec_from_config(config)
    model = build_model(spec, dtype=jnp.dtype(jnp.bfloat16), layers="unroll")
    fill = jax.jit(lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(0.02), static_argnums=1)
    params = jax.block_until_ready(jax.tree.map(lambda array: fill(jax.random.key(0), array.shape), model.abstract_params()))
    weight_bytes = sum(array.nbytes for array in jax.tree.leaves(params)) - params["embed"]["values"].nbytes
    layout = make_layout(MeshShape(), ShardingConfig())
    context = 1024 if on_gpu else 32
    for rows in (1, 8, 64, 256) if on_gpu else (2,):
        width = ceil_div(context + 64, PAGE_SIZE)
        bucket = Bucket(rows, rows, width, True, "greedy")
        plan = pool_of_size(model, layout, [bucket], num_pages=rows * width, page_size=PAGE_SIZE, kv_dtype=jnp.bfloat16, attention=NAME)
        carry = jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), abstract_carry(rows, layout))
        packed = jnp.asarray(packed_batch(bucket, num_rows=rows, query_len=1, context_len=context, page_size=PAGE_SIZE))
        start = time.perf_counter()
        compiled = lower_bucket(model, params, plan, bucket, max_num_seqs=rows).compile()
        compile_s = time.perf_counter() - start

        def run(state: Any, compiled: Any = compiled, packed: Any = packed) -> Any:
            pool, carry, _ = compiled(params, state[0], state[1], packed)
            return pool, carry

        seconds, state = measure(run, (plan.allocate(), carry), calls=20 if on_gpu else 1)
        del state
        kv_bytes = rows * context * spec.num_layers * spec.attention.token_values() * 2
        roofline = (weight_bytes + kv_bytes) / (copy_rate)
        yield Row(
            "engine", f"8B decode batch {rows} context {context}", seconds * 1e3, roofline / seconds, "of roofline", note=f"compiled in {compile_s:.0f} s"
        )


PARTS = ("correctness", "decode", "prefill", "engine")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS), help=f"comma-separated, of {', '.join(PARTS)}")
    parts = parser.parse_args().parts.split(",")
    unknown = set(parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown parts {sorted(unknown)}; allowed are {', '.join(PARTS)}")
    device = jax.devices()[0]
    on_gpu = device.platform == "gpu"
    started = time.perf_counter()
    print(f"jax {jax.__version__}, {device.device_kind}{'' if on_gpu else ': no GPU here, reduced, in the interpreter'}")
    row, copy_rate = copy_bandwidth(on_gpu)
    rows = [row]
    row.print()
    sources: dict[str, Callable[[], Iterator[Row]]] = {
        "correctness": lambda: correctness(on_gpu),
        "decode": lambda: decode_bandwidth(on_gpu, copy_rate),
        "prefill": lambda: prefill_flops(on_gpu),
        "engine": lambda: engine_steps(on_gpu, copy_rate),
    }
    for part in parts:
        for row in sources[part]():
            rows.append(row)
            row.print()
    failed = sum(not row.ok for row in rows)
    seconds = time.perf_counter() - started
    print(f"{len(rows)} results, {failed} failed, {seconds:.0f} s")
    result = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "seconds": round(seconds, 1),
        "failed": failed,
        "rows": [dataclasses.asdict(r) for r in rows],
    }
    print(json.dumps(result))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

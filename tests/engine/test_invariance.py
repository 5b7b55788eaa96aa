"""A request's tokens do not depend on who else is served, nor on how its work was cut: real engine, tiny model."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.engine.engine import Engine
from jaxserve.kernels_pallas.ragged_paged_attention import xla
from jaxserve.kernels_pallas.ragged_paged_attention.api import NO_WINDOW, KVPool, RaggedBatch
from jaxserve.request import SamplingParams
from tests.engine.tiny import MAX_POSITION, run, tiny_engine

LAYOUTS = {
    "small pages, pool too small for all": {"page_size": 4, "num_pages": 26, "max_num_seqs": 4, "max_tokens_per_step": 16, "token_buckets": (16,)},
    "large pages, whole prompts": {"page_size": 32, "num_pages": 24, "max_num_seqs": 8, "max_tokens_per_step": 128, "token_buckets": (32, 128)},
    "tiny chunks": {"page_size": 8, "num_pages": 30, "max_num_seqs": 3, "max_tokens_per_step": 5, "token_buckets": (5,)},
}


@functools.cache
def engine_of(layout: str) -> Engine:
    return tiny_engine(**LAYOUTS[layout])


@functools.cache
def alone(prompt: tuple[int, ...], params: SamplingParams) -> tuple[int, ...]:
    """The plain run: one request, whole prompt in one step, a page for everything."""
    return run(reference_engine(), [(list(prompt), params)])[0]


@functools.cache
def reference_engine() -> Engine:
    return tiny_engine(page_size=128, num_pages=4, max_num_seqs=2, max_tokens_per_step=128, token_buckets=(128,))


@st.composite
def workloads(draw: st.DrawFn) -> list[tuple[tuple[int, ...], SamplingParams, int]]:
    requests = []
    for _ in range(draw(st.integers(1, 7))):
        prompt = tuple(draw(st.lists(st.integers(0, 299), min_size=1, max_size=draw(st.sampled_from([1, 4, 30, 60])))))
        temperature = draw(st.sampled_from([0.0, 0.0, 0.8, 1.3]))
        params = SamplingParams(
            temperature=temperature,
            top_k=draw(st.sampled_from([0, 5])),
            top_p=draw(st.sampled_from([1.0, 0.9])),
            seed=draw(st.integers(0, 5)),
            max_tokens=draw(st.integers(1, min(24, MAX_POSITION - len(prompt)))),
            ignore_eos=True,
        )
        requests.append((prompt, params, draw(st.integers(0, 12))))
    return requests


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(workloads(), st.sampled_from(sorted(LAYOUTS)))
def test_tokens_do_not_depend_on_the_company(workload: list[tuple[tuple[int, ...], SamplingParams, int]], layout: str) -> None:
    got = run(engine_of(layout), [(list(prompt), params) for prompt, params, _ in workload], arrivals=[arrival for _, _, arrival in workload])
    assert got == [alone(prompt, params) for prompt, params, _ in workload]


def test_preempted_sequences_repeat_their_tokens() -> None:
    engine = engine_of("small pages, pool too small for all")
    requests = [([7 * i + j for j in range(20)], SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=40, ignore_eos=True)) for i in range(4)]
    before = engine.stats().num_preemptions
    got = run(engine, requests)
    assert engine.stats().num_preemptions > before, "the pool was meant to be too small"
    assert got == [alone(tuple(prompt), params) for prompt, params in requests]


@pytest.mark.parametrize("greedy", [True, False])
def test_order_of_arrival_does_not_matter(greedy: bool) -> None:
    requests = [
        ([i * 3 + 1, i, 5], SamplingParams(temperature=0.0 if greedy else 1.0, seed=i, max_tokens=12, ignore_eos=True)) for i in range(8)
    ]  # fmt: skip
    engine = engine_of("large pages, whole prompts")
    forwards, backwards = run(engine, requests), run(engine, requests[::-1])
    assert forwards == backwards[::-1]


def test_bfloat16_rows_do_not_depend_on_the_bucket() -> None:
    """In bfloat16, too, a decode gives the same tokens in a bucket of 2 rows and of 8: the tiny model's reductions are row-wise."""
    requests = [([i * 5 + j for j in range(9)], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)) for i in range(8)]
    together = run(tiny_engine(dtype="bfloat16", optimized=True, max_num_seqs=8, num_pages=96, token_buckets=(128,), max_tokens_per_step=128), requests)
    two = tiny_engine(dtype="bfloat16", optimized=True, max_num_seqs=2, token_buckets=(128,), max_tokens_per_step=128)
    assert together == [run(two, [request])[0] for request in requests]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("num_kv_heads", "group_size", "head_dim"), [(3, 3, 64), (1, 4, 256)])
def test_attention_rows_do_not_depend_on_the_bucket(dtype: jnp.dtype, num_kv_heads: int, group_size: int, head_dim: int) -> None:
    """Bit for bit, at the shapes of the embedded models: a row of 2 decodes is the same row among 32."""
    page_size, num_pages, most = 16, 64, 32
    rng = np.random.default_rng(0)
    pool = KVPool(*(jnp.asarray(rng.normal(size=(num_pages, page_size * num_kv_heads * head_dim)), dtype) for _ in range(2)))
    context_lens = jnp.asarray(rng.integers(1, 600, most), jnp.int32)
    table = jnp.asarray(rng.integers(0, num_pages, (most, 40)), jnp.int32)
    q = jnp.asarray(rng.normal(size=(most, num_kv_heads * group_size, head_dim)), dtype)
    kv = jnp.zeros((most, num_kv_heads, head_dim), dtype)

    def rows(count: int) -> np.ndarray:
        dropped = jnp.full((count,), num_pages * page_size, jnp.int32)
        starts, counts = jnp.arange(count + 1, dtype=jnp.int32), jnp.asarray([count, count], jnp.int32)
        batch = RaggedBatch(context_lens[:count], starts, table[:count], dropped, context_lens[:count] - 1, counts)
        sizes = {"num_pages": num_pages, "page_size": page_size, "scale": head_dim**-0.5}
        work = xla.prepare(batch, count, decode_only=True)
        out, _ = jax.jit(lambda q, kv, pool: xla.attend(q, kv, kv, pool, batch, work, layer=0, window=NO_WINDOW, **sizes))(q[:count], kv[:count], pool)
        return np.asarray(out, np.float32)

    every = rows(most)
    for count in (2, 8):
        np.testing.assert_array_equal(rows(count), every[:count])

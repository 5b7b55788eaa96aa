"""On the device: tokens do not depend on what the prefix cache holds, on copied pages, or on pages that were in host memory."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.engine.engine import Engine
from jaxserve.mesh import MeshShape
from jaxserve.request import SamplingParams
from tests.engine.tiny import run, tiny_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def plain() -> Engine:
    """Without a cache, on one device, with room for all."""
    return tiny_engine(prefix="off", token_buckets=(32,))


def waves(engine: Engine) -> list[tuple[int, ...]]:
    """Prompts that share a beginning, twice; then turns that go on from answers; then prompts that part from it within a page."""
    shared = [(7 * i) % 100 for i in range(27)]
    first = [([*shared, 90 + i, 91, 92, 93, 94], (GREEDY, SEEDED)[i % 2]) for i in range(5)]
    tokens = run(engine, first)
    tokens += run(engine, first)
    turns = [([*prompt, *answer, 5, 6], GREEDY) for (prompt, _), answer in zip(first, tokens[:5], strict=True)]
    tokens += run(engine, turns)
    return tokens + run(engine, [([*shared[:cut], 3, 2, 1], GREEDY) for cut in (7, 14, 21, 22, 23)])


@pytest.mark.parametrize(("kind", "mesh"), [("radix", MeshShape()), ("hash", MeshShape()), ("radix", MeshShape(2, 2))])
def test_tokens_are_those_without_a_cache(plain: Engine, kind: Any, mesh: MeshShape) -> None:
    cached = tiny_engine(prefix=kind, mesh=mesh, token_buckets=(32,))
    assert waves(cached) == waves(plain)
    stats = cached.stats()
    assert stats.num_page_copies > 0 and stats.prefix_hit_tokens > stats.prefix_miss_tokens > 0
    assert (plain.stats().prefix_hit_tokens, plain.stats().num_cached_pages) == (0, 0)
    before = cached.stats()
    requests = [([*range(40), 60 + i, 61, 62], GREEDY) for i in range(4)]
    for _ in range(2):
        run(cached, requests)
    assert cached.stats().prefix_hit_tokens - before.prefix_hit_tokens >= 4 * 40  # of 4 x 43: the last three are in a page of which too little is saved


@pytest.mark.parametrize("mesh", [MeshShape(), MeshShape(2, 1)], ids=str)
def test_tokens_are_those_without_swapping(plain: Engine, mesh: MeshShape) -> None:
    """A pool too small for all: sequences go to host memory and come back."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    requests = [([(3 * i + j) % 100 for j in range(10 + i)], params) for i in range(6)]
    swapping = tiny_engine(num_pages=10, mesh=mesh, prefix="off", preemption="swap", num_host_pages=40, token_buckets=(32,))
    assert run(swapping, requests) == run(plain, requests)
    stats = swapping.stats()
    assert stats.num_swap_outs == stats.num_preemptions > 0


def test_all_at_once(plain: Engine) -> None:
    """Shared pages, copies, eviction, swapping and preemption in one small pool."""
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    shared = [(7 * i) % 100 for i in range(20)]
    requests = [([*shared[: 20 - i], *range(50, 54 + i)], params) for i in range(6)] * 2
    arrivals = [0, 0, 3, 5, 8, 13, 20, 21, 22, 30, 31, 32]
    engine = tiny_engine(num_pages=14, preemption="swap", num_host_pages=12, token_buckets=(32,))
    assert run(engine, requests, arrivals=arrivals) == run(plain, requests, arrivals=arrivals)
    stats = engine.stats()
    assert stats.num_swap_outs and stats.num_evicted_pages and stats.num_page_copies and stats.prefix_hit_tokens

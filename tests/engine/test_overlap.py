"""The overlapped loop on the real engine: tokens go from step to step on the device, and are those of the loop that fetches each step before the next."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

from jaxserve.engine.engine import Engine
from jaxserve.engine.scheduling.schedule import Schedule
from jaxserve.mesh_shape import MeshShape
from jaxserve.request import RequestOutput, SamplingParams
from tests.engine.tiny import overlapped, run, tiny_engine

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 40}, {"temperature": 2.0, "min_p": 0.1},
]  # fmt: skip


def serve(engine: Engine, num_requests: int, *, seed: int) -> tuple[dict[str, tuple[tuple[int, ...], str]], int]:
    """Random requests whose prompts share beginnings, some aborted, some paused. Returns tokens and reason of each that was let be, and how many stopped."""
    rng, actions = random.Random(seed), random.Random(seed + 1)
    tokens: dict[str, list[int]] = {}
    ends: dict[str, RequestOutput] = {}

    def take(outputs: list[RequestOutput]) -> None:
        for output in outputs:
            assert output.request_id not in ends and output.error is None, output.error
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                ends[output.request_id] = output

    aborted: set[str] = set()
    for number in range(num_requests):
        prompt = [rng.randrange(4)] * rng.randrange(0, 30) + [rng.randrange(300) for _ in range(rng.randrange(1, 5))]
        params = SamplingParams(
            max_tokens=rng.randrange(1, 50), seed=rng.randrange(50), stop_token_ids=tuple(rng.sample(range(300), 6)),
            stop=rng.choice([(), ("e",), ("ab", "1")]), **rng.choice(KINDS),
        )  # fmt: skip
        engine.add(engine.make_request(prompt, params, f"r{number}"))
        for _ in range(actions.randrange(4)):
            take(engine.step())
        victim = f"r{actions.randrange(number + 1)}"
        chance = actions.random()
        if chance < 0.15 and victim not in ends:
            aborted.add(victim)
            output = engine.abort(victim)
            assert output is not None
            take([output])
        elif chance < 0.3:
            engine.pause(victim)
            for _ in range(2):
                take(engine.step())
            engine.resume(victim)
        if number % 10 == 0:
            engine.check_integrity()
    while engine.has_work:
        take(engine.step())
    engine.check_integrity()
    stats = engine.stats()
    assert stats.num_free_pages == stats.num_pages and len(ends) == num_requests
    assert stats.num_generated_tokens == sum(map(len, tokens.values()))
    kept = {name: (tuple(tokens[name]), str(end.finish_reason)) for name, end in ends.items() if name not in aborted}
    return kept, sum(reason == "stop" for _, reason in kept.values())


@pytest.mark.parametrize(
    ("mesh", "num_requests"),
    [
        (MeshShape(), 60),
        (MeshShape(2, 2), 30),
        pytest.param(MeshShape(), 500, marks=pytest.mark.slow),
        pytest.param(MeshShape(2, 2), 500, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_random_requests_get_the_same_tokens(mesh: MeshShape, num_requests: int) -> None:
    plain = tiny_engine(
        mesh=mesh, page_size=4, num_pages=26, max_num_seqs=4, max_tokens_per_step=16, token_buckets=(16,), preemption="swap", num_host_pages=12,
    )  # fmt: skip
    with_overlap = overlapped(plain)
    want, num_stopped = serve(plain, num_requests, seed=num_requests)
    got, _ = serve(with_overlap, num_requests, seed=num_requests)
    for name in want.keys() & got.keys():
        assert got[name] == want[name], name
    assert num_stopped >= num_requests // 6
    for engine in (plain, with_overlap):
        stats = engine.stats()
        assert min(stats.num_swap_outs, stats.prefix_hit_tokens, stats.num_preemptions - stats.num_swap_outs) > 0


def test_a_packed_batch_is_never_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU takes aligned numpy arrays without a copy: one that is changed while its step runs changes the step."""
    engine = tiny_engine(overlap=True)
    runner: Any = engine.runner
    build, packed = runner._builder.build, list[tuple[np.ndarray, bytes]]()

    def watched(schedule: Schedule) -> Any:
        batch = build(schedule)
        packed.append((batch.packed, batch.packed.tobytes()))
        return batch

    monkeypatch.setattr(runner._builder, "build", watched)
    run(engine, [([1, 2, 3], SamplingParams(max_tokens=9, ignore_eos=True)), ([4] * 20, SamplingParams(max_tokens=5, ignore_eos=True))])
    assert len(packed) >= 9 and all(array.tobytes() == before for array, before in packed)
    assert not any(np.shares_memory(first, second) for (first, _), (second, _) in itertools.pairwise(packed))


def test_a_step_that_fails_behind_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the step under way gave is kept, the requests of the failed one end, and the engine goes on."""
    engine = tiny_engine(overlap=True)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    want = run(engine, [([5, 6, 7], params)])
    engine.add(engine.make_request([1, 2], params, "broken"))
    assert engine.step() == []
    runner: Any = engine.runner

    def explode(*_: object) -> None:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "_compiled", dict.fromkeys(runner._compiled, explode))
        outputs = engine.step()
    assert [(output.finish_reason, len(output.token_ids)) for output in outputs] == [(None, 1), ("error", 0)]
    assert run(engine, [([5, 6, 7], params)]) == want

"""The search for the highest rate, on the jumping clock, against a server whose capacity is known."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from jaxserve.bench.load.metrics import Slo, parse_slo
from jaxserve.bench.load.session import Result, RunOptions, ServerInfo, Session
from jaxserve.bench.load.sweep import MaxRate, Sweep, at_concurrency, at_rate, find_max_rate, run_levels
from jaxserve.bench.load.system_under_test import RequestFailedError, Stream
from jaxserve.bench.workload.workload import Workload
from jaxserve.errors import BenchmarkError, ConfigError
from tests.bench.fake_server import FakeModel, FakeSystem

INFO = ServerInfo("http://fake", "fake", "openai", "token ids", True, {})
Virtual = Callable[[Any], Any]


async def no_metrics() -> None:
    return None


async def search(model: FakeModel, workload: Workload, slo: Slo, **options: Any) -> MaxRate:
    session = Session(FakeSystem(model), INFO, no_metrics, None)

    async def run(work: Workload) -> Any:
        return await session.run(work, RunOptions(num_warmup=0, slo=slo))

    return await find_max_rate(workload, slo, run, **options)


@pytest.mark.parametrize(("slots", "start_rate"), [(1, 10.0), (4, None), (16, 1.0)])
def test_the_known_capacity_is_found_within_5_percent(slots: int, start_rate: float | None, virtual: Virtual) -> None:
    async def main() -> MaxRate:
        steady = Workload(arrival="steady", rate=1.0, output_len="2")
        return await search(FakeModel(0.375, 0.125, slots), steady, parse_slo("ttft:500"), start_rate=start_rate)

    found: MaxRate = virtual(main())
    capacity = slots / 0.5
    assert found.rate == pytest.approx(capacity, rel=0.05)
    assert found.above is not None
    assert found.rate < found.above <= found.rate * 1.025
    # The evidence: every trial is there, and they agree with the answer.
    assert all(trial.sustained == (trial.rate <= found.rate) for trial in found.trials)
    assert all(trial.good_share >= 0.99 for trial in found.trials if trial.sustained)


def test_an_impossible_slo_is_said_to_be_one(virtual: Virtual) -> None:
    async def main() -> MaxRate:
        return await search(FakeModel(0.375, 0.125, 4), Workload(rate=1.0, output_len="2"), parse_slo("ttft:100"))

    found: MaxRate = virtual(main())
    assert found.rate == 0
    assert not found.trials
    assert "not even one request at a time keeps TTFT <= 100 ms" in found.note


def test_answers_must_keep_up_however_loose_the_slo(virtual: Virtual) -> None:
    async def main() -> MaxRate:
        steady = Workload(arrival="steady", rate=1.0, output_len="2", duration_s=30)
        return await search(FakeModel(0.375, 0.125, 4), steady, parse_slo("ttft:100000"))

    found: MaxRate = virtual(main())
    assert found.rate == pytest.approx(8.0, rel=0.05)


def test_refusals_are_too_much(virtual: Virtual) -> None:
    async def main() -> MaxRate:
        session = Session(FakeSystem(FakeModel(0.375, 0.125), refuse=frozenset(range(20, 10_000))), INFO, no_metrics, None)

        async def run(work: Workload) -> Any:
            return await session.run(work, RunOptions(num_warmup=0, slo=slo))

        slo = parse_slo("ttft:500")
        return await find_max_rate(Workload(arrival="steady", rate=1.0, output_len="2", duration_s=10), slo, run)

    found: MaxRate = virtual(main())
    assert found.rate == pytest.approx(2.0, rel=0.05)  # 20 requests in 10 s are all that is served


class Mortal(FakeSystem):
    """Is gone, or answers nothing but errors, after a number of requests."""

    def __init__(self, model: FakeModel, lives: int, *, unreachable: bool) -> None:
        super().__init__(model)
        self._lives = lives
        self._unreachable = unreachable

    async def run(self, prepared: Any, stream: Stream) -> None:
        self._lives -= 1
        if self._lives < 0:
            raise RequestFailedError("out of order", unreachable=self._unreachable)
        await super().run(prepared, stream)


def runs_of(system: FakeSystem, slo: Slo, stop: asyncio.Event | None = None) -> Callable[[Workload], Awaitable[Result]]:
    session = Session(system, INFO, no_metrics, None)
    return lambda work: session.run(work, RunOptions(num_warmup=0, slo=slo), stop=stop)


STEADY = Workload(arrival="steady", rate=1.0, output_len="2", duration_s=10)
SLO = parse_slo("ttft:500")


@pytest.mark.parametrize("unreachable", [True, False])
def test_a_server_that_dies_leaves_what_was_found_until_then(unreachable: bool, virtual: Virtual) -> None:
    async def main() -> MaxRate:
        return await find_max_rate(STEADY, SLO, runs_of(Mortal(FakeModel(0.375, 0.125, 4), 25, unreachable=unreachable), SLO))

    found: MaxRate = virtual(main())
    assert [trial.rate for trial in found.trials] == [2.0]  # five alone and twenty at 2 requests/s
    assert found.rate == 2.0
    assert "out of order" in (found.interrupted or "")


def test_stopping_while_nothing_is_known_says_nothing_of_the_slo(virtual: Virtual) -> None:
    async def main() -> MaxRate:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(0.2, stop.set)
        return await find_max_rate(STEADY, SLO, runs_of(FakeSystem(FakeModel(0.375, 0.125)), SLO, stop))

    found: MaxRate = virtual(main())
    assert (found.rate, found.interrupted) == (0, "stopped")
    assert "impossible" not in found.note


@pytest.mark.parametrize("turns", [1, 5])
def test_a_few_requests_that_all_fit_at_once_end_the_search(turns: int, virtual: Virtual) -> None:
    async def main() -> MaxRate:
        few = Workload(arrival="poisson", rate=1.0, output_len="2", num_requests=10, turns=turns)
        return await find_max_rate(few, SLO, runs_of(FakeSystem(FakeModel(0.375, 0.125)), SLO))

    found: MaxRate = virtual(main())
    assert found.above is None
    assert 2 <= found.rate < 200
    assert "need more requests" in found.note


def test_levels_that_were_run_are_kept(virtual: Virtual) -> None:
    async def main(lives: int, unreachable: bool) -> Sweep:
        levels = [at_rate(dataclasses.replace(STEADY, num_requests=10, duration_s=None), rate) for rate in (1, 2, 4)]
        return await run_levels(levels, runs_of(Mortal(FakeModel(0.375, 0.125), lives, unreachable=unreachable), SLO))

    for lives, unreachable, completed in ((100, True, [10, 10, 10]), (10, True, [10]), (10, False, [10]), (13, True, [10, 3])):
        found: Sweep = virtual(main(lives, unreachable))
        assert [result.metrics.completed for result in found.results] == completed
        assert (found.interrupted is None) == (lives == 100)
    with pytest.raises(BenchmarkError, match="out of order"):
        virtual(main(0, False))


def test_levels() -> None:
    closed = Workload(arrival="closed", concurrency=3)
    assert (at_rate(closed, 2.0).arrival, at_rate(closed, 2.0).rate) == ("poisson", 2.0)
    ramp = at_rate(Workload(arrival="ramp", rate=1, end_rate=4), 2.0)
    assert (ramp.rate, ramp.end_rate) == (2.0, 8.0)
    burst = at_concurrency(Workload(arrival="burst", rate=1, burst_size=4), 7)
    assert (burst.arrival, burst.concurrency, burst.burst_size) == ("closed", 7, None)
    with pytest.raises(ConfigError, match="trace_speedup"):
        at_rate(Workload(arrival="trace", trace="x.csv"), 2.0)

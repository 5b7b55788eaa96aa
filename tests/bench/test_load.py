"""The load generator and the figures, on a clock that jumps: every time and every count is known beforehand."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxserve.bench.load.load import Record, Run, run_load
from jaxserve.bench.load.metrics import measure, parse_slo, percentile
from jaxserve.bench.load.system_under_test import RequestFailedError, Stream
from jaxserve.bench.workload.plan import PlannedRequest, plan, read_sources
from jaxserve.bench.workload.workload import Workload
from tests.bench.fake_server import FakeModel, FakeSystem

TTFT_S, TPOT_S = 0.25, 0.0625  # powers of two: sums are exact
Virtual = Callable[[Any], Any]

KINDS: dict[str, dict[str, Any]] = {
    "closed": {"concurrency": 3},
    "steady": {"rate": 8.0},
    "poisson": {"rate": 8.0},
    "gamma": {"rate": 8.0, "burstiness": 0.3},
    "burst": {"rate": 8.0, "burst_size": 5},
    "diurnal": {"rate": 8.0, "period_s": 4.0},
    "ramp": {"rate": 2.0, "end_rate": 20.0},
    "trace": {},
}


def workload(kind: str, folder: Path, **fields: Any) -> Workload:
    trace = folder / "trace.csv"
    trace.write_text("timestamp,input_length,output_length\n" + "".join(f"{100 + index * 0.375},{50 + index},{1 + index % 7}\n" for index in range(40)))
    own = {"trace": str(trace), "lengths": "trace"} if kind == "trace" else {"output_len": "uniform:1:9"}
    return Workload(arrival=kind, num_requests=30, **KINDS[kind] | own | fields)  # type: ignore[arg-type]


async def drive(work: Workload, system: FakeSystem, **options: Any) -> Run:
    closed = {"concurrency": work.concurrency} if work.arrival == "closed" else {}
    return await run_load(plan(work, read_sources(work)), system, **closed, **options)


def expected_spans(work: Workload, slots: int) -> list[tuple[float, float, float]]:
    """(sent, first token, end) of each request, by a simulation of its own: the earliest free slot serves the earliest request."""
    requests = list(itertools.chain.from_iterable(plan(work, read_sources(work))))
    free, places = [0.0] * slots, [0.0] * (work.concurrency or 0)
    spans: list[tuple[float, float, float]] = []
    for request in requests:
        sent = min(places) if work.arrival == "closed" else request.arrival_s or 0.0
        slot = free.index(min(free))
        first = max(sent, free[slot]) + TTFT_S
        end = first + (request.output_len - 1) * TPOT_S
        free[slot] = end
        if places:
            places[places.index(min(places))] = end
        spans.append((sent, first, end))
    return spans


@pytest.mark.parametrize("slots", [2, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_every_figure_is_exact(kind: str, slots: int, virtual: Virtual, tmp_path: Path) -> None:
    work = workload(kind, tmp_path)

    async def main() -> Run:
        return await drive(work, FakeSystem(FakeModel(TTFT_S, TPOT_S, slots)))

    run: Run = virtual(main())
    spans = expected_spans(work, slots)
    by_index = sorted(run.records, key=lambda record: record.request.index)
    assert [record.outcome for record in by_index] == ["success"] * 30
    close = lambda value: pytest.approx(value, abs=1e-9)  # noqa: E731
    assert [(record.sent_s, record.piece_times_s[0], record.end_s) for record in by_index] == [(close(a), close(b), close(c)) for a, b, c in spans]
    assert all(record.late_s == close(0) for record in by_index)

    metrics = measure(run)
    tokens = [record.request.output_len for record in by_index]
    duration_s = max(end for *_, end in spans)
    assert metrics.outcomes == {"success": 30, "cancelled": 0, "refused": 0, "timed_out": 0, "error": 0}
    assert metrics.duration_s == close(duration_s)
    assert metrics.output_tokens == sum(tokens)
    assert metrics.output_tokens_per_s == close(sum(tokens) / duration_s)
    assert metrics.requests_per_s == close(30 / duration_s)
    ttft = sorted((first - sent) * 1e3 for sent, first, _ in spans)
    e2el = sorted((end - sent) * 1e3 for sent, _, end in spans)
    assert metrics.latencies["ttft"].mean == pytest.approx(math.fsum(ttft) / 30)
    assert metrics.latencies["ttft"].p99 == pytest.approx(percentile(ttft, 99))
    assert metrics.latencies["e2el"].median == pytest.approx((e2el[14] + e2el[15]) / 2)
    assert metrics.latencies["tpot"].count == sum(count > 1 for count in tokens)
    assert metrics.latencies["tpot"].mean == pytest.approx(TPOT_S * 1e3)
    assert metrics.latencies["itl"].count == sum(count - 1 for count in tokens)
    assert metrics.latencies["itl"].max == pytest.approx(TPOT_S * 1e3)
    assert metrics.input_mismatches == metrics.output_mismatches == metrics.uncounted == 0


def test_percentiles_are_numpys() -> None:
    numpy = pytest.importorskip("numpy")
    values = sorted((index * 37 % 101) ** 1.3 for index in range(57))
    for percent in (0, 1, 50, 90, 99, 99.9, 100):
        assert percentile(values, percent) == pytest.approx(float(numpy.percentile(values, percent)))


def test_outcomes_are_told_apart(virtual: Virtual, tmp_path: Path) -> None:
    """Refused at once, cancelled by plan, too slow, broken: each counts once, and goodput counts only what was good."""

    class Breaking(FakeSystem):
        async def run(self, prepared: Any, stream: Stream) -> None:
            if prepared.index in (3, 4):
                raise RequestFailedError("the server closed the connection before the answer was complete")
            await super().run(prepared, stream)

    async def main() -> Run:
        work = Workload(arrival="steady", rate=1.0, num_requests=40, output_len="9", cancel_share=0.3, cancel_after_s=0.5)
        return await drive(work, Breaking(FakeModel(TTFT_S, TPOT_S), refuse=frozenset({0, 1, 2})), timeout_s=0.74)

    run: Run = virtual(main())
    metrics = measure(run, parse_slo("ttft:250"))
    planned = [record for record in run.records if record.request.cancel_after_s is not None and record.request.index > 4]
    assert metrics.outcomes["refused"] == 3
    assert metrics.outcomes["error"] == 2
    assert metrics.outcomes["cancelled"] == len(planned) > 5
    assert metrics.outcomes["timed_out"] == 35 - len(planned)  # an answer takes 0.75 s
    assert sum(metrics.outcomes.values()) == 40
    assert metrics.good_requests == metrics.completed == 0
    assert all(record.end_s - record.sent_s == pytest.approx(record.request.cancel_after_s) for record in planned)


def test_goodput_counts_requests_within_every_limit(virtual: Virtual) -> None:
    async def main() -> Run:
        return await drive(Workload(arrival="burst", rate=1, burst_size=4, num_requests=4, output_len="2"), FakeSystem(FakeModel(TTFT_S, TPOT_S, 1)))

    run: Run = virtual(main())  # first tokens after 250, 562.5, 875, 1187.5 ms
    assert [measure(run, parse_slo(slo)).good_requests for slo in ("ttft:249", "ttft:250", "ttft:875,tpot:62.5", "ttft:9999,tpot:62", "e2el:313")] == [
        0,
        1,
        3,
        0,
        1,
    ]


def test_what_was_prepared_before_the_start_is_not_in_the_clients_cost(virtual: Virtual) -> None:
    class Slow(FakeSystem):
        def prepare(self, request: PlannedRequest) -> PlannedRequest:
            end_s = time.process_time() + 0.1
            while time.process_time() < end_s:
                pass
            return request

    async def main() -> Run:
        return await drive(Workload(arrival="steady", rate=1, num_requests=3, output_len="1"), Slow(FakeModel(TTFT_S, TPOT_S)))

    assert any(virtual(main()).cpu_s < 0.1 for _ in range(5))  # what else may run in this process, such as a collection of garbage, is not always there


def test_sessions_wait_for_their_answers_and_think(virtual: Virtual) -> None:
    async def main() -> tuple[Run, FakeSystem]:
        system = FakeSystem(FakeModel(TTFT_S, TPOT_S))
        return await drive(Workload(arrival="steady", rate=1, num_requests=6, turns=3, think_s=0.5, output_len="1"), system), system

    run, _ = virtual(main())
    sessions = itertools.groupby(sorted(run.records, key=lambda record: record.request.index), lambda record: record.request.session)
    for session, records in sessions:
        turns: list[Record] = list(records)
        assert turns[0].sent_s == session
        for before, after in itertools.pairwise(turns):
            assert after.sent_s == pytest.approx(before.end_s + after.request.think_s)
            assert after.request.segments[: len(before.request.segments)] == before.request.segments


def test_a_closed_loop_starts_nothing_after_its_duration(virtual: Virtual) -> None:
    async def main() -> Run:
        work = Workload(arrival="closed", concurrency=2, duration_s=1.1, output_len="1")
        return await run_load(plan(work), FakeSystem(FakeModel(TTFT_S, TPOT_S)), concurrency=2, duration_s=1.1)

    run: Run = virtual(main())
    assert [record.sent_s for record in run.records] == [0, 0, 0.25, 0.25, 0.5, 0.5, 0.75, 0.75, 1.0, 1.0]
    assert run.duration_s == 1.25


def test_stopping_keeps_what_there_was(virtual: Virtual) -> None:
    async def main() -> Run:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(2.1, stop.set)
        return await drive(Workload(arrival="steady", rate=4, num_requests=100, output_len="5"), FakeSystem(FakeModel(TTFT_S, TPOT_S)), stop=stop)

    run: Run = virtual(main())
    assert run.interrupted == "stopped"
    assert len(run.records) == 7  # sent at 0, 0.25, …, 1.5; each takes 0.5 s
    assert run.unfinished == 2
    assert run.duration_s == pytest.approx(2.1)


def test_a_server_that_is_gone_ends_the_run(virtual: Virtual) -> None:
    class Gone(FakeSystem):
        async def run(self, prepared: Any, stream: Stream) -> None:
            if prepared.index >= 10:
                raise RequestFailedError("cannot connect", unreachable=True)
            await super().run(prepared, stream)

    async def main() -> Run:
        return await drive(Workload(arrival="steady", rate=4, num_requests=100, output_len="1"), Gone(FakeModel(TTFT_S, TPOT_S)))

    run: Run = virtual(main())
    assert run.interrupted == "cannot connect"
    assert [record.outcome for record in run.records] == ["success"] * 10 + ["error"] * 5

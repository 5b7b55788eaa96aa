"""Open and closed loops through an engine in this process, on a clock that moves only with steps and waits."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.bench.load.load import Run
from jaxserve.bench.load.metrics import measure, parse_slo
from jaxserve.bench.local.in_process import run_in_process
from jaxserve.bench.workload.plan import PlannedRequest, plan
from jaxserve.bench.workload.workload import load_workload
from jaxserve.config import SchedulerConfig
from jaxserve.engine.scheduling.schedule import Schedule
from jaxserve.errors import InvalidRequestError
from tests.engine_host.fakes import FakeRunner, FakeStep, fake_engine

STEP_S = 1.0


class SteppingClock:
    """Seconds that pass in steps and while nothing is to be done."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.waits_s: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.waits_s.append(seconds)
        self.now_s += seconds


class SteppingRunner(FakeRunner):
    def __init__(self, clock: SteppingClock) -> None:
        super().__init__()
        self._time = clock

    def dispatch(self, schedule: Schedule) -> FakeStep:
        self._time.now_s += STEP_S
        return super().dispatch(schedule)


def run(sessions: list[list[PlannedRequest]], *, concurrency: int | None = None, **scheduler: Any) -> tuple[Run, SteppingClock]:
    clock = SteppingClock()
    runner = SteppingRunner(clock)
    config = SchedulerConfig(**({"max_num_seqs": runner.max_num_seqs, "max_tokens_per_step": 16} | scheduler))
    engine = fake_engine(runner, scheduler=config, clock=lambda: clock.now_s)
    found = run_in_process(engine, sessions, concurrency=concurrency, clock=lambda: clock.now_s, sleep=clock.sleep)
    assert not engine.has_work
    engine.check_integrity()
    return found, clock


def planned(**fields: Any) -> list[list[PlannedRequest]]:
    return list(plan(load_workload(None, {"input_len": "4", "output_len": "3"} | fields)))


def test_an_open_loop_sends_at_its_times_and_waits_between() -> None:
    found, clock = run(planned(arrival="steady", rate=0.1, num_requests=3))
    assert [record.sent_s for record in found.records] == [0, 10, 20]
    assert [record.piece_times_s for record in found.records] == [(1, 2, 3), (11, 12, 13), (21, 22, 23)]
    assert (clock.waits_s, found.duration_s) == ([7, 7], 23)


def test_what_is_due_within_a_step_counts_from_when_it_was_due() -> None:
    found, _ = run(planned(arrival="steady", rate=2, num_requests=2))
    first, second = found.records
    assert (first.sent_s, first.piece_times_s[0]) == (0, 1)
    assert (second.sent_s, second.piece_times_s[0]) == (0.5, 2)
    slo = parse_slo("ttft:1400")
    assert measure(found, slo).good_requests == 1


def test_a_full_queue_refuses_in_an_open_loop_and_never_in_a_closed_one() -> None:
    bounds = {"max_num_seqs": 1, "max_queued_requests": 1}
    found, _ = run(planned(arrival="burst", rate=1, burst_size=5, num_requests=5), **bounds)
    assert measure(found).outcomes == {"success": 2, "cancelled": 0, "refused": 3, "timed_out": 0, "error": 0}
    assert all(record.error and "queue" in record.error for record in found.records if record.outcome == "refused")
    found, _ = run(planned(concurrency=5, num_requests=5), concurrency=5, **bounds)
    assert measure(found).completed == 5


def test_a_queue_that_times_out_refuses() -> None:
    found, _ = run(planned(arrival="burst", rate=1, burst_size=3, num_requests=3), max_num_seqs=1, queue_timeout_s=2.0)
    assert [record.outcome for record in sorted(found.records, key=lambda record: record.request.index)] == ["success", "refused", "refused"]


def test_dynamic_batches_wait_without_stepping() -> None:
    found, clock = run(planned(arrival="steady", rate=1, num_requests=2), policy="dynamic", max_batch_delay_s=0.25)
    assert [record.piece_times_s[0] for record in found.records] == [1.25, 4.25]
    assert len(clock.waits_s) <= 4


def test_turns_follow_one_another_in_both_loops() -> None:
    for fields, concurrency in (({"arrival": "steady", "rate": 1}, None), ({"concurrency": 2}, 2)):
        found, _ = run(planned(num_requests=6, turns=3, input_len="2", output_len="2", **fields), concurrency=concurrency)
        by_turn = {(record.request.session, record.request.turn): record for record in found.records}
        assert len(by_turn) == 6
        assert all(by_turn[session, turn].end_s <= by_turn[session, turn + 1].sent_s for session in range(2) for turn in range(2))


def test_a_prompt_too_long_is_refused_before_anything_runs() -> None:
    sessions = [*planned(concurrency=1, num_requests=1), *planned(concurrency=1, num_requests=1, input_len="500")]
    with pytest.raises(InvalidRequestError, match="128"):
        run(sessions, concurrency=1)


def test_a_session_pauses_between_its_turns_and_keeps_its_place() -> None:
    found, clock = run(planned(concurrency=1, num_requests=4, turns=2, think_s=5), concurrency=1)
    for before, after in zip(found.records, found.records[1:], strict=False):
        assert after.sent_s == pytest.approx(before.end_s + after.request.think_s), "a session that pauses keeps the place of a closed loop"
    assert clock.waits_s == pytest.approx([record.request.think_s for record in found.records if record.request.turn])
    assert [record.outcome for record in found.records] == ["success"] * 4


def test_clients_go_away_on_plan() -> None:
    found, _ = run(planned(arrival="steady", rate=0.1, num_requests=6, turns=2, output_len="20", cancel_share=0.5, cancel_after_s=8))
    leaving = [record for record in found.records if record.request.cancel_after_s is not None]
    assert 0 < len(leaving) < len(found.records) == 6, "a conversation goes on after an answer that was broken off"
    for record in found.records:
        if record.request.cancel_after_s is None:
            assert record.outcome == "success" and len(record.piece_times_s) == 20
        else:
            assert record.outcome == "cancelled" and record.end_s == pytest.approx(record.sent_s + record.request.cancel_after_s)
            assert all(time_s <= record.end_s for time_s in record.piece_times_s) and len(record.piece_times_s) < 20


def test_tenants_and_priorities_reach_the_engine() -> None:
    found, _ = run(planned(arrival="burst", rate=1, burst_size=8, num_requests=8, tenants=2, priorities=(0, 1)), max_num_seqs=1)
    by_priority = [record.request.priority for record in sorted(found.records, key=lambda record: record.end_s)]
    assert sorted(by_priority) == by_priority or sorted(by_priority, reverse=True) == by_priority

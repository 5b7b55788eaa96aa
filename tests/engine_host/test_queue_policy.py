"""Who is next: the orders, their bounds, and the batching policies."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from jaxserve.config import SchedulerConfig
from jaxserve.engine.scheduling.queue_policy import FairQueue
from jaxserve.engine.scheduling.scheduler import Scheduler
from jaxserve.engine.scheduling.sequence import Sequence
from jaxserve.engine.scheduling.waiting_queue import WaitingQueue
from jaxserve.request import Request, RequestOptions, SamplingParams
from tests.engine_host.fakes import results_of


def make_sequence(name: str, *, arrival_s: float = 0.0, prompt_len: int = 1, max_tokens: int = 1, **options: Any) -> Sequence:
    request = Request(
        request_id=name, prompt_token_ids=[1] * prompt_len, sampling_params=SamplingParams(), options=RequestOptions(**options), arrival_s=arrival_s
    )
    return Sequence.of(request, seed=0, max_tokens=max_tokens)


def make_scheduler(*, weights: dict[str, float] | None = None, num_ranks: int = 1, **fields: Any) -> Scheduler:
    config = SchedulerConfig(**({"max_num_seqs": 1, "max_tokens_per_step": 64} | fields))
    return Scheduler(64, 4, config, num_ranks=num_ranks, weights=weights or {})


def step(scheduler: Scheduler, now_s: float = 0.0) -> list[str]:
    """Runs a step. Returns the names of those that took part."""
    schedule = scheduler.schedule(now_s)
    for sequence, _ in scheduler.update(schedule, results_of(schedule, 0)):
        if sequence.num_generated_tokens == sequence.max_tokens:
            scheduler.finish(sequence, "length")
    scheduler.check_integrity()
    return [row.sequence.request.request_id for row in schedule.sequences]


def run(scheduler: Scheduler) -> list[str]:
    names: list[str] = []
    while scheduler.has_work:
        names += step(scheduler)
    return names


class TestOrders:
    def test_fcfs(self) -> None:
        scheduler = make_scheduler()
        for name in "abc":
            scheduler.add(make_sequence(name, priority=-ord(name)))
        assert run(scheduler) == ["a", "b", "c"]

    def test_smaller_priorities_run_first_and_equals_by_arrival(self) -> None:
        scheduler = make_scheduler(order="priority")
        for name, priority in (("a", 1), ("b", 0), ("c", -1), ("d", 0)):
            scheduler.add(make_sequence(name, priority=priority))
        assert run(scheduler) == ["c", "b", "d", "a"]

    def test_nobody_starves_under_priority(self) -> None:
        """An endless stream of urgent requests overtakes for ``ageing_s`` times the difference and no longer."""
        scheduler = make_scheduler(order="priority", ageing_s=5.0)
        scheduler.add(make_sequence("patient", arrival_s=0.0, priority=2))
        for second in range(100):
            scheduler.add(make_sequence(f"urgent{second}", arrival_s=second + 0.5, priority=-1))
            if step(scheduler) == ["patient"]:
                break
        assert second == 5 * 3  # pyright: ignore[reportPossiblyUnboundVariable]

    def test_earliest_deadline_first_and_none_is_a_minute(self) -> None:
        scheduler = make_scheduler(order="deadline")
        for name, arrival_s, deadline_ms in (("none", 0.0, None), ("late", 0.0, 90_000), ("soon", 1.0, 500), ("sooner", 1.0, 400)):
            scheduler.add(make_sequence(name, arrival_s=arrival_s, deadline_ms=deadline_ms))
        assert run(scheduler) == ["sooner", "soon", "none", "late"]

    def test_a_running_sequence_takes_pages_from_those_behind_it_in_order_not_in_arrival(self) -> None:
        scheduler = Scheduler(5, 4, SchedulerConfig(max_num_seqs=2, max_tokens_per_step=64, order="priority"))
        idle, urgent = make_sequence("idle", prompt_len=8, max_tokens=8, priority=5), make_sequence("urgent", prompt_len=8, max_tokens=8)
        scheduler.add(idle)
        for _ in range(2):
            first = scheduler.schedule()
            scheduler.update(first, results_of(first))
        scheduler.add(urgent)
        preempted: list[Sequence] = []
        for _ in range(6):
            schedule = scheduler.schedule()
            preempted += schedule.preempted
            scheduler.update(schedule, results_of(schedule, 0))
        assert preempted == [idle]


class TestFairShare:
    def test_a_flood_does_not_hold_up_another_tenant(self) -> None:
        scheduler = make_scheduler(order="fair")
        for i in range(50):
            scheduler.add(make_sequence(f"flood{i}", tenant="flood"))
        assert step(scheduler) == ["flood0"]
        scheduler.add(make_sequence("quiet", tenant="quiet"))
        assert "quiet" in step(scheduler) + step(scheduler)

    def test_served_tokens_are_shared_whatever_their_number_a_request(self) -> None:
        scheduler = make_scheduler(order="fair")
        for i in range(200):
            scheduler.add(make_sequence(f"long{i}", prompt_len=40, tenant="long"))
            scheduler.add(make_sequence(f"short{i}", prompt_len=4, tenant="short"))
        served: Counter[str] = Counter()
        for _ in range(110):
            for name in step(scheduler):
                served[name[:4]] += 41 if name.startswith("long") else 5
        assert abs(served["long"] - served["shor"]) <= 41

    def test_weights(self) -> None:
        scheduler = make_scheduler(order="fair", weights={"gold": 3.0})
        for i in range(100):
            scheduler.add(make_sequence(f"gold{i}", tenant="gold"))
            scheduler.add(make_sequence(f"iron{i}", tenant="iron"))
        names = Counter(step(scheduler)[0][:4] for _ in range(80))
        assert names == {"gold": 60, "iron": 20}

    def test_idleness_earns_no_credit(self) -> None:
        scheduler = make_scheduler(order="fair")
        for i in range(100):
            scheduler.add(make_sequence(f"busy{i}", tenant="busy"))
        for _ in range(50):
            step(scheduler)
        for i in range(50):
            scheduler.add(make_sequence(f"late{i}", tenant="late"))
        names = Counter(step(scheduler)[0][:4] for _ in range(20))
        assert abs(names["late"] - names["busy"]) <= 2


def test_the_length_of_a_fair_queue_may_be_asked_while_it_changes() -> None:
    class Changing(dict[str, WaitingQueue]):
        def values(self) -> Any:
            raise RuntimeError("dictionary changed size during iteration")

    queue = FairQueue({})
    for tenant in "abc":
        queue.push(make_sequence(tenant, tenant=tenant))
    queue._queues = Changing(queue._queues)
    assert len(queue) == 3


@pytest.mark.parametrize("kind", ["heap", "fair"])
def test_queues_against_a_sorted_list(kind: str) -> None:
    random.seed(3)
    queue = WaitingQueue() if kind == "heap" else FairQueue({})
    model: list[Sequence] = []
    gone: list[Sequence] = []
    for i in range(3000):
        choice = random.random()
        if choice < 0.4:
            sequence = make_sequence(f"s{i}", tenant="t")
            sequence.order = (float(random.randrange(20)), i)
            queue.push(sequence)
            model.append(sequence)
        elif choice < 0.5 and gone:
            queue.push(gone[-1])  # comes back to its old place
            model.append(gone.pop())
        elif model:
            sequence = min(model, key=lambda s: s.order) if choice < 0.7 else random.choice(model)
            queue.remove(sequence)
            model.remove(sequence)
            gone.append(sequence)
        assert queue.peek() is min(model, key=lambda s: s.order, default=None)
        assert len(queue) == len(model) == len(list(queue)) and all(sequence in queue for sequence in model)
        queue.check_integrity()


class TestBatches:
    def test_static_runs_a_batch_to_its_end(self) -> None:
        scheduler = make_scheduler(policy="static", max_num_seqs=2, num_ranks=2)
        for i in range(6):
            scheduler.add(make_sequence(f"s{i}", max_tokens=1 + i))
        sizes = []
        while scheduler.has_work:
            sizes.append(len(step(scheduler)))
        assert sizes == [4, 3, 2, 1, 2, 2, 2, 2, 2, 1]

    def test_a_static_batch_may_take_several_steps_to_begin(self) -> None:
        scheduler = make_scheduler(policy="static", max_num_seqs=3, max_tokens_per_step=8)
        for i in range(4):
            scheduler.add(make_sequence(f"s{i}", prompt_len=6, max_tokens=4))
        started: list[int] = []
        for _ in range(4):
            step(scheduler)
            started.append(scheduler.num_running)
        assert started == [2, 3, 3, 2]  # the first has ended, and the fourth does not take its place

    def test_dynamic_waits_for_company_but_not_for_ever(self) -> None:
        scheduler = make_scheduler(policy="dynamic", max_num_seqs=4, preferred_batch_size=3, max_batch_delay_s=0.5)
        scheduler.add(make_sequence("a", arrival_s=10.0))
        assert step(scheduler, 10.0) == [] and scheduler.wake_at_s == 10.5
        assert step(scheduler, 10.4) == []
        assert step(scheduler, 10.5) == ["a"]
        for name in "bcd":
            scheduler.add(make_sequence(name, arrival_s=11.0))
        assert step(scheduler, 11.0) == ["b", "c", "d"]

    def test_one_that_joins_late_waits_for_the_next_batch(self) -> None:
        scheduler = make_scheduler(policy="static", max_num_seqs=4)
        scheduler.add(make_sequence("a", max_tokens=3))
        step(scheduler)
        scheduler.add(make_sequence("b", max_tokens=1))
        assert [step(scheduler) for _ in range(3)] == [["a"], ["a"], ["b"]]

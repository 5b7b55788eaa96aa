"""The scheduler and page pool: the promises one by one. Random histories are in ``test_histories.py``."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from jaxserve.config import SchedulerConfig
from jaxserve.engine.pages.pool import PagePool
from jaxserve.engine.pages.prefix_cache.choice import choose_prefix_cache
from jaxserve.engine.scheduling.schedule import RunnerCosts, Schedule
from jaxserve.engine.scheduling.scheduler import Scheduler
from jaxserve.engine.scheduling.sequence import Lag, Sequence, SequenceStatus
from jaxserve.engine.scheduling.waiting_queue import WaitingQueue
from jaxserve.request import Request, SamplingParams
from tests.engine_host.fakes import FakeRunner, plain_run, results_of


def make_sequence(name: str, prompt_len: int, max_tokens: int, seed: int = 0) -> Sequence:
    prompt = [(seed + 7 * i + len(name)) % 256 for i in range(prompt_len)]
    request = Request(request_id=name, prompt_token_ids=prompt, sampling_params=SamplingParams())
    return Sequence.of(request, seed=seed, max_tokens=max_tokens)


def make_scheduler(num_pages: int = 16, page_size: int = 4, max_num_seqs: int = 4, max_tokens_per_step: int = 16, num_ranks: int = 1) -> Scheduler:
    return Scheduler(num_pages, page_size, SchedulerConfig(max_num_seqs=max_num_seqs, max_tokens_per_step=max_tokens_per_step), num_ranks=num_ranks)


def shape(schedule: Schedule) -> list[tuple[str, int, int, bool]]:
    return [(row.sequence.request.request_id, row.start, row.num_tokens, row.num_samples) for row in schedule.sequences]


def run_to_end(scheduler: Scheduler, runner: FakeRunner, *, max_steps: int = 2000) -> None:
    """Steps until all is done; a sequence ends after ``max_tokens``."""
    for _ in range(max_steps):
        if not scheduler.has_work:
            return
        schedule = scheduler.schedule()
        for sequence, _ in scheduler.update(schedule, runner.dispatch(schedule).fetch()):
            if sequence.num_generated_tokens == sequence.max_tokens:
                scheduler.finish(sequence, "length")
        scheduler.check_integrity()
    pytest.fail(f"not done after {max_steps} steps")


class TestPagePool:
    def test_all_or_nothing(self) -> None:
        pool = PagePool(4, 8)
        taken = pool.allocate(3)
        assert sorted(taken or ()) == [0, 1, 2]
        assert pool.allocate(2) is None
        assert pool.num_free == 1
        assert pool.allocate(0) == []

    def test_a_shared_page_is_free_after_its_last_holder(self) -> None:
        pool = PagePool(2, 8)
        page_ids = pool.allocate(1)
        assert page_ids is not None
        pool.share(page_ids)
        pool.check_integrity([page_ids, page_ids])
        pool.release(page_ids)
        assert pool.num_free == 1
        pool.release(page_ids)
        assert pool.num_free == 2
        pool.check_integrity([])

    def test_misuse_is_noticed(self) -> None:
        pool = PagePool(2, 8)
        page_ids = pool.allocate(1)
        assert page_ids is not None
        with pytest.raises(AssertionError, match="holders of pages"):
            pool.check_integrity([])
        pool.release(page_ids)
        with pytest.raises(AssertionError, match="released more often"):
            pool.release(page_ids)
        with pytest.raises(AssertionError, match="cannot be shared"):
            pool.share(page_ids)


class TestPolicy:
    def test_decodes_come_first_and_chunks_fill_the_budget(self) -> None:
        scheduler = make_scheduler(max_tokens_per_step=8)
        short, long = make_sequence("short", 3, 4), make_sequence("long", 20, 4)
        scheduler.add(short)
        scheduler.add(long)
        schedule = scheduler.schedule()
        assert shape(schedule) == [("short", 0, 3, True), ("long", 0, 5, False)]
        scheduler.update(schedule, results_of(schedule, 1))
        schedule = scheduler.schedule()
        assert shape(schedule) == [("short", 3, 1, True), ("long", 5, 7, False)]
        assert (schedule.ranks[0].num_decodes, schedule.ranks[0].num_tokens) == (1, 8)
        scheduler.update(schedule, results_of(schedule, 1))
        schedule = scheduler.schedule()
        scheduler.update(schedule, results_of(schedule, 1))
        schedule = scheduler.schedule()
        assert shape(schedule) == [("short", 5, 1, True), ("long", 19, 1, True)]
        assert schedule.ranks[0].num_decodes == 2

    def test_a_chunk_takes_only_its_own_pages(self) -> None:
        scheduler = make_scheduler(num_pages=16, page_size=4, max_tokens_per_step=8)
        scheduler.add(make_sequence("long", 20, 4))
        scheduler.schedule()
        assert scheduler.num_free_pages == 14

    def test_first_come_first_served(self) -> None:
        scheduler = make_scheduler(num_pages=8, page_size=4, max_tokens_per_step=64)
        scheduler.add(make_sequence("first", 20, 4))
        scheduler.add(make_sequence("large", 16, 4))
        scheduler.add(make_sequence("small", 1, 1))
        assert [name for name, *_ in shape(scheduler.schedule())] == ["first"]  # large has no room; small must not overtake it

    def test_at_most_max_num_seqs_run(self) -> None:
        scheduler = make_scheduler(max_num_seqs=2)
        for i in range(5):
            scheduler.add(make_sequence(f"s{i}", 1, 2))
        assert len(scheduler.schedule().sequences) == 2
        assert (scheduler.num_running, scheduler.num_waiting) == (2, 3)

    def test_the_youngest_is_preempted_and_keeps_its_tokens(self) -> None:
        runner = FakeRunner(num_pages=4, page_size=4)
        scheduler = make_scheduler(num_pages=4, page_size=4)
        old, young = make_sequence("old", 7, 9, seed=1), make_sequence("young", 7, 9, seed=2)
        scheduler.add(old)
        scheduler.add(young)
        schedules = [scheduler.schedule()]
        for _ in range(2):
            scheduler.update(schedules[-1], runner.dispatch(schedules[-1]).fetch())
            schedules.append(scheduler.schedule())
        assert [schedule.preempted for schedule in schedules] == [(), (), (young,)]
        scheduler.update(schedules[-1], runner.dispatch(schedules[-1]).fetch())
        assert (young.status, young.num_generated_tokens, young.num_scheduled_tokens) == (SequenceStatus.WAITING, 2, 0)
        assert scheduler.num_preemptions == young.num_preemptions == 1
        run_to_end(scheduler, runner)
        for sequence in (old, young):
            assert sequence.token_ids[7:] == plain_run(sequence.token_ids[:7], 9, sequence.seed)

    def test_two_long_requests_that_do_not_fit_together_both_finish(self) -> None:
        runner = FakeRunner(num_pages=12, page_size=4)
        scheduler = make_scheduler(num_pages=12, page_size=4)
        sequences = [make_sequence("a", 20, 28), make_sequence("b", 20, 28)]
        for sequence in sequences:
            scheduler.add(sequence)
        run_to_end(scheduler, runner)
        assert [sequence.finish_reason for sequence in sequences] == ["length", "length"]
        assert sum(sequence.num_preemptions for sequence in sequences) <= 2, "thrashing"

    def test_a_token_in_flight_outlives_the_pages(self) -> None:
        """A sequence that has lost its pages gets its token, and waits for it before it begins anew: no position is sampled twice."""
        scheduler = make_scheduler()
        sequence = make_sequence("s", 3, 4)
        scheduler.add(sequence)
        first = scheduler.schedule()
        scheduler.forget_pools()
        assert shape(first) == [("s", 0, 3, 1)] and shape(scheduler.schedule()) == []
        assert [(grown, result.token_ids) for grown, result in scheduler.update(first, results_of(first, 5))] == [(sequence, [5])]
        assert shape(scheduler.schedule()) == [("s", 0, 4, 1)]

    def test_a_step_is_scheduled_on_tokens_in_flight(self) -> None:
        scheduler = make_scheduler(max_tokens_per_step=8)
        short = make_sequence("short", 3, 3)
        scheduler.add(short)
        scheduler.add(make_sequence("long", 12, 4))
        first, second, third = (scheduler.schedule() for _ in range(3))
        assert shape(first) == [("short", 0, 3, 1), ("long", 0, 5, 0)]
        assert shape(second) == [("short", 3, 1, 1), ("long", 5, 7, 1)]
        assert shape(third) == [("short", 4, 1, 1), ("long", 12, 1, 1)]
        assert (short.num_generated_tokens, short.num_in_flight, short.num_tokens) == (0, 3, 6)
        assert shape(scheduler.schedule()) == [("long", 13, 1, 1)], "max_tokens is known: no step is spent on a token behind the last"
        for schedule in (first, second, third):
            scheduler.update(schedule, results_of(schedule, 7))
            scheduler.check_integrity()
        assert short.token_ids[3:] == [7, 7, 7] and short.num_in_flight == 0

    @pytest.mark.parametrize("lag", [Lag.SITS_OUT, Lag.HOLDS_STEP])
    def test_a_sequence_that_needs_its_token_known_sits_out(self, lag: Lag) -> None:
        scheduler = make_scheduler(max_tokens_per_step=8)
        strict = make_sequence("strict", 3, 4)
        strict.lag = lag
        scheduler.add(strict)
        scheduler.add(make_sequence("other", 4, 4))
        first = scheduler.schedule()
        assert shape(first) == [("strict", 0, 3, 1), ("other", 0, 4, 1)]
        assert scheduler.is_held == (lag is Lag.HOLDS_STEP)
        second = scheduler.schedule()
        assert shape(second) == [("other", 4, 1, 1)]
        scheduler.update(first, results_of(first))
        assert not scheduler.is_held
        assert shape(scheduler.schedule()) == [("strict", 3, 1, 1), ("other", 5, 1, 1)]
        scheduler.update(second, results_of(second))
        scheduler.finish(strict, "abort")
        assert not scheduler.is_held and scheduler._num_holding == 0

    def test_what_a_lost_step_was_to_give_is_computed_again(self) -> None:
        scheduler = make_scheduler()
        sequence = make_sequence("s", 3, 4)
        scheduler.add(sequence)
        schedules = [scheduler.schedule(), scheduler.schedule()]
        for schedule in schedules:
            scheduler.lose(schedule)
        scheduler.forget_pools()
        scheduler.check_integrity()
        assert shape(scheduler.schedule()) == [("s", 0, 3, 1)]

    def test_the_same_events_give_the_same_schedules(self) -> None:
        def history() -> list[object]:
            runner = FakeRunner(num_pages=10, page_size=4)
            scheduler = make_scheduler(num_pages=10, page_size=4)
            for i in range(6):
                scheduler.add(make_sequence(f"s{i}", 3 + 5 * i % 7, 12, seed=i))
            seen: list[object] = []
            while scheduler.has_work:
                schedule = scheduler.schedule()
                seen.append((shape(schedule), [(row.sequence.slot, tuple(row.sequence.page_ids)) for row in schedule.sequences]))
                for sequence, _ in scheduler.update(schedule, runner.dispatch(schedule).fetch()):
                    if sequence.num_generated_tokens == sequence.max_tokens:
                        scheduler.finish(sequence, "length")
            return seen

        assert history() == history()

    def test_the_queue_is_not_walked(self) -> None:
        class Counted(WaitingQueue):
            num_peeks = 0

            def peek(self) -> Sequence | None:
                Counted.num_peeks += 1
                return super().peek()

            def __iter__(self) -> Iterator[Sequence]:
                raise AssertionError("walked")

        scheduler = make_scheduler(max_num_seqs=2)
        scheduler._waiting = Counted()
        for i in range(500):
            scheduler.add(make_sequence(f"s{i}", 1, 9))
        for _ in range(3):
            schedule = scheduler.schedule()
            scheduler.update(schedule, results_of(schedule, 1))
        assert Counted.num_peeks == 3 + 2


class TestRanks:
    def test_each_rank_has_its_own_limits(self) -> None:
        scheduler = make_scheduler(max_num_seqs=2, max_tokens_per_step=8, num_ranks=3)
        for i in range(9):
            scheduler.add(make_sequence(f"s{i}", 4, 2))
        schedule = scheduler.schedule()
        assert [(len(rank.sequences), rank.num_tokens) for rank in schedule.ranks] == [(2, 8)] * 3
        assert (scheduler.num_running, scheduler.num_waiting) == (6, 3)

    def test_the_head_goes_where_it_is_done_soonest(self) -> None:
        scheduler = make_scheduler(num_pages=64, page_size=4, max_num_seqs=8, max_tokens_per_step=512, num_ranks=2)
        large, *small = [make_sequence("large", 150, 1), *(make_sequence(f"small{i}", 4, 1) for i in range(5))]
        for sequence in (large, *small):
            scheduler.add(sequence)
        scheduler.schedule()
        assert [sequence.rank for sequence in (large, *small)] == [0, 1, 1, 1, 1, 0]

    def test_an_empty_rank_idles_while_another_works(self) -> None:
        scheduler = make_scheduler(num_ranks=2)
        scheduler.add(make_sequence("only", 3, 2))
        schedule = scheduler.schedule()
        assert [len(rank.sequences) for rank in schedule.ranks] == [1, 0]

    def test_a_preempted_sequence_may_come_to_another_rank(self) -> None:
        runner = FakeRunner(num_pages=4, page_size=4, num_ranks=2)
        scheduler = make_scheduler(num_pages=4, page_size=4, max_num_seqs=2, max_tokens_per_step=16, num_ranks=2)
        blocker = make_sequence("blocker", 13, 3)
        old, young = make_sequence("old", 7, 9, seed=1), make_sequence("young", 7, 9, seed=2)
        for sequence in (blocker, old, young):
            scheduler.add(sequence)
        ranks: list[int] = []
        while scheduler.has_work:
            schedule = scheduler.schedule()
            for sequence, _ in scheduler.update(schedule, runner.dispatch(schedule).fetch()):
                if sequence.num_generated_tokens == sequence.max_tokens:
                    scheduler.finish(sequence, "length")
            scheduler.check_integrity()
            ranks.append(young.rank)
        assert (ranks[0], ranks[-1], young.num_preemptions) == (1, 0, 1)
        assert young.token_ids[7:] == plain_run(young.token_ids[:7], 9, 2)


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(0, 2**32 - 1), st.integers(0, 6)), min_size=1, max_size=8),
    num_pages=st.integers(8, 24),
    page_size=st.sampled_from([4, 8, 16]),
    max_num_seqs=st.integers(1, 6),
    budget_over=st.integers(0, 40),
    num_ranks=st.integers(1, 4),
)
def test_tokens_do_not_depend_on_company(
    requests: list[tuple[int, int, int, int]], num_pages: int, page_size: int, max_num_seqs: int, budget_over: int, num_ranks: int
) -> None:
    """Batch mates, ranks, chunk size, page size, preemption and arrival: a request's tokens are those of the plain run."""
    runner = FakeRunner(num_pages=num_pages, page_size=page_size, max_num_seqs=max_num_seqs, num_ranks=num_ranks)
    scheduler = make_scheduler(num_pages, page_size, max_num_seqs, max_num_seqs + budget_over, num_ranks)
    sequences: list[Sequence] = []
    for i, (prompt_len, max_tokens, seed, num_steps_before) in enumerate(requests):
        for _ in range(num_steps_before):
            schedule = scheduler.schedule()
            if schedule.sequences:
                for sequence, _ in scheduler.update(schedule, runner.dispatch(schedule).fetch()):
                    if sequence.num_generated_tokens == sequence.max_tokens:
                        scheduler.finish(sequence, "length")
        sequences.append(make_sequence(f"s{i}", prompt_len, max_tokens, seed))
        scheduler.add(sequences[-1])
    run_to_end(scheduler, runner)
    for sequence, (prompt_len, max_tokens, seed, _) in zip(sequences, requests, strict=True):
        assert sequence.token_ids[prompt_len:] == plain_run(sequence.token_ids[:prompt_len], max_tokens, seed)


class TestSwap:
    def scheduler(self, kind: str, *, num_host_pages: int = 16, costs: RunnerCosts | None = None) -> tuple[Scheduler, FakeRunner]:
        runner = FakeRunner(num_pages=4, page_size=4, num_host_pages=num_host_pages)
        config = SchedulerConfig(max_num_seqs=4, max_tokens_per_step=16, preemption=kind)  # pyright: ignore[reportArgumentType]
        return Scheduler(4, 4, config, num_host_pages=num_host_pages, costs=costs), runner

    def run(self, scheduler: Scheduler, runner: FakeRunner) -> list[Sequence]:
        sequences = [make_sequence("old", 7, 9, seed=1), make_sequence("young", 7, 9, seed=2)]
        for sequence in sequences:
            scheduler.add(sequence)
        run_to_end(scheduler, runner)
        for sequence in sequences:
            assert sequence.token_ids[7:] == plain_run(sequence.token_ids[:7], 9, sequence.seed)
        return sequences

    def test_what_was_computed_is_not_computed_again(self) -> None:
        scheduler, runner = self.scheduler("swap")
        num_tokens = 0
        for sequence in [make_sequence("old", 7, 9, seed=1), make_sequence("young", 7, 9, seed=2)]:
            scheduler.add(sequence)
        while scheduler.has_work:
            schedule = scheduler.schedule()
            num_tokens += schedule.ranks[0].num_tokens
            for sequence, _ in scheduler.update(schedule, runner.dispatch(schedule).fetch()):
                if sequence.num_generated_tokens == 9:
                    scheduler.finish(sequence, "length")
            scheduler.check_integrity()
        assert scheduler.num_swap_outs == scheduler.num_preemptions > 0
        assert num_tokens == 2 * (7 + 8)

    def test_without_room_on_the_host_it_is_recomputed(self) -> None:
        scheduler, runner = self.scheduler("swap", num_host_pages=1)
        self.run(scheduler, runner)
        assert scheduler.num_swap_outs == 0 < scheduler.num_preemptions

    @pytest.mark.parametrize(("page_swap_s", "swaps"), [(1e-6, True), (1.0, False)])
    def test_auto_takes_what_costs_less_time(self, page_swap_s: float, swaps: bool) -> None:
        scheduler, runner = self.scheduler("auto", costs=RunnerCosts(token_s=1e-3, page_swap_s=page_swap_s))
        self.run(scheduler, runner)
        assert (scheduler.num_swap_outs > 0) == swaps and scheduler.num_preemptions

    def test_nobody_overtakes_a_swapped_sequence(self) -> None:
        scheduler, runner = self.scheduler("swap")
        self.run(scheduler, runner)
        old, young, late = make_sequence("old", 7, 9), make_sequence("young", 7, 9), make_sequence("late", 1, 1)
        scheduler.add(old)
        scheduler.add(young)
        while not young.num_preemptions:
            schedule = scheduler.schedule()
            scheduler.update(schedule, runner.dispatch(schedule).fetch())
        scheduler.add(late)
        while late.status is SequenceStatus.WAITING:
            assert young.status is SequenceStatus.SWAPPED
            schedule = scheduler.schedule()
            for sequence, _ in scheduler.update(schedule, runner.dispatch(schedule).fetch()):
                if sequence is old and sequence.num_generated_tokens == 9:
                    scheduler.finish(sequence, "length")
            if young.status is SequenceStatus.RUNNING:
                break
        assert young.status is SequenceStatus.RUNNING


class TestPause:
    def test_a_paused_sequence_holds_nothing_and_goes_on_from_the_cache(self) -> None:
        runner = FakeRunner()
        config = SchedulerConfig(max_num_seqs=2, max_tokens_per_step=32)
        scheduler = Scheduler(64, 4, config, make_cache=choose_prefix_cache("radix"))
        paused, other = make_sequence("paused", 9, 12, seed=1), make_sequence("other", 9, 12, seed=2)
        scheduler.add(paused)
        scheduler.add(other)
        for _ in range(3):
            schedule = scheduler.schedule()
            scheduler.update(schedule, runner.dispatch(schedule).fetch())
        scheduler.pause(paused)
        scheduler.pause(paused)
        assert (scheduler.num_paused, scheduler.num_running) == (1, 1) and not paused.page_ids
        for _ in range(3):
            schedule = scheduler.schedule()
            scheduler.update(schedule, runner.dispatch(schedule).fetch())
            assert [row.sequence for row in schedule.sequences] == [other]
        scheduler.resume(paused)
        schedule = scheduler.schedule()
        assert {row.sequence: row.num_tokens for row in schedule.sequences} == {other: 1, paused: 12 - 8}  # two pages of its own are in the cache
        scheduler.update(schedule, runner.dispatch(schedule).fetch())
        run_to_end(scheduler, runner)
        assert paused.token_ids[9:] == plain_run(paused.token_ids[:9], 12, 1)

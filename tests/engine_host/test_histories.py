"""Random histories of the scheduler: every policy and prefix cache, all books checked after each event, every output equal to the plain run."""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import Literal

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from jaxserve.config import SchedulerConfig
from jaxserve.engine.pages.prefix_cache.choice import choose_prefix_cache
from jaxserve.engine.scheduling.chunking import Chunking, ContextCost
from jaxserve.engine.scheduling.schedule import RunnerCosts, Schedule
from jaxserve.engine.scheduling.scheduler import Scheduler
from jaxserve.engine.scheduling.sequence import Lag, Sequence, SequenceStatus
from jaxserve.request import Request, RequestOptions, SamplingParams
from tests.engine_host.fakes import FakeRunner, FakeStep, plain_run

LONGEST = 40
"""Tokens of prompt and output together."""

RARE_STATES = ("decoding", "prefilling", "preempted", "swapped")
STATES = ("queued", "prefilling", "decoding", "preempted", "swapped", "paused")


class Histories(RuleBasedStateMachine):
    """Adds, aborts and steps at random, with up to three steps in flight, in pools that are mostly too small, with prompts that share their beginnings."""

    counts: Counter[str]

    @initialize(
        page_size=st.sampled_from([1, 2, 4, 8, 8]),
        pages_over=st.integers(0, 6),
        max_num_seqs=st.integers(1, 6),
        budget_over=st.sampled_from([0, 0, 1, 2, 4, 8, 20]),
        depth=st.integers(1, 3),
        num_ranks=st.sampled_from([1, 1, 1, 2, 3, 4]),
        prefix=st.sampled_from(["radix", "radix", "hash", "hash", "off"]),
        policy=st.sampled_from(["continuous", "continuous", "continuous", "continuous", "static", "dynamic"]),
        order=st.sampled_from(["fcfs", "priority", "deadline", "fair"]),
        preemption=st.sampled_from(["recompute", "swap", "swap", "auto"]),
        num_host_pages=st.integers(10, 80),
        page_swap_s=st.sampled_from([0.0, 1e-3, 1.0]),
        context_cost=st.sampled_from([0.0, 0.05, 1.0]),
    )
    def start(
        self,
        page_size: int,
        pages_over: int,
        max_num_seqs: int,
        budget_over: int,
        depth: int,
        num_ranks: int,
        prefix: str,
        policy: Literal["continuous", "static", "dynamic"],
        order: Literal["fcfs", "priority", "deadline", "fair"],
        preemption: Literal["recompute", "swap", "auto"],
        num_host_pages: int,
        page_swap_s: float,
        context_cost: float,
    ) -> None:
        self.num_pages = -(-LONGEST // page_size) + pages_over
        self.max_tokens = max_num_seqs + budget_over
        self.depth = depth
        self.runner = FakeRunner(num_pages=self.num_pages, page_size=page_size, max_num_seqs=max_num_seqs, num_ranks=num_ranks, num_host_pages=num_host_pages)
        limits = SchedulerConfig(
            max_num_seqs=max_num_seqs, max_tokens_per_step=self.max_tokens, policy=policy, order=order, preemption=preemption, max_batch_delay_s=3.0
        )
        self.scheduler = Scheduler(
            self.num_pages,
            page_size,
            limits,
            num_ranks=num_ranks,
            num_host_pages=num_host_pages,
            costs=RunnerCosts(token_s=1e-3, page_swap_s=page_swap_s),
            make_cache=choose_prefix_cache(prefix),  # pyright: ignore[reportArgumentType]
            chunking=Chunking(ContextCost(((20.0, context_cost),)), self.runner.token_buckets),
            session_ttl_s=5.0,
        )
        self.in_flight: deque[tuple[Schedule, FakeStep]] = deque()
        self.live: list[Sequence] = []  # in order of arrival
        self.finished: list[Sequence] = []
        self.num_added = 0
        self.now_s = 0.0

    def _add(self, prompt: list[int], max_tokens: int, seed: int, options: RequestOptions) -> None:
        self.num_added += 1
        request = Request(request_id=f"s{self.num_added}", prompt_token_ids=prompt, sampling_params=SamplingParams(), options=options, arrival_s=self.now_s)
        sequence = Sequence.of(request, seed=seed, max_tokens=max_tokens, namespace=(options.cache_salt or "").encode())
        sequence.lag = Lag.SITS_OUT if self.num_added % 8 == 0 else Lag.NONE
        self.live.append(sequence)
        self.scheduler.add(sequence)
        self._count("add")

    def _count(self, event: str, number: int = 1) -> None:
        self.counts[event] += number
        self.counts["events"] += 1

    options = st.builds(
        RequestOptions,
        cache_salt=st.sampled_from([None, None, None, "x"]),
        session_id=st.sampled_from([None, None, "s"]),
        priority=st.integers(-1, 1),
        deadline_ms=st.sampled_from([None, 5_000, 50_000]),
        tenant=st.sampled_from(["a", "b"]),
    )

    @rule(family=st.integers(0, 2), shared=st.integers(0, 14), own=st.lists(st.integers(0, 1), min_size=1, max_size=2), max_tokens=st.integers(1, 24),
          seed=st.integers(0, 3), options=options, number=st.sampled_from([1, 3, 6]))  # fmt: skip
    def add(self, family: int, shared: int, own: list[int], max_tokens: int, seed: int, options: RequestOptions, number: int) -> None:
        for i in range(number):
            self._add([(family + i // 2 + 3 * j) % 5 for j in range(shared)] + own, max_tokens, seed + i, options)

    @precondition(lambda self: self.finished)
    @rule(data=st.data(), cut=st.integers(0, 3), more=st.integers(0, 1), max_tokens=st.integers(1, 6), options=options)
    def add_next_turn(self, data: st.DataObject, cut: int, more: int, max_tokens: int, options: RequestOptions) -> None:
        """A prompt that begins with all or most of an earlier prompt and its answer."""
        before = data.draw(st.sampled_from(self.finished[-8:])).token_ids
        prompt = before[: max(1, min(len(before), 20) - cut)]
        self._add(prompt + [7] * more, max_tokens, 0, options)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def pause_or_resume(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        if sequence.status is SequenceStatus.PAUSED:
            self.scheduler.resume(sequence)
            self._count("resume")
            assert sequence.status is SequenceStatus.WAITING
        else:
            self._pause(sequence)

    def _pause(self, sequence: Sequence) -> None:
        self.scheduler.pause(sequence)
        assert sequence.status is SequenceStatus.PAUSED and not sequence.page_ids and not sequence.host_page_ids
        self._count("pause")

    @rule(number=st.integers(1, 3))
    def preempt(self, number: int) -> None:
        """As when pages run out, at a bad moment."""
        for sequence in [sequence for sequence in self.live if sequence.status is SequenceStatus.RUNNING][-number:]:
            swaps = self.scheduler.num_swap_outs
            self.scheduler.ranks[sequence.rank].preempt(sequence)
            self._count("preempt")
            self.counts["swap"] += self.scheduler.num_swap_outs - swaps
            assert _state(sequence) in ("preempted", "swapped")
            self.books_add_up()

    @precondition(lambda self: self.live)
    @rule(state=st.sampled_from([*STATES, *RARE_STATES, *RARE_STATES]), number=st.integers(2, 8))
    def abort(self, state: str, number: int) -> None:
        """Aborts sequences of one state, which is brought about if need be."""
        for _ in range(4):
            if any(_state(sequence) == state for sequence in self.live):
                break
            if state in ("preempted", "swapped") and self.scheduler.num_running:
                self.preempt(number)
            elif state == "paused":
                for sequence in self.live[-number:]:
                    self._pause(sequence)
            else:
                if state == "prefilling":
                    self._add([self.num_added % 97, *range(15)], 4, 0, RequestOptions())
                self.dispatch()
            self.books_add_up()
        self._abort([sequence for sequence in self.live if _state(sequence) == state][-number:])

    def _abort(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self.live.remove(sequence)
            self._count(f"abort {_state(sequence)}")
            for _ in range(2):
                self.scheduler.finish(sequence, "abort")
            assert sequence.finish_reason == "abort" and not sequence.page_ids and not sequence.host_page_ids
            self.books_add_up()

    @rule()
    def dispatch(self) -> None:
        if len(self.in_flight) == self.depth:
            self.fetch()
        in_flight = {row.sequence for schedule, _ in self.in_flight for row in schedule.sequences}
        first = [rank.running[0] for rank in self.scheduler.ranks if rank.running and rank.running[0].num_pending_tokens]
        self.now_s += 1.0
        before, swaps = self.scheduler.num_evicted_pages, self.scheduler.num_swap_outs
        schedule = self.scheduler.schedule(self.now_s)
        ahead = [row.sequence for row in schedule.sequences if row.start >= len(row.sequence.token_ids)]
        assert all(sequence.lag is Lag.NONE for sequence in ahead)
        self._count("ahead", len(ahead))
        if schedule.sequences:
            assert all(rank.num_tokens <= self.max_tokens for rank in schedule.ranks)
            self.in_flight.append((schedule, self.runner.dispatch(schedule)))
        assert set(first) <= {row.sequence for row in schedule.sequences}, "the first sequence of each rank moves in every step"
        assert schedule.sequences or in_flight or not self.scheduler.has_work or self.now_s < self.scheduler.wake_at_s < math.inf, "somebody moves"
        self._count("dispatch")
        self.counts["preempt"] += len(schedule.preempted)
        self.counts["swap"] += self.scheduler.num_swap_outs - swaps
        self.counts["copy"] += sum(len(rank.moves.copies) for rank in schedule.ranks)
        self.counts["evict"] += self.scheduler.num_evicted_pages - before

    @precondition(lambda self: self.in_flight)
    @rule()
    def fetch(self) -> None:
        schedule, step = self.in_flight.popleft()
        for sequence, result in self.scheduler.update(schedule, step.fetch()):
            assert sequence in self.live and len(result.token_ids) == 1
            if sequence.token_ids[-1] % 16 == 0:  # as a stop would: known only now, when a step behind it may be under way
                sequence.max_tokens = sequence.num_generated_tokens
                self._count("stop", bool(sequence.num_in_flight))
            if sequence.num_generated_tokens == sequence.max_tokens:
                self.scheduler.finish(sequence, "length")
                self.live.remove(sequence)
                self.finished.append(sequence)
            prompt = sequence.token_ids[: sequence.num_prompt_tokens]
            assert sequence.token_ids[sequence.num_prompt_tokens :] == plain_run(prompt, sequence.num_generated_tokens, sequence.seed)
        self._count("fetch")

    @rule(num_steps=st.integers(1, 6))
    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.dispatch()
            self.books_add_up()

    @precondition(lambda self: self.num_added > 30)
    @rule()
    def lose_pools(self) -> None:
        for schedule, _ in self.in_flight:
            self.scheduler.lose(schedule)
        self.in_flight.clear()
        self.runner.lose_pools()
        self.scheduler.forget_pools()
        assert self.scheduler.num_cached_pages == 0
        self._count("lose pools")

    @invariant()
    def books_add_up(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_integrity()
        scheduler = self.scheduler
        assert scheduler.num_running + scheduler.num_waiting + scheduler.num_swapped + scheduler.num_paused == len(self.live)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self._add([self.num_added % 97, *range(15)], 4, 0, RequestOptions())
        self.dispatch()
        self._abort(self.live[1::2])
        for sequence in self.finished[-3:]:
            self._add(sequence.token_ids[:16], 1, 0, sequence.request.options)
        self.dispatch()
        self.preempt(4)
        self._abort(self.live[::-2])
        for sequence in self.live:
            self.scheduler.resume(sequence)
        for _ in range(2000):
            if not (self.live or self.in_flight):
                break
            self.dispatch()
            if self.in_flight:
                self.fetch()
        assert not self.live and not self.scheduler.has_work
        self.scheduler.check_integrity()
        assert self.scheduler.num_free_pages == self.scheduler.num_pages == self.num_pages * len(self.scheduler.ranks)


def _state(sequence: Sequence) -> str:
    """One of ``STATES``."""
    if sequence.status in (SequenceStatus.SWAPPED, SequenceStatus.PAUSED):
        return sequence.status.value
    if sequence.status is SequenceStatus.RUNNING:
        return "prefilling" if sequence.num_scheduled_tokens < sequence.num_prompt_tokens else "decoding"
    return "preempted" if sequence.num_preemptions else "queued"


@pytest.mark.parametrize(("num_histories", "least"), [(300, 50), pytest.param(1200, 500, marks=pytest.mark.slow)])
def test_histories(num_histories: int, least: int) -> None:
    """At least 20,000 events, and so many of each kind that matters."""
    Histories.counts = Counter()
    options = settings(max_examples=num_histories, stateful_step_count=50, deadline=None, derandomize=True, database=None)
    run_state_machine_as_test(Histories, settings=options)
    counts = Histories.counts
    wanted = {"events": 20_000} | dict.fromkeys(["preempt", "swap", "evict", "copy", "ahead", "stop", *(f"abort {state}" for state in STATES)], least)
    assert not {kind: counts[kind] for kind, number in wanted.items() if counts[kind] < number}

"""One data rank on the host: its pages, its sequence slots and the sequences that run on it. Which sequence comes to it is the scheduler's matter."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable

from jaxserve.engine.page_pool import PagePool
from jaxserve.engine.schedule import RankSchedule, ScheduledSequence
from jaxserve.engine.sequence import Sequence, SequenceStatus

_HEADROOM_DIVISOR = 100
"""A sequence is admitted beside others only if 1/100 of the pool stays free, or the next decodes would preempt it at once."""


@dataclasses.dataclass(slots=True)
class RankPlan:
    """A rank's part of a step in the making.

    Args:
        budget: Tokens left for prefill chunks; decodes have theirs.
        num_reserved: Pages that running prefills will still need for the tokens they have.
        is_short: Pages ran out: nothing is admitted in this step.
    """

    budget: int
    num_reserved: int = 0
    is_short: bool = False
    decodes: list[ScheduledSequence] = dataclasses.field(default_factory=list[ScheduledSequence])
    chunks: list[ScheduledSequence] = dataclasses.field(default_factory=list[ScheduledSequence])

    def add(self, scheduled: ScheduledSequence) -> None:
        (self.decodes if scheduled.num_tokens == 1 else self.chunks).append(scheduled)

    def build(self) -> RankSchedule:
        num_tokens = len(self.decodes) + sum(scheduled.num_tokens for scheduled in self.chunks)
        return RankSchedule((*self.decodes, *self.chunks), len(self.decodes), num_tokens)


class Rank:
    """Runs its sequences in their order: the first takes pages first, and when pages run out it takes them from those behind it.

    Of these, the one with the least progress gives up its pages first, all of them. A sequence with nobody behind it waits in place with what it has. So
    the first sequence moves in every step, and as each alone fits the pool (the engine's door sees to it), each one finishes.

    Args:
        index: Of the rank.
        num_pages: Pages of its pool.
        page_size: Slots of one page.
        max_num_seqs: Sequence slots.
        max_tokens: Token budget of a step.
        on_preempted: Told about each sequence that lost its pages; must queue it.

    Attributes:
        pool: The pages.
        running: By ``order``.
    """

    def __init__(self, index: int, *, num_pages: int, page_size: int, max_num_seqs: int, max_tokens: int, on_preempted: Callable[[Sequence], None]) -> None:
        self.index = index
        self.pool = PagePool(num_pages, page_size)
        self.running: list[Sequence] = []
        self._max_num_seqs = max_num_seqs
        self._max_tokens = max_tokens
        self._on_preempted = on_preempted
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))

    def plan(self) -> RankPlan:
        """Decides what the running sequences do in the next step, and takes the pages for it: decodes first, then prefill chunks in order."""
        pool, page_size = self.pool, self.pool.page_size
        running = list(self.running)  # preemption takes from the other one, always behind the sequence in hand and so never one that is scheduled
        num_pending = [len(sequence.token_ids) - sequence.num_computed_tokens for sequence in running]
        plan = RankPlan(self._max_tokens - num_pending.count(1))
        decodes = plan.decodes
        for sequence, pending in zip(running, num_pending, strict=True):
            if plan.is_short and sequence.status is not SequenceStatus.RUNNING:
                continue
            start = sequence.num_computed_tokens
            if pending == 1:
                if start == len(sequence.page_ids) * page_size and not self._grow(sequence, 1, plan):
                    continue
                sequence.num_computed_tokens = start + 1
                decodes.append(ScheduledSequence(sequence, start, 1, True))
            elif pending > 1:
                num_tokens = self._fit_chunk(sequence, min(pending, plan.budget), plan)
                plan.num_reserved += pool.pages_for(start + pending) - len(sequence.page_ids)
                if num_tokens > 0:
                    plan.budget -= num_tokens
                    plan.add(_take(sequence, num_tokens))
        return plan

    def room_for(self, sequence: Sequence, plan: RankPlan) -> int | None:
        """Whether a waiting sequence can start in this step: a slot, a token, and pages for all the tokens it has, not just for the first chunk.

        Without those pages a preempted sequence would come back at once, only to be preempted again before it has caught up.

        Returns:
            Pages that would stay free, more being better; ``None`` if it cannot.
        """
        if plan.is_short or plan.budget <= 0 or not self._free_slots:
            return None
        headroom = self.pool.num_pages // _HEADROOM_DIVISOR if self.running else 0
        num_left = self.pool.num_free - plan.num_reserved - self.pool.pages_for(len(sequence.token_ids))
        return num_left if num_left >= headroom else None

    def start(self, sequence: Sequence, plan: RankPlan) -> None:
        """Starts a sequence that ``room_for`` has room for."""
        sequence.status = SequenceStatus.RUNNING
        sequence.rank = self.index
        sequence.slot = self._free_slots.pop()
        bisect.insort(self.running, sequence, key=_order)
        num_tokens = min(len(sequence.token_ids), plan.budget)
        has_room = self._grow(sequence, self.pool.pages_for(num_tokens), plan)
        assert has_room
        plan.budget -= num_tokens
        plan.num_reserved += self.pool.pages_for(len(sequence.token_ids)) - len(sequence.page_ids)
        plan.add(_take(sequence, num_tokens))

    def remove(self, sequence: Sequence) -> None:
        """Takes a running sequence out; its pages and slot are free at once. Its status is the caller's to change."""
        index = bisect.bisect_left(self.running, sequence.order, key=_order)
        assert self.running[index] is sequence
        del self.running[index]
        self.pool.release(sequence.page_ids)
        sequence.page_ids = []
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    def preempt(self, sequence: Sequence) -> None:
        """Takes everything from a running sequence and hands it back."""
        self.remove(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self._on_preempted(sequence)

    def check_integrity(self) -> None:
        """Recomputes the books from the sequences' own state.

        Raises:
            AssertionError: A page or slot is leaked or owned twice, or a sequence's state contradicts where it is kept.
        """
        for sequence in self.running:
            assert sequence.status is SequenceStatus.RUNNING and sequence.rank == self.index
            assert 0 < sequence.num_computed_tokens <= len(sequence.token_ids)
            assert len(sequence.page_ids) == self.pool.pages_for(sequence.num_computed_tokens)
        assert [sequence.order for sequence in self.running] == sorted(sequence.order for sequence in self.running)
        slots = [sequence.slot for sequence in self.running]
        assert sorted(slots + self._free_slots) == list(range(self._max_num_seqs)), "sequence slots are leaked or owned twice"
        self.pool.check_integrity(sequence.page_ids for sequence in self.running)

    def _fit_chunk(self, sequence: Sequence, num_tokens: int, plan: RankPlan) -> int:
        """Takes pages for a chunk of up to ``num_tokens`` tokens. Returns the tokens that found room; 0 for none."""
        if num_tokens <= 0:
            return 0
        pool, start = self.pool, sequence.num_computed_tokens
        missing = pool.pages_for(start + num_tokens) - len(sequence.page_ids)
        if not self._make_room(sequence, missing, plan):
            missing = pool.num_free
            num_tokens = (len(sequence.page_ids) + missing) * pool.page_size - start
        if num_tokens > 0:
            has_room = self._grow(sequence, missing, plan)
            assert has_room
        return num_tokens

    def _grow(self, sequence: Sequence, num_pages: int, plan: RankPlan) -> bool:
        if not self._make_room(sequence, num_pages, plan):
            return False
        page_ids = self.pool.allocate(num_pages)
        assert page_ids is not None
        sequence.page_ids += page_ids
        return True

    def _make_room(self, sequence: Sequence, num_pages: int, plan: RankPlan) -> bool:
        """Preempts sequences behind this one until ``num_pages`` are free. Returns whether they are."""
        while self.pool.num_free < num_pages:
            plan.is_short = True
            behind = self.running[bisect.bisect_right(self.running, sequence.order, key=_order) :]
            if not behind:
                return False
            self.preempt(min(behind, key=_progress))
        return True


def _order(sequence: Sequence) -> tuple[float, int]:
    return sequence.order


def _progress(sequence: Sequence) -> tuple[int, float, int]:
    """Tokens that recomputing would cost; of equals the last in order is the least."""
    key, arrival = sequence.order
    return sequence.num_computed_tokens, -key, -arrival


def _take(sequence: Sequence, num_tokens: int) -> ScheduledSequence:
    """Books the next ``num_tokens`` tokens of a sequence that has the pages for them."""
    start = sequence.num_computed_tokens
    sequence.num_computed_tokens = start + num_tokens
    return ScheduledSequence(sequence, start, num_tokens, start + num_tokens == len(sequence.token_ids))

"""One data rank as the host sees it: its pages, prefix cache, sequence slots and running sequences. The scheduler decides which sequences it gets."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Callable

from jaxserve.engine.pages.pool import PagePool
from jaxserve.engine.pages.prefix_cache.choice import MakePrefixCache
from jaxserve.engine.pages.prefix_cache.interface import Match
from jaxserve.engine.scheduling.chunking import Chunking
from jaxserve.engine.scheduling.preemption import Preemption
from jaxserve.engine.scheduling.schedule import NO_MOVES, PageMoves, RankSchedule, ScheduledSequence
from jaxserve.engine.scheduling.sequence import Sequence, SequenceStatus, by_order
from jaxserve.engine.scheduling.swap_space import SwapSpace

_WHOLE_STEPS = Chunking()

_HEADROOM_DIVISOR = 100
"""A sequence is admitted beside others only if 1/100 of the pool stays free; otherwise the next decodes would preempt it at once."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pending:
    """The tokens that a rank's running sequences have ready for the next step. Decodes run in every step; prefills share what is left of the token budget.

    Args:
        decodes: The sequences whose tokens are a decode, in order, and the number of these tokens.
        in_need: The sequences that need a decision, in order: decodes that need pages, and prefills. Each with the number of its tokens, and whether they are
            a decode.
        num_decode_tokens: Number of tokens of all decodes.
    """

    decodes: list[tuple[Sequence, int]]
    in_need: list[tuple[Sequence, int, bool]]
    num_decode_tokens: int


@dataclasses.dataclass(slots=True)
class RankPlan:
    """A rank's part of the next step while it is being planned.

    Args:
        max_tokens: Token budget of the step.
        budget: The part of it that is left for prefill chunks, in units of the cost of a sequence's first token (see ``chunking``). The decodes' part has been
            taken off.
        num_tokens: Tokens of the step so far. Decodes are counted from the start.
        chunking: Decides the length of prefill chunks.
        num_reserved: Pages that running prefills will still need for the tokens they have.
        num_behind: Tokens of running prefills that the step has no room for.
        is_short: Whether the pages ran out; nothing is admitted in this step then.
        decodes: Sequences that run one token.
        chunks: Sequences that run a prefill chunk of two or more tokens.
        swap_ins: Pairs (host page, page) of pages that come back from host memory.
        copies: Pairs (source, destination) of pages to be copied; the sources are held until the plan is finished.
    """

    max_tokens: int
    budget: int
    num_tokens: int
    chunking: Chunking
    num_reserved: int = 0
    num_behind: int = 0
    is_short: bool = False
    decodes: list[ScheduledSequence] = dataclasses.field(default_factory=list[ScheduledSequence])
    chunks: list[ScheduledSequence] = dataclasses.field(default_factory=list[ScheduledSequence])
    swap_ins: list[tuple[int, int]] = dataclasses.field(default_factory=list[tuple[int, int]])
    copies: list[tuple[int, int]] = dataclasses.field(default_factory=list[tuple[int, int]])

    @property
    def num_ahead(self) -> int:
        """Tokens that would run before those of a sequence admitted now."""
        return self.max_tokens - self.budget + self.num_behind

    def fit(self, context: int, num_pending: int) -> int:
        """The number of tokens of the next chunk, at most ``num_pending``. Takes its cost from the budget."""
        num_tokens, cost = self.chunking.fit(num_pending, self.budget, context=context, num_beside=self.num_tokens)
        self.budget -= cost
        return num_tokens

    def add(self, scheduled: ScheduledSequence) -> None:
        """Adds a sequence's tokens, whose pages have been taken, to the plan."""
        self.num_tokens += scheduled.num_tokens
        (self.decodes if scheduled.num_tokens == 1 else self.chunks).append(scheduled)


@dataclasses.dataclass(frozen=True, slots=True)
class Room:
    """The room that a rank has for a waiting sequence.

    Args:
        match: The pages of the sequence that the rank's prefix cache holds.
        num_cached_tokens: Tokens that the match covers.
        num_left: Pages that would stay available (free, or cached and held by no sequence) if the sequence started.
    """

    match: Match
    num_cached_tokens: int
    num_left: int


class Rank:
    """Runs its sequences in their order: earlier ones take pages first, and when pages run out they take them from later ones.

    Of the later sequences, the one with the least progress is preempted first and gives up all its pages. A sequence that has none behind it keeps its pages
    and waits. So the first sequence progresses in every step, and since each sequence alone fits the pool (``requests.door`` refuses others), each finishes.

    Args:
        index: Index of the rank, from 0.
        num_pages: Pages of its pool.
        page_size: Tokens that one page holds.
        max_num_seqs: Sequence slots.
        max_tokens: Token budget of a step.
        make_cache: Makes the prefix cache of its pool.
        chunking: How long chunks are while others decode.
        can_copy_pages: Whether ``PageMoves.copies`` are carried out.
        num_host_pages: Pages of host memory for preempted sequences; 0 for none.
        preemption: Decides whether a preempted sequence is swapped to host memory.
        on_preempted: Called with each sequence that lost its pages; must queue it if its status is WAITING.

    Attributes:
        pool: The rank's pages.
        cache: The prefix cache of these pages.
        running: The running sequences, sorted by ``order``.
        swap_space: The rank's host memory.
        num_page_copies: Pages copied since the start.
    """

    def __init__(
        self,
        index: int,
        *,
        num_pages: int,
        page_size: int,
        max_num_seqs: int,
        max_tokens: int,
        make_cache: MakePrefixCache,
        chunking: Chunking,
        can_copy_pages: bool,
        num_host_pages: int,
        preemption: Preemption,
        on_preempted: Callable[[Sequence], None],
    ) -> None:
        self.index = index
        self.pool = PagePool(num_pages, page_size)
        self.cache = make_cache(self.pool)
        self.running: list[Sequence] = []
        self.swap_space = SwapSpace(num_host_pages, page_size)
        self.num_page_copies = 0
        self._preemption = preemption
        self._chunking = chunking
        self._can_copy_pages = can_copy_pages
        self._max_num_seqs = max_num_seqs
        self._max_tokens = max_tokens
        self._on_preempted = on_preempted
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._tenures = itertools.count()
        self._now_s = 0.0

    def pending(self) -> Pending:
        """The tokens that the running sequences have ready for the next step."""
        decodes: list[tuple[Sequence, int]] = []
        in_need: list[tuple[Sequence, int, bool]] = []
        page_size, num_decode_tokens = self.pool.page_size, 0
        for sequence in self.running:
            num_tokens = sequence.num_pending_tokens
            if not num_tokens:
                continue
            if is_decode := num_tokens <= sequence.decode_width:
                num_decode_tokens += num_tokens
                decodes.append((sequence, num_tokens))
                if sequence.num_scheduled_tokens + num_tokens <= len(sequence.page_ids) * page_size:
                    continue
            in_need.append((sequence, num_tokens, is_decode))
        return Pending(decodes, in_need, num_decode_tokens)

    def plan(self, pending: Pending, now_s: float, *, beside_decodes: bool) -> RankPlan:
        """Decides what the running sequences do in the next step, and takes the pages for it.

        Running sequences come first, in order, then sequences that come back from host memory. The token budget serves all decodes before any prefill chunk.

        Args:
            pending: The result of ``pending``, called just before.
            now_s: The time, in seconds.
            beside_decodes: Whether any rank has sequences that decode.
        """
        pool = self.pool
        self._now_s = now_s
        num_decode_tokens = pending.num_decode_tokens
        plan = RankPlan(self._max_tokens, self._max_tokens - num_decode_tokens, num_decode_tokens, self._chunking if beside_decodes else _WHOLE_STEPS)
        starved: set[Sequence] = set()
        for sequence, num_pending, is_decode in pending.in_need:
            if plan.is_short and sequence.status is not SequenceStatus.RUNNING:
                continue  # preempted for one before it
            start = sequence.num_scheduled_tokens
            if is_decode:
                if not self._grow(sequence, pool.pages_for(start + num_pending) - len(sequence.page_ids), plan):
                    starved.add(sequence)
            else:
                num_tokens = self._take_pages(sequence, plan.fit(start, num_pending), plan)
                plan.num_reserved += pool.pages_for(start + num_pending) - len(sequence.page_ids)
                plan.num_behind += num_pending - num_tokens
                if num_tokens > 0:
                    plan.add(_take(sequence, num_tokens))
        decodes = pending.decodes
        if plan.is_short:
            decodes = [row for row in decodes if row[0].status is SequenceStatus.RUNNING and row[0] not in starved]
        plan.decodes += [_take(sequence, num_tokens) for sequence, num_tokens in decodes]
        self._swap_in(plan)
        return plan

    def room_for(self, sequence: Sequence, plan: RankPlan) -> Room | None:
        """The room for a waiting sequence in this step; ``None`` if it cannot start.

        It needs a slot, budget for a token, and pages for all the tokens it has, not only for the first chunk: otherwise a preempted sequence would come back
        at once, only to be preempted again before it has caught up.
        """
        swapped = self.swap_space.sequences
        if not self._is_open(plan) or (swapped and swapped[0].order < sequence.order):
            return None
        pool, headroom = self.pool, self._headroom
        num_spare = pool.num_available - plan.num_reserved - headroom - pool.pages_for(len(sequence.token_ids))
        match = self.cache.match(sequence.cache_path, len(sequence.token_ids) - 1)  # the last token is always computed: it gives the logits
        matches = (match, Match(match.page_ids)) if match.copy_page_id is not None else (match,)
        for match in matches if self._can_copy_pages else matches[-1:]:
            num_idle = sum(not pool.is_held(page_id) for page_id in match.all_page_ids)
            num_left = num_spare + len(match.page_ids) - num_idle
            if num_left >= 0:
                return Room(match, len(match.page_ids) * pool.page_size + match.num_copied, num_left + headroom)
        return None

    def start(self, sequence: Sequence, plan: RankPlan, room: Room) -> None:
        """Starts a sequence in the room that ``room_for`` found."""
        self._share(sequence, plan, room.match)
        sequence.num_scheduled_tokens = room.num_cached_tokens
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = min(room.num_cached_tokens, sequence.num_prompt_tokens)
        self._run(sequence, plan)

    def finish_plan(self, plan: RankPlan, *, runs: bool) -> RankSchedule:
        """The rank's part of the schedule, from its finished plan. Pages that its chunks fill can be shared from the next step on.

        Args:
            plan: The plan made by ``plan``.
            runs: Whether the step has sequences, of this rank or another. If not, no step is dispatched, and pages to be swapped out stay for the next
                schedule.
        """
        for scheduled in plan.chunks:
            sequence, end = scheduled.sequence, scheduled.start + scheduled.num_tokens
            num_full = end // self.pool.page_size
            if num_full > scheduled.start // self.pool.page_size:
                self.cache.insert(sequence.cache_path, sequence.page_ids[:num_full], self._now_s, release=False)
        self.pool.release(source for source, _ in plan.copies)
        num_tokens = len(plan.decodes) + sum(scheduled.num_tokens for scheduled in plan.chunks)
        swap_outs = self.swap_space.take_moves() if runs else ()
        moves = PageMoves(swap_outs, tuple(plan.swap_ins), tuple(plan.copies)) if swap_outs or plan.swap_ins or plan.copies else NO_MOVES
        return RankSchedule((*plan.decodes, *plan.chunks), len(plan.decodes), num_tokens, moves)

    def remove(self, sequence: Sequence, *, is_sound: bool = True, keep_s: float = 0.0) -> None:
        """Takes a running sequence out; its pages and slot are free at once. The caller changes its status.

        Args:
            sequence: A running sequence.
            is_sound: Whether its pages hold the right keys and values; only then are they cached.
            keep_s: Seconds into the future to which the pages' last use is dated, so that they are evicted later than others; 0 for none.
        """
        if is_sound:
            num_full = min(sequence.num_scheduled_tokens, len(sequence.token_ids)) // self.pool.page_size
            keep_until_s = self._now_s + keep_s if keep_s else 0.0
            self.cache.insert(sequence.cache_path, sequence.page_ids[:num_full], self._now_s, release=True, keep_until_s=keep_until_s)
        index = bisect.bisect_left(self.running, sequence.order, key=by_order)
        assert self.running[index] is sequence
        del self.running[index]
        self.pool.release(sequence.page_ids)
        sequence.page_ids = []
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    def preempt(self, sequence: Sequence) -> None:
        """Takes slot and pages from a running sequence. Its keys and values go to host memory, or are recomputed when it runs again."""
        num_pages = len(sequence.page_ids)
        num_shared = next((index for index, page_id in enumerate(sequence.page_ids) if not self.pool.is_shared(page_id)), num_pages)
        num_lost = sequence.num_scheduled_tokens - num_shared * self.pool.page_size  # others keep the shared pages in the prefix cache
        swaps = self.swap_space.has_room(num_pages) and self._preemption.swaps(num_pages=num_pages, num_tokens=num_lost)
        if swaps:
            self.swap_space.swap_out(sequence)
        self.remove(sequence, is_sound=not swaps)
        sequence.num_preemptions += 1
        if swaps:
            sequence.status = SequenceStatus.SWAPPED
        else:
            sequence.status = SequenceStatus.WAITING
            sequence.num_scheduled_tokens = 0
        self._on_preempted(sequence)

    def check_integrity(self) -> None:
        """Recomputes who holds which page and slot from the sequences' own state, and compares that with the rank's records.

        Raises:
            AssertionError: A page or slot is leaked or owned twice, or a sequence's state contradicts where it is kept.
        """
        for sequence in self.running:
            assert sequence.status is SequenceStatus.RUNNING and sequence.rank == self.index
            assert 0 < sequence.num_scheduled_tokens <= sequence.num_tokens
            assert len(sequence.page_ids) == self.pool.pages_for(sequence.num_scheduled_tokens)
        assert [sequence.order for sequence in self.running] == sorted(sequence.order for sequence in self.running)
        slots = [sequence.slot for sequence in self.running]
        assert sorted(slots + self._free_slots) == list(range(self._max_num_seqs)), "sequence slots are leaked or owned twice"
        self.pool.check_integrity((sequence.page_ids for sequence in self.running), self.cache.cached_page_ids())
        self.cache.check_integrity()
        for sequence in self.swap_space.sequences:
            assert sequence.status is SequenceStatus.SWAPPED and sequence.rank == self.index and sequence.slot == -1 and not sequence.page_ids
            assert 0 < sequence.num_scheduled_tokens < sequence.num_tokens
            assert len(sequence.host_page_ids) == self.pool.pages_for(sequence.num_scheduled_tokens)
        self.swap_space.check_integrity()

    @property
    def _headroom(self) -> int:
        """Pages that must stay available when a sequence starts."""
        return self.pool.num_pages // _HEADROOM_DIVISOR if self.running else 0

    def _is_open(self, plan: RankPlan) -> bool:
        """Whether another sequence can start in this step at all."""
        return not plan.is_short and plan.budget > 0 and bool(self._free_slots)

    def _swap_in(self, plan: RankPlan) -> None:
        """Brings sequences back from host memory, in order, as long as there is room for all the tokens that the next one has."""
        pool, swapped = self.pool, self.swap_space.sequences
        while swapped and self._is_open(plan):
            sequence = swapped[0]
            num_pages = pool.pages_for(len(sequence.token_ids))
            if sequence.num_in_flight or num_pages + plan.num_reserved + self._headroom > pool.num_available:
                return
            sequence.page_ids = self._allocate(len(sequence.host_page_ids))
            plan.swap_ins += self.swap_space.swap_in(sequence, sequence.page_ids)
            self._run(sequence, plan)

    def _run(self, sequence: Sequence, plan: RankPlan) -> None:
        """Makes a sequence, which holds the pages of its computed tokens, a running one, with as many tokens in this step as the budget allows."""
        sequence.status = SequenceStatus.RUNNING
        sequence.rank = self.index
        sequence.slot = self._free_slots.pop()
        sequence.tenure = next(self._tenures)
        bisect.insort(self.running, sequence, key=by_order)
        start, end = sequence.num_scheduled_tokens, len(sequence.token_ids)
        num_tokens = plan.fit(start, end - start)
        has_room = self._grow(sequence, self.pool.pages_for(start + num_tokens) - len(sequence.page_ids), plan)
        assert has_room
        plan.num_reserved += self.pool.pages_for(end) - len(sequence.page_ids)
        plan.num_behind += end - start - num_tokens
        plan.add(_take(sequence, num_tokens))

    def _take_pages(self, sequence: Sequence, num_tokens: int, plan: RankPlan) -> int:
        """Takes pages for a chunk of up to ``num_tokens`` tokens. Returns the number of tokens that found room; 0 for none."""
        if num_tokens <= 0:
            return 0
        pool, start = self.pool, sequence.num_scheduled_tokens
        missing = pool.pages_for(start + num_tokens) - len(sequence.page_ids)
        if not self._make_room(sequence, missing, plan):
            missing = pool.num_available
            num_tokens = (len(sequence.page_ids) + missing) * pool.page_size - start
        if num_tokens > 0:
            has_room = self._grow(sequence, missing, plan)
            assert has_room
        return num_tokens

    def _grow(self, sequence: Sequence, num_pages: int, plan: RankPlan) -> bool:
        if not self._make_room(sequence, num_pages, plan):
            return False
        sequence.page_ids += self._allocate(num_pages)
        return True

    def _allocate(self, num_pages: int) -> list[int]:
        """Takes pages that are available."""
        if num_pages > self.pool.num_free:
            self.cache.evict(num_pages - self.pool.num_free)
        page_ids = self.pool.allocate(num_pages)
        assert page_ids is not None
        return page_ids

    def _share(self, sequence: Sequence, plan: RankPlan, match: Match) -> None:
        """Gives a sequence the cached pages of its prefix, and a page for a copy if the match has one."""
        self.pool.share(match.all_page_ids)
        self.cache.use(sequence.cache_path, len(match.page_ids), self._now_s)
        sequence.page_ids = list(match.page_ids)
        if match.copy_page_id is not None:
            (copy_page_id,) = self._allocate(1)
            sequence.page_ids.append(copy_page_id)
            plan.copies.append((match.copy_page_id, copy_page_id))
            self.num_page_copies += 1

    def _make_room(self, sequence: Sequence, num_pages: int, plan: RankPlan) -> bool:
        """Preempts sequences behind this one until ``num_pages`` pages are available. Returns whether they are."""
        while self.pool.num_available < num_pages:
            plan.is_short = True
            behind = self.running[bisect.bisect_right(self.running, sequence.order, key=by_order) :]
            if not behind:
                return False
            self.preempt(min(behind, key=_progress))
        return True


def _progress(sequence: Sequence) -> tuple[int, float, int]:
    """Key by which the least advanced sequence is found: its scheduled tokens; of equal ones the last in order is the least."""
    key, arrival = sequence.order
    return sequence.num_scheduled_tokens, -key, -arrival


def _take(sequence: Sequence, num_tokens: int) -> ScheduledSequence:
    """Marks the next ``num_tokens`` tokens of a sequence, which has the pages for them, as scheduled. If they are its last, it samples one token after them."""
    start = sequence.num_scheduled_tokens
    end = sequence.num_scheduled_tokens = start + num_tokens
    if end < len(sequence.token_ids) + sequence.num_in_flight:
        return ScheduledSequence(sequence, start, num_tokens, 0)
    sequence.num_in_flight += 1
    return ScheduledSequence(sequence, start, num_tokens, 1)

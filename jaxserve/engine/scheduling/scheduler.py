"""Which tokens run in the next step, and which sequence holds which pages and slot on which data rank. Deterministic, plain Python; imports no jax.

Why pages and slots are free the moment a sequence ends or is preempted, even with a step of it in flight: the pool and the per-sequence state are
donated from each step to the next, so steps touch them strictly in the order of dispatch. A new owner's first step is dispatched after the old
owner's last one, hence its writes land after the stray ones, and a sequence reads only entries of its pages that it wrote itself. The tokens of the
old owner's last steps come back to ``update``, which drops those of finished sequences.

A step may be scheduled while others are in flight: it counts on the tokens that they will give, whose values only the device has. A sequence that has lost
its pages meanwhile still gets its token, and is not admitted again before.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from types import MappingProxyType

from jaxserve.config import SchedulerConfig
from jaxserve.engine.pages.prefix_cache.choice import MakePrefixCache
from jaxserve.engine.pages.prefix_cache.interface import NoPrefixCache
from jaxserve.engine.scheduling.batching import make_batching
from jaxserve.engine.scheduling.chunking import Chunking
from jaxserve.engine.scheduling.preemption import Preemption
from jaxserve.engine.scheduling.queue_policy import make_key, make_queue
from jaxserve.engine.scheduling.rank import Rank, RankPlan, Room
from jaxserve.engine.scheduling.schedule import RunnerCosts, Schedule, SequenceResult
from jaxserve.engine.scheduling.sequence import Lag, Sequence, SequenceStatus
from jaxserve.request import FinishReason

_SEQUENCE_TOKENS = 64
"""What a running sequence counts for when ranks are compared, in prompt tokens: it takes a token of every step to come."""


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A rank that has room for a sequence."""

    rank: Rank
    plan: RankPlan
    room: Room


Placement = Callable[[Sequence, SequenceOf[Candidate]], Candidate]
"""Chooses the rank of a sequence that is admitted, among those with room."""


def soonest(sequence: Sequence, candidates: SequenceOf[Candidate]) -> Candidate:
    """The rank that would finish its prompt soonest: few tokens ahead of it, few of its own that are not cached, few sequences that run beside it.

    So the longest cached prefix decides until it is outweighed by load. Of equals the rank where most pages stay available, then the first.
    """
    num_tokens = len(sequence.token_ids)

    def cost(candidate: Candidate) -> tuple[int, int, int]:
        num_ahead = candidate.plan.num_ahead + _SEQUENCE_TOKENS * len(candidate.rank.running)
        return num_ahead + num_tokens - candidate.room.num_cached_tokens, -candidate.room.num_left, candidate.rank.index

    return min(candidates, key=cost)


class Scheduler:
    """Continuous batching with chunked prefill over any number of data ranks.

    Every sequence has a place in one order, for good: its ``order`` (see ``queue_policy``). Each rank runs its sequences in this order (see
    :class:`Rank`), and one queue holds those that wait. The queue's head is admitted as soon as some rank has room for it, and is placed only then; nobody
    overtakes it. A preempted sequence goes back to its place in the queue, may come to another rank, and recomputes all its tokens as if they were a
    prompt. As the first sequence of a rank moves in every step, every sequence finishes.

    The cost of a step grows with the running sequences only.

    Args:
        num_pages: Pages of each rank's pool.
        page_size: Tokens that one page holds.
        config: Limits of each rank: ``max_num_seqs`` bounds its running sequences, ``max_tokens_per_step`` the tokens of a step.
        num_ranks: Data ranks.
        make_cache: Makes a rank's prefix cache.
        chunking: How long chunks are while others decode; without one they fill the step.
        can_copy_pages: Whether the runner copies pages.
        num_host_pages: Host pages of each rank, for preempted sequences.
        costs: What the runner measured.
        session_ttl_s: How much longer than others the pages of a sequence with a session are kept.
        weights: Of the tenants, by name, for ``order=fair``.
        place: Chooses between ranks.

    Attributes:
        ranks: The data ranks.
        num_preemptions: Since the start.
        num_queued: Sequences that have not run yet.
        num_queued_tokens: Tokens of their prompts.
        num_queued_tokens_of: The same by tenant.
        num_hit_tokens: Prompt tokens found in a prefix cache since the start; every prompt counts once, when it is first admitted.
        num_miss_tokens: Prompt tokens not found there.

    Raises:
        ConfigError: A preferred batch that is larger than all slots.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        config: SchedulerConfig,
        *,
        num_ranks: int = 1,
        make_cache: MakePrefixCache = lambda _: NoPrefixCache(),
        chunking: Chunking = Chunking(),
        can_copy_pages: bool = True,
        num_host_pages: int = 0,
        costs: RunnerCosts | None = None,
        session_ttl_s: float = 0.0,
        weights: Mapping[str, float] = MappingProxyType({}),
        place: Placement = soonest,
    ) -> None:
        assert 1 <= config.max_num_seqs <= config.max_tokens_per_step, "Config has checked it"
        self.ranks = tuple(
            Rank(
                index,
                num_pages=num_pages,
                page_size=page_size,
                max_num_seqs=config.max_num_seqs,
                max_tokens=config.max_tokens_per_step,
                make_cache=make_cache,
                chunking=chunking,
                can_copy_pages=can_copy_pages,
                num_host_pages=num_host_pages,
                preemption=Preemption(config.preemption, costs),
                on_preempted=self._on_preempted,
            )
            for index in range(num_ranks)
        )
        self.num_preemptions = 0
        self.num_queued = 0
        self.num_queued_tokens = 0
        self.num_queued_tokens_of: Counter[str] = Counter()
        self.num_hit_tokens = 0
        self.num_miss_tokens = 0
        self._session_ttl_s = session_ttl_s
        self._waiting = make_queue(config.order, weights)
        self._key = make_key(config.order, ageing_s=config.ageing_s)
        self._num_slots = num_ranks * config.max_num_seqs
        self._batching = make_batching(config, self._num_slots)
        self._place = place
        self._paused: set[Sequence] = set()
        self._num_holding = 0  # sequences with ``Lag.HOLDS_STEP``
        self._arrivals = itertools.count()
        self._preempted: list[Sequence] = []  # since the last schedule

    @property
    def waiting(self) -> Iterable[Sequence]:
        """Those that wait to be admitted, in no order."""
        return self._waiting

    @property
    def paused(self) -> Iterable[Sequence]:
        return self._paused

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return sum(len(rank.running) for rank in self.ranks)

    @property
    def num_swapped(self) -> int:
        return sum(len(rank.swap_space.sequences) for rank in self.ranks)

    @property
    def num_paused(self) -> int:
        return len(self._paused)

    @property
    def num_swap_outs(self) -> int:
        """Preemptions since the start that went to host memory."""
        return sum(rank.swap_space.num_swap_outs for rank in self.ranks)

    @property
    def num_pages(self) -> int:
        """Pages of all ranks."""
        return sum(rank.pool.num_pages for rank in self.ranks)

    @property
    def num_free_pages(self) -> int:
        """Pages that no sequence holds, of all ranks; those that are cached can be evicted."""
        return sum(rank.pool.num_available for rank in self.ranks)

    @property
    def num_idle_pages(self) -> int:
        """Pages that no sequence holds and that are cached, of all ranks."""
        return sum(rank.pool.num_idle for rank in self.ranks)

    @property
    def num_cached_pages(self) -> int:
        """Pages that are cached, held or not, of all ranks."""
        return sum(rank.pool.num_cached for rank in self.ranks)

    @property
    def num_evicted_pages(self) -> int:
        """Cached pages given up for others since the start."""
        return sum(rank.cache.num_evicted for rank in self.ranks)

    @property
    def num_page_copies(self) -> int:
        """Cached pages copied since the start, for a sequence that goes on within one."""
        return sum(rank.num_page_copies for rank in self.ranks)

    @property
    def num_free_slots(self) -> int:
        """Sequences that can start in the next step, as far as slots go."""
        return self._num_slots - self.num_running

    @property
    def has_work(self) -> bool:
        return len(self._waiting) > 0 or any(rank.running or rank.swap_space.sequences for rank in self.ranks)

    @property
    def is_held(self) -> bool:
        """Whether a sequence forbids that a step be scheduled before the host knows its token in flight (``Lag.HOLDS_STEP``)."""
        return self._num_holding > 0 and any(sequence.lag is Lag.HOLDS_STEP and sequence.num_in_flight for rank in self.ranks for sequence in rank.running)

    @property
    def wake_at_s(self) -> float:
        """When ``schedule``, having found nothing to run, may find something though nothing has happened since; infinity for never."""
        return self._batching.wake_at_s(self._waiting.peek())

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence. Its prompt and ``max_tokens`` together must fit the pool of one rank."""
        pool = self.ranks[0].pool
        assert sequence.status is SequenceStatus.WAITING and sequence not in self._waiting and sequence.num_scheduled_tokens == 0
        assert pool.pages_for(sequence.num_prompt_tokens + sequence.max_tokens) <= pool.num_pages
        self._count_queued(sequence, 1)
        sequence.order = (self._key(sequence), next(self._arrivals))
        self._num_holding += sequence.lag is Lag.HOLDS_STEP
        self._waiting.push(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a sequence in whatever state it is; its pages and slot are free at once. Does nothing to one that has ended already."""
        if sequence.status is SequenceStatus.FINISHED:
            return
        if sequence.num_cached_tokens is None:
            self._count_queued(sequence, -1)
        keep_s = self._session_ttl_s if sequence.request.options.session_id is not None else 0.0
        self._detach(sequence, is_sound=reason != "error", keep_s=keep_s)
        self._num_holding -= sequence.lag is Lag.HOLDS_STEP
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason

    def schedule(self, now_s: float = 0.0) -> Schedule:
        """Decides the next step and takes the pages it needs: what runs already goes first, then waiting sequences are admitted.

        May be called again before ``update``: steps in flight are counted on to give each sequence that samples its token. One whose last token is in
        flight, or that needs the host to know it (``Sequence.lag``), is left out.

        Args:
            now_s: The time, of a monotonic clock.

        Returns:
            The step; without sequences only if there is nothing to run.
        """
        self._preempted = []
        pending = [rank.pending() for rank in self.ranks]
        beside_decodes = any(each.num_decode_tokens for each in pending)
        plans = [rank.plan(each, now_s, beside_decodes=beside_decodes) for rank, each in zip(self.ranks, pending, strict=True)]
        self._admit(plans, now_s)
        runs = any(plan.decodes or plan.chunks for plan in plans)
        return Schedule(tuple(rank.finish_plan(plan, runs=runs) for rank, plan in zip(self.ranks, plans, strict=True)), tuple(self._preempted))

    def update(self, schedule: Schedule, results: SequenceOf[SequenceResult]) -> list[tuple[Sequence, SequenceResult]]:
        """Takes the outcome of a step, in the order of dispatch. A sequence preempted or paused meanwhile gets its tokens, one that has ended none.

        Args:
            schedule: What ``schedule`` returned.
            results: One for each of its sequences.

        Returns:
            The sequences that have more tokens, and what they got, in the order of the schedule.
        """
        grown: list[tuple[Sequence, SequenceResult]] = []
        charge = self._waiting.charge
        for scheduled, result in zip(schedule.sequences, results, strict=True):
            if num_samples := scheduled.num_samples:
                sequence, token_ids = scheduled.sequence, result.token_ids
                sequence.num_in_flight -= num_samples
                if token_ids and sequence.status is not SequenceStatus.FINISHED:
                    sequence.token_ids += token_ids
                    grown.append((sequence, result))
                    charge(sequence, len(token_ids))
        return grown

    def lose(self, schedule: Schedule) -> None:
        """Takes it that a step in flight gives nothing: it has failed. What it was to compute is lost too: call ``forget_pools`` after this."""
        for scheduled in schedule.sequences:
            scheduled.sequence.num_in_flight -= scheduled.num_samples

    def forget_pools(self) -> None:
        """Sends every sequence back to the queue and empties the prefix caches: for when the pools' content is lost, or the weights change."""
        for rank in self.ranks:
            for sequence in [*rank.running, *rank.swap_space.sequences]:
                self._detach(sequence, is_sound=False)
                sequence.num_scheduled_tokens = 0
                sequence.num_preemptions += 1
                sequence.status = SequenceStatus.WAITING
                self._on_preempted(sequence)
            rank.cache.clear()

    def truncate(self, sequence: Sequence, num_generated_tokens: int) -> None:
        """Forgets the generated tokens after the first so many, for a sequence that is to end there: it cannot go on."""
        num_tokens = sequence.num_prompt_tokens + num_generated_tokens
        del sequence.token_ids[num_tokens:]
        del sequence.cache_path.digests[num_tokens // self.ranks[0].pool.page_size :]

    def pause(self, sequence: Sequence) -> None:
        """Stops a sequence until ``resume``, in whatever state it is; slot and pages are free at once, the pages' content stays in the prefix cache while
        nobody needs the room. Does nothing to one that is paused or has ended.
        """
        if sequence.status in (SequenceStatus.FINISHED, SequenceStatus.PAUSED):
            return
        if sequence.status is not SequenceStatus.WAITING:
            sequence.num_preemptions += 1
        self._detach(sequence)
        sequence.num_scheduled_tokens = 0
        sequence.status = SequenceStatus.PAUSED
        self._paused.add(sequence)

    def resume(self, sequence: Sequence) -> None:
        """Queues a paused sequence, at its old place. Does nothing to others."""
        if sequence.status is SequenceStatus.PAUSED:
            self._paused.remove(sequence)
            sequence.status = SequenceStatus.WAITING
            self._waiting.push(sequence)

    def check_integrity(self) -> None:
        """Recomputes the books of every rank and of the queue.

        Raises:
            AssertionError: A page or slot is leaked or owned twice, or a sequence's state contradicts where it is kept.
        """
        for rank in self.ranks:
            rank.check_integrity()
            assert not any(sequence in self._waiting for sequence in rank.running)
        self._waiting.check_integrity()
        queued = [sequence for sequence in itertools.chain(self._waiting, self._paused) if sequence.num_cached_tokens is None]
        num_tokens_of: Counter[str] = Counter()
        for sequence in queued:
            num_tokens_of[sequence.request.options.tenant] += sequence.num_prompt_tokens
        assert (self.num_queued, self.num_queued_tokens) == (len(queued), num_tokens_of.total())
        assert self.num_queued_tokens_of == num_tokens_of
        for sequence in itertools.chain(self._waiting, self._paused):
            assert sequence.status is (SequenceStatus.PAUSED if sequence in self._paused else SequenceStatus.WAITING)
            assert sequence.slot == -1 and not sequence.page_ids and sequence.num_scheduled_tokens == 0

    def _admit(self, plans: SequenceOf[RankPlan], now_s: float) -> None:
        """Starts waiting sequences in their order, until one finds no room."""
        queue, batching = self._waiting, self._batching
        head = queue.peek()
        batching.open(num_waiting=len(queue), num_running=self.num_running, num_slots=self._num_slots, head=head, now_s=now_s)
        while head is not None and not head.num_in_flight and batching.admits(head):
            chosen = self._rank_for(head, plans)
            if chosen is None:
                if any(plan.budget > 0 for plan in plans):
                    batching.close()
                return
            queue.remove(head)
            batching.admitted(head)
            queue.charge(head, len(head.token_ids) - chosen.room.num_cached_tokens)
            is_first_time = head.num_cached_tokens is None
            chosen.rank.start(head, chosen.plan, chosen.room)
            if is_first_time and head.num_cached_tokens is not None:
                head.scheduled_s = now_s
                self._count_queued(head, -1)
                self.num_hit_tokens += head.num_cached_tokens
                self.num_miss_tokens += head.num_prompt_tokens - head.num_cached_tokens
            head = queue.peek()

    def _rank_for(self, sequence: Sequence, plans: SequenceOf[RankPlan]) -> Candidate | None:
        rooms = ((rank, plan, rank.room_for(sequence, plan)) for rank, plan in zip(self.ranks, plans, strict=True))
        candidates = [Candidate(rank, plan, room) for rank, plan, room in rooms if room is not None]
        return self._place(sequence, candidates) if candidates else None

    def _count_queued(self, sequence: Sequence, number: int) -> None:
        """Counts the begin (1) or the end (-1) of a sequence's first wait."""
        num_tokens = number * sequence.num_prompt_tokens
        self.num_queued += number
        self.num_queued_tokens += num_tokens
        self.num_queued_tokens_of[sequence.request.options.tenant] += num_tokens

    def _on_preempted(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        self._preempted.append(sequence)
        if sequence.status is SequenceStatus.WAITING:
            self._waiting.push(sequence)

    def _detach(self, sequence: Sequence, *, is_sound: bool = True, keep_s: float = 0.0) -> None:
        """Takes a sequence out of where its status says it is, with all that it holds there. The status is the caller's to change."""
        if sequence.status is SequenceStatus.RUNNING:
            self.ranks[sequence.rank].remove(sequence, is_sound=is_sound, keep_s=keep_s)
        elif sequence.status is SequenceStatus.SWAPPED:
            self.ranks[sequence.rank].swap_space.drop(sequence)
        elif sequence.status is SequenceStatus.PAUSED:
            self._paused.remove(sequence)
        else:
            self._waiting.remove(sequence)

"""The scheduler: which tokens run in the next step, and which sequence holds which pages and slot on which data rank. Deterministic plain Python; no jax.

Pages and slots are free as soon as a sequence ends or is preempted, even while one of its steps is in flight. This is safe because each step hands the
pool and the per-sequence state to the next one (the arrays are donated), so steps use them strictly in the order of dispatch. The new owner's first step is
dispatched after the old owner's last one, so its writes come later, and a sequence reads only entries that it wrote itself or shares through the prefix
cache. The tokens of the old owner's last steps come back to ``update``, which drops those of finished sequences.

A step may be scheduled while others are in flight. It counts on the tokens that they will generate, whose values only the device knows. A sequence that
loses its pages meanwhile still gets its token in flight, and is not admitted again before that.
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
"""Number of prompt tokens that one running sequence counts as when the load of ranks is compared, since it takes a token of every step to come."""


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A rank that has room for a waiting sequence, with its plan of the step and that room."""

    rank: Rank
    plan: RankPlan
    room: Room


Placement = Callable[[Sequence, SequenceOf[Candidate]], Candidate]
"""Function that chooses the rank of a sequence from the candidates that have room for it."""


def soonest(sequence: Sequence, candidates: SequenceOf[Candidate]) -> Candidate:
    """The rank that would finish the sequence's prompt soonest, judged by the tokens ahead of it, its own tokens that are not cached, and the running
    sequences.

    So the longest cached prefix decides unless the load outweighs it. Of equal ranks, the one where most pages stay available is taken, then the first.
    """
    num_tokens = len(sequence.token_ids)

    def cost(candidate: Candidate) -> tuple[int, int, int]:
        num_ahead = candidate.plan.num_ahead + _SEQUENCE_TOKENS * len(candidate.rank.running)
        return num_ahead + num_tokens - candidate.room.num_cached_tokens, -candidate.room.num_left, candidate.rank.index

    return min(candidates, key=cost)


class Scheduler:
    """Schedules steps with continuous batching and chunked prefill over any number of data ranks.

    Every sequence has one fixed place among all, its ``order`` (see ``queue_policy``). Each rank runs its sequences in this order (see :class:`Rank`), and one
    queue holds those that wait. The queue's head is admitted as soon as some rank has room for it, and gets its rank only then; no other sequence overtakes
    it. A preempted sequence either waits in host memory or goes back to its place in the queue, from where it may come to another rank and recomputes its
    tokens as if they were a prompt. Since the first sequence of a rank progresses in every step, every sequence finishes.

    The host's work for a step grows with the number of running sequences only, not with the number that wait.

    Args:
        num_pages: Pages of each rank's pool.
        page_size: Tokens that one page holds.
        config: Limits of each rank: ``max_num_seqs`` bounds its running sequences, ``max_tokens_per_step`` the tokens of a step.
        num_ranks: Data ranks.
        make_cache: Makes a rank's prefix cache.
        chunking: Decides the length of prefill chunks in steps that also decode; by default they fill the step.
        can_copy_pages: Whether the runner copies pages.
        num_host_pages: Host pages of each rank, for preempted sequences.
        costs: Times measured by the runner, from which it is decided whether to swap.
        session_ttl_s: Seconds into the future to which the last use of a finished request's pages is dated if it has a session id, so that they are evicted
            later.
        weights: Weights of the tenants by name, for ``order=fair``.
        place: Chooses between the ranks that have room for a sequence.

    Attributes:
        ranks: The data ranks.
        num_preemptions: Preemptions since the start.
        num_queued: Number of sequences that have not run yet.
        num_queued_tokens: Number of tokens of their prompts.
        num_queued_tokens_of: Number of tokens of their prompts by tenant.
        num_hit_tokens: Prompt tokens found in a prefix cache since the start. Every prompt counts once, when it is first admitted.
        num_miss_tokens: Prompt tokens not found in a prefix cache, counted in the same way.

    Raises:
        ConfigError: The preferred batch size is larger than the number of slots.
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
        """The sequences that wait to be admitted, in no particular order."""
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
        """Number of sequences swapped to host memory since the start."""
        return sum(rank.swap_space.num_swap_outs for rank in self.ranks)

    @property
    def num_pages(self) -> int:
        """Number of pages of all ranks."""
        return sum(rank.pool.num_pages for rank in self.ranks)

    @property
    def num_free_pages(self) -> int:
        """Number of pages of all ranks that no sequence holds, including cached ones, which can be evicted."""
        return sum(rank.pool.num_available for rank in self.ranks)

    @property
    def num_idle_pages(self) -> int:
        """Number of pages of all ranks that are cached and that no sequence holds."""
        return sum(rank.pool.num_idle for rank in self.ranks)

    @property
    def num_cached_pages(self) -> int:
        """Number of pages of all ranks that are cached, whether a sequence holds them or not."""
        return sum(rank.pool.num_cached for rank in self.ranks)

    @property
    def num_evicted_pages(self) -> int:
        """Number of cached pages evicted since the start."""
        return sum(rank.cache.num_evicted for rank in self.ranks)

    @property
    def num_page_copies(self) -> int:
        """Number of cached pages copied since the start, each for a sequence that shares only the first part of a page."""
        return sum(rank.num_page_copies for rank in self.ranks)

    @property
    def num_free_slots(self) -> int:
        """Number of sequence slots of all ranks that are free."""
        return self._num_slots - self.num_running

    @property
    def has_work(self) -> bool:
        return len(self._waiting) > 0 or any(rank.running or rank.swap_space.sequences for rank in self.ranks)

    @property
    def is_held(self) -> bool:
        """Whether no step may be scheduled now, because a sequence demands that the host know its token in flight first (``Lag.HOLDS_STEP``)."""
        return self._num_holding > 0 and any(sequence.lag is Lag.HOLDS_STEP and sequence.num_in_flight for rank in self.ranks for sequence in rank.running)

    @property
    def wake_at_s(self) -> float:
        """The time at which ``schedule``, after it found nothing to run, may find something even if nothing else happens; infinity for never."""
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
        """Ends a sequence in whatever state it is; its pages and slot are free at once. Does nothing if it has ended already."""
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
        """Decides the next step and takes the pages it needs: running sequences go first, then waiting ones are admitted.

        May be called again before ``update``: it then counts on one token for each sequence that samples in a step in flight. A sequence is left out if its
        last token is in flight, or if the host must know its token first (``Sequence.lag``).

        Args:
            now_s: The time in seconds, of a monotonic clock.

        Returns:
            The step. It has no sequences only if there is nothing to run.
        """
        self._preempted = []
        pending = [rank.pending() for rank in self.ranks]
        beside_decodes = any(each.num_decode_tokens for each in pending)
        plans = [rank.plan(each, now_s, beside_decodes=beside_decodes) for rank, each in zip(self.ranks, pending, strict=True)]
        self._admit(plans, now_s)
        runs = any(plan.decodes or plan.chunks for plan in plans)
        return Schedule(tuple(rank.finish_plan(plan, runs=runs) for rank, plan in zip(self.ranks, plans, strict=True)), tuple(self._preempted))

    def update(self, schedule: Schedule, results: SequenceOf[SequenceResult]) -> list[tuple[Sequence, SequenceResult]]:
        """Takes the results of a step. Call it once for each step, in the order of dispatch.

        A sequence that was preempted or paused meanwhile still gets its tokens; one that has ended gets none.

        Args:
            schedule: The schedule of the step, from ``schedule``.
            results: One result for each of its sequences.

        Returns:
            The sequences that got tokens, each with its result, in the order of the schedule.
        """
        grown: list[tuple[Sequence, SequenceResult]] = []
        for scheduled, result in zip(schedule.sequences, results, strict=True):
            if num_samples := scheduled.num_samples:
                sequence, token_ids = scheduled.sequence, result.token_ids
                sequence.num_in_flight -= num_samples
                if token_ids and sequence.status is not SequenceStatus.FINISHED:
                    sequence.token_ids += token_ids
                    grown.append((sequence, result))
        self._waiting.charge((sequence, len(result.token_ids)) for sequence, result in grown)
        return grown

    def lose(self, schedule: Schedule) -> None:
        """Accepts that a step in flight has failed and gives no tokens. What it should have computed is missing too, so call ``forget_pools`` afterwards."""
        for scheduled in schedule.sequences:
            scheduled.sequence.num_in_flight -= scheduled.num_samples

    def forget_pools(self) -> None:
        """Sends every sequence back to the queue and empties the prefix caches. For use when the pools' content is lost or the weights change."""
        for rank in self.ranks:
            for sequence in [*rank.running, *rank.swap_space.sequences]:
                self._detach(sequence, is_sound=False)
                sequence.num_scheduled_tokens = 0
                sequence.num_preemptions += 1
                sequence.status = SequenceStatus.WAITING
                self._on_preempted(sequence)
            rank.cache.clear()

    def truncate(self, sequence: Sequence, num_generated_tokens: int) -> None:
        """Drops a sequence's generated tokens after the first ``num_generated_tokens``. The sequence must be finished next; it cannot go on."""
        num_tokens = sequence.num_prompt_tokens + num_generated_tokens
        del sequence.token_ids[num_tokens:]
        del sequence.cache_path.digests[num_tokens // self.ranks[0].pool.page_size :]

    def pause(self, sequence: Sequence) -> None:
        """Stops a sequence until ``resume``, in whatever state it is. Does nothing if it is paused already or has ended.

        Its slot and pages are free at once. The content of full pages stays in the prefix cache until the pages are needed for others.
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
        """Queues a paused sequence again, at its old place. Does nothing if the sequence is not paused."""
        if sequence.status is SequenceStatus.PAUSED:
            self._paused.remove(sequence)
            sequence.status = SequenceStatus.WAITING
            self._waiting.push(sequence)

    def check_integrity(self) -> None:
        """Recomputes the records of every rank and of the queue, and compares them with those that are kept.

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
            queue.charge([(head, len(head.token_ids) - chosen.room.num_cached_tokens)])
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
        """Adds a sequence to (``number`` 1) or takes it from (-1) the counts of those that have not run yet."""
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
        """Removes a sequence from the place that its status says it is in, with all that it holds there. The caller changes the status."""
        if sequence.status is SequenceStatus.RUNNING:
            self.ranks[sequence.rank].remove(sequence, is_sound=is_sound, keep_s=keep_s)
        elif sequence.status is SequenceStatus.SWAPPED:
            self.ranks[sequence.rank].swap_space.drop(sequence)
        elif sequence.status is SequenceStatus.PAUSED:
            self._paused.remove(sequence)
        else:
            self._waiting.remove(sequence)

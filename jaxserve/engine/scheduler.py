"""Which tokens run in the next step, and which sequence holds which pages and slot on which data rank. Deterministic, plain Python; imports no jax.

Why pages and slots are free the moment a sequence ends or is preempted, even with a step of it in flight: the pool and the per-sequence state are
donated from each step to the next, so steps touch them strictly in the order of dispatch. A new owner's first step is dispatched after the old
owner's last one, hence its writes land after the stray ones, and a sequence reads only slots of its page that it wrote itself. The tokens of the
old owner's last step come back to ``update``, which drops those of finished sequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from jaxserve.config import SchedulerConfig
from jaxserve.engine.rank import Rank, RankPlan
from jaxserve.engine.schedule import Schedule
from jaxserve.engine.sequence import Sequence, SequenceStatus
from jaxserve.engine.waiting_queue import WaitingQueue
from jaxserve.errors import ConfigError
from jaxserve.request import FinishReason

Placement = Callable[[Sequence, SequenceOf[tuple[Rank, int]]], Rank]
"""Chooses the rank of a sequence that is admitted, among ranks with room, each with the pages that would stay free there."""


def most_room(_: Sequence, ranks: SequenceOf[tuple[Rank, int]]) -> Rank:
    """The rank where most pages would stay free; of equals the one that runs fewest sequences, then the first."""
    return max(ranks, key=lambda entry: (entry[1], -len(entry[0].running), -entry[0].index))[0]


class Scheduler:
    """Continuous batching with chunked prefill over any number of data ranks.

    Every sequence has a place in one order, for good: its ``order``, which is that of arrival. Each rank runs its sequences in this order (see
    :class:`Rank`), and one queue holds those that wait. The queue's head is admitted as soon as some rank has room for it, and is placed only then; nobody
    overtakes it. A preempted sequence goes back to its place in the queue, may come to another rank, and recomputes all its tokens as if they were a
    prompt. As the first sequence of a rank moves in every step, every sequence finishes.

    The cost of a step grows with the running sequences only.

    Args:
        num_pages: Pages of each rank's pool.
        page_size: Slots of one page.
        config: Limits of each rank: ``max_num_seqs`` bounds its running sequences, ``max_tokens_per_step`` the tokens of a step.
        num_ranks: Data ranks.
        place: Chooses between ranks.

    Attributes:
        ranks: The data ranks.
        num_preemptions: Since the start.

    Raises:
        ConfigError: Limits below 1, or a token budget that cannot give each running sequence a token.
    """

    def __init__(self, num_pages: int, page_size: int, config: SchedulerConfig, *, num_ranks: int = 1, place: Placement = most_room) -> None:
        if config.max_num_seqs < 1:
            raise ConfigError(f"scheduler.max_num_seqs must be at least 1, got {config.max_num_seqs}")
        if config.max_tokens_per_step < config.max_num_seqs:
            raise ConfigError(
                f"scheduler.max_tokens_per_step must be at least scheduler.max_num_seqs ({config.max_num_seqs}), "
                f"so that each running sequence can have a token a step; got {config.max_tokens_per_step}"
            )
        self.ranks = tuple(
            Rank(
                index,
                num_pages=num_pages,
                page_size=page_size,
                max_num_seqs=config.max_num_seqs,
                max_tokens=config.max_tokens_per_step,
                on_preempted=self._on_preempted,
            )
            for index in range(num_ranks)
        )
        self.num_preemptions = 0
        self._waiting = WaitingQueue()
        self._place = place
        self._arrivals = itertools.count()
        self._preempted: list[Sequence] = []  # since the last schedule

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return sum(len(rank.running) for rank in self.ranks)

    @property
    def num_pages(self) -> int:
        """Pages of all ranks."""
        return sum(rank.pool.num_pages for rank in self.ranks)

    @property
    def num_free_pages(self) -> int:
        """Pages that nobody holds, of all ranks."""
        return sum(rank.pool.num_free for rank in self.ranks)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or any(rank.running for rank in self.ranks)

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence. Its prompt and ``max_tokens`` together must fit the pool of one rank."""
        pool = self.ranks[0].pool
        assert sequence.status is SequenceStatus.WAITING and sequence not in self._waiting and sequence.num_computed_tokens == 0
        assert pool.pages_for(sequence.num_prompt_tokens + sequence.max_tokens) <= pool.num_pages
        sequence.order = (0.0, next(self._arrivals))
        self._waiting.push(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a sequence in whatever state it is; its pages and slot are free at once. Does nothing to one that has ended already."""
        if sequence.status is SequenceStatus.FINISHED:
            return
        if sequence.status is SequenceStatus.RUNNING:
            self.ranks[sequence.rank].remove(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason

    def schedule(self) -> Schedule:
        """Decides the next step and takes the pages it needs: what runs already goes first, then waiting sequences are admitted.

        May be called again before ``update``: a sequence whose next token is not known yet sits out, other chunks go on.

        Returns:
            The step; without sequences only if there is nothing to run.
        """
        self._preempted = []
        plans = [rank.plan() for rank in self.ranks]
        while (sequence := self._waiting.peek()) is not None and (rank := self._rank_for(sequence, plans)) is not None:
            self._waiting.remove(sequence)
            rank.start(sequence, plans[rank.index])
        return Schedule(tuple(plan.build() for plan in plans), tuple(self._preempted))

    def update(self, schedule: Schedule, token_ids: SequenceOf[int]) -> list[Sequence]:
        """Takes the outcome of a step, in the order of dispatch.

        A sequence that was preempted meanwhile keeps its token; one that has sampled the same position again since then gets it once.

        Args:
            schedule: What ``schedule`` returned.
            token_ids: One id for each of its sequences; ignored where it did not sample.

        Returns:
            The sequences that have one more token, in the order of the schedule.
        """
        grown: list[Sequence] = []
        for scheduled, token_id in zip(schedule.sequences, token_ids, strict=True):
            if scheduled.samples:
                sequence = scheduled.sequence
                if sequence.status is not SequenceStatus.FINISHED and len(sequence.token_ids) == scheduled.start + scheduled.num_tokens:
                    sequence.token_ids.append(token_id)
                    grown.append(sequence)
        return grown

    def preempt_all(self) -> None:
        """Sends every running sequence back to the queue: for when the pools' content is lost."""
        for rank in self.ranks:
            while rank.running:
                rank.preempt(rank.running[-1])

    def check_integrity(self) -> None:
        """Recomputes the books of every rank and of the queue.

        Raises:
            AssertionError: A page or slot is leaked or owned twice, or a sequence's state contradicts where it is kept.
        """
        for rank in self.ranks:
            rank.check_integrity()
            assert not any(sequence in self._waiting for sequence in rank.running)
        self._waiting.check_integrity()
        for sequence in self._waiting:
            assert sequence.status is SequenceStatus.WAITING
            assert sequence.slot == -1 and not sequence.page_ids and sequence.num_computed_tokens == 0

    def _rank_for(self, sequence: Sequence, plans: SequenceOf[RankPlan]) -> Rank | None:
        rooms = [(rank, room) for rank, plan in zip(self.ranks, plans, strict=True) if (room := rank.room_for(sequence, plan)) is not None]
        return self._place(sequence, rooms) if rooms else None

    def _on_preempted(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        self._preempted.append(sequence)
        self._waiting.push(sequence)

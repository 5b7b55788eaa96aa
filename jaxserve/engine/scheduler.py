"""Which tokens run in the next step, and which sequence holds which pages and slot. Deterministic, plain Python; imports no jax.

Why pages and slots are free the moment a sequence ends or is preempted, even with a step of it in flight: the pool and the per-sequence state are
donated from each step to the next, so steps touch them strictly in the order of dispatch. A new owner's first step is dispatched after the old
owner's last one, hence its writes land after the stray ones, and a sequence reads only slots of its page that it wrote itself. The tokens of the
old owner's last step come back to ``update``, which drops those of finished sequences.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as SequenceOf

from jaxserve.config import SchedulerConfig
from jaxserve.engine.page_pool import PagePool
from jaxserve.engine.schedule import RankSchedule, Schedule, ScheduledSequence
from jaxserve.engine.sequence import Sequence, SequenceStatus
from jaxserve.errors import ConfigError
from jaxserve.request import FinishReason

_HEADROOM_DIVISOR = 100
"""A sequence is admitted beside others only if 1/100 of the pool stays free, or the next decodes would preempt it at once."""


class Scheduler:
    """Continuous batching, first come first served, with chunked prefill and preemption by recompute.

    Order of arrival rules everything: running sequences are older than waiting ones, the oldest take pages first, and when pages run out the
    youngest running sequence is preempted: it gives up its pages, goes back to the front of the queue, and later recomputes all its tokens as if
    they were a prompt. A sequence that is itself the youngest waits in place with what it has. So the oldest running sequence moves in every step,
    and as each sequence alone fits the pool (the engine's door sees to it), every sequence finishes.

    The cost of a step grows with the running sequences only. Work for later policies plugs in at three places: which waiting sequence is next
    (``_admit``), whom to preempt (``_make_room``), and what a sequence starts with (``_start``).

    Args:
        num_pages: Pages of the pool.
        page_size: Slots of one page.
        config: ``max_num_seqs`` bounds the running sequences, ``max_tokens_per_step`` the tokens of a step.

    Raises:
        ConfigError: Limits below 1, or a token budget that cannot give each running sequence a token.
    """

    def __init__(self, num_pages: int, page_size: int, config: SchedulerConfig) -> None:
        if config.max_num_seqs < 1:
            raise ConfigError(f"scheduler.max_num_seqs must be at least 1, got {config.max_num_seqs}")
        if config.max_tokens_per_step < config.max_num_seqs:
            raise ConfigError(
                f"scheduler.max_tokens_per_step must be at least scheduler.max_num_seqs ({config.max_num_seqs}), "
                f"so that each running sequence can have a token a step; got {config.max_tokens_per_step}"
            )
        self.pool = PagePool(num_pages, page_size)
        self._max_num_seqs = config.max_num_seqs
        self._max_tokens = config.max_tokens_per_step
        self._waiting: OrderedDict[Sequence, None] = OrderedDict()  # a queue with O(1) removal anywhere
        self._running: list[Sequence] = []  # in order of arrival
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_preemptions(self) -> int:
        """Preemptions since the start."""
        return self._num_preemptions

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence. Its prompt and ``max_tokens`` together must fit the pool."""
        assert sequence.status is SequenceStatus.WAITING and sequence not in self._waiting and sequence.num_computed_tokens == 0
        assert self.pool.pages_for(sequence.num_prompt_tokens + sequence.max_tokens) <= self.pool.num_pages
        self._waiting[sequence] = None

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a sequence in whatever state it is; its pages and slot are free at once. Does nothing to one that has ended already."""
        if sequence.status is SequenceStatus.FINISHED:
            return
        if sequence.status is SequenceStatus.RUNNING:
            self._running.remove(sequence)
            self._release(sequence)
        else:
            del self._waiting[sequence]
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason

    def schedule(self) -> Schedule:
        """Decides the next step and takes the pages it needs: decodes first, prefill chunks of running sequences, then waiting sequences.

        May be called again before ``update``: a sequence whose next token is not known yet sits out, other chunks go on.

        Returns:
            The step; without sequences only if there is nothing to run.
        """
        pool, running, page_size = self.pool, self._running, self.pool.page_size
        decodes: list[ScheduledSequence] = []
        chunks: list[ScheduledSequence] = []
        preempted: list[Sequence] = []
        num_pending = [len(sequence.token_ids) - sequence.num_computed_tokens for sequence in running]
        budget = self._max_tokens - num_pending.count(1)  # for chunks; decodes have theirs
        num_reserved = 0  # pages that running prefills will still need for the tokens they have

        # In order of arrival; _make_room only ever cuts the tail of `running`, behind the sequence in hand, and so never one scheduled already.
        for index, sequence in enumerate(running):
            pending = num_pending[index]
            start = sequence.num_computed_tokens
            if pending == 1:
                if start == len(sequence.page_ids) * page_size and not self._grow(sequence, 1, preempted):
                    continue
                sequence.num_computed_tokens = start + 1
                decodes.append(ScheduledSequence(sequence, start, 1, True))
            elif pending > 1:
                num_tokens = self._fit_chunk(sequence, min(pending, budget), preempted)
                num_reserved += pool.pages_for(start + pending) - len(sequence.page_ids)
                if num_tokens > 0:
                    budget -= num_tokens
                    (decodes if num_tokens == 1 else chunks).append(self._take(sequence, num_tokens))

        if not preempted:  # else the pool is short, and the queue's head is one of them
            for scheduled in self._admit(budget, num_reserved):
                (decodes if scheduled.num_tokens == 1 else chunks).append(scheduled)
        num_tokens = len(decodes) + sum(scheduled.num_tokens for scheduled in chunks)
        return Schedule((RankSchedule((*decodes, *chunks), len(decodes), num_tokens),), tuple(preempted))

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
        """Sends every running sequence back to the queue, in order: for when the pool's content is lost."""
        while self._running:
            self._preempt(self._running[-1])

    def check_integrity(self) -> None:
        """Recomputes the books from the sequences' own state.

        Raises:
            AssertionError: A page or slot is leaked or owned twice, or a sequence's state contradicts where it is kept.
        """
        assert len(self._running) <= self._max_num_seqs
        for sequence in self._running:
            assert sequence.status is SequenceStatus.RUNNING and sequence not in self._waiting
            assert 0 < sequence.num_computed_tokens <= len(sequence.token_ids)
            assert len(sequence.page_ids) == self.pool.pages_for(sequence.num_computed_tokens)
        for sequence in self._waiting:
            assert sequence.status is SequenceStatus.WAITING
            assert sequence.slot == -1 and not sequence.page_ids and sequence.num_computed_tokens == 0
        slots = [sequence.slot for sequence in self._running]
        assert sorted(slots + self._free_slots) == list(range(self._max_num_seqs)), "sequence slots are leaked or owned twice"
        self.pool.check_integrity(sequence.page_ids for sequence in self._running)

    def _admit(self, budget: int, num_reserved: int) -> list[ScheduledSequence]:
        """Starts waiting sequences while slots, tokens and room for all the tokens they have (not just the first chunk) last.

        Without that room a preempted sequence would come back at once, only to be preempted again before it has caught up.
        """
        pool = self.pool
        started: list[ScheduledSequence] = []
        while self._waiting and len(self._running) < self._max_num_seqs and budget > 0:
            sequence = next(iter(self._waiting))
            num_pages = pool.pages_for(len(sequence.token_ids))
            headroom = pool.num_pages // _HEADROOM_DIVISOR if self._running else 0
            if num_pages + num_reserved + headroom > pool.num_free:
                break
            del self._waiting[sequence]
            self._start(sequence)
            num_tokens = min(len(sequence.token_ids), budget)
            budget -= num_tokens
            has_room = self._grow(sequence, pool.pages_for(num_tokens), [])
            assert has_room
            num_reserved += num_pages - len(sequence.page_ids)
            started.append(self._take(sequence, num_tokens))
        return started

    def _start(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.RUNNING
        sequence.slot = self._free_slots.pop()
        self._running.append(sequence)

    def _take(self, sequence: Sequence, num_tokens: int) -> ScheduledSequence:
        """Books the next ``num_tokens`` tokens of a sequence that has the pages for them."""
        start = sequence.num_computed_tokens
        sequence.num_computed_tokens = start + num_tokens
        return ScheduledSequence(sequence, start, num_tokens, start + num_tokens == len(sequence.token_ids))

    def _fit_chunk(self, sequence: Sequence, num_tokens: int, preempted: list[Sequence]) -> int:
        """Takes pages for a chunk of up to ``num_tokens`` tokens. Returns the tokens that found room; 0 for none."""
        if num_tokens <= 0:
            return 0
        pool, start = self.pool, sequence.num_computed_tokens
        missing = pool.pages_for(start + num_tokens) - len(sequence.page_ids)
        if not self._make_room(sequence, missing, preempted):
            missing = pool.num_free
            num_tokens = (len(sequence.page_ids) + missing) * pool.page_size - start
        if num_tokens > 0:
            has_room = self._grow(sequence, missing, preempted)
            assert has_room
        return num_tokens

    def _grow(self, sequence: Sequence, num_pages: int, preempted: list[Sequence]) -> bool:
        if not self._make_room(sequence, num_pages, preempted):
            return False
        page_ids = self.pool.allocate(num_pages)
        assert page_ids is not None
        sequence.page_ids += page_ids
        return True

    def _make_room(self, sequence: Sequence, num_pages: int, preempted: list[Sequence]) -> bool:
        """Preempts sequences younger than this one, the youngest first, until ``num_pages`` are free. Returns whether they are."""
        while self.pool.num_free < num_pages:
            victim = self._running[-1]
            if victim is sequence:
                return False
            self._preempt(victim)
            preempted.append(victim)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        assert sequence is self._running[-1]
        self._running.pop()
        self._release(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self._num_preemptions += 1
        self._waiting[sequence] = None
        self._waiting.move_to_end(sequence, last=False)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.page_ids)
        sequence.page_ids = []
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

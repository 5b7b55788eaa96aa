"""What the scheduler hands to the runner and what it gets back: plain data, no jax."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence as SequenceOf
from typing import Protocol

from jaxserve.engine.scheduling.sequence import Sequence


@dataclasses.dataclass(slots=True)  # never changed; not frozen because a frozen one takes 0.55 us to make against 0.16, and a step makes hundreds
class ScheduledSequence:
    """One sequence's part of a step.

    Args:
        sequence: Its ``page_ids`` already cover ``start + num_tokens`` tokens, which is also its ``num_scheduled_tokens`` from now on.
        start: Position of its first token in this step.
        num_tokens: Tokens from ``start`` on to run, ``>= 1``. The last ones may be in flight: their values are on the device only.
        num_samples: After how many of them, the last ones, tokens are sampled: 1 when the step reaches the end of the sequence, else 0.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    num_samples: int


@dataclasses.dataclass(frozen=True, slots=True)
class PageMoves:
    """Whole pages that a data rank moves before its tokens of the step run: the swaps out, then the swaps in, then the copies.

    A page that is swapped out may be the destination of a later kind. Within one kind no page is a destination twice, nor a source and a destination.

    Args:
        swap_outs: (page, host page): keys and values go to host memory.
        swap_ins: (host page, page): and come back.
        copies: (page, page) of the rank's pool: source and destination. A sequence is about to write to a page that others read.
    """

    swap_outs: tuple[tuple[int, int], ...] = ()
    swap_ins: tuple[tuple[int, int], ...] = ()
    copies: tuple[tuple[int, int], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.swap_outs or self.swap_ins or self.copies)


NO_MOVES = PageMoves()


@dataclasses.dataclass(frozen=True, slots=True)
class RankSchedule:
    """One data rank's part of a step: first every sequence with ``num_tokens == 1``, then prefill chunks of two or more tokens.

    Args:
        sequences: Of this rank, at most ``max_num_seqs``, no sequence twice; may be empty.
        num_decodes: How many of them, at the front, have ``num_tokens == 1``.
        num_tokens: Sum of their ``num_tokens``, at most the token budget.
        moves: What happens to whole pages before its tokens run.
    """

    sequences: tuple[ScheduledSequence, ...]
    num_decodes: int
    num_tokens: int
    moves: PageMoves = NO_MOVES


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """One step.

    Args:
        ranks: One part for each data rank; all run in the same step.
        preempted: Sequences that lost their pages to make this step possible.
    """

    ranks: tuple[RankSchedule, ...]
    preempted: tuple[Sequence, ...] = ()

    @property
    def sequences(self) -> tuple[ScheduledSequence, ...]:
        """All of them, rank by rank: the order in which their tokens come back. Empty when there is nothing to do."""
        return self.ranks[0].sequences if len(self.ranks) == 1 else tuple(itertools.chain.from_iterable(rank.sequences for rank in self.ranks))


@dataclasses.dataclass(frozen=True, slots=True)
class RunnerCosts:
    """What a runner measured at its start, in seconds.

    Args:
        token_s: One prompt token, in a prefill chunk that fills the step.
        page_swap_s: One page to host memory or back.
    """

    token_s: float
    page_swap_s: float


@dataclasses.dataclass(slots=True)
class SequenceResult:
    """What a step gave one sequence.

    Args:
        token_ids: The tokens that it generated, in order: at most ``ScheduledSequence.num_samples``, none where it did not sample.
    """

    token_ids: list[int]


class PendingStep(Protocol):
    """A step under way on the device."""

    num_bucket_tokens: int
    """Tokens that the step computes, padding included, on all data ranks."""
    num_bucket_sequences: int
    """Sequences that it has room for, on all data ranks."""

    def fetch(self) -> SequenceOf[SequenceResult]:
        """Waits for the step. Returns the result of each scheduled sequence, in order.

        The ids must be Python ints: they go into ``Sequence.token_ids`` as they are.
        """
        ...


class Runner(Protocol):
    """Runs schedules on a device (or pretends to). The engine owns exactly one and calls it from one thread.

    An exception from ``dispatch`` or ``fetch`` fails the scheduled sequences; the engine recomputes all others and goes on, so the runner must be
    usable again (its pool may hold anything). One that cannot go on raises :class:`jaxserve.errors.EngineDeadError`.
    """

    num_ranks: int
    """Data ranks: each has pages and sequence slots of its own."""
    num_pages: int
    """Pages of one rank's pool."""
    page_size: int
    """Tokens that one page holds."""
    max_num_seqs: int
    """Sequence slots of one rank."""
    num_host_pages: int
    """Pages of host memory that one rank's pages can be swapped to; 0 if it cannot swap."""
    token_buckets: tuple[int, ...]
    """Token counts that mixed steps are compiled for, in order; a rank's part of a step costs what its bucket costs."""
    can_copy_pages: bool
    """Whether it carries out ``PageMoves.copies``; without it a page that is shared in part is recomputed."""
    page_bytes: int
    """Bytes of one page on one device, all layers."""
    costs: RunnerCosts | None
    """Measured by ``warmup``; ``None`` if it has not been or nothing can be swapped."""
    num_late_compiles: int
    """Programs that held up running requests although the runner had been warmed up."""
    is_compiling: bool
    """Whether ``dispatch`` is compiling at this moment. Read from other threads."""

    @property
    def num_programs(self) -> int:
        """Programs compiled, or found compiled, since the start."""
        ...

    def warmup(self) -> None:
        """Compiles every bucket. Afterwards ``dispatch`` compiles nothing."""
        ...

    def dispatch(self, schedule: Schedule) -> PendingStep:
        """Starts one step of a schedule that has sequences, without waiting for it. Steps, page moves included, run in the order of dispatch."""
        ...

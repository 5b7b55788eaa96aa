"""The plain data that the scheduler hands to the runner and gets back, and the runner's interface. Imports no jax."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence as SequenceOf
from typing import Protocol

import msgspec

from jaxserve.engine.scheduling.sequence import Sequence


class ScheduledSequence(msgspec.Struct, frozen=True, eq=False):  # a step makes hundreds: msgspec's structs are made in C
    """One sequence's part of a step.

    Args:
        sequence: The sequence. Its ``page_ids`` already cover ``start + num_tokens`` tokens, and its ``num_scheduled_tokens`` is already that number.
        start: Position of its first token in this step.
        num_tokens: Number of tokens to run from ``start`` on, ``>= 1``. The values of the last ones may be on the device only, if they are in flight.
        num_samples: Number of tokens that the step samples for this sequence: 1 if it reaches the sequence's end, else 0.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    num_samples: int


@dataclasses.dataclass(frozen=True, slots=True)
class PageMoves:
    """Whole pages that a data rank moves before the step's tokens run: first the swaps out, then the swaps in, then the copies.

    A page that is swapped out may be a destination of the later kinds. Within one kind, no page is a destination twice, or both source and destination.

    Args:
        swap_outs: Pairs (page, host page) of pages whose keys and values go to host memory.
        swap_ins: Pairs (host page, page) of pages that come back from host memory.
        copies: Pairs (source, destination) of pages of the rank's pool, for sequences that are about to write to a page that others read.
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
        sequences: The rank's sequences in this step, at most ``max_num_seqs``, none of them twice; may be empty.
        num_decodes: How many of them, at the front, have ``num_tokens == 1``.
        num_tokens: Sum of their ``num_tokens``, at most the token budget.
        moves: Whole pages to be moved before the tokens run.
    """

    sequences: tuple[ScheduledSequence, ...]
    num_decodes: int
    num_tokens: int
    moves: PageMoves = NO_MOVES


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """The plan of one step on all data ranks.

    Args:
        ranks: One part for each data rank; all run in the same step.
        preempted: Sequences that lost their pages to make this step possible.
    """

    ranks: tuple[RankSchedule, ...]
    preempted: tuple[Sequence, ...] = ()

    @property
    def sequences(self) -> tuple[ScheduledSequence, ...]:
        """All sequences of the step, rank by rank, which is the order of its results. Empty if there is nothing to run."""
        return self.ranks[0].sequences if len(self.ranks) == 1 else tuple(itertools.chain.from_iterable(rank.sequences for rank in self.ranks))


@dataclasses.dataclass(frozen=True, slots=True)
class RunnerCosts:
    """Times that a runner measured when it started.

    Args:
        token_s: Seconds for one prompt token, in a prefill chunk that fills the step.
        page_swap_s: Seconds to move one page to host memory or back.
    """

    token_s: float
    page_swap_s: float


class SequenceResult(msgspec.Struct, frozen=True):
    """The result of a step for one sequence.

    Args:
        token_ids: Ids of the generated tokens, in order: at most ``ScheduledSequence.num_samples`` of them.
    """

    token_ids: list[int]


class PendingStep(Protocol):
    """A step in flight on the device."""

    num_bucket_tokens: int
    """Number of tokens that the step computes on all data ranks together, padding included."""
    num_bucket_sequences: int
    """Number of sequences that its shapes have room for, on all data ranks together."""

    def fetch(self) -> SequenceOf[SequenceResult]:
        """Waits for the step. Returns one result for each scheduled sequence, in order.

        The token ids are Python ints, because they go into ``Sequence.token_ids`` as they are.
        """
        ...


class Runner(Protocol):
    """Runs schedules on devices, or pretends to in tests and simulations. The engine owns exactly one and calls it from one thread.

    An exception from ``dispatch`` or ``PendingStep.fetch`` ends the scheduled sequences. The engine recomputes all others and goes on, so the runner must be
    usable afterwards, whatever its pool then holds. A runner that cannot go on raises :class:`jaxserve.errors.EngineDeadError`.
    """

    num_ranks: int
    """Number of data ranks, each with pages and sequence slots of its own."""
    num_pages: int
    """Pages of one rank's pool."""
    page_size: int
    """Tokens that one page holds."""
    max_num_seqs: int
    """Sequence slots of one rank."""
    num_host_pages: int
    """Pages of host memory that one rank's pages can be swapped to; 0 if it cannot swap."""
    token_buckets: tuple[int, ...]
    """Token counts that mixed steps (with prefill chunks) are compiled for, ascending. A step takes as long as its bucket does."""
    can_copy_pages: bool
    """Whether the runner carries out ``PageMoves.copies``; if not, a partly shared page is recomputed instead of copied."""
    page_bytes: int
    """Bytes of one page on one device, for all layers together."""
    costs: RunnerCosts | None
    """Times measured by ``warmup``; ``None`` before it, or if the runner cannot swap."""
    num_late_compiles: int
    """Number of programs that had to be compiled after ``warmup``, while requests waited for them."""
    is_compiling: bool
    """Whether ``dispatch`` is compiling at this moment. May be read from other threads."""

    @property
    def num_programs(self) -> int:
        """Number of programs compiled, or loaded already compiled, since the start."""
        ...

    def warmup(self) -> None:
        """Compiles the programs of every bucket, so that ``dispatch`` compiles nothing afterwards."""
        ...

    def dispatch(self, schedule: Schedule) -> PendingStep:
        """Starts a step without waiting for it. The schedule has at least one sequence. Steps, page moves included, run in the order of dispatch."""
        ...

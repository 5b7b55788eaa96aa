"""A step's batch: the buckets of fixed shapes, and the one int32 array that carries a schedule to the device (``step.unpack`` takes it apart). No jax."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence as SequenceOf

import numpy as np

from jaxserve.dims import ceil_div
from jaxserve.engine.scheduling.schedule import PageMoves, RankSchedule, Schedule
from jaxserve.engine.scheduling.sequence import Sequence

FROM_CARRY = -1
"""Token id that stands for "the last token sampled in this slot", which the host may not have seen yet."""

ROW_FIELDS = ("query_len", "context_len", "slot", "temperature", "top_k", "top_p", "min_p", "seed")
"""The int32 (or bit-cast float32) columns of a row, in packed order, before its page table."""


_LEAST_MIXED_ROWS = 8
"""The output head costs hardly less for 2 rows than for 8 (3.5 ms against 4.5 at V = 49,152 on two cores), and every bucket costs a compile."""


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """The shapes that one compiled step serves, of each data rank.

    Args:
        num_tokens: T, packed tokens.
        num_rows: B, sequences.
        table_width: M, pages a sequence can hold.
        decode_only: Every row has one token, so T = B; prefill is not even compiled.
    """

    num_tokens: int
    num_rows: int
    table_width: int
    decode_only: bool

    @property
    def packed_size(self) -> int:
        """Length of a rank's packed int32 array: two counts, the token ids, then the rows' fields and page tables."""
        return 2 + self.num_tokens + self.num_rows * (len(ROW_FIELDS) + self.table_width)


@dataclasses.dataclass(frozen=True)
class Buckets:
    """All buckets of an engine, and which one a schedule takes.

    Args:
        decode: Buckets of steps in which every row has one token: B = T. Ascending.
        mixed_tokens: Token counts of the other steps, ascending.
        mixed_rows: Sequence counts of the other steps, ascending; every token count goes with every sequence count up to its own.
        table_width: M.
    """

    decode: tuple[int, ...]
    mixed_tokens: tuple[int, ...]
    mixed_rows: tuple[int, ...]
    table_width: int

    def all(self) -> list[Bucket]:
        """Every bucket once, smallest first."""
        mixed = {Bucket(tokens, min(rows, tokens), self.table_width, False) for tokens in self.mixed_tokens for rows in self.mixed_rows}
        return sorted(mixed | {Bucket(rows, rows, self.table_width, True) for rows in self.decode})

    def choose(self, ranks: SequenceOf[RankSchedule]) -> Bucket:
        """The smallest bucket that holds each rank's part of a step. The scheduler's limits guarantee one."""
        num_rows = max(len(rank.sequences) for rank in ranks)
        if all(rank.num_tokens == len(rank.sequences) for rank in ranks):
            rows = _at_least(self.decode, num_rows)
            return Bucket(rows, rows, self.table_width, True)
        tokens = _at_least(self.mixed_tokens, max(rank.num_tokens for rank in ranks))
        return Bucket(tokens, min(_at_least(self.mixed_rows, num_rows), tokens), self.table_width, False)


def make_buckets(token_buckets: SequenceOf[int], sequence_buckets: SequenceOf[int], *, max_tokens: int, max_rows: int, table_width: int) -> Buckets:
    """The buckets of an engine.

    Args:
        token_buckets: Token counts of mixed steps; those above ``max_tokens`` are left out and ``max_tokens`` is added.
        sequence_buckets: Sequence counts, likewise up to ``max_rows``. All serve decode steps; none is below 2, for one row takes a slow path on CPU.
            Mixed steps, whose cost hangs on tokens more than on rows, take every other one, from the largest down to 8.
        max_tokens: The scheduler's token budget.
        max_rows: The scheduler's most sequences.
        table_width: Pages a sequence can hold.
    """
    decode = tuple(sorted({max(2, rows) for rows in (*sequence_buckets, max_rows) if rows <= max_rows}))
    tokens = tuple(sorted({max(2, count) for count in (*token_buckets, max_tokens) if count <= max_tokens}))
    rows = [count for count in decode[::-2] if count >= _LEAST_MIXED_ROWS] or [decode[-1]]
    return Buckets(decode, tokens, tuple(sorted(rows)), table_width)


@dataclasses.dataclass(frozen=True)
class StepMessage:
    """A step as every process runs it.

    Args:
        bucket: Index of its bucket among all, smallest first.
        packed: ``[ranks, X]`` The packed batch of every data rank.
        moves: Of each data rank; nothing is swapped where there are several processes.
    """

    bucket: int
    packed: np.ndarray
    moves: SequenceOf[PageMoves]


class BatchBuilder:
    """Packs schedules. Keeps each slot's page table and sampling parameters between steps, so that a decode step costs a few vector operations.

    Args:
        buckets: What a schedule is fitted to.
        max_num_seqs: Sequence slots of one rank.
        num_ranks: Data ranks.
    """

    def __init__(self, buckets: Buckets, *, max_num_seqs: int, num_ranks: int = 1) -> None:
        self._buckets = buckets
        self._ranks = [_RankRows(buckets.table_width, max_num_seqs) for _ in range(num_ranks)]

    def build(self, schedule: Schedule) -> tuple[Bucket, np.ndarray]:
        """The bucket of a schedule that is not empty, and its packed array ``[ranks, X]``: a fresh one, for the device may still read the one before."""
        bucket = self._buckets.choose(schedule.ranks)
        packed = np.zeros((len(self._ranks), bucket.packed_size), np.int32)
        for rows, rank, packed_X in zip(self._ranks, schedule.ranks, packed, strict=True):
            rows.pack(rank, bucket, packed_X)
        return bucket, packed


class _RankRows:
    """What one data rank's sequence slots hold: a packed row each."""

    def __init__(self, table_width: int, max_num_seqs: int) -> None:
        self._rows = np.zeros((max_num_seqs, len(ROW_FIELDS) + table_width), np.int32)
        self._table_width = table_width
        self._owners: list[tuple[Sequence, int] | None] = [None] * max_num_seqs
        self._num_pages = [0] * max_num_seqs

    def pack(self, schedule: RankSchedule, bucket: Bucket, packed: np.ndarray) -> None:
        """Writes the rank's part of a step into ``packed`` ``[X]``, which is zero."""
        scheduled = schedule.sequences
        packed[0], packed[1] = schedule.num_decodes, len(scheduled)
        tokens: list[int] = []
        lengths: list[int] = []
        contexts: list[int] = []
        slots: list[int] = []
        for item in scheduled:
            sequence, end = item.sequence, item.start + item.num_tokens
            known = sequence.token_ids
            if item.num_tokens == 1:
                tokens.append(known[item.start] if item.start < len(known) else FROM_CARRY)
            else:
                tokens += known[item.start : end]
            lengths.append(item.num_tokens)
            contexts.append(end)
            slots.append(sequence.slot)
            if len(sequence.page_ids) != self._num_pages[sequence.slot] or self._owners[sequence.slot] != (sequence, sequence.num_preemptions):
                self._update_slot(sequence)
        packed[2 : 2 + len(tokens)] = tokens
        rows = packed[2 + bucket.num_tokens :].reshape(bucket.num_rows, -1)
        live = rows[: len(scheduled)]
        width = len(ROW_FIELDS) + max((self._num_pages[slot] for slot in slots), default=0)  # copying whole tables of 131,072 tokens took ten times the rest
        live[:, :width] = self._rows[:, :width][slots]
        live[:, 0], live[:, 1], live[:, 2] = lengths, contexts, slots
        rows[len(scheduled) :, 2] = len(self._owners)  # A slot out of range: nothing is kept of a padding row.

    def _update_slot(self, sequence: Sequence) -> None:
        slot, row = sequence.slot, self._rows[sequence.slot]
        first_page = self._num_pages[slot]
        if self._owners[slot] != (sequence, sequence.num_preemptions):
            self._owners[slot] = (sequence, sequence.num_preemptions)
            first_page = 0
            params = sequence.request.params
            row[3:8].view(np.float32)[[0, 2, 3]] = params.temperature, params.top_p, params.min_p
            row[4] = params.top_k if params.top_k > 0 else np.iinfo(np.int32).max
            row[7:8].view(np.uint32)[0] = sequence.seed
        assert len(sequence.page_ids) <= self._table_width, "the scheduler gave a sequence more pages than the table holds"
        table = row[len(ROW_FIELDS) :]
        table[first_page : len(sequence.page_ids)] = sequence.page_ids[first_page:]
        self._num_pages[slot] = len(sequence.page_ids)


def packed_batch(bucket: Bucket, *, num_rows: int, query_len: int, context_len: int, page_size: int, num_ranks: int = 1) -> np.ndarray:
    """A packed batch of greedy rows that are all alike, each with pages of its own, the first pages of each rank: for measuring.

    Args:
        bucket: The shapes.
        num_rows: Live rows of each rank.
        query_len: New tokens of each row.
        context_len: Its length after the step.
        page_size: Slots of a page.
        num_ranks: Data ranks.
    """
    packed = np.zeros((num_ranks, bucket.packed_size), np.int32)
    packed[:, :2] = num_rows if query_len == 1 else 0, num_rows
    rows = packed[:, 2 + bucket.num_tokens :].reshape(num_ranks, bucket.num_rows, -1)[:, :num_rows]
    rows[..., 0], rows[..., 1], rows[..., 2] = query_len, context_len, np.arange(num_rows)
    num_pages = ceil_div(context_len, page_size)
    rows[..., len(ROW_FIELDS) : len(ROW_FIELDS) + num_pages] = np.arange(num_rows * num_pages).reshape(num_rows, num_pages)
    return packed


def table_width(max_model_len: int, page_size: int) -> int:
    """M: pages of the longest sequence."""
    return ceil_div(max_model_len, page_size)


def _at_least(ascending: tuple[int, ...], value: int) -> int:
    index = bisect.bisect_left(ascending, value)
    assert index < len(ascending), f"no bucket holds {value}; the largest is {ascending[-1]}"
    return ascending[index]

"""A step's batch: the int32 array that carries a schedule to the device, where ``function.unpack`` takes it apart, and the fills of slots. Imports no jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np

from jaxserve.dims import ceil_div
from jaxserve.engine.scheduling.schedule import PageMoves, RankSchedule, Schedule, ScheduledSequence
from jaxserve.engine.scheduling.sequence import Sequence
from jaxserve.engine.step.buckets import Bucket, Buckets
from jaxserve.engine.step.rows import OFF, ROW_FIELDS, records, set_defaults, set_owner, stages_needed

FROM_CARRY = -1
"""Token id that stands for the last token sampled in the row's slot, whose value the host may not know yet."""

FILL_TOKENS = 512
"""Number of tokens of a rank that one fill carries."""

NO_TOKEN = -1
"""Token id that pads a fill."""


class Batch(NamedTuple):
    """A schedule packed into arrays for the device."""

    bucket: Bucket
    packed: np.ndarray
    """``[ranks, X]`` int32. For each rank: the numbers of decode rows and of live rows, the token ids, then the rows."""
    fills: np.ndarray
    """``[F, ranks, 2 + FILL_TOKENS]`` int32: F fills, to be run one after the other before the step.

    For each rank a fill holds a slot (out of range for none), the position of the first token, and ids of tokens that the slot's new owner has and that no
    step will run, padded with ``NO_TOKEN``. A fill from position 0 resets the slot first.
    """


@dataclasses.dataclass(frozen=True)
class StepMessage:
    """A step in the form that is sent to every process that runs it.

    Args:
        bucket: Index of its bucket among all buckets, smallest first.
        packed: ``[ranks, X]`` int32, the packed batch of every data rank.
        moves: Page moves of each data rank. Nothing is swapped if there are several processes.
        fills: See :class:`Batch`.
    """

    bucket: int
    packed: np.ndarray
    moves: SequenceOf[PageMoves]
    fills: np.ndarray


class BatchBuilder:
    """Packs schedules. Keeps each slot's page table and sampling parameters between steps, so that packing a decode step takes a few vector operations.

    Args:
        buckets: The shapes that schedules are padded to.
        max_num_seqs: Sequence slots of one rank.
        num_ranks: Data ranks.
        fills: Whether slots have wide state (see ``slot_state``), which must be filled with the tokens that a new owner brings.
    """

    def __init__(self, buckets: Buckets, *, max_num_seqs: int, num_ranks: int = 1, fills: bool = False) -> None:
        self._buckets = buckets
        self._ranks = [_RankRows(buckets.table_width, max_num_seqs, fills=fills) for _ in range(num_ranks)]

    def build(self, schedule: Schedule) -> Batch:
        """The batch of a schedule that has sequences, in new arrays, since the device may still read those of earlier steps."""
        bucket = self._buckets.choose(schedule.ranks)
        packed = np.zeros((len(self._ranks), bucket.packed_size), np.int32)
        filled = [rows.pack(rank, bucket, packed_X) for rows, rank, packed_X in zip(self._ranks, schedule.ranks, packed, strict=True)]
        if len(self._buckets.sampling) > 1:
            bucket = self._buckets.narrow(bucket, stages_needed(_rows(packed, bucket)))
        return Batch(bucket, packed, _fills(filled))


class _RankRows:
    """The packed rows of one data rank's sequence slots."""

    def __init__(self, table_width: int, max_num_seqs: int, *, fills: bool) -> None:
        self._rows = np.zeros((max_num_seqs, len(ROW_FIELDS) + table_width), np.int32)
        self._table_width = table_width
        self._fills = fills
        self._owners: list[tuple[Sequence, int] | None] = [None] * max_num_seqs
        self._num_pages = [0] * max_num_seqs

    def pack(self, schedule: RankSchedule, bucket: Bucket, packed: np.ndarray) -> list[ScheduledSequence]:
        """Writes the rank's part of a step into ``packed`` ``[X]``, which holds zeros. Returns the sequences whose slots must be filled before the step."""
        scheduled = schedule.sequences
        packed[0], packed[1] = schedule.num_decodes, len(scheduled)
        tokens: list[int] = []
        lengths: list[int] = []
        contexts: list[int] = []
        slots: list[int] = []
        beginning: list[int] = []
        filled: list[ScheduledSequence] = []
        for item in scheduled:
            sequence, end = item.sequence, item.start + item.num_tokens
            known = sequence.token_ids
            if item.num_tokens == 1:
                tokens.append(known[item.start] if item.start < len(known) else FROM_CARRY)
            else:
                tokens += known[item.start : end]
            slot = sequence.slot
            if self._owners[slot] != (sequence, sequence.num_preemptions):
                self._begin(sequence)
                if self._fills and item.start > 0:
                    filled.append(item)
                else:
                    beginning.append(len(slots))
            if len(sequence.page_ids) != self._num_pages[slot]:
                self._add_pages(sequence)
            lengths.append(item.num_tokens)
            contexts.append(end)
            slots.append(slot)
        packed[2 : 2 + len(tokens)] = tokens
        rows = _rows(packed, bucket)
        live = rows[: len(scheduled)]
        width = len(ROW_FIELDS) + max((self._num_pages[slot] for slot in slots), default=0)  # copying whole tables of 131,072 tokens took ten times the rest
        live[:, :width] = self._rows[:, :width][slots]
        fields = records(live)
        fields["query_len"], fields["context_len"], fields["slot"] = lengths, contexts, slots
        if beginning:
            fields["begins"][beginning] = 1
        set_defaults(rows[len(scheduled) :])
        return filled

    def _begin(self, sequence: Sequence) -> None:
        slot = sequence.slot
        self._owners[slot] = (sequence, sequence.num_preemptions)
        self._num_pages[slot] = 0
        set_owner(self._rows[slot], sequence)

    def _add_pages(self, sequence: Sequence) -> None:
        slot, num_pages = sequence.slot, len(sequence.page_ids)
        assert num_pages <= self._table_width, "the scheduler gave a sequence more pages than the table holds"
        first_page = self._num_pages[slot]
        self._rows[slot, len(ROW_FIELDS) + first_page : len(ROW_FIELDS) + num_pages] = sequence.page_ids[first_page:]
        self._num_pages[slot] = num_pages


def packed_batch(bucket: Bucket, *, num_rows: int, query_len: int, context_len: int, page_size: int, num_ranks: int = 1) -> np.ndarray:
    """A packed batch for measurements: greedy rows that are all alike, each with pages of its own, taken from the beginning of each rank's pool.

    Args:
        bucket: The shapes of the batch.
        num_rows: Number of live rows of each rank.
        query_len: Number of new tokens of each row.
        context_len: Length of each row's sequence after the step, in tokens.
        page_size: Tokens that one page holds.
        num_ranks: Data ranks.
    """
    packed = np.zeros((num_ranks, bucket.packed_size), np.int32)
    packed[:, :2] = num_rows if query_len == 1 else 0, num_rows
    rows = _rows(packed, bucket)
    set_defaults(rows)
    live = rows[:, :num_rows]
    fields = records(live)
    fields["query_len"], fields["context_len"], fields["slot"] = query_len, context_len, np.arange(num_rows)
    num_pages = ceil_div(context_len, page_size)
    live[..., len(ROW_FIELDS) : len(ROW_FIELDS) + num_pages] = np.arange(num_rows * num_pages).reshape(num_rows, num_pages)
    return packed


def _rows(packed: np.ndarray, bucket: Bucket) -> np.ndarray:
    """The rows ``[..., B, fields and pages]`` of a packed batch ``[..., X]``, as a view."""
    return packed[..., 2 + bucket.num_tokens :].reshape(*packed.shape[:-1], bucket.num_rows, -1)


def _fills(filled: SequenceOf[SequenceOf[ScheduledSequence]]) -> np.ndarray:
    """The array ``Batch.fills`` for the sequences of each rank whose slots must be filled."""
    if not any(filled):
        return np.zeros((0, len(filled), 2 + FILL_TOKENS), np.int32)
    portions = [[(item.sequence, first, item.start) for item in items for first in range(0, item.start, FILL_TOKENS)] for items in filled]
    fills = np.full((max(map(len, portions)), len(filled), 2 + FILL_TOKENS), NO_TOKEN, np.int32)
    fills[:, :, 0] = OFF
    for rank, each in enumerate(portions):
        for fill, (sequence, first, end) in zip(fills[:, rank], each, strict=False):
            token_ids = sequence.token_ids[first : min(first + FILL_TOKENS, end)]
            fill[0], fill[1] = sequence.slot, first
            fill[2 : 2 + len(token_ids)] = token_ids
    return fills

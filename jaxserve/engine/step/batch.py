"""A step's batch: the int32 array that carries a schedule to the device, where ``function.unpack`` takes it apart, and the fills of slots. Imports no jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from jaxserve.dims import ceil_div
from jaxserve.engine.scheduling.schedule import PageMoves, RankSchedule, Schedule, ScheduledSequence
from jaxserve.engine.scheduling.sequence import NO_TENURE, Sequence
from jaxserve.engine.step.buckets import Bucket, Buckets
from jaxserve.engine.step.rows import OFF, ROW_FIELDS, records, set_defaults, set_owner, stages_needed

FROM_CARRY = -1
"""Token id that stands for the last token sampled in the row's slot, whose value the host may not know yet."""

FILL_TOKENS = 512
"""Number of tokens of a rank that one fill carries."""

NO_TOKEN = -1
"""Token id that pads a fill."""

_NOWHERE = -1
"""Position of a slot's carried token if the carry has none for its owner."""

_sequence, _start, _num_tokens, _num_samples, _slot, _tenure, _page_ids = (
    attrgetter(name) for name in ("sequence", "start", "num_tokens", "num_samples", "slot", "tenure", "page_ids")
)


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
        self._tenures = np.full(max_num_seqs, NO_TENURE, np.int64)
        self._num_pages = np.zeros(max_num_seqs, np.int64)
        self._carried = np.full(max_num_seqs, _NOWHERE, np.int64)  # position of the token that the carry has for each slot's owner

    def pack(self, schedule: RankSchedule, bucket: Bucket, packed: np.ndarray) -> list[ScheduledSequence]:
        """Writes the rank's part of a step into ``packed`` ``[X]``, which holds zeros. Returns the sequences whose slots must be filled before the step."""
        scheduled = schedule.sequences
        num_rows = len(scheduled)
        packed[0], packed[1] = schedule.num_decodes, num_rows
        # Of hundreds of decodes a few need more than vector operations: new owners, and those that have begun a page.
        sequences = list(map(_sequence, scheduled))
        slots, starts, tenures = _column(_slot, sequences), _column(_start, scheduled), _column(_tenure, sequences)
        query_lens = np.ones(num_rows, np.int64)
        query_lens[schedule.num_decodes :] = _column(_num_tokens, scheduled[schedule.num_decodes :])
        begins = self._tenures[slots] != tenures
        self._tenures[slots] = tenures
        filled: list[ScheduledSequence] = []
        for row in _indices(begins):
            item = scheduled[row]
            self._begin(item.sequence)
            if self._fills and item.start > 0:
                filled.append(item)
                begins[row] = False
        num_pages = _column(len, list(map(_page_ids, sequences)))
        for row in _indices(num_pages != self._num_pages[slots]):
            self._add_pages(sequences[row])
        self._write_token_ids(scheduled, slots, starts, query_lens, packed[2:])
        rows = _rows(packed, bucket)
        live = rows[:num_rows]
        width = len(ROW_FIELDS) + int(num_pages.max(initial=0))  # copying whole tables of 131,072 tokens took ten times the rest
        live[:, :width] = self._rows[:, :width][slots]
        fields = records(live)
        fields["query_len"], fields["context_len"], fields["slot"], fields["begins"] = query_lens, starts + query_lens, slots, begins
        set_defaults(rows[num_rows:])
        return filled

    def _write_token_ids(
        self, scheduled: SequenceOf[ScheduledSequence], slots: np.ndarray, starts: np.ndarray, query_lens: np.ndarray, token_ids: np.ndarray
    ) -> None:
        """Writes the ids of the rows' tokens, one row after the other. A token that the slot's owner sampled last comes from the carry, known or not."""
        is_carried = (self._carried[slots] == starts) & (query_lens == 1)
        firsts = query_lens.cumsum() - query_lens
        token_ids[firsts[is_carried]] = FROM_CARRY
        for row in _indices(~is_carried):
            item, first = scheduled[row], firsts[row]
            known = item.sequence.token_ids[item.start : item.start + item.num_tokens]
            assert len(known) == item.num_tokens
            token_ids[first : first + item.num_tokens] = known
        samples = _column(_num_samples, scheduled) > 0
        self._carried[slots[samples]], self._carried[slots[~samples]] = (starts + query_lens)[samples], _NOWHERE

    def _begin(self, sequence: Sequence) -> None:
        slot = sequence.slot
        self._num_pages[slot] = 0
        self._carried[slot] = _NOWHERE
        set_owner(self._rows[slot], sequence)

    def _add_pages(self, sequence: Sequence) -> None:
        slot, num_pages = sequence.slot, len(sequence.page_ids)
        assert num_pages <= self._table_width, "the scheduler gave a sequence more pages than the table holds"
        first_page = int(self._num_pages[slot])
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


def _column(read: Callable[[Any], int], items: SequenceOf[Any]) -> np.ndarray:
    """What ``read`` finds in each of the items, as an int64 array."""
    return np.fromiter(map(read, items), np.int64, len(items))


def _indices(mask: np.ndarray) -> list[int]:
    """Indices of the true elements of ``[N]``."""
    return mask.nonzero()[0].tolist()


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

"""The buckets: the fixed shapes that steps are compiled for, and which one a schedule takes. Imports no jax."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Collection, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Literal

from jaxserve.dims import ceil_div
from jaxserve.engine.scheduling.schedule import RankSchedule
from jaxserve.engine.step.rows import ROW_FIELDS, Stage

_LEAST_MIXED_ROWS = 8
"""Smallest row count of mixed steps. The output head costs hardly less for 2 rows than for 8 (3.5 ms against 4.5 at V = 49,152 on two cores), and every
bucket costs a compile.
"""

Sampling = Literal["any", "greedy", "plain", "filtered"]
"""The set of stages that a program has between logits and token. A program with ``any`` has all, and the device skips those that no row needs."""

SAMPLING_STAGES: Mapping[Sampling, frozenset[Stage]] = {
    "greedy": frozenset(),
    "plain": frozenset({"temperature"}),
    "filtered": frozenset({"temperature", "filters"}),
}
"""The stages that each other kind of program always runs, fewest first, for devices on which a conditional makes the host wait. The last serves every row."""


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """The shapes of one compiled step, for each data rank.

    Args:
        num_tokens: T, the number of packed tokens.
        num_rows: B, the number of sequences.
        table_width: M, the largest number of pages of a sequence.
        decode_only: Whether every row has exactly one token, so that T = B and prefill is not compiled.
        sampling: The stages of sampling that the program has.
    """

    num_tokens: int
    num_rows: int
    table_width: int
    decode_only: bool
    sampling: Sampling = "any"

    @property
    def packed_size(self) -> int:
        """X, the length of a rank's packed int32 array: two counts, the token ids, then the rows' fields and page tables."""
        return 2 + self.num_tokens + self.num_rows * (len(ROW_FIELDS) + self.table_width)


@dataclasses.dataclass(frozen=True)
class Buckets:
    """All buckets of an engine, and which one a schedule takes.

    Args:
        decode: Row counts of decode steps, in which every row has one token (B = T), ascending.
        mixed_tokens: Token counts of mixed steps, ascending.
        mixed_rows: Sequence counts of mixed steps, ascending. Every token count is combined with every sequence count, which is capped at the token count.
        table_width: M, the largest number of pages of a sequence.
        sampling: The kinds of programs of each shape; the last one serves every row.
    """

    decode: tuple[int, ...]
    mixed_tokens: tuple[int, ...]
    mixed_rows: tuple[int, ...]
    table_width: int
    sampling: tuple[Sampling, ...] = ("any",)

    def all(self) -> list[Bucket]:
        """Every bucket once, smallest first."""
        shapes = {(tokens, min(rows, tokens), self.table_width, False) for tokens in self.mixed_tokens for rows in self.mixed_rows}
        shapes |= {(rows, rows, self.table_width, True) for rows in self.decode}
        return sorted(Bucket(*shape, sampling) for shape in shapes for sampling in self.sampling)

    def choose(self, ranks: SequenceOf[RankSchedule]) -> Bucket:
        """The smallest bucket that holds each rank's part of a step, with the program that serves every row. The scheduler's limits guarantee one."""
        num_rows = max(len(rank.sequences) for rank in ranks)
        if all(rank.num_tokens == len(rank.sequences) for rank in ranks):
            rows = _at_least(self.decode, num_rows)
            return Bucket(rows, rows, self.table_width, True, self.sampling[-1])
        tokens = _at_least(self.mixed_tokens, max(rank.num_tokens for rank in ranks))
        return Bucket(tokens, min(_at_least(self.mixed_rows, num_rows), tokens), self.table_width, False, self.sampling[-1])

    def narrow(self, bucket: Bucket, stages: Collection[Stage]) -> Bucket:
        """The bucket of the same shapes whose program has the fewest stages among those that have all of ``stages``."""
        sampling = next((sampling for sampling in self.sampling[:-1] if SAMPLING_STAGES[sampling].issuperset(stages)), self.sampling[-1])
        return dataclasses.replace(bucket, sampling=sampling)


def make_buckets(
    token_buckets: SequenceOf[int],
    sequence_buckets: SequenceOf[int],
    *,
    max_tokens: int,
    max_rows: int,
    table_width: int,
    sampling: tuple[Sampling, ...] = ("any",),
) -> Buckets:
    """The buckets of an engine.

    Args:
        token_buckets: Token counts of mixed steps; those above ``max_tokens`` are left out and ``max_tokens`` is added.
        sequence_buckets: Sequence counts; those above ``max_rows`` are left out, ``max_rows`` is added, and none is below 2, because one row takes a slow path
            on CPU. Decode steps use all of them. Mixed steps, whose cost depends more on tokens than on rows, use every other one, from the largest down to 8.
        max_tokens: The scheduler's token budget of a step.
        max_rows: Largest number of running sequences of a data rank.
        table_width: Largest number of pages of a sequence.
        sampling: The kinds of programs of each shape.
    """
    decode = tuple(sorted({max(2, rows) for rows in (*sequence_buckets, max_rows) if rows <= max_rows}))
    tokens = tuple(sorted({max(2, count) for count in (*token_buckets, max_tokens) if count <= max_tokens}))
    rows = [count for count in decode[::-2] if count >= _LEAST_MIXED_ROWS] or [decode[-1]]
    return Buckets(decode, tokens, tuple(sorted(rows)), table_width, sampling)


def table_width(max_model_len: int, page_size: int) -> int:
    """M, the number of pages of the longest sequence."""
    return ceil_div(max_model_len, page_size)


def _at_least(ascending: tuple[int, ...], value: int) -> int:
    index = bisect.bisect_left(ascending, value)
    assert index < len(ascending), f"no bucket holds {value}; the largest is {ascending[-1]}"
    return ascending[index]

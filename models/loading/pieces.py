"""Where the rows and columns of a checkpoint tensor lie in a parameter, and what of them a part of the parameter holds. Plain numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.models.param_spec import Piece

Box = tuple[slice, ...]
"""A part of an array: for each axis a slice with start and stop, and step 1."""


class Run(NamedTuple):
    """Consecutive rows or columns of a tensor as entries of one axis of the parameter.

    Args:
        axis: Of the parameter.
        start: Where the tensor begins on that axis.
        num_entries: How many entries of the axis it fills.
        each: How many rows or columns make up an entry.
    """

    axis: int
    start: int
    num_entries: int
    each: int

    def held(self, box: Box) -> range:
        """The entries that a part of the parameter holds, counted from the tensor's first."""
        within = box[self.axis]
        return range(max(within.start - self.start, 0), min(within.stop - self.start, self.num_entries))


@dataclasses.dataclass(frozen=True)
class Place:
    """A tensor's place in one layer's parameter.

    Args:
        box: What it fills.
        rows: Its rows.
        columns: Its columns; ``None`` for a tensor of one axis.
    """

    box: Box
    rows: Run
    columns: Run | None

    def shared(self, part: Box) -> Box | None:
        """What of a part of the parameter this tensor fills, counted from the part's own beginning; ``None`` if nothing."""
        shared: list[slice] = []
        for axis, (own, given) in enumerate(zip(self.box, part, strict=True)):
            start, stop = max(own.start, given.start), min(own.stop, given.stop)
            if start >= stop:
                return None
            is_run = axis == self.rows.axis or (self.columns is not None and axis == self.columns.axis)
            assert is_run or (start, stop) == (own.start, own.stop), f"{part} cuts an axis of {self.box} that is inside a row"
            shared.append(slice(start - given.start, stop - given.start))
        return tuple(shared)


def place_of(piece: Piece, shape: Sequence[int]) -> Place:
    """The place of a piece in a parameter.

    Args:
        piece: The checkpoint tensor.
        shape: Of one layer's parameter.
    """
    box = tuple(slice(*index.indices(size)[:2]) for index, size in zip(piece.into, shape, strict=True))
    sizes = [index.stop - index.start for index in box]
    num_rows = piece.shape[0] * piece.repeat
    split = next((axis for axis in range(1, len(sizes) + 1) if math.prod(sizes[:axis]) == num_rows), None)
    assert split is not None, f"{piece} does not fill whole axes of {tuple(shape)}"
    rows = _run(box, range(split), num_rows)
    columns = _run(box, range(split, len(sizes)), piece.shape[1]) if len(piece.shape) > 1 else None
    return Place(box, rows, columns)


def _run(box: Box, axes: range, num_values: int) -> Run:
    """The first of these axes that has more than one entry counts; the others are inside its entries."""
    axis = next((axis for axis in axes if box[axis].stop - box[axis].start > 1), axes[-1])
    num_entries = box[axis].stop - box[axis].start
    return Run(axis, box[axis].start, num_entries, num_values // num_entries)

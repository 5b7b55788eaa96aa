"""The row schema: the fields that a step gets for each of its rows. Packing on the host and unpacking on the device derive from it. Imports no jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from jaxserve.engine.scheduling.sequence import Sequence
from jaxserve.request import SamplingParams

OFF = int(np.iinfo(np.int32).max)
"""Value that stands for "no limit" or "no slot": it is larger than any vocabulary and any number of slots."""

Stage = Literal["temperature", "filters"]
"""A stage between logits and token that a step can skip if no row needs it; see ``step.sampler``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowField:
    """One number of a row. It takes 32 bits of the packed int32 array, whatever its dtype.

    Args:
        name: Name, unique among the fields.
        dtype: Dtype of 32 bits.
        default: Value in a padding row.
        meaning: Meaning of the number, for readers.
        of: Gives the value for a sequence, which stays the same while the sequence holds its slot; ``None`` for a field that each step sets anew.
        stage: Stage of sampling that a row needs if its value is not the default; ``None`` if no stage depends on the field.
    """

    name: str
    dtype: type[np.generic]
    default: float
    meaning: str
    of: Callable[[Sequence], float] | None = None
    stage: Stage | None = None


def _filter(name: str, dtype: type[np.generic], off: float, meaning: str, read: Callable[[SamplingParams], float]) -> RowField:
    """A field of a filter, which is off in a greedy row: one row's filter makes the sampler search for the thresholds of all."""

    def of(sequence: Sequence) -> float:
        sampling_params = sequence.request.sampling_params
        return off if sampling_params.greedy else read(sampling_params)

    return RowField(name=name, dtype=dtype, default=off, meaning=meaning, of=of, stage="filters")


ROW_FIELDS: tuple[RowField, ...] = (
    RowField(name="query_len", dtype=np.int32, default=0, meaning="Tokens that the step runs."),
    RowField(name="context_len", dtype=np.int32, default=0, meaning="Length of the sequence after them."),
    RowField(name="slot", dtype=np.int32, default=OFF, meaning="Index of the sequence's state on the device; nothing is kept of a row out of range."),
    RowField(name="begins", dtype=np.int32, default=0, meaning="1 to reset the slot's wide state first: its owner is new, and nothing was filled."),
    RowField(
        name="temperature", dtype=np.float32, default=0.0, meaning="Divides the logits; 0 is greedy.",
        of=lambda sequence: sequence.request.sampling_params.temperature, stage="temperature",
    ),
    _filter("top_k", np.int32, OFF, "Most tokens that are kept.", lambda sampling_params: sampling_params.top_k if sampling_params.top_k > 0 else OFF),
    _filter("top_p", np.float32, 1.0, "Share of the probability that is kept.", lambda sampling_params: sampling_params.top_p),
    _filter("min_p", np.float32, 0.0, "Least probability that is kept, relative to the likeliest token's.", lambda sampling_params: sampling_params.min_p),
    RowField(name="seed", dtype=np.uint32, default=0, meaning="Seed of the sequence's randomness.", of=lambda sequence: sequence.seed),
)  # fmt: skip
"""The columns of a row, in packed order, before its page table."""

OWNER_FIELDS = tuple(field for field in ROW_FIELDS if field.of is not None)
"""The fields that depend on the owner of a slot only."""

_RECORD = np.dtype([(field.name, field.dtype) for field in ROW_FIELDS])
_DEFAULTS = np.array(tuple(field.default for field in ROW_FIELDS), _RECORD)
_OWNER_NAMES = [field.name for field in OWNER_FIELDS]
_OWNER_READERS = [field.of for field in ROW_FIELDS if field.of is not None]


def records(rows: np.ndarray) -> Any:
    """The fields of packed rows as a structured view, by name.

    Args:
        rows: ``[..., X]`` int32. The last axis is contiguous and begins with the fields.
    """
    return rows[..., : len(ROW_FIELDS)].view(_RECORD)[..., 0]


def set_defaults(rows: np.ndarray) -> None:
    """Makes packed rows ``[..., X]`` padding rows."""
    records(rows)[...] = _DEFAULTS


def set_owner(row: np.ndarray, sequence: Sequence) -> None:
    """Writes the fields of a slot's owner into its packed row ``[X]``."""
    records(row)[_OWNER_NAMES] = tuple(read(sequence) for read in _OWNER_READERS)


def stages_needed(rows: np.ndarray) -> set[Stage]:
    """The stages of sampling that at least one of the packed rows ``[..., X]`` needs."""
    values = records(rows)
    return {field.stage for field in ROW_FIELDS if field.stage is not None and (values[field.name] != field.default).any()}

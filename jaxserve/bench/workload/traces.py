"""Reads recorded requests: times and lengths, in the formats that are published (Azure's and BurstGPT's CSV, Mooncake's JSON lines)."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, cast

from jaxserve.bench.workload.lengths import MAX_LEN, refuse_mostly_broken
from jaxserve.errors import ConfigError

_TIME_NAMES = ("timestamp", "arrival_time", "arrived_at", "time")
_INPUT_NAMES = ("input_length", "input_tokens", "contexttokens", "request tokens", "prompt_tokens", "num_prefill_tokens", "input_len")
_OUTPUT_NAMES = ("output_length", "output_tokens", "generatedtokens", "response tokens", "completion_tokens", "num_decode_tokens", "output_len")


@dataclasses.dataclass(frozen=True, slots=True)
class TraceRow:
    """One recorded request: seconds from the first one, and lengths in tokens."""

    arrival_s: float
    input_len: int
    output_len: int


@dataclasses.dataclass(frozen=True)
class Trace:
    """Recorded requests by time.

    Args:
        broken: Rows left out: no time, or a length that is no whole number of at least 1.
    """

    rows: tuple[TraceRow, ...]
    broken: int


def read_trace(path: str, *, unit: Literal["s", "ms"] = "s", limit: int | None = None) -> Trace:
    """Reads a trace; times count from its earliest row.

    Args:
        path: ``.jsonl`` or ``.json`` holds an object a line, everything else is CSV with a header.
        unit: Of numeric timestamps; those with a date are read as such.
        limit: Stop after that many good rows.

    Raises:
        ConfigError: No readable file, no column with times and lengths, or most rows are broken.
    """
    try:
        with Path(path).expanduser().open(encoding="utf-8", errors="replace", newline="") as lines:
            rows, broken = _collect(_json_rows(lines) if Path(path).suffix in (".jsonl", ".json") else csv.DictReader(lines), unit, limit)
    except OSError as error:
        raise ConfigError(f"trace: cannot read {path}: {error.strerror}") from None
    except csv.Error as error:
        raise ConfigError(f"trace: {path} is no CSV: {error}") from None
    refuse_mostly_broken(f"trace: {path} (wanted: {_TIME_NAMES[0]}, {_INPUT_NAMES[0]} and {_OUTPUT_NAMES[0]}, or their other names)", len(rows), broken, "rows")
    start_s = min(row.arrival_s for row in rows)
    shifted = (dataclasses.replace(row, arrival_s=row.arrival_s - start_s) for row in rows)
    return Trace(tuple(sorted(shifted, key=lambda row: row.arrival_s)), broken)


def _collect(rows: Iterable[Mapping[str, Any] | None], unit: Literal["s", "ms"], limit: int | None) -> tuple[list[TraceRow], int]:
    good: list[TraceRow] = []
    broken = 0
    for row in rows:
        read = None if row is None else _row(row, unit)
        if read is None:
            broken += 1
            continue
        good.append(read)
        if len(good) == limit:
            break
    return good, broken


def _json_rows(lines: Iterable[str]) -> Iterator[Mapping[str, Any] | None]:
    for line in lines:
        if not line.strip():
            continue
        try:
            row: Any = json.loads(line)
        except ValueError:
            row = None
        yield cast(Mapping[str, Any], row) if isinstance(row, dict) else None


def _row(row: Mapping[str, Any], unit: Literal["s", "ms"]) -> TraceRow | None:
    fields = {str(name).strip().lower(): value for name, value in row.items()}
    try:
        time_s = _seconds(_first(fields, _TIME_NAMES), unit)
        lengths = [int(_first(fields, names)) for names in (_INPUT_NAMES, _OUTPUT_NAMES)]
    except (TypeError, ValueError, KeyError, OverflowError):
        return None
    if not math.isfinite(time_s) or not all(1 <= length <= MAX_LEN for length in lengths):
        return None
    return TraceRow(time_s, *lengths)


def _first(fields: Mapping[str, Any], names: Iterable[str]) -> Any:
    for name in names:
        if name in fields:
            return fields[name]
    raise KeyError(f"none of {', '.join(names)}")


def _seconds(value: Any, unit: Literal["s", "ms"]) -> float:
    try:
        return float(value) / (1000 if unit == "ms" else 1)
    except ValueError:
        # Azure writes seven digits of a second, Python reads six.
        head, dot, fraction = str(value).strip().partition(".")
        digits = "".join(character for character in fraction if character.isdigit())[:6]
        return datetime.datetime.fromisoformat(f"{head}{dot}{digits}").replace(tzinfo=datetime.UTC).timestamp()

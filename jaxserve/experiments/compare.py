"""Lays the results of two sweeps side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.experiments.file import label_of, show
from jaxserve.experiments.results import Result, read_results
from jaxserve.experiments.summary import COLUMNS, figure, markdown

_BESIDE = {"decode_step_ms_p50": "predicted_decode_step_ms"}
"""Measured -> the prediction that stands beside it where one folder measures and the other plans."""


def compare(first: Path, second: Path) -> str:
    """Both folders' figures as Markdown, cell by cell, with second / first.

    Cells are the same when their settings are, but for those that each folder has one value of: they are what the folders differ in.

    Raises:
        ConfigError: A folder is none of a sweep's, or no cell is in both.
    """
    a, b = ([result for result in read_results(folder) if result.status == "done"] for folder in (first, second))
    differing = _differing_constants(a, b)
    left, right = _by_key(a, differing, first), _by_key(b, differing, second)
    shared = [key for key in left if key in right]
    if not shared:
        raise ConfigError(f"no cell has figures in both {first} ({len(a)} have) and {second} ({len(b)} have)")
    settings = {key: left[key].settings for key in shared}
    names = dict.fromkeys(name for key in shared for name in settings[key] if name not in differing)
    axes = [name for name in names if len({json.dumps(one.get(name)) for one in settings.values()}) > 1]
    rows = [row for key in shared for row in _rows(left[key], right[key], label_of(settings[key], axes))]
    lines = [f"first:  {first}", f"second: {second}"]
    lines += [f"{key}: {show(values[0])} in the first, {show(values[1])} in the second" for key, values in differing.items()]
    lines += ["", markdown(["cell", "figure", "first", "second", "second / first"], rows, num_left=2)]
    lines += [f"only in the {which}: {len(mine) - len(shared)} cells" for which, mine in (("first", left), ("second", right)) if len(mine) > len(shared)]
    return "\n".join(lines)


def _differing_constants(a: Sequence[Result], b: Sequence[Result]) -> dict[str, tuple[Any, Any]]:
    """Settings of which each side has one value, and the other another."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in dict.fromkeys(key for result in (*a, *b) for key in result.settings):
        values = [{json.dumps(result.settings.get(key)) for result in side} for side in (a, b)]
        if len(values[0]) == len(values[1]) == 1 and values[0] != values[1]:
            found[key] = (json.loads(*values[0]), json.loads(*values[1]))
    return found


def _by_key(results: Sequence[Result], differing: Any, folder: Path) -> dict[str, Result]:
    found: dict[str, Result] = {}
    for result in results:
        key = json.dumps({name: value for name, value in sorted(result.settings.items()) if name not in differing})
        if key in found:
            raise ConfigError(f"{folder} holds two cells that cannot be told apart: {result.cell} and {found[key].cell}")
        found[key] = result
    return found


def _rows(first: Result, second: Result, label: str) -> list[list[str]]:
    rows: list[list[str]] = []
    for name, title in COLUMNS.items():
        a, b = first.metrics.get(name), second.metrics.get(name)
        if name in _BESIDE and (a is None) != (b is None):
            other = _BESIDE[name]
            a, b = (first.metrics.get(other), b) if a is None else (a, second.metrics.get(other))
            title = "decode step ms, measured and predicted"
        if a is None or b is None:
            continue
        numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (a, b))
        rows.append([label, title, figure(a), figure(b), f"{b / a:.3f}" if numbers and a else ""])
        label = ""
    return rows

"""What a sweep found, for people: ``summary.md`` and plots."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from jaxserve.bench.load.compare import NOISY_CORES
from jaxserve.experiments.file import Experiment, label_of, show
from jaxserve.experiments.results import SUMMARY, Result

COLUMNS: Mapping[str, str] = {
    "goodput_per_s": "good requests/s",
    "output_tokens_per_s": "output tokens/s",
    "ttft_ms_p50": "TTFT p50 ms",
    "ttft_ms_p99": "TTFT p99 ms",
    "tpot_ms_p50": "TPOT p50 ms",
    "tpot_ms_p99": "TPOT p99 ms",
    "decode_step_ms_p50": "decode step p50 ms",
    "fits": "fits",
    "weights_gib": "weights GiB",
    "kv_gib": "KV GiB",
    "temp_gib": "temp GiB",
    "usable_gib": "usable GiB",
    "room_sequences": "room, sequences",
    "predicted_decode_step_ms": "predicted decode ms",
    "predicted_decode_tokens_per_s_per_chip": "predicted tokens/s/chip",
    "predicted_full_tokens_per_s_per_chip": "predicted, memory full",
    "predicted_decode_binds": "bound by",
    "predicted_mixed_step_ms": "predicted mixed ms",
}
"""Metrics that a table shows, of those that its cells have; ``results.jsonl`` holds all."""

PLOTTED = ("goodput_per_s", "output_tokens_per_s", "ttft_ms_p50", "tpot_ms_p50", "predicted_decode_step_ms", "predicted_decode_tokens_per_s_per_chip")

_MEASURED_AND_PREDICTED = ("decode_step_ms_p50", "predicted_decode_step_ms")


def write_summary(experiment: Experiment, results: Sequence[Result], folder: Path) -> list[str]:
    """Writes the table and the plots.

    Args:
        experiment: What was run.
        results: Of its cells, in its order; some may be missing.
        folder: Of the sweep.

    Returns:
        Lines for the terminal: what failed, what was written.
    """
    plots = _plot(experiment, results, folder)
    (folder / SUMMARY).write_text(summary(experiment, results, plots), encoding="utf-8")
    failed = [result for result in results if result.status != "done"]
    lines = [f"{label_of(result.settings, experiment.axes)} {result.status}: {result.reason}" for result in failed]
    if not plots and not _has_matplotlib():
        lines.append('no plots, which need matplotlib: pip install "jaxserve[plots]"')
    return [*lines, f"{len(results) - len(failed)} of {len(experiment.cells)} cells have figures: {folder / SUMMARY}"]


def summary(experiment: Experiment, results: Sequence[Result], plots: Sequence[str] = ()) -> str:
    """The summary as Markdown.

    Args:
        experiment: What was run.
        results: Of its cells.
        plots: Names of PNG files beside it.
    """
    failed = [result for result in results if result.status != "done"]
    done = [result for result in results if result.status == "done"]
    first: Mapping[str, Any] = results[0].settings if results else {}
    common = {key: value for key, value in first.items() if all(result.settings.get(key) == value for result in results) and key not in experiment.axes}
    parts = [f"# {experiment.title}", "", f"{len(done)} of {len(experiment.cells)} cells have figures."]
    if common:
        parts += ["", "Every cell: " + ", ".join(f"`{key}={show(value)}`" for key, value in common.items())]
    if any(key.startswith("predicted_") for result in done for key in result.metrics):
        parts += ["", "Predicted figures are a roofline over data sheets (docs/plan.md), not measurements."]
    busiest = max((result.metrics.get("cores_others") or 0.0 for result in done), default=0.0)
    if busiest > NOISY_CORES:
        parts += ["", f"Other processes used up to {busiest:.1f} cores meanwhile: measured figures measure them as well."]
    if done:
        parts += ["", table(done, experiment.axes)]
    both = [result for result in done if all(result.metrics.get(name) for name in _MEASURED_AND_PREDICTED)]
    if both:
        parts += ["", "## Predicted beside measured", ""]
        parts += [_beside(result, experiment.axes) for result in both]
    if failed:
        parts += ["", "## Without figures", ""]
        parts += [f"- {label_of(result.settings, experiment.axes)}: {result.status}: {result.reason}" for result in failed]
    too_large = [result for result in done if result.metrics.get("fits") is False]
    if too_large:
        parts += ["", "## Does not fit", ""]
        parts += [f"- {label_of(result.settings, experiment.axes)}: {result.metrics['reason']}" for result in too_large]
    for name in plots:
        parts += ["", f"![{name}]({name})"]
    return "\n".join(parts) + "\n"


def table(results: Sequence[Result], axes: Sequence[str]) -> str:
    """A Markdown table: the settings that differ, then the figures that there are."""
    names = [name for name in COLUMNS if any(result.metrics.get(name) is not None for result in results)]
    rows = [[*(show(result.settings.get(axis, "")) for axis in axes), *(figure(result.metrics.get(name)) for name in names)] for result in results]
    return markdown([*axes, *(COLUMNS[name] for name in names)], rows, num_left=len(axes))


def markdown(headers: Sequence[str], rows: Sequence[Sequence[str]], *, num_left: int) -> str:
    """A table whose first ``num_left`` columns are words."""
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in (headers, *rows)]
    lines = ["| " + " | ".join(row) + " |" for row in escaped]
    lines.insert(1, "|" + "|".join("---" if index < num_left else "---:" for index in range(len(headers))) + "|")
    return "\n".join(lines)


def figure(value: Any) -> str:
    """A metric as text: four digits at most, empty for none."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _beside(result: Result, axes: Sequence[str]) -> str:
    measured, predicted = (result.metrics[name] for name in _MEASURED_AND_PREDICTED)
    return f"- {label_of(result.settings, axes)}: decode step {figure(measured)} ms, {measured / predicted:.2f} times the predicted {figure(predicted)} ms"


def _has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def _plot(experiment: Experiment, results: Sequence[Result], folder: Path) -> list[str]:
    """One file a metric, as PNG and SVG: the first axis along x, a series for each combination of the others. Returns the PNG files' names."""
    done = [result for result in results if result.status == "done"]
    if len(done) < 2 or not experiment.axes or not _has_matplotlib():
        return []
    from jaxserve import plots

    first, *others = experiment.axes
    places = list(dict.fromkeys(show(result.settings.get(first, "")) for result in done))
    series = list(dict.fromkeys(label_of(result.settings, others) for result in done)) if others else [""]
    names: list[str] = []
    for metric in PLOTTED:
        values = {
            (show(result.settings.get(first, "")), label_of(result.settings, others) if others else ""): value
            for result in done
            if (value := result.metrics.get(metric)) is not None
        }
        if not any(values.values()):
            continue
        drawn_series = [plots.Series(label, range(len(places)), [values.get((place, label), math.nan) for place in places]) for label in series]
        with plots.figure(width=max(5.0, 0.3 * len(places) * len(series) + 2), height=3.6) as (drawn, (axes,)):
            plots.bars(axes, places, drawn_series, title=experiment.title, y=COLUMNS[metric])
            cast(Any, axes).set_xlabel(first)
            for kind in ("png", "svg"):
                plots.save(drawn, folder / f"{metric}.{kind}")
        names.append(f"{metric}.png")
    return names

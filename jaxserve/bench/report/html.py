"""One page, complete in itself, of what a benchmark found: figures as tables, distributions and timelines as plots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from jaxserve import html_page, plots
from jaxserve.bench.load.metrics import LATENCIES, concurrency_over_time, latency_values_ms, pieces_per_second, ttft_s, waiting_over_time
from jaxserve.bench.load.session import Result
from jaxserve.bench.load.sweep import MaxRate, Sweep
from jaxserve.bench.report import report
from jaxserve.html_page import text
from jaxserve.output_files import write_text

T = TypeVar("T")

MAX_POINTS = 2000
"""Of one curve: more cannot be told apart and make the page heavy."""


def write_page(file: Path, found: Sweep | MaxRate) -> None:
    """Writes the page of a run, a sweep or a search.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    write_text(file, to_page(found))


def to_page(found: Sweep | MaxRate) -> str:
    """The page as text; see :func:`write_page`."""
    shown = list(found.results) if isinstance(found, Sweep) else [trial.result for trial in found.trials] or [found.unloaded]
    info = shown[0].info
    parts = [f"<h1>{text(info.model)}</h1><p class=sub>{text(info.url)} ({text(info.api)}) · {text(report.describe(shown[0], load=len(shown) == 1))}</p>"]
    if isinstance(found, MaxRate):
        answer = f"{found.rate:.4g} requests/s" if found.rate else "none found"
        parts.append(
            f"<section><dl><div><dt>highest rate that keeps {text(str(found.slo))}</dt><dd>{answer}</dd></div></dl><p>{text(found.note)}</p></section>"
        )
    elif found.interrupted is not None and len(shown) > 1:
        parts.append(f"<section class=note>{text(report.ended_early(found))}</section>")
    if len(shown) > 1:
        parts.append(_sweep(shown))
    parts += [_run(result, heading=len(shown) > 1) for result in shown]
    return measured_page(f"{info.model}: benchmark", parts)


def measured_page(title: str, parts: Sequence[str]) -> str:
    """A whole page of measurements, with the facts of this machine at its end; see :func:`~jaxserve.html_page.page`."""
    return html_page.page(title, [*parts, f"<h2>Measured from</h2><section>{html_page.table((), report.environment().items())}</section>"])


def _run(result: Result, *, heading: bool) -> str:
    metrics = result.metrics
    tiles = [
        ("requests", f"{metrics.completed} of {sum(metrics.outcomes.values())}"),
        ("requests/s", f"{metrics.requests_per_s:.3g}"),
        ("output tokens/s", f"{metrics.output_tokens_per_s:.1f}"),
        ("total tokens/s", f"{metrics.total_tokens_per_s:.1f}"),
        *([("good requests/s", f"{metrics.goodput_per_s:.3g}")] if metrics.goodput_per_s is not None else []),
        *([("per million output tokens", f"{metrics.usd_per_million_tokens:.4g}")] if metrics.usd_per_million_tokens is not None else []),
        ("most at once", str(metrics.peak_concurrency)),
        ("duration", f"{metrics.duration_s:.1f} s"),
    ]
    dl = "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in tiles)
    parts = [f"<section><dl>{dl}</dl></section>"]
    if notes := report.warnings_of(result):
        parts.append(f"<section class=note>{html_page.lines(notes)}</section>")
    parts.append(f"<section>{_latency_table(result)}</section>")
    if metrics.completed:
        parts.append(f"<section>{_distributions(result)}</section><section>{_timeline(result)}</section>")
    body = "".join(parts)
    if not heading:
        return body
    return f"<h2>{text(report.load_of(result))}</h2><details><summary>figures and plots</summary>{body}</details>"


def _latency_table(result: Result) -> str:
    return html_page.table(report.LATENCY_COLUMNS, report.latency_rows(result)) + f"<p class=sub>{text(report.latency_remark(result))}</p>"


def _distributions(result: Result) -> str:
    values = latency_values_ms(record for record in result.run.records if record.outcome == "success")
    present = [name for name in LATENCIES if values[name]]
    with plots.figure(len(present), width=3.4, height=2.9) as (drawn, axes):
        for name, place in zip(present, axes, strict=True):
            spread = result.metrics.latencies[name]
            plots.distribution(place, _thinned(sorted(values[name])), [("median", spread.median), ("p99", spread.p99)], title=LATENCIES[name], x="ms")
        return plots.to_svg(drawn)


def _timeline(result: Result) -> str:
    records = result.run.records
    waiting = waiting_over_time(records)
    running = concurrency_over_time(records)
    good = [record for record in records if record.piece_times_s]
    with plots.figure(3, width=4.5, height=2.9) as (drawn, axes):
        curves = [plots.Series(label, *_curve(points)) for label, points in (("under way", running), ("without a first token", waiting)) if points]
        plots.lines(axes[0], curves, title="Requests", x="s", y="", step=True)
        rates = pieces_per_second(good)
        seconds = [float(second) for second in range(len(rates) + 1)]  # the last value is held to the end of its second
        plots.lines(axes[1], [plots.Series("", seconds, [*rates, *(rates[-1:] or [0])])], title="Pieces of text a second", x="s", y="", step=True)
        ttft = [(record.sent_s, value * 1e3) for record in good if (value := ttft_s(record)) is not None]
        plots.scatter(axes[2], [plots.Series("", *_curve(ttft))], title="TTFT by time of sending", x="s", y="ms")
        for place in axes:
            place.set_xlim(left=0)
        return plots.to_svg(drawn)


def _sweep(results: Sequence[Result]) -> str:
    closed = results[0].workload.arrival == "closed"
    ordered = sorted(results, key=lambda result: (result.workload.concurrency or 0, result.workload.rate or 0))
    levels = [float((result.workload.concurrency if closed else result.workload.rate) or 0) for result in ordered]
    level_name = "requests at once" if closed else "offered requests/s"
    with plots.figure(3, width=4.5, height=3.2) as (drawn, axes):
        throughput = [result.metrics.output_tokens_per_s for result in ordered]
        plots.lines(
            axes[0],
            [_median_band(ordered, "ttft", throughput)],
            title="TTFT against throughput",
            x="output tokens/s",
            y="ms",
            markers=True,
        )
        plots.lines(
            axes[1],
            [_median_band(ordered, "tpot", throughput)],
            title="TPOT against throughput",
            x="output tokens/s",
            y="ms",
            markers=True,
        )
        rates = [plots.Series("completed", levels, [result.metrics.requests_per_s for result in ordered])]
        if all(result.metrics.goodput_per_s is not None for result in ordered):
            rates.append(plots.Series("within the SLO", levels, [result.metrics.goodput_per_s or 0.0 for result in ordered]))
        plots.lines(axes[2], rates, title="Requests a second", x=level_name, y="requests/s", markers=True)
        svg = plots.to_svg(drawn)
    table = html_page.table(report.sweep_headers(ordered[0]), map(report.sweep_cells, ordered))
    return f"<section>{table}<p class=sub>Latencies: median, p99.</p></section><section>{svg}</section>"


def _median_band(results: Sequence[Result], name: str, throughput: Sequence[float]) -> plots.Series:
    spreads = [result.metrics.latencies.get(name) for result in results]
    medians = [math.nan if spread is None else spread.median for spread in spreads]
    return plots.Series("median; band up to p99", throughput, medians, medians, [math.nan if spread is None else spread.p99 for spread in spreads])


def _curve(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    thinned = _thinned(points)
    return [x for x, _ in thinned], [y for _, y in thinned]


def _thinned(values: Sequence[T]) -> list[T]:
    """At most about ``MAX_POINTS`` of them, evenly, the last included."""
    every = max(1, len(values) // MAX_POINTS)
    return [*values[::every], *([values[-1]] if (len(values) - 1) % every else [])]

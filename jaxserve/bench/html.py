"""One page, complete in itself, of what a benchmark found: figures as tables, distributions and timelines as plots."""

from __future__ import annotations

import html
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from jaxserve import plots
from jaxserve.bench import report
from jaxserve.bench.load import Record
from jaxserve.bench.metrics import LATENCIES, concurrency_over_time, e2el_s, pieces_per_second, tpot_s, ttft_s, waiting_over_time
from jaxserve.bench.session import Result
from jaxserve.bench.sweep import MaxRate
from jaxserve.errors import ConfigError

T = TypeVar("T")

MAX_POINTS = 2000
"""Of one curve: more cannot be told apart and make the page heavy."""

_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1e293b; background: #f8fafc; margin: 0; }
main { max-width: 1120px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 24px; margin: 8px 0 2px; } h2 { font-size: 18px; margin: 32px 0 8px; }
p.sub { color: #64748b; margin: 0 0 16px; }
section { background: #fff; border: 1px solid #e2e8f0; border-radius: 8px; padding: 14px 18px; margin: 12px 0; overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 14px 4px 0; text-align: right; white-space: nowrap; border-bottom: 1px solid #f1f5f9; }
th:first-child, td:first-child { text-align: left; } th { color: #64748b; font-weight: 600; }
dl { display: flex; flex-wrap: wrap; gap: 10px 40px; margin: 4px 0; }
dt { color: #64748b; font-size: 13px; } dd { margin: 0; font-size: 20px; font-weight: 600; }
.note { background: #fffbeb; border-color: #fde68a; } svg, img { max-width: 100%; height: auto; } summary { cursor: pointer; color: #64748b; }
"""


def write_page(file: Path, results: Sequence[Result], found: MaxRate | None = None) -> None:
    """Writes the page of one run, a sweep or a search.

    Args:
        file: Where to.
        results: At least one run, or the trials of ``found``.
        found: A search's answer.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    write_text(file, to_page(results, found))


def to_page(results: Sequence[Result], found: MaxRate | None = None) -> str:
    """The page as text; see :func:`write_page`."""
    shown = list(results) or ([found.unloaded] if found else [])
    info = shown[0].info
    parts = [f"<h1>{_text(info.model)}</h1><p class=sub>{_text(info.url)} ({_text(info.api)}) · {_text(report.describe(shown[0], load=len(shown) == 1))}</p>"]
    if found is not None:
        answer = f"{found.rate:.4g} requests/s" if found.rate else "none"
        parts.append(
            f"<section><dl><div><dt>highest rate that keeps {_text(str(found.slo))}</dt><dd>{answer}</dd></div></dl><p>{_text(found.note)}</p></section>"
        )
    if len(shown) > 1:
        parts.append(_sweep(shown))
    parts += [_run(result, heading=len(shown) > 1) for result in shown]
    return page(f"{info.model}: benchmark", parts)


def page(title: str, parts: Sequence[str]) -> str:
    """A whole page in our style, with the facts of this machine at its end.

    Args:
        title: Of the page, as text.
        parts: Its body, as HTML.
    """
    facts = "".join(f"<tr><td>{_text(name)}</td><td>{_text(str(value))}</td></tr>" for name, value in report.environment().items())
    return (
        f"<!doctype html><html lang=en><head><meta charset=utf-8><meta name=viewport content='width=device-width'><title>{_text(title)}</title>"
        f"<style>{_CSS}</style></head><body><main>{''.join(parts)}<h2>Measured from</h2><section><table>{facts}</table></section></main></body></html>\n"
    )


def write_text(file: Path, text: str) -> None:
    """Writes a page.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from None


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
    dl = "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in tiles)
    parts = [f"<section><dl>{dl}</dl></section>"]
    if notes := report.warnings_of(result):
        parts.append(f"<section class=note>{'<br>'.join(_text(note) for note in notes)}</section>")
    parts.append(f"<section>{_latency_table(result)}</section>")
    if metrics.completed:
        parts.append(f"<section>{_distributions(result)}</section><section>{_timeline(result)}</section>")
    body = "".join(parts)
    if not heading:
        return body
    return f"<h2>{_text(report.load_of(result))}</h2><details><summary>figures and plots</summary>{body}</details>"


def _latency_table(result: Result) -> str:
    columns = ("mean", "median", "std", "p90", "p95", "p99", "max")
    head = "".join(f"<th>{name}</th>" for name in ("ms", *columns))
    rows = "".join(
        f"<tr><td>{name}</td>{''.join(f'<td>{getattr(values, column):.1f}</td>' for column in columns)}</tr>"
        for key, name in LATENCIES.items()
        if (values := result.metrics.latencies.get(key)) is not None
    )
    return f"<table><tr>{head}</tr>{rows}</table><p class=sub>TPOT leaves out the first token; ITL is between pieces of text.</p>"


def _distributions(result: Result) -> str:
    good = [record for record in result.run.records if record.outcome == "success"]
    of: dict[str, Callable[[Record], float | None]] = {"ttft": ttft_s, "tpot": tpot_s, "e2el": e2el_s}
    values = {name: [value * 1e3 for record in good if (value := measure(record)) is not None] for name, measure in of.items()}
    values["itl"] = [(after - before) * 1e3 for record in good for before, after in itertools.pairwise(record.piece_times_s)]
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
        plots.lines(axes[1], [plots.Series("", seconds, [*rates, rates[-1]])], title="Pieces of text a second", x="s", y="", step=True)
        ttft = [(record.sent_s, value * 1e3) for record in good if (value := ttft_s(record)) is not None]
        plots.scatter(axes[2], [plots.Series("", *_curve(ttft))], title="TTFT by time of sending", x="s", y="ms")
        for place in axes:
            place.set_xlim(left=0)
        return plots.to_svg(drawn)


def _sweep(results: Sequence[Result]) -> str:
    closed = results[0].workload.arrival == "closed"
    ordered = sorted(
        (result for result in results if result.metrics.completed), key=lambda result: (result.workload.concurrency or 0, result.workload.rate or 0)
    )
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
    rows = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in report.sweep_cells(result)) + "</tr>" for result in ordered)
    head = "".join(f"<th>{_text(name)}</th>" for name in report.sweep_headers(ordered[0]))
    return f"<section><table><tr>{head}</tr>{rows}</table><p class=sub>Latencies: median, p99.</p></section><section>{svg}</section>"


def _median_band(results: Sequence[Result], name: str, throughput: Sequence[float]) -> plots.Series:
    points = [(at, result.metrics.latencies[name]) for at, result in zip(throughput, results, strict=True) if name in result.metrics.latencies]
    return plots.Series(
        "median; band up to p99",
        [at for at, _ in points],
        [spread.median for _, spread in points],
        [spread.median for _, spread in points],
        [spread.p99 for _, spread in points],
    )


def _curve(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    thinned = _thinned(points)
    return [x for x, _ in thinned], [y for _, y in thinned]


def _thinned(values: Sequence[T]) -> list[T]:
    """At most about ``MAX_POINTS`` of them, evenly, the last included."""
    every = max(1, len(values) // MAX_POINTS)
    return [*values[::every], *([values[-1]] if (len(values) - 1) % every else [])]


def _text(value: str) -> str:
    return html.escape(value, quote=True)

"""A comparison for people (table, page) and for programs (JSON)."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from jaxserve import html_page, plots
from jaxserve.bench.load.compare import FIGURES, NOISY_CORES, Comparison, Contender
from jaxserve.bench.report import report
from jaxserve.bench.report.html import measured_page
from jaxserve.html_page import text
from jaxserve.output_files import write_text


def print_comparison(found: Comparison, console: Console) -> None:
    """A table for each level of load: medians over the rounds with their range, the ratio to the first server, and cores that other processes used."""
    for level in range(len(found.workloads)):
        results = [turn.result for turn in found.turns if turn.level == level]
        if not results:
            continue
        rounds = max(turn.round for turn in found.turns if turn.level == level) + 1
        table = report.make_table(f"{report.describe(results[0])}: medians of {rounds} rounds (range); x is against {found.contenders[0].name}")
        for index, header in enumerate(headers()):
            table.add_column(header, justify="right" if index else "left")
        for contender in found.contenders:
            table.add_row(*(Text(cell.replace(" (", "\n(")) for cell in cells(found, contender, level)))
        console.print(table)
    report.print_notes(console, notes(found))


def headers() -> list[str]:
    """Columns of :func:`cells`."""
    return ["server", "tok/s", "x", "TTFT ms", "x", "TPOT ms", "x", "bad", "others"]


def cells(found: Comparison, contender: Contender, level: int) -> list[str]:
    """One server at one level, as a line of a table."""
    turns = [turn for turn in found.turns if (turn.contender, turn.level) == (contender.name, level)]
    line = [contender.name]
    for figure in ("output_throughput", "median_ttft_ms", "median_tpot_ms"):
        line.append(report.median_range(found.values(contender.name, level, figure), ".0f" if figure == "median_ttft_ms" else ".1f"))
        line.append("1" if contender is found.contenders[0] else report.median_range(found.ratios(contender.name, level, figure), ".2f"))
    others = [turn.cpu.others for turn in turns if turn.cpu is not None]
    return [*line, str(sum(turn.result.metrics.failed for turn in turns)), report.median_range(others, ".2f")]


def notes(found: Comparison) -> list[str]:
    """What a reader must know before trusting the figures."""
    lines: list[str] = []
    if noisy := sum(turn.noisy for turn in found.turns):
        lines.append(f"in {noisy} of {len(found.turns)} runs other processes used more than {NOISY_CORES} cores: those figures are low")
    if found.interrupted:
        lines.append(f"ended early ({found.interrupted}): not all rounds were run")
    for contender in found.contenders:
        start = found.starts.get(contender.name)
        if start is not None and start.ready_s is not None:
            memory = "" if start.resident_mib is None else f", {start.resident_mib:.0f} MiB resident after its last run"
            lines.append(f"{contender.name}: ready after {start.ready_s:.1f} s{memory}")
        lines += [f"{contender.name}: {warning}" for warning in _warnings(found, contender)]
    return lines


def to_json(found: Comparison) -> dict[str, Any]:
    """All of it as one JSON object; ``runs`` are those of ``bench serve --json``."""
    levels: list[dict[str, Any]] = []
    for level in range(len(found.workloads)):
        servers: dict[str, Any] = {}
        for contender in found.contenders:
            servers[contender.name] = {
                figure: {
                    "values": found.values(contender.name, level, figure),
                    "median": _median(found.values(contender.name, level, figure)),
                    "ratios": found.ratios(contender.name, level, figure),
                    "median_ratio": _median(found.ratios(contender.name, level, figure)),
                }
                for figure in FIGURES
            }
        levels.append(servers)
    return {
        "servers": [{"name": contender.name, "url": contender.url, "command": contender.command, **_start(found, contender)} for contender in found.contenders],
        "reference": found.contenders[0].name,
        "interrupted": found.interrupted,
        "levels": levels,
        "runs": [
            {
                "server_name": turn.contender,
                "level": turn.level,
                "round": turn.round,
                "cores_server_and_client": turn.cpu and turn.cpu.ours,
                "cores_others": turn.cpu and turn.cpu.others,
                "cores_stolen": turn.cpu and turn.cpu.stolen,
                "noisy": turn.noisy,
                **report.to_json(turn.result),
            }
            for turn in found.turns
        ],
    }


def write_page(file: Path, found: Comparison) -> None:
    """One page with bars and tables.

    Args:
        found: With at least one turn.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    levels = [level for level in range(len(found.workloads)) if any(turn.level == level for turn in found.turns)]
    labels = [report.load_of(next(turn.result for turn in found.turns if turn.level == level)) for level in levels]
    with plots.figure(3, width=4.5, height=3.2) as (drawn, axes):
        for place, figure in zip(axes, ("output_throughput", "median_ttft_ms", "median_tpot_ms"), strict=True):
            series: list[plots.Series] = []
            for contender in found.contenders:
                values = [found.values(contender.name, level, figure) or [math.nan] for level in levels]
                series.append(plots.Series(contender.name, [], [statistics.median(v) for v in values], [min(v) for v in values], [max(v) for v in values]))
            name = FIGURES[figure][0]
            plots.bars(place, labels, series, title=name, y="median, lowest to highest")
        svg = plots.to_svg(drawn)
    parts = [f"<h1>{text(' · '.join(contender.name for contender in found.contenders))}</h1>", f"<section>{svg}</section>"]
    for level in levels:
        table = html_page.table(headers(), (cells(found, contender, level) for contender in found.contenders))
        described = report.describe(next(turn.result for turn in found.turns if turn.level == level))
        parts.append(f"<h2>{text(described)}</h2><section>{table}</section>")
    parts.append(f"<section class=note>{html_page.lines(notes(found))}</section>")
    write_text(file, measured_page("comparison of servers", parts))


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _start(found: Comparison, contender: Contender) -> dict[str, Any]:
    start = found.starts.get(contender.name)
    return {"ready_s": start and start.ready_s, "resident_mib": start and start.resident_mib}


def _warnings(found: Comparison, contender: Contender) -> list[str]:
    return list(dict.fromkeys(warning for turn in found.turns if turn.contender == contender.name for warning in report.warnings_of(turn.result)))

"""Measured steps for people (a table) and for programs (JSON)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from jaxserve.bench.local.ceilings import Ceilings
from jaxserve.bench.local.steps import PHASES, StepTimes
from jaxserve.bench.report.report import make_table, print_notes
from jaxserve.bench.report.surroundings import Surroundings
from jaxserve.plan.roofline import Work

ENOUGH_ACCOUNTED = 0.95


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepResult:
    """Steps of one shape beside what they did.

    Args:
        times: As measured.
        work: On one device.
        ceilings: Of one device.
    """

    times: StepTimes
    work: Work
    ceilings: Ceilings

    @property
    def moved_bytes(self) -> float:
        """Weights, keys and values that have to be read or written."""
        return self.work.weight_bytes + self.work.kv_bytes

    @property
    def mbu(self) -> float:
        """Share of the measured bandwidth that weights, keys and values take over a whole step, the host's part included."""
        return self.moved_bytes / (self.times.median_s * self.ceilings.bytes_per_s)

    @property
    def mfu(self) -> float:
        """Share of the measured FLOP/s, likewise. Padding is no work."""
        return self.work.flops / (self.times.median_s * self.ceilings.flops_per_s)

    @property
    def bound_s(self) -> float:
        """The time that the step would take at the ceilings, memory and arithmetic overlapping."""
        return max(self.moved_bytes / self.ceilings.bytes_per_s, self.work.flops / self.ceilings.flops_per_s)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepReport:
    """All that one call of the command measured.

    Args:
        model: Its name.
        mesh: As users write it.
        dtype: Of the weights.
        kv_dtype: Of keys and values.
        results: One for each shape.
        surroundings: Machine and program.
        interrupted: Ctrl-C came before the last shape.
    """

    model: str
    mesh: str
    dtype: str
    kv_dtype: str
    ceilings: Ceilings
    results: Sequence[StepResult]
    surroundings: Surroundings
    interrupted: bool = False


def to_json(report: StepReport) -> dict[str, Any]:
    """The report as a JSON object. Times of steps and phases are medians, in ms; bytes and FLOPs those of one step on one device."""
    return {
        "model_id": report.model,
        "mesh": report.mesh,
        "dtype": report.dtype,
        "kv_dtype": report.kv_dtype,
        "ceilings": dataclasses.asdict(report.ceilings),
        "steps": [_step(result) for result in report.results],
        "interrupted": report.interrupted,
        **report.surroundings.to_json(),
    }


def print_report(report: StepReport, console: Console) -> None:
    """A column for each shape: where its time goes, what it did, and how near that is to the ceilings. Nothing where nothing was measured."""
    results = report.results
    if not results:
        return
    num_steps = len(results[0].times.steps)
    table = make_table(f"{report.model} ({report.dtype}) on {report.surroundings.device}: ms, medians of {num_steps} steps")
    table.add_column("", no_wrap=True)
    for result in results:
        table.add_column(str(result.times.shape).replace(" + ", "\n+ "), justify="right")

    def row(name: str, cell: Callable[[StepResult], str], *, style: str | None = None, last: bool = False) -> None:
        table.add_row(name, *(cell(result) for result in results), style=style, end_section=last)

    for phase in PHASES:
        row(phase, lambda result, phase=phase: _ms(result.times.phase_s(phase)))
    row("step", lambda result: _ms(result.times.median_s), style="bold")
    row("fastest", lambda result: _ms(min(result.times.walls_s)))
    row("in a phase", lambda result: f"{result.times.accounted:.1%}", last=True)
    row("context", lambda result: f"{result.times.context:.0f}" if result.times.context else "–")
    row("weights MB", lambda result: f"{result.work.weight_bytes / 1e6:.4g}")
    row("KV MB", lambda result: f"{result.work.kv_bytes / 1e6:.3g}")
    row("GFLOP", lambda result: f"{result.work.flops / 1e9:.3g}", last=True)
    row("GB/s", lambda result: f"{result.moved_bytes / result.times.median_s / 1e9:.3g}")
    row("MBU", lambda result: f"{result.mbu:.1%}")
    row("GFLOP/s", lambda result: f"{result.work.flops / result.times.median_s / 1e9:.3g}")
    row("MFU", lambda result: f"{result.mfu:.1%}")
    row("at the ceilings", lambda result: _ms(result.bound_s))
    console.print(table)
    ceilings = report.ceilings
    console.print(f"ceilings, measured just before: {ceilings.bytes_per_s / 1e9:.3g} GB/s, {ceilings.flops_per_s / 1e9:.4g} GFLOP/s", highlight=False)
    print_notes(console, notes(report))


def notes(report: StepReport) -> list[str]:
    """What a reader must know before trusting the figures."""
    lines = report.surroundings.notes()
    for result in report.results:
        if result.times.accounted < ENOUGH_ACCOUNTED:
            lines.append(f"{result.times.shape}: {1 - result.times.accounted:.1%} of the time lies in no phase")
    if any(result.mbu > 1 or result.mfu > 1 for result in report.results):
        lines.append("a step that is faster than its ceilings means that the machine was busy while they were measured")
    return lines


def _step(result: StepResult) -> dict[str, Any]:
    times, work = result.times, result.work
    return {
        "decodes": times.shape.decodes,
        "prompt_tokens": times.shape.prompt,
        "context": times.context,
        "num_steps": len(times.steps),
        "median_step_ms": times.median_s * 1e3,
        "min_step_ms": min(times.walls_s) * 1e3,
        "step_ms": [wall_s * 1e3 for wall_s in times.walls_s],
        "phases_ms": {phase: times.phase_s(phase) * 1e3 for phase in PHASES},
        "accounted": times.accounted,
        "weight_bytes": work.weight_bytes,
        "kv_bytes": work.kv_bytes,
        "flops": work.flops,
        "bytes_per_s": result.moved_bytes / times.median_s,
        "flops_per_s": work.flops / times.median_s,
        "mbu": result.mbu,
        "mfu": result.mfu,
        "ceiling_step_ms": result.bound_s * 1e3,
    }


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}"

"""One fixed batch, again and again: what its requests wait for, without arrivals and without a server."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console

from jaxserve.bench.load.metrics import measure
from jaxserve.bench.load.session import Result, estimate_tokens
from jaxserve.bench.local.offline import engine_figures, engine_info, joined, plan_offline, run_offline
from jaxserve.bench.report import report
from jaxserve.bench.report.surroundings import Surroundings
from jaxserve.bench.workload.plan import PlannedRequest
from jaxserve.bench.workload.workload import Workload
from jaxserve.engine.engine import Engine


@dataclasses.dataclass(frozen=True)
class BatchResult:
    """A batch that was run several times.

    Args:
        result: Of all its runs together.
        batches_s: Of each run: from the first request to the last token.
    """

    result: Result
    batches_s: Sequence[float]


def run_batches(engine: Engine, workload: Workload, *, repeats: int, device: str, numbers: Iterator[int]) -> BatchResult:
    """Runs a batch once to compile what it needs, then ``repeats`` times with other prompts. Ctrl-C ends it early.

    Args:
        engine: Idle; with a slot for every request.
        workload: The batch, as :func:`~jaxserve.bench.local.offline.offline_workload` makes it.
        repeats: How often; at least 1.
        device: For the report.
        numbers: Gives every run on this engine a number of its own, and with it other prompts: no batch finds those of an earlier one in the prefix cache.

    Raises:
        InvalidRequestError: A request is longer than the engine can ever hold.
    """

    def planned() -> list[PlannedRequest]:
        return plan_offline(workload, estimate_tokens, run=next(numbers))[0]

    warmup = run_offline(engine, planned())
    before = engine.stats()
    runs = [] if warmup.interrupted is None else [dataclasses.replace(warmup, records=())]
    for _ in range(repeats):
        if runs and runs[-1].interrupted:
            break
        runs.append(run_offline(engine, planned(), start_s=sum(run.duration_s for run in runs)))
    run = joined(runs)
    result = Result(workload, engine_info(engine, device), measure(run), engine_figures(before, engine.stats()), run)
    return BatchResult(result, [run.duration_s for run in runs if run.interrupted is None])


def to_json(batches: Sequence[BatchResult], surroundings: Surroundings) -> dict[str, Any]:
    """An object a batch, with the keys of ``bench serve`` and the time of each whole batch."""
    return {
        "runs": [
            {
                **report.to_json(batch.result),
                "median_batch_ms": statistics.median(batch.batches_s) * 1e3 if batch.batches_s else None,
                "batch_ms": [seconds * 1e3 for seconds in batch.batches_s],
            }
            for batch in batches
        ],
        **surroundings.to_json(),
    }


def print_batches(batches: Sequence[BatchResult], surroundings: Surroundings, console: Console) -> None:
    """A line a batch."""
    first = batches[0].result
    title = f"{first.info.model} on {first.info.url}: {first.workload.input_len} in, {first.workload.output_len} out; median, p99"
    table = report.make_table(title)
    for header in ("batch", *report.LATENCY_HEADERS, "whole batch ms", "tok/s"):
        table.add_column(header, justify="right", no_wrap=True)
    for batch in batches:
        _, _, _, _, tokens_per_s, *latencies = report.sweep_cells(batch.result)
        whole = report.median_range([seconds * 1e3 for seconds in batch.batches_s], ".0f")
        table.add_row(str(batch.result.workload.concurrency), *latencies, whole, tokens_per_s)
    console.print(table)
    warnings = [warning for batch in batches for warning in report.warnings_of(batch.result)]
    report.print_notes(console, [*warnings, *surroundings.notes()])

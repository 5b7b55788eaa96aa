"""Results for people and for programs: tables in the terminal, and JSON objects whose keys are vLLM's where vLLM has one."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxserve import __version__
from jaxserve.bench.load.load import Record
from jaxserve.bench.load.metrics import LATENCIES, PERCENTILES, Spread, e2el_s, input_tokens, output_tokens, tpot_s, ttft_s
from jaxserve.bench.load.session import Result
from jaxserve.bench.load.sweep import MaxRate, Sweep
from jaxserve.output_files import write_text

LATENCY_HEADERS = ("TTFT ms", "TPOT ms", "E2E ms")
"""Of cells that read median, p99."""

LATENCY_COLUMNS = ("ms", "mean", "median", "std", "p90", "p95", "p99", "max")
"""Of :func:`latency_rows`."""

STATISTICS = ("median", "std", *(f"p{percent}" for percent in PERCENTILES))
"""Beside the mean."""

BUSY_CORES = 0.8
LATE_MS = 20.0
RECOUNT_TOLERANCE = 0.1


def to_json(result: Result, *, requests: bool = False) -> dict[str, Any]:
    """One run as a JSON object. Keys are stable: new ones may come, none changes its meaning.

    Args:
        result: What was run.
        requests: Also every request (``requests``), with the times of its pieces.
    """
    metrics, workload, info = result.metrics, result.workload, result.info
    fields: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "endpoint_type": info.api,
        "model_id": info.model,
        "num_prompts": sum(metrics.outcomes.values()),
        "request_rate": "inf" if workload.rate is None else workload.rate,
        "burstiness": 1.0 if workload.burstiness is None else workload.burstiness,
        "max_concurrency": workload.concurrency,
        "duration": metrics.duration_s,
        "completed": metrics.completed,
        "failed": metrics.failed,
        **{name: count for name, count in metrics.outcomes.items() if name != "success"},
        "unfinished": metrics.unfinished,
        "interrupted": metrics.interrupted,
        "total_input_tokens": metrics.input_tokens,
        "total_output_tokens": metrics.output_tokens,
        "request_throughput": metrics.requests_per_s,
        "request_goodput": metrics.goodput_per_s,
        "good_requests": metrics.good_requests,
        "output_throughput": metrics.output_tokens_per_s,
        "total_token_throughput": metrics.total_tokens_per_s,
        "max_output_tokens_per_s": metrics.peak_output_tokens_per_s,
        "max_concurrent_requests": metrics.peak_concurrency,
    }
    for name in LATENCIES:
        values = metrics.latencies.get(name)
        for statistic in ("mean", *STATISTICS):
            fields[f"{statistic}_{name}_ms"] = None if values is None else getattr(values, statistic)
    fields |= {
        "mean_queue_time_ms": result.server.queue_time_ms,
        **{f"estimated_{statistic}_queue_time_ms": result.server.estimated_queue_time_ms.get(statistic) for statistic in STATISTICS},
        "cached_input_tokens": metrics.cached_tokens,
        "usd_per_million_output_tokens": metrics.usd_per_million_tokens,
        "input_length_mismatches": metrics.input_mismatches,
        "output_length_mismatches": metrics.output_mismatches,
        "requests_without_usage": metrics.uncounted,
        "requests_miscounted": metrics.miscounted,
        "own_over_server_output_tokens": metrics.recount,
        "client_cores": metrics.client_cores,
        "p99_send_lateness_ms": None if metrics.late_ms is None else metrics.late_ms.p99,
        "broken_rows": result.broken_rows,
        "server": dataclasses.asdict(result.server),
        "server_info": {**dataclasses.asdict(dataclasses.replace(info, fields={})), "fields": dict(info.fields)},
        "workload": dataclasses.asdict(workload),
        "environment": environment(),
    }
    if requests:
        fields["requests"] = [_request(record) for record in result.run.records]
    return fields


def sweep_json(found: Sweep, *, requests: bool = False) -> dict[str, Any]:
    """A sweep as a JSON object: every run as :func:`to_json` gives it."""
    return {"runs": [to_json(result, requests=requests) for result in found.results], "interrupted": found.interrupted}


def max_rate_json(found: MaxRate) -> dict[str, Any]:
    """A search as a JSON object: the answer, and every trial as :func:`to_json` gives it."""
    return {
        "max_request_rate": found.rate,
        "first_rate_too_high": found.above,
        "slo_ms": dict(found.slo.limits_ms),
        "slo_attainment": found.slo.attainment,
        "note": found.note,
        "interrupted": found.interrupted,
        "unloaded": to_json(found.unloaded),
        "trials": [{"rate": trial.rate, "good_share": trial.good_share, "sustained": trial.sustained, **to_json(trial.result)} for trial in found.trials],
    }


def environment() -> dict[str, Any]:
    """The machine and the program that measured, which need not be the server's."""
    return {
        "jaxserve": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "cpu": _cpu_name(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Writes one JSON object.

    Raises:
        ConfigError: The file cannot be written.
    """
    write_text(file, json.dumps(value, indent=1) + "\n")


def print_result(result: Result, console: Console) -> None:
    """One run as tables, and whatever makes its figures less than they seem."""
    table = make_table(f"{result.info.model} at {result.info.url}: {describe(result)}")
    for header in LATENCY_COLUMNS:
        table.add_column(header, justify="left" if header == "ms" else "right")
    for row in latency_rows(result):
        table.add_row(*row)
    console.print(table)
    console.print(latency_remark(result), style="dim", highlight=False)
    facts = Table.grid(padding=(0, 2))
    for name, value in _facts(result):
        facts.add_row(name, Text(value))
    console.print(facts)
    print_notes(console, warnings_of(result))


def print_notes(console: Console, notes: Iterable[str]) -> None:
    """What a reader must know, a line each and each once. Texts of servers are shown as they are, whatever brackets they have."""
    for note in dict.fromkeys(notes):
        console.print(Text.assemble(("note:", "yellow"), f" {note}"))


def print_sweep(found: Sweep, console: Console) -> None:
    """Runs side by side, a line each."""
    results = found.results
    table = make_table(f"{results[0].info.model} at {results[0].info.url}; latencies: median, p99")
    for header in sweep_headers(results[0]):
        table.add_column(header, justify="right", no_wrap=True)
    for result in results:
        table.add_row(*sweep_cells(result))
    console.print(table)
    ended = [] if found.interrupted is None else [ended_early(found)]
    print_notes(console, [*(warning for result in results for warning in warnings_of(result)), *ended])


def ended_early(found: Sweep) -> str:
    """Why a sweep has not run all of its levels."""
    return f"the sweep ended early ({found.interrupted})"


def sweep_headers(result: Result) -> list[str]:
    """Columns of :func:`sweep_cells`."""
    good = ["good/s"] if result.metrics.goodput_per_s is not None else []
    return ["load", "ok", "bad", "req/s", "tok/s", *LATENCY_HEADERS, *good]


def sweep_cells(result: Result) -> list[str]:
    """One run as a line of a table."""
    metrics = result.metrics
    counts = [load_of(result), str(metrics.completed), str(metrics.failed), f"{metrics.requests_per_s:.2f}", f"{metrics.output_tokens_per_s:.1f}"]
    latencies = [_median_p99(metrics.latencies.get(name)) for name in ("ttft", "tpot", "e2el")]
    return [*counts, *latencies, *([] if metrics.goodput_per_s is None else [f"{metrics.goodput_per_s:.2f}"])]


def print_max_rate(found: MaxRate, console: Console) -> None:
    """The answer of a search, under its evidence."""
    table = make_table(f"{found.unloaded.info.model} at {found.unloaded.info.url}: {found.slo}, for {found.slo.attainment:.4g} of all requests")
    for header in ("req/s", "requests", "good", "", *LATENCY_HEADERS):
        table.add_column(header, justify="right")
    for trial in (None, *sorted(found.trials, key=lambda trial: trial.rate)):
        metrics = (found.unloaded if trial is None else trial.result).metrics
        total = sum(metrics.outcomes.values())
        verdict = "" if trial is None else Text("sustained", "green") if trial.sustained else Text("too much", "red")
        cells = ["1 at a time" if trial is None else f"{trial.rate:.4g}", str(total), f"{(metrics.good_requests or 0) / max(1, total):.1%}"]
        table.add_row(*cells, verdict, *(_median_p99(metrics.latencies.get(name)) for name in ("ttft", "tpot", "e2el")))
    console.print(table)
    console.print(Text.assemble("highest rate: ", (f"{found.rate:.4g}", "bold"), f" requests/s; {found.note}") if found.rate else Text(found.note))


def load_of(result: Result) -> str:
    """The load of a run in two words."""
    workload = result.workload
    if workload.arrival == "closed":
        return f"{workload.concurrency} at once"
    return "trace" if workload.rate is None else f"{workload.rate:g} req/s"


def describe(result: Result, *, load: bool = True) -> str:
    """The workload of a run in a line.

    Args:
        load: Say how much load, too.
    """
    workload = result.workload
    lengths = f"lengths from {workload.lengths}" if workload.lengths else f"{workload.input_len} in, {workload.output_len} out"
    prefix = f", {workload.prefix_len} shared" if workload.prefix_len else ""
    turns = f", {workload.turns} turns" if workload.turns > 1 else ""
    arrival = f"{workload.arrival}, {load_of(result)}" if load else workload.arrival
    return f"{arrival}, {lengths}{prefix}{turns}"


def warnings_of(result: Result) -> list[str]:
    """What a reader must know before trusting the figures; empty when all is well."""
    metrics, notes = result.metrics, list[str]()
    if metrics.interrupted:
        notes.append(f"ended early ({metrics.interrupted}); {metrics.unfinished} requests were under way and are not counted")
    if errors := dict.fromkeys(record.error for record in result.run.records if record.error):
        notes.append(f"{metrics.failed} requests failed: {'; '.join(list(filter(None, errors))[:3])}")
    if metrics.uncounted:
        how = "by the tokenizer given" if any(record.own_tokens is not None for record in result.run.records) else "as pieces of text, at least one token each"
        notes.append(f"{metrics.uncounted} answers came without usage: their tokens are counted {how}")
    if metrics.miscounted:
        notes.append(f"for {metrics.miscounted} answers the server counted fewer tokens than it sent pieces of text")
    if metrics.recount is not None and abs(metrics.recount - 1) > RECOUNT_TOLERANCE:
        notes.append(f"the tokenizer given finds {metrics.recount:.2f} times the output tokens that the server counted: is it the served model's?")
    if metrics.input_mismatches:
        notes.append(f"{metrics.input_mismatches} prompts were not of the planned length by the server's count ({result.info.prompt_source})")
    elif not result.info.exact_prompts and result.info.prompt_source:
        notes.append(f"lengths of prompts are estimates: {result.info.prompt_source}")
    if metrics.output_mismatches:
        notes.append(f"{metrics.output_mismatches} answers were not of the planned length")
    if metrics.client_cores > BUSY_CORES:
        notes.append(f"this client used {metrics.client_cores:.2f} cores: it may have been the limit; use several, or a faster machine")
    if metrics.late_ms is not None and metrics.late_ms.p99 > LATE_MS:
        notes.append(f"1% of requests were sent more than {metrics.late_ms.p99:.0f} ms late: this machine was too busy")
    if result.broken_rows:
        notes.append(f"{result.broken_rows} broken rows of the workload's files were left out")
    return notes


def _facts(result: Result) -> list[tuple[str, str]]:
    metrics, server = result.metrics, result.server
    counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in metrics.outcomes.items() if count or name == "success")
    facts = [
        ("requests", f"{counts} in {metrics.duration_s:.2f} s; at most {metrics.peak_concurrency} at once"),
        (
            "throughput",
            f"{metrics.requests_per_s:.3g} requests/s, {metrics.output_tokens_per_s:.1f} output and {metrics.total_tokens_per_s:.1f} total tokens/s",
        ),
        ("tokens", f"{metrics.input_tokens} in, {metrics.output_tokens} out"),
    ]
    if metrics.goodput_per_s is not None:
        total = sum(metrics.outcomes.values())
        facts.append(("goodput", f"{metrics.goodput_per_s:.3g} requests/s; {metrics.good_requests} of {total} within the SLO"))
    if metrics.usd_per_million_tokens is not None:
        facts.append(("cost", f"{metrics.usd_per_million_tokens:.4g} per million output tokens"))
    said = [
        ("peak KV cache use", server.peak_kv_cache_usage, "{:.1%}"),
        ("peak running", server.peak_running, "{:.0f}"),
        ("peak waiting", server.peak_waiting, "{:.0f}"),
        ("prefix cache hits", server.prefix_cache_hit_rate, "{:.1%}"),
        ("preemptions", server.preemptions, "{:.0f}"),
    ]
    if known := ", ".join(f"{name} {form.format(value)}" for name, value, form in said if value is not None):
        facts.append(("server", known))
    if metrics.cached_tokens is not None and metrics.input_tokens:
        facts.append(("cached", f"{metrics.cached_tokens / metrics.input_tokens:.1%} of prompt tokens"))
    if result.info.api != "engine":  # which has no client beside it
        facts.append(("client", f"{metrics.client_cores:.2f} cores"))
    facts.append(("prompts", result.info.prompt_source))
    return facts


def latency_rows(result: Result) -> list[list[str]]:
    """A line for each latency, and one for the time in the server's queue where the server tells."""
    rows: list[list[str]] = []
    for key, name in LATENCIES.items():
        values = result.metrics.latencies.get(key)
        rows.append([name, *("–" if values is None else f"{getattr(values, column):.1f}" for column in LATENCY_COLUMNS[1:])])
    if (mean := result.server.queue_time_ms) is not None:
        known = {"mean": mean, **result.server.estimated_queue_time_ms}
        rows.append(["queue", *(f"{known[column]:.1f}" if column in known else "–" for column in LATENCY_COLUMNS[1:])])
    return rows


def latency_remark(result: Result) -> str:
    """What to know about :func:`latency_rows`."""
    told = "TPOT leaves out the first token; ITL is the time between pieces of text."
    if result.server.queue_time_ms is None:
        return told
    how = "; all but its mean is estimated from the buckets of its histogram" if result.server.estimated_queue_time_ms else ""
    return f"{told} Queue is by the server{how}."


def median_range(values: Sequence[float], form: str) -> str:
    """``12 (10–15)``: median, lowest and highest. Of one value itself, of none a dash.

    Args:
        form: Of a number, as in a format string.
    """
    if not values:
        return "–"
    median = f"{statistics.median(values):{form}}"
    return median if len(values) == 1 else f"{median} ({min(values):{form}}–{max(values):{form}})"


def make_table(title: str) -> Table:
    """An empty table in the style of all reports. Its title is shown as it is; cells are markup unless they are :class:`~rich.text.Text`."""
    return Table(title=Text(title, "bold"), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), min_width=min(len(title), 78))


def _median_p99(values: Spread | None) -> str:
    return "–" if values is None else f"{_ms(values.median)}, {_ms(values.p99)}"


def _ms(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _request(record: Record) -> dict[str, Any]:
    request = record.request
    latencies = {"ttft": ttft_s(record), "tpot": tpot_s(record), "e2el": e2el_s(record)}
    return {
        "index": request.index,
        "session": request.session,
        "turn": request.turn,
        "outcome": record.outcome,
        "error": record.error,
        "start_time": record.sent_s,
        "late_ms": record.late_s * 1e3,
        "planned_input_len": request.input_len,
        "planned_output_len": request.output_len,
        "input_len": input_tokens(record),
        "output_len": output_tokens(record),
        "cached_tokens": record.cached_tokens,
        **{f"{name}_ms": None if value is None else value * 1e3 for name, value in latencies.items()},
        "piece_times": list(record.piece_times_s),
        "finish_reason": record.finish_reason,
    }


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)

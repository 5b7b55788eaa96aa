"""Requests through an engine in this process, all at once, without a server or a clock of arrivals."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxserve.bench.load.load import Observer, Run
from jaxserve.bench.load.metrics import measure
from jaxserve.bench.load.server_metrics import ServerFigures
from jaxserve.bench.load.session import Result, ServerInfo
from jaxserve.bench.local.in_process import run_in_process
from jaxserve.bench.workload.plan import PlannedRequest, plan, read_sources
from jaxserve.bench.workload.workload import DEFAULT_NUM_REQUESTS, Workload, load_workload
from jaxserve.engine.engine import Engine
from jaxserve.engine.observation.stats import EngineStats


def offline_workload(file: Path | None, values: dict[str, Any]) -> Workload:
    """A workload as :func:`~jaxserve.bench.workload.workload.load_workload` reads it, with everything that is about time taken out.

    Raises:
        ConfigError: As there.
    """
    workload = load_workload(file, {"arrival": "closed", "concurrency": 1} | values)
    num_requests = workload.num_requests or DEFAULT_NUM_REQUESTS
    return dataclasses.replace(workload, num_requests=num_requests, concurrency=num_requests, duration_s=None, think_s=0.0, cancel_share=0.0)


def plan_offline(workload: Workload, count_tokens: Callable[[str], int], *, run: int = 0) -> tuple[list[PlannedRequest], int]:
    """The requests of a workload, and how many broken rows its files have. The turns of a session are requests like any other.

    Args:
        workload: What to plan; also the next two, see :func:`~jaxserve.bench.workload.plan.plan`.

    Raises:
        ConfigError: A file of the workload cannot be used.
    """
    sources = read_sources(workload)
    return list(itertools.chain.from_iterable(plan(workload, sources, count_tokens, run=run))), sources.broken


def run_workload(
    engine: Engine, workload: Workload, *, device: str, price_per_hour: float | None = None, observer: Callable[[int | None], Observer] | None = None
) -> Result:
    """Runs a workload and measures it.

    Args:
        engine: Idle and warm.
        workload: As :func:`offline_workload` made it.
        device: For the report.
        price_per_hour: Of the machine.
        observer: Makes one for that many requests.

    Raises:
        ConfigError: A file of the workload cannot be used.
        InvalidRequestError: A request is longer than the engine can ever hold.
    """
    planned, broken = plan_offline(workload, lambda text: max(1, len(engine.tokenizer.encode(text, add_special_tokens=False))))
    before = engine.stats()
    run = run_offline(engine, planned, observer=observer(len(planned)) if observer else None)
    figures = engine_figures(before, engine.stats())
    return Result(workload, engine_info(engine, device), measure(run, None, price_per_hour), figures, run, broken)


def run_offline(
    engine: Engine, planned: Sequence[PlannedRequest], *, start_s: float = 0.0, observer: Observer | None = None, clock: Callable[[], float] = time.perf_counter
) -> Run:
    """Gives all requests to an idle engine at once; otherwise as :func:`~jaxserve.bench.local.in_process.run_in_process`."""
    sessions = [[request] for request in planned]
    return run_in_process(engine, sessions, concurrency=max(1, len(sessions)), start_s=start_s, observer=observer, clock=clock)


def joined(runs: Iterable[Run]) -> Run:
    """Runs that came one after the other as one; their records' times follow one another already."""
    found = list(runs)
    return Run(
        records=tuple(record for run in found for record in run.records),
        duration_s=sum(run.duration_s for run in found),
        cpu_s=0.0,
        unfinished=sum(run.unfinished for run in found),
        interrupted=next((run.interrupted for run in found if run.interrupted), None),
    )


def engine_info(engine: Engine, device: str) -> ServerInfo:
    """The engine as reports name a server."""
    return ServerInfo(f"{device}, in this process", engine.model_name, "engine", "token ids", True, {"temperature": 0.0, "ignore_eos": True})


def engine_figures(before: EngineStats, after: EngineStats) -> ServerFigures:
    """What an engine did between two snapshots, as reports show it of a server."""
    hits, misses = after.prefix_hit_tokens - before.prefix_hit_tokens, after.prefix_miss_tokens - before.prefix_miss_tokens
    return ServerFigures(prefix_cache_hit_rate=hits / (hits + misses) if hits + misses else None, preemptions=after.num_preemptions - before.num_preemptions)

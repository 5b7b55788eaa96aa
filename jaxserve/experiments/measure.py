"""Runs a workload on an engine in this process and measures it with the benchmark's own figures."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

from jaxserve.bench.load.load import Run
from jaxserve.bench.load.metrics import Slo, Spread, measure, spread
from jaxserve.bench.local.in_process import run_in_process
from jaxserve.bench.report.surroundings import Watch
from jaxserve.bench.workload.plan import plan, read_sources
from jaxserve.bench.workload.workload import Workload
from jaxserve.engine.engine import Engine
from jaxserve.errors import EngineError

Metrics = dict[str, float | int | str | bool | None]


@dataclasses.dataclass(frozen=True)
class Measured:
    """One run of a workload.

    Args:
        run: Every request as it went.
        step_ms: Of every step, host and device together.
        decode_step_ms: Of the steps in which every sequence had its first token already: nothing but decodes.
    """

    run: Run
    step_ms: list[float]
    decode_step_ms: list[float]


def measure_workload(engine: Engine, workload: Workload, *, slo: Slo | None = None, repeats: int = 1) -> Metrics:
    """The figures of a workload: of the run of median goodput, or median throughput without an SLO. One request goes before them, unmeasured.

    Runs differ in their prompts alone, so that no run finds those of another in the prefix cache.

    Args:
        engine: Ready, without work.
        workload: What to run.
        slo: For goodput.
        repeats: Runs.

    Raises:
        InvalidRequestError: A request that the engine cannot serve, such as one longer than the context.
        EngineError: A request failed.
    """
    run_workload(engine, dataclasses.replace(workload, num_requests=1, duration_s=None, turns=1, seed=workload.seed + 1))
    preemptions, watch = engine.stats().num_preemptions, Watch()
    runs = [run_workload(engine, workload, run=repeat) for repeat in range(repeats)]
    others = watch.others()
    rate = "output_tokens_per_s" if slo is None else "goodput_per_s"
    measured = sorted(((measure(one.run, slo), one) for one in runs), key=lambda pair: getattr(pair[0], rate))
    figures, middle = measured[(len(runs) - 1) // 2]
    rates: list[float] = [getattr(figures, rate) for figures, _ in measured]
    metrics: Metrics = {
        "output_tokens_per_s": round(figures.output_tokens_per_s, 2),
        "total_tokens_per_s": round(figures.total_tokens_per_s, 2),
        "requests_per_s": round(figures.requests_per_s, 3),
    }
    for name, of in (("ttft", figures.latencies.get("ttft")), ("tpot", figures.latencies.get("tpot")), ("e2el", figures.latencies.get("e2el"))):
        metrics |= _ends(name, of)
    metrics |= _ends("step", spread(middle.step_ms)) | _ends("decode_step", spread(middle.decode_step_ms))
    metrics |= {
        "requests": figures.completed,
        "refused": figures.outcomes["refused"],
        "input_tokens": figures.input_tokens,
        "output_tokens": figures.output_tokens,
        "steps": len(middle.step_ms),
        "duration_s": round(figures.duration_s, 3),
        "preemptions": engine.stats().num_preemptions - preemptions,
        "cores_others": None if others is None else round(others, 2),
    }
    if figures.goodput_per_s is not None:
        metrics["goodput_per_s"] = round(figures.goodput_per_s, 4)
    if repeats > 1 and (median := statistics.median(rates)):
        metrics[f"{rate}_spread"] = round((rates[-1] - rates[0]) / median, 4)
    return metrics


def run_workload(engine: Engine, workload: Workload, clock: Callable[[], float] = time.perf_counter, *, run: int = 0) -> Measured:
    """Runs the plan to its end, in a closed loop or at its arrivals. Answers have their planned length, whatever the model says.

    Args:
        engine: Ready, without work.
        workload: What to run; ``run`` as in :func:`~jaxserve.bench.workload.plan.plan`.
        clock: Gives seconds.

    Raises:
        InvalidRequestError: As :func:`measure_workload`; also the next.
        EngineError: A request failed.
    """
    step_ms: list[float] = []
    decode_step_ms: list[float] = []

    def step_ended(seconds: float, only_decodes: bool) -> None:
        step_ms.append(seconds * 1e3)
        if only_decodes:
            decode_step_ms.append(step_ms[-1])

    planned = plan(workload, read_sources(workload), run=run)
    done = run_in_process(engine, planned, concurrency=workload.concurrency, step_ended=step_ended, clock=clock)
    if done.interrupted:
        raise KeyboardInterrupt
    if (failed := next((record for record in done.records if record.outcome == "error"), None)) is not None:
        raise EngineError(f"request {failed.request.index} failed: {failed.error}")
    return Measured(done, step_ms, decode_step_ms)


def _ends(name: str, of: Spread | None) -> Metrics:
    """Median and 99th percentile, in milliseconds; ``None`` where nothing of the kind happened."""
    return {f"{name}_ms_p50": of and round(of.p50, 3), f"{name}_ms_p99": of and round(of.p99, 3)}

"""Runs a workload on an engine in this process, as a closed loop, and measures it with the benchmark's own figures."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from jaxserve.bench.load import Record, Run
from jaxserve.bench.metrics import Spread, measure, spread
from jaxserve.bench.offline import make_request, record_of
from jaxserve.bench.plan import PlannedRequest, plan, read_sources
from jaxserve.bench.prompts import IdPrompts
from jaxserve.bench.surroundings import Watch
from jaxserve.bench.target import Stream
from jaxserve.bench.workload import Workload
from jaxserve.engine.engine import Engine
from jaxserve.errors import EngineError

Metrics = dict[str, float | int | str | bool | None]


class _Running(NamedTuple):
    request: PlannedRequest
    session: Iterator[PlannedRequest]
    sent_s: float
    stream: Stream


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


def measure_workload(engine: Engine, workload: Workload, *, repeats: int = 1) -> Metrics:
    """The figures of a workload: of the run of median throughput, where there are several. One request goes before them, unmeasured.

    Args:
        engine: Ready, without work.
        workload: A closed loop.
        repeats: Runs.

    Raises:
        InvalidRequestError: A request that the engine cannot serve, such as one longer than the context.
        EngineError: A request failed.
    """
    run_workload(engine, dataclasses.replace(workload, num_requests=1, concurrency=1, turns=1, seed=workload.seed + 1))
    preemptions, watch = engine.stats().num_preemptions, Watch()
    runs = [run_workload(engine, workload) for _ in range(repeats)]
    others = watch.others()
    measured = {id(one): measure(one.run) for one in runs}
    runs.sort(key=lambda one: measured[id(one)].output_tokens_per_s)
    middle = runs[(len(runs) - 1) // 2]
    figures = measured[id(middle)]
    rates = [measured[id(one)].output_tokens_per_s for one in runs]
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
        "input_tokens": figures.input_tokens,
        "output_tokens": figures.output_tokens,
        "steps": len(middle.step_ms),
        "duration_s": round(figures.duration_s, 3),
        "preemptions": engine.stats().num_preemptions - preemptions,
        "cores_others": None if others is None else round(others, 2),
    }
    if repeats > 1:
        metrics["output_tokens_per_s_spread"] = round((rates[-1] - rates[0]) / statistics.median(rates), 4)
    return metrics


def run_workload(engine: Engine, workload: Workload, clock: Callable[[], float] = time.perf_counter) -> Measured:
    """Keeps ``concurrency`` sessions running until the plan is done. Answers have their planned length, whatever the model says.

    Raises:
        InvalidRequestError: As :func:`measure_workload`; also the next.
        EngineError: A request failed.
    """
    prompts = IdPrompts.within(engine.spec.vocab_size)
    sessions = (iter(session) for session in plan(workload, read_sources(workload)))
    running: dict[str, _Running] = {}
    records: list[Record] = []
    step_ms: list[float] = []
    decode_step_ms: list[float] = []
    start = clock()

    def send(session: Iterator[PlannedRequest] | None) -> None:
        """The session's next request; at its end, or without one, the next session's first."""
        request = None
        while request is None:
            if session is None and (session := next(sessions, None)) is None:
                return
            request = next(session, None)
            session = session if request is not None else None
        assert session is not None
        made = make_request(engine, prompts, request)
        running[made.request_id] = _Running(request, session, clock() - start, Stream())
        engine.add(made)

    try:
        for _ in range(workload.concurrency or 1):
            send(None)
        while running:
            only_decodes = all(one.stream.piece_times_s for one in running.values())
            before = clock()
            outputs = engine.step()
            now = clock()
            step_ms.append((now - before) * 1e3)
            if only_decodes:
                decode_step_ms.append(step_ms[-1])
            for output in outputs:
                one = running[output.request_id]
                if output.error is not None:
                    raise EngineError(f"request {one.request.index} failed: {output.error}")
                one.stream.piece_times_s += [now - start] * len(output.token_ids)
                if output.finish_reason is not None:
                    del running[output.request_id]
                    records.append(record_of(one.request, one.sent_s, one.stream, output, now - start))
                    send(one.session)
    finally:
        for request_id in list(running):
            engine.abort(request_id)
    run = Run(records=tuple(sorted(records, key=lambda record: record.sent_s)), duration_s=clock() - start, cpu_s=0.0)
    return Measured(run, step_ms, decode_step_ms)


def _ends(name: str, of: Spread | None) -> Metrics:
    """Median and 99th percentile, in milliseconds; ``None`` where nothing of the kind happened."""
    return {f"{name}_ms_p50": of and round(of.p50, 3), f"{name}_ms_p99": of and round(of.p99, 3)}

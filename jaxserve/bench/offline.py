"""Requests through an engine in this process, all at once, without a server or a clock of arrivals."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxserve.bench.load import Observer, Record, Run, Silent
from jaxserve.bench.metrics import measure
from jaxserve.bench.plan import PlannedRequest, plan, read_sources
from jaxserve.bench.prompts import IdPrompts
from jaxserve.bench.server_metrics import ServerFigures
from jaxserve.bench.session import Result, ServerInfo
from jaxserve.bench.target import Outcome, Stream
from jaxserve.bench.workload import DEFAULT_NUM_REQUESTS, Workload, load_workload
from jaxserve.engine.engine import Engine
from jaxserve.engine.stats import EngineStats
from jaxserve.request import Request, RequestOptions, RequestOutput, SamplingParams


def offline_workload(file: Path | None, values: dict[str, Any]) -> Workload:
    """A workload as :func:`~jaxserve.bench.workload.load_workload` reads it, with everything that is about time taken out.

    Raises:
        ConfigError: As there.
    """
    workload = load_workload(file, {"arrival": "closed", "concurrency": 1} | values)
    num_requests = workload.num_requests or DEFAULT_NUM_REQUESTS
    return dataclasses.replace(workload, num_requests=num_requests, concurrency=num_requests, duration_s=None, think_s=0.0, cancel_share=0.0)


def plan_offline(workload: Workload, count_tokens: Callable[[str], int]) -> tuple[list[PlannedRequest], int]:
    """The requests of a workload, and how many broken rows its files have. The turns of a session are requests like any other.

    Raises:
        ConfigError: A file of the workload cannot be used.
    """
    sources = read_sources(workload)
    broken = (sources.trace.broken if sources.trace else 0) + (sources.lengths.broken if sources.lengths else 0)
    return list(itertools.chain.from_iterable(plan(workload, sources, count_tokens))), broken


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
    """Gives all requests to an idle engine at once and runs it until they have ended. Ctrl-C ends it early; the run says so.

    A token is there when the step that sampled it has ended. Every token counts as a piece, also one that completes no character.

    Args:
        engine: Idle.
        planned: What to run. Prompts are token ids, answers have exactly the planned length.
        start_s: Where the times of the records begin.
        observer: Told of each request.
        clock: Gives seconds.

    Raises:
        InvalidRequestError: A request is longer than the engine can ever hold; nothing has run then.
        EngineDeadError: The engine cannot go on.
    """
    prompts = IdPrompts.within(engine.spec.vocab_size)
    requests = [make_request(engine, prompts, request) for request in planned]
    batch = _Batch(observer or Silent())
    began_s = clock()
    interrupted = None
    try:
        for request, plan_ in zip(requests, planned, strict=True):
            batch.sent(request.request_id, plan_, start_s + clock() - began_s)
            engine.add(request)
        while engine.has_work:
            outputs = engine.step()
            batch.take(outputs, start_s + clock() - began_s)
    except KeyboardInterrupt:
        interrupted = "stopped"
    finally:
        for request in requests:
            engine.abort(request.request_id)
    return Run(
        records=tuple(batch.records),
        duration_s=clock() - began_s,
        cpu_s=0.0,  # this client is the engine: it has no cost of its own
        unfinished=batch.num_under_way,
        interrupted=interrupted,
    )


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


class _Batch:
    """Requests in flight and what has come of them."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._under_way: dict[str, tuple[PlannedRequest, float, Stream]] = {}
        self.records: list[Record] = []

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    def sent(self, request_id: str, planned: PlannedRequest, at_s: float) -> None:
        stream = Stream()
        self._under_way[request_id] = planned, at_s, stream
        self._observer.sent(planned, stream)

    def take(self, outputs: Iterable[RequestOutput], at_s: float) -> None:
        """Outputs of a step that ended at ``at_s``."""
        for output in outputs:
            planned, sent_s, stream = self._under_way[output.request_id]
            stream.piece_times_s += [at_s] * len(output.token_ids)
            if output.finish_reason is not None:
                del self._under_way[output.request_id]
                record = record_of(planned, sent_s, stream, output, at_s)
                self.records.append(record)
                self._observer.ended(record)


def record_of(planned: PlannedRequest, sent_s: float, stream: Stream, last: RequestOutput, end_s: float) -> Record:
    """What is kept of a request that has ended."""
    outcome: Outcome = "success" if last.error is None else "error"
    return Record(
        request=planned,
        outcome=outcome,
        sent_s=sent_s,
        late_s=0.0,
        end_s=end_s,
        piece_times_s=tuple(stream.piece_times_s),
        finish_reason=last.finish_reason,
        prompt_tokens=last.usage.prompt_tokens,
        completion_tokens=last.usage.completion_tokens,
        cached_tokens=last.usage.cached_tokens,
        error=last.error,
    )


def make_request(engine: Engine, prompts: IdPrompts, planned: PlannedRequest) -> Request:
    """A planned request as the engine takes it: greedy, and of exactly its planned length.

    Raises:
        InvalidRequestError: It is longer than the engine can ever hold.
    """
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=planned.output_len)
    tenant = "" if planned.tenant is None else f"tenant-{planned.tenant}"
    return engine.make_request(prompts.prompt(planned.segments), params, options=RequestOptions(tenant=tenant, priority=planned.priority or 0))

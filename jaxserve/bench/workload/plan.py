"""Turns a workload into requests, one after the other and the same ones every time. Nothing here is sent."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from jaxserve.bench.workload import arrivals
from jaxserve.bench.workload.lengths import LengthFile, LengthPairs, independent_pairs, parse_lengths, read_length_file
from jaxserve.bench.workload.randomness import seeded
from jaxserve.bench.workload.traces import Trace, read_trace
from jaxserve.bench.workload.workload import DEFAULT_NUM_REQUESTS, Workload

DEFAULT_SWING = 0.8


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """A run of prompt tokens. Equal keys begin with equal tokens.

    Args:
        key: Seeds the tokens.
        length: Tokens.
        role: Whose words they are, where the prompt is a chat.
    """

    key: str
    length: int
    role: Literal["system", "user", "assistant"] = "user"


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request as planned.

    Args:
        index: Position in the plan.
        arrival_s: Seconds from the start; ``None`` when it waits for something else: a free place of a closed loop, or the turn before it.
        segments: The prompt.
        output_len: Tokens to generate.
        session: Requests of one session run one after the other, by ``turn``.
        think_s: Pause after the turn before.
        cancel_after_s: The client goes away that long after sending; ``None``: it stays.
    """

    index: int
    arrival_s: float | None
    segments: tuple[Segment, ...]
    output_len: int
    session: int
    turn: int = 0
    think_s: float = 0.0
    tenant: int | None = None
    priority: int | None = None
    cancel_after_s: float | None = None

    @property
    def input_len(self) -> int:
        """Tokens of the prompt."""
        return sum(segment.length for segment in self.segments)


@dataclasses.dataclass(frozen=True)
class Sources:
    """The files of a workload, read once."""

    trace: Trace | None = None
    lengths: LengthFile | None = None

    @property
    def broken(self) -> int:
        """Rows of them that cannot be read and are left out."""
        return (self.trace.broken if self.trace else 0) + (self.lengths.broken if self.lengths else 0)


def read_sources(workload: Workload) -> Sources:
    """Reads the files that a workload names.

    Raises:
        ConfigError: One cannot be read, or most of it is broken.
    """
    return Sources(
        trace=None if workload.trace is None else read_trace(workload.trace, unit=workload.trace_unit, limit=workload.num_requests),
        lengths=None if workload.lengths is None or workload.lengths == "trace" else read_length_file(workload.lengths),
    )


def plan(workload: Workload, sources: Sources = Sources(), count_tokens: Callable[[str], int] = len, *, run: int = 0) -> Iterator[list[PlannedRequest]]:
    """The sessions of a workload in order of arrival, each a list of its requests in order. Endless for a closed loop that only time ends.

    Args:
        workload: What to plan.
        sources: What :func:`read_sources` gave for it.
        count_tokens: Tokens of a text, for lengths that come as texts.
        run: Plans that differ in it alone have the same arrivals and lengths but other prompts: what a server has cached of one does not help it in another.
    """
    limit = request_limit(workload)
    times = _times(workload, sources)
    pairs = _pairs(workload, sources, count_tokens)
    traits = seeded(workload.seed, "traits")
    index = 0
    for session in itertools.count():
        arrival_s = next(times, None) if times is not None else None
        left = workload.turns if limit is None else min(workload.turns, limit - index)
        if left <= 0 or (times is not None and (arrival_s is None or (workload.duration_s is not None and arrival_s >= workload.duration_s))):
            return
        requests = _session(workload, f"{workload.seed}.{run}" if run else str(workload.seed), session, index, left, arrival_s, pairs, traits)
        index += len(requests)
        yield requests


def request_limit(workload: Workload) -> int | None:
    """Most requests of the plan; ``None`` where only time, or the end of the trace, ends it."""
    if workload.num_requests is None and workload.duration_s is None and workload.arrival != "trace":
        return DEFAULT_NUM_REQUESTS
    return workload.num_requests


def to_jsonl(requests: Sequence[PlannedRequest]) -> str:
    """The plan as text, a request a line: equal workloads give equal texts."""
    return "".join(json.dumps(dataclasses.asdict(request), separators=(",", ":")) + "\n" for request in requests)


def _times(workload: Workload, sources: Sources) -> arrivals.Times | None:
    rng = seeded(workload.seed, "arrivals")
    rate = workload.rate or 0.0
    match workload.arrival:
        case "closed":
            return None
        case "steady":
            return arrivals.steady(rate)
        case "poisson":
            return arrivals.poisson(rate, rng)
        case "gamma":
            return arrivals.gamma(rate, workload.burstiness or 1.0, rng)
        case "burst":
            return arrivals.burst(rate, workload.burst_size or 1)
        case "diurnal":
            return arrivals.diurnal(rate, DEFAULT_SWING if workload.swing is None else workload.swing, workload.period_s or 1.0, rng)
        case "ramp":
            end_rate = workload.end_rate or rate
            span_s = workload.duration_s or 2 * (request_limit(workload) or 1) / (rate + end_rate)
            return arrivals.ramp(rate, end_rate, span_s, rng)
        case "trace":
            assert sources.trace is not None
            return (row.arrival_s / workload.trace_speedup for row in sources.trace.rows)


def _pairs(workload: Workload, sources: Sources, count_tokens: Callable[[str], int]) -> LengthPairs:
    rng = seeded(workload.seed, "lengths")
    if workload.lengths == "trace":
        assert sources.trace is not None
        return itertools.cycle((row.input_len, row.output_len) for row in sources.trace.rows)
    if sources.lengths is not None:
        return sources.lengths.pairs(rng, count_tokens)
    return independent_pairs(parse_lengths(workload.input_len, "input_len"), parse_lengths(workload.output_len, "output_len"), rng)


def _session(
    workload: Workload, key: str, session: int, first: int, count: int, arrival_s: float | None, pairs: LengthPairs, rng: random.Random
) -> list[PlannedRequest]:
    tenant = rng.randrange(workload.tenants) if workload.tenants else None
    history: tuple[Segment, ...] = ()
    if workload.prefix_len:
        history = (Segment(f"{key}/prefix/{rng.randrange(workload.num_prefixes)}", workload.prefix_len, "system"),)
    requests: list[PlannedRequest] = []
    for turn in range(count):
        input_len, output_len = next(pairs)
        index = first + turn
        segments = (*history, Segment(f"{key}/prompt/{index}", input_len))
        cancelled = rng.random() < workload.cancel_share
        cancel_after_s = rng.random() * workload.cancel_after_s if cancelled else None
        requests.append(
            PlannedRequest(
                index=index,
                arrival_s=arrival_s if turn == 0 else None,
                segments=segments,
                output_len=output_len,
                session=session,
                turn=turn,
                think_s=rng.expovariate(1 / workload.think_s) if turn and workload.think_s else 0.0,
                tenant=tenant,
                priority=rng.choice(workload.priorities) if workload.priorities else None,
                cancel_after_s=cancel_after_s,
            )
        )
        history = (*segments, Segment(f"{key}/answer/{index}", output_len, "assistant"))
    return requests

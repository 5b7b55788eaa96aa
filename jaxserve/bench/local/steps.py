"""Single steps of the real engine, taken apart by phase. The engine knows nothing of it: the stopwatch is put around its pieces from outside."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxserve.bench.local.stopwatch import OTHER, Stopwatch
from jaxserve.bench.workload.plan import Segment
from jaxserve.bench.workload.prompts import IdPrompts
from jaxserve.dims import ceil_div
from jaxserve.engine.engine import Engine
from jaxserve.engine.scheduling.schedule import Schedule
from jaxserve.errors import BenchmarkError, ConfigError
from jaxserve.plan.roofline import Split, Work, rank_work
from jaxserve.request import Request, RequestOutput, SamplingParams

NUM_WARMUP = 3
"""Steps before those that count: the first one compiles."""

PHASES: Mapping[str, str] = {
    "schedule": "which tokens run, and pages for them",
    "build": "the schedule as one array",
    "dispatch": "handing it to the device; also what XLA:CPU computes before it returns",
    "device": "waiting for the device",
    "fetch": "the sampled ids, as Python numbers",
    "update": "what was sampled, into the sequences",
    "output": "text, stop conditions, ends",
    OTHER: "all that no phase covers",
}
"""Phase -> what it is, in the order of a step."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """What a step does.

    Args:
        decodes: Sequences that take one token.
        prompt: Tokens of a new prompt that runs beside them as a whole; 0 for none.
    """

    decodes: int = 0
    prompt: int = 0

    def __str__(self) -> str:
        parts = [f"decode {self.decodes}"] * (self.decodes > 0) + [f"prefill {self.prompt}"] * (self.prompt > 0)
        return " + ".join(parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Steps of one shape, measured.

    Args:
        shape: What they do.
        context: Tokens that a decoding sequence attends to, on average; 0 without any.
        steps: Of each step: phase -> seconds. They sum up to the step.
    """

    shape: StepShape
    context: float
    steps: Sequence[Mapping[str, float]]

    @property
    def walls_s(self) -> list[float]:
        """Seconds of each step, from the call to its outputs."""
        return [sum(step.values()) for step in self.steps]

    @property
    def median_s(self) -> float:
        return statistics.median(self.walls_s)

    def phase_s(self, phase: str) -> float:
        """Median over the steps."""
        return statistics.median(step.get(phase, 0.0) for step in self.steps)

    @property
    def accounted(self) -> float:
        """Share of all steps' time that lies in a phase."""
        return 1 - sum(step.get(OTHER, 0.0) for step in self.steps) / sum(self.walls_s)


class StepBench:
    """Runs steps of chosen shapes on an engine, which is of no other use from then on.

    Args:
        engine: Idle. It need not be warm.
        repeats: Steps that count, of each shape; at least 1.
        context: Tokens that decoding sequences attend to, on average over the steps.
        seed: Of the prompts.

    Raises:
        ConfigError: The context is too long for the model.
    """

    def __init__(self, engine: Engine, *, repeats: int, context: int, seed: int = 0) -> None:
        if context + repeats > engine.max_model_len:
            raise ConfigError(f"context is {context}, and grows by {repeats} steps; together they must be at most {engine.max_model_len}")
        self._engine = engine
        self._repeats = repeats
        self._prompt_len = max(1, context - NUM_WARMUP - (repeats + 1) // 2)
        self._prompts = IdPrompts.within(engine.spec.vocab_size)
        self._keys = (f"{seed}/{index}" for index in itertools.count())
        self._stopwatch = watch_engine(engine)

    def measure(self, shape: StepShape) -> StepTimes:
        """Brings sequences to decode, then times steps.

        Raises:
            InvalidRequestError: A sequence is longer than the engine can ever hold.
            BenchmarkError: The engine cannot run all of it in one step: too few pages, slots or tokens a step.
        """
        requests = [self._request(self._prompt_len) for _ in range(shape.decodes)]
        try:
            self._start_decoding(requests)
            steps, contexts = list[dict[str, float]](), list[int]()
            for index in range(NUM_WARMUP + self._repeats):
                if shape.prompt:
                    self._engine.add(self._request(shape.prompt, max_tokens=1))
                self._stopwatch.start()
                outputs = self._engine.step()
                seconds = self._stopwatch.read()
                _check_outputs(shape, outputs)
                if index >= NUM_WARMUP:
                    steps.append(seconds)
                    contexts += [output.usage.total_tokens - 1 for output in outputs if output.finish_reason is None]
        finally:
            for request in requests:
                self._engine.abort(request.request_id)
        return StepTimes(shape=shape, context=statistics.fmean(contexts) if contexts else 0.0, steps=steps)

    def _start_decoding(self, requests: Sequence[Request]) -> None:
        """Runs the prompts of all requests; they decode from then on."""
        waiting = {request.request_id for request in requests}
        for request in requests:
            self._engine.add(request)
        while waiting:
            outputs = self._engine.step()
            stats = self._engine.stats()
            if stats.num_preemptions:
                raise BenchmarkError(f"the {stats.num_pages} pages do not hold {len(requests)} sequences at once; use a larger cache.num_pages")
            waiting.difference_update(output.request_id for output in outputs)
            _check_errors(outputs)

    def _request(self, length: int, max_tokens: int | None = None) -> Request:
        prompt = self._prompts.prompt([Segment(next(self._keys), length)])
        # Room for every step that comes, those included in which later sequences are still being prefilled.
        return self._engine.make_request(prompt, SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens))


def watch_engine(engine: Engine) -> Stopwatch:
    """Puts a stopwatch around the pieces that ``Engine.step`` is made of."""
    stopwatch = Stopwatch()
    pieces: Any = engine  # private to everyone else
    scheduler, runner = pieces._scheduler, pieces._runner
    stopwatch.watch(scheduler, "schedule", "schedule")
    stopwatch.watch(runner._builder, "build", "build")
    stopwatch.watch(scheduler, "update", "update")
    stopwatch.watch(engine, "_process", "output")
    dispatch = runner.dispatch

    def watched_dispatch(schedule: Schedule) -> Any:
        with stopwatch.phase("dispatch"):
            step = dispatch(schedule)
            fetch, token_ids = step.fetch, step._token_ids_RB

        def watched_fetch() -> Sequence[int]:
            with stopwatch.phase("device"):
                token_ids.block_until_ready()
            with stopwatch.phase("fetch"):
                return fetch()

        step.fetch = watched_fetch
        return step

    runner.dispatch = watched_dispatch
    return stopwatch


def step_work(split: Split, times: StepTimes) -> Work:
    """What a step did on one device: on the data rank that has most of it."""
    shape = times.shape
    decodes = ceil_div(shape.decodes, split.mesh.data)
    return rank_work(split, decodes=decodes, context=times.context, prompt=shape.prompt, prompt_context=shape.prompt)


def check_shapes(shapes: Sequence[StepShape], *, max_num_seqs: int, max_tokens_per_step: int, num_ranks: int = 1) -> None:
    """Refuses shapes that the scheduler's limits split into several steps.

    Raises:
        ConfigError: One is too large.
    """
    for shape in shapes:
        sequences = ceil_div(shape.decodes, num_ranks) + (shape.prompt > 0)
        if sequences > max_num_seqs:
            raise ConfigError(f"{shape} has {sequences} sequences on a data rank; scheduler.max_num_seqs is {max_num_seqs}, and must be at least that")
        tokens = ceil_div(shape.decodes, num_ranks) + shape.prompt
        if tokens > max_tokens_per_step:
            raise ConfigError(f"{shape} has {tokens} tokens on a data rank; scheduler.max_tokens_per_step is {max_tokens_per_step}, and must be at least that")


def _check_outputs(shape: StepShape, outputs: Sequence[RequestOutput]) -> None:
    _check_errors(outputs)
    expected = shape.decodes + (shape.prompt > 0)
    if len(outputs) != expected:
        raise BenchmarkError(f"a step of {shape} gave {len(outputs)} tokens, not {expected}: the engine did not run all of it at once; it may lack pages")


def _check_errors(outputs: Sequence[RequestOutput]) -> None:
    for output in outputs:
        if output.error is not None:
            raise BenchmarkError(f"a step failed: {output.error.message}")


def shapes_of(batches: Sequence[int], prompts: Sequence[int], mixed: Sequence[tuple[int, int]]) -> Iterator[StepShape]:
    """Decode steps, then prefill steps, then those that do both."""
    yield from (StepShape(decodes=size) for size in batches)
    yield from (StepShape(prompt=length) for length in prompts)
    yield from (StepShape(decodes=size, prompt=length) for size, length in mixed)

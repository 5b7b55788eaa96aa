"""The synchronous engine: requests in, steps, outputs out. One thread; ``async_engine`` puts it into one of its own."""

from __future__ import annotations

import dataclasses
import logging
import math
import random
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jaxserve.config import Config
from jaxserve.engine.observation.inspection import SchedulerView, inspect_scheduler
from jaxserve.engine.observation.meter import Measurements, Meter
from jaxserve.engine.observation.stats import Counts, EngineStats, RefusalReason
from jaxserve.engine.pages.prefix_cache.choice import choose_prefix_cache
from jaxserve.engine.pages.prefix_cache.interface import make_namespace
from jaxserve.engine.pipeline import Pipeline
from jaxserve.engine.requests.admission import Admission, Load
from jaxserve.engine.requests.door import Door
from jaxserve.engine.requests.output import Delta, OutputProcessor, TextMaker, TokenRules
from jaxserve.engine.requests.sampling_params import resolve_sampling
from jaxserve.engine.requests.time_limits import TimeLimits
from jaxserve.engine.scheduling.chunking import make_chunking
from jaxserve.engine.scheduling.schedule import Runner, Schedule, SequenceResult
from jaxserve.engine.scheduling.scheduler import Scheduler
from jaxserve.engine.scheduling.sequence import Sequence, SequenceStatus
from jaxserve.errors import (
    ConfigError,
    EngineDeadError,
    ErrorData,
    InvalidRequestError,
    JaxserveError,
    ModelError,
    OverloadedError,
    QuotaExceededError,
    to_data,
)
from jaxserve.models.context_length import check_context_length
from jaxserve.models.spec import ModelSpec
from jaxserve.request import Request, RequestOptions, RequestOutput, SamplingParams, Usage

if TYPE_CHECKING:
    from jaxserve.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_MOST_FAILED_STEPS = 3
"""As many failed steps in a row mean that the device will not recover."""
_CHECK_INTERVAL_S = 10.0
"""Least time between two checks of the books: a check passes over all pages, and a request may come meanwhile."""


@dataclasses.dataclass(slots=True)
class _Generation:
    """A request in flight: what the scheduler moves, and what turns its tokens into output."""

    sequence: Sequence
    processor: OutputProcessor
    degraded_max_tokens: int | None


class Engine:
    """Serves requests on one runner.

    ``submit`` takes a request if the bounds of the configuration allow it, ``add`` in any case. Then ``step`` after ``step`` gives their outputs: each
    launches the next step and collects the one that is due. With overlap that is the step before, so that the device runs while the host turns tokens into
    outputs and prepares the step after; a request that ends by its tokens then takes a row of one step too many, whose token nobody sees.

    ``make_request``, ``stats`` and ``measurements`` may be called from any thread, all else from one.

    Args:
        runner: Runs the steps; warmed up.
        tokenizer: Of the model.
        spec: Of the model; gives the vocabulary, the longest context and EOS ids.
        config: ``model.max_model_len``, ``scheduler``, ``cache`` and ``engine`` are read here.
        model_name: What the model is called.
        model_revision: The commit of its files, where one is known.
        sampling_defaults: The model's own values for sampling fields that a request leaves out.
        overlap: Whether a step is launched while the one before it runs.
        seed: Of the generator that gives a seed to each request without one; ``None`` for a fresh one.
        clock: Gives the time in seconds, as ``Request.arrival_s`` has it.

    Attributes:
        max_model_len: Most tokens of prompt and output together.
        watchdog_s: See ``EngineConfig``.
        reader_buffer: See ``EngineConfig``.

    Raises:
        ConfigError: Limits that contradict each other or the model.
        ModelError: A sampling default out of its range.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        spec: ModelSpec,
        config: Config,
        *,
        model_name: str = "model",
        model_revision: str | None = None,
        sampling_defaults: Mapping[str, Any] = MappingProxyType({}),
        overlap: bool = False,
        seed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_model_len = check_context_length(config.model.max_model_len, spec, key="model.max_model_len", model=model_name)
        try:
            resolve_sampling({}, sampling_defaults)
        except InvalidRequestError as error:
            raise ModelError(f"the sampling defaults of {model_name} cannot be used: {error}") from error
        if config.scheduler.preemption == "swap" and not runner.num_host_pages:
            raise ConfigError(
                f"scheduler.preemption is swap, but this engine has no host memory to swap to (cache.swap_gib is {config.cache.swap_gib}; by default it is 0 "
                f"on CPU, and several hosts have none); set cache.swap_gib, or scheduler.preemption to auto or recompute"
            )
        assert runner.max_num_seqs >= config.scheduler.max_num_seqs
        self.watchdog_s = config.engine.watchdog_s
        self.reader_buffer = config.engine.reader_buffer
        self.tokenizer = tokenizer
        self.spec = spec
        self.model_name = model_name
        self.model_revision = model_revision
        self.sampling_defaults = sampling_defaults
        self._runner = runner
        self._config = config
        self._tenants = config.read_tenants()
        self._door = Door(spec.vocab_size, self.max_model_len, num_pages=runner.num_pages, page_size=runner.page_size)
        self._eos_token_ids = frozenset(spec.eos_token_ids) | frozenset(tokenizer.eos_token_ids)
        self._clock = clock
        self._meter = Meter()
        self._seeds = random.Random(seed)  # noqa: S311  (seeds of samples, no secrets)
        self._counts = Counts()
        self._pipeline = Pipeline(runner, int(overlap), clock)
        self._idle_until_s = 0.0
        self._checked_s = -math.inf
        self._num_failed_steps = 0  # in a row
        self._open_books()

    def _open_books(self) -> None:
        """Begins with no request in flight, all pages free, and nothing cached."""
        config, runner = self._config, self._runner
        self._scheduler = Scheduler(
            runner.num_pages,
            runner.page_size,
            config.scheduler,
            num_ranks=runner.num_ranks,
            make_cache=choose_prefix_cache(config.cache.prefix),
            chunking=make_chunking(config.scheduler, self.spec, runner.token_buckets),
            can_copy_pages=runner.can_copy_pages,
            num_host_pages=runner.num_host_pages,
            costs=runner.costs,
            session_ttl_s=config.cache.session_ttl_s,
            weights=self._tenants.weights,
        )
        self._admission = Admission(config.scheduler, self._tenants)
        self._time_limits = TimeLimits(config.scheduler.queue_timeout_s, config.engine.reader_timeout_s, self._retry_after_s)
        self._generations: dict[str, _Generation] = {}
        self._last_move: tuple[float, int] | None = None  # since when the queue has moved by so many tokens; None without a queue or steps
        self._counts.num_requests = self._counts.finished.total()

    @property
    def runner(self) -> Runner:
        """What runs the steps, for its facts."""
        return self._runner

    @property
    def has_work(self) -> bool:
        """Whether requests are in flight, or a step that was launched for them."""
        return bool(self._generations) or self._pipeline.num_steps > 0

    @property
    def idle_s(self) -> float:
        """How long ``step`` has nothing to do unless another method is called, in seconds; infinity for ever. Known after it had nothing to do."""
        return max(0.0, self._idle_until_s - self._clock()) if self._generations else 0.0

    @property
    def slack_s(self) -> float:
        """How long the next ``step`` can be put off, in seconds, and the device still goes from step to step: requests that come until then join it.

        Tell ``note_sleep`` what was made of it.
        """
        return self._pipeline.slack_s

    def note_sleep(self, seconds: float) -> None:
        """Notes that the caller slept in the slack: so long the host had nothing to do."""
        self._pipeline.note_sleep(seconds)

    @property
    def is_compiling(self) -> bool:
        """Whether the step under way is compiling. May be asked from any thread."""
        return self._runner.is_compiling

    def make_request(
        self, prompt_token_ids: Iterable[int], params: SamplingParams, request_id: str | None = None, options: RequestOptions | None = None
    ) -> Request:
        """Checks everything about a request that can be known before it runs; see :class:`Door`.

        Args:
            prompt_token_ids: The prompt.
            params: How to continue it.
            request_id: Unique among the requests in flight; ``None`` makes one.
            options: How to treat it; ``None`` for nothing special.

        Raises:
            InvalidRequestError: Empty prompt, or ids, also to stop at, that are no integers in ``[0, V)``.
            ContextLengthError: More tokens than the model's context or the page pool can hold.
        """
        token_ids = self._door.check(prompt_token_ids, params)
        return Request(
            request_id=request_id or uuid.uuid4().hex,
            prompt_token_ids=token_ids,
            params=params,
            options=options or RequestOptions(),
            arrival_s=self._clock(),
        )

    def submit(self, request: Request) -> list[RequestOutput]:
        """Queues a request that came through ``make_request``, if it may join. Queued ones may have to leave for it, by priority or by their tenant's share.

        Returns:
            The last outputs of those.

        Raises:
            InvalidRequestError: Its id is in flight already.
            QuotaExceededError: Its tenant has used up what it may.
            OverloadedError: The queue is full, or too long for the request's deadline.
        """
        self._check_id(request)
        max_tokens = self._door.max_tokens(len(request.prompt_token_ids), request.params)
        scheduler = self._scheduler
        load = Load(
            num_queued=scheduler.num_queued,
            num_queued_tokens=scheduler.num_queued_tokens,
            num_queued_tokens_of=scheduler.num_queued_tokens_of,
            num_free_slots=scheduler.num_free_slots,
        )
        try:
            shed = self._admission.check(request, max_tokens, load, self._clock())
        except QuotaExceededError:
            self._counts.refused["quota"] += 1
            raise
        except OverloadedError:
            self._counts.refused["overload"] += 1
            raise
        # First of all, for it may fail: nobody has to leave for a request that does not come.
        sequence = self._queue(request, self._admission.limit_max_tokens(max_tokens, load), max_tokens)
        self._time_limits.watch(sequence, may_wait_for_ever=False)
        message = f"the queue is full, and another request has taken this one's place (scheduler.order is {self._config.scheduler.order})"
        return [self._refuse(lower, OverloadedError(message, retry_after_s=self._retry_after_s()), "shed") for lower in shed]

    def add(self, request: Request) -> None:
        """Queues a request that came through ``make_request``, however many there are and however long it may wait.

        Raises:
            InvalidRequestError: Its id is in flight already.
        """
        self._check_id(request)
        max_tokens = self._door.max_tokens(len(request.prompt_token_ids), request.params)
        self._time_limits.watch(self._queue(request, max_tokens, max_tokens), may_wait_for_ever=True)

    def pause(self, request_id: str) -> None:
        """Stops a request until ``resume``: nobody reads its outputs. What it holds is free for others. Does nothing if it is not in flight.

        After ``engine.reader_timeout_s`` it ends.
        """
        self._idle_until_s = 0.0
        generation = self._generations.get(request_id)
        if generation is not None and not self._time_limits.is_paused(generation.sequence):
            self._time_limits.pause(generation.sequence, self._clock())
            self._meter.pause(generation.sequence)
            self._scheduler.pause(generation.sequence)

    def resume(self, request_id: str) -> None:
        """Lets a paused request go on. Does nothing to others."""
        self._idle_until_s = 0.0
        if (generation := self._generations.get(request_id)) is not None:
            self._time_limits.resume(generation.sequence)
            self._scheduler.resume(generation.sequence)

    def _check_id(self, request: Request) -> None:
        if request.request_id in self._generations:
            raise InvalidRequestError(f"request id {request.request_id!r} is in flight already", param="request_id")

    def _queue(self, request: Request, max_tokens: int, wanted_max_tokens: int) -> Sequence:
        prompt, params = request.prompt_token_ids, request.params
        text = TextMaker(params, self.tokenizer.detokenizer(prompt, skip_special_tokens=params.skip_special_tokens)) if request.options.detokenize else None
        processor = OutputProcessor(TokenRules(params, self._eos_token_ids, max_tokens), text)
        seed = self._seeds.getrandbits(32) if params.seed is None else fold_seed(params.seed)
        sequence = Sequence.of(request, seed=seed, max_tokens=max_tokens, namespace=self._namespace(request.options))
        self._scheduler.add(sequence)
        self._admission.enter(sequence, self._clock())
        degraded = max_tokens if max_tokens < wanted_max_tokens else None
        self._generations[request.request_id] = _Generation(sequence, processor, degraded)
        self._idle_until_s = 0.0
        self._counts.num_requests += 1
        self._counts.num_prompt_tokens += len(prompt)
        return sequence

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request, whatever its state; its pages are free at once.

        Returns:
            Its last output, with reason "abort" and all text held back; ``None`` if it is not in flight (any more).
        """
        generation = self._generations.get(request_id)
        if generation is None:
            return None
        self._idle_until_s = 0.0
        try:
            return self._emit(generation.sequence, (), generation.processor.finish("abort"))
        except Exception as error:  # whatever it is, it is this request's alone
            return self._emit_error(generation.sequence, error)

    def stop(self, request_id: str, num_tokens: int) -> RequestOutput | None:
        """Ends a request as of its first ``num_tokens`` generated tokens, with reason "stop": whoever makes its text has found a stop string there. What
        was generated since is in no count of the request, and not in the prefix cache.

        Returns:
            Its last output; ``None`` if it is not in flight (any more).
        """
        generation = self._generations.get(request_id)
        if generation is None:
            return None
        self._idle_until_s = 0.0
        self._scheduler.truncate(generation.sequence, num_tokens)
        return self._emit(generation.sequence, (), Delta("", "stop"))

    def give_back(self, tenant: str, num_tokens: int) -> None:
        """Gives tokens back to a tenant: of a request that had ended by itself before it was known that its text had ended ``num_tokens`` earlier."""
        self._admission.give_back(tenant, num_tokens, self._clock())

    def step(self) -> list[RequestOutput]:
        """Launches the next step and collects the one that is due. Does nothing without work.

        What goes wrong while one request's output is made ends that request; what goes wrong on the device ends the requests of that step. Both end
        with reason "error", and the engine goes on.

        Returns:
            What the collected step added, at most one output a request, and the ends of requests whose time was up.

        Raises:
            EngineDeadError: The runner cannot go on, or steps fail one after the other.
        """
        num_steps = self._pipeline.num_steps
        outputs = self.launch()
        if self._pipeline.is_full or self._pipeline.num_steps == num_steps:
            outputs += self.collect()
        return outputs

    def launch(self) -> list[RequestOutput]:
        """Schedules the next step and starts it on the device, without waiting for it. Does nothing if there is nothing to run.

        Where a sequence holds steps back until its token is known (``Lag.HOLDS_STEP``), the steps under way are collected first.

        Returns:
            The ends of requests whose time was up, and what was collected.

        Raises:
            EngineDeadError: As ``step``.
        """
        began_s = self._clock()
        outputs = [self._refuse(*due) for due in self._time_limits.take_due(began_s)]
        while self._pipeline.num_steps and self._scheduler.is_held:
            outputs += self.collect()
        scheduler = self._scheduler
        schedule = self._schedule(began_s)
        if not schedule.sequences:
            if not self._pipeline.num_steps:
                self._idle_until_s = min(scheduler.wake_at_s, self._time_limits.next_s)
                assert not scheduler.has_work or scheduler.wake_at_s < math.inf, "requests in flight, yet nothing to run"
            return outputs
        self._counts.num_steps += 1
        try:
            self._pipeline.launch(schedule, began_s)
        except EngineDeadError:
            raise
        except Exception as error:
            while self._pipeline.num_steps:  # what was launched before has not failed
                outputs += self.collect()
            outputs += self._fail_step(schedule, error)
        return outputs

    def collect(self) -> list[RequestOutput]:
        """Waits for the oldest step under way, and turns what it gave into outputs. Does nothing if there is none.

        Returns:
            At most one output a request.

        Raises:
            EngineDeadError: As ``step``.
        """
        if not self._pipeline.num_steps:
            return []
        try:
            fetched = self._pipeline.fetch()
        except EngineDeadError:
            raise
        except Exception as error:
            failed, *others = self._pipeline.lose()  # the steps behind it ran on what it left
            for schedule in others:
                self._scheduler.lose(schedule)
            return self._fail_step(failed, error)
        self._num_failed_steps = 0
        grown = self._scheduler.update(fetched.schedule, fetched.results)
        self._meter.tokens(grown, fetched.fetched_s)
        outputs = [self._process(sequence, result) for sequence, result in grown]
        output_s = self._clock() - fetched.fetched_s
        self._meter.step(fetched.schedule, fetched.step, total_s=fetched.total_s + output_s, wait_s=fetched.wait_s)
        return outputs

    def on_idle(self) -> None:
        """For when nothing is in flight and all outputs are delivered: checks the books now and then (``engine.check_integrity``).

        If they do not add up, that is logged, and they are opened anew: no request needs them now, and the requests to come must not suffer.
        """
        assert not self.has_work
        now_s = self._clock()
        if not self._config.engine.check_integrity or now_s - self._checked_s < _CHECK_INTERVAL_S:
            return
        self._checked_s = now_s
        try:
            self.check_integrity()
        except Exception:  # wrong books may fail in any way
            logger.critical("the books of pages and requests do not add up; they are opened anew, without what was cached", exc_info=True)
            self._open_books()

    def reset_prefix_cache(self) -> None:
        """Forgets all keys and values: for when the weights have changed. Running requests are computed anew."""
        self._scheduler.forget_pools()

    def stats(self) -> EngineStats:
        """A snapshot; taken from another thread its numbers may be a step apart."""
        return self._counts.snapshot(self._scheduler, self._runner, self._config.scheduler.max_num_seqs * self._runner.num_ranks)

    def measurements(self) -> Measurements:
        """What has been measured since the start."""
        return self._meter.snapshot()

    def inspect(self) -> SchedulerView:
        """What runs and who waits, request by request. For a person who looks: it takes time."""
        return inspect_scheduler(self._scheduler, self._clock())

    def check_integrity(self) -> None:
        """Recomputes the books of pages, slots and requests.

        Raises:
            AssertionError: They do not add up.
        """
        scheduler = self._scheduler
        scheduler.check_integrity()
        assert len(self._generations) == scheduler.num_running + scheduler.num_waiting + scheduler.num_swapped + scheduler.num_paused
        assert self._counts.num_requests == len(self._generations) + self._counts.finished.total()

    def _namespace(self, options: RequestOptions) -> bytes:
        """All that changes the keys and values of the same tokens, and who may share them."""
        model, cache = self._config.model, self._config.cache
        tenant = options.tenant if cache.isolate_tenants else ""
        salt = "" if options.cache_salt is None else f"salt {options.cache_salt}"
        return make_namespace(model.source, model.revision or "", model.dtype, cache.dtype, tenant, salt)

    def _process(self, sequence: Sequence, result: SequenceResult) -> RequestOutput:
        """Makes the output for a sequence that has more tokens, and ends it if one of them was the last; those behind it are as if they had not been."""
        token_ids = result.token_ids
        try:
            delta = self._generations[sequence.request.request_id].processor.push(token_ids)
        except Exception as error:  # whatever it is, it is this request's alone
            self._counts.num_generated_tokens += len(token_ids)
            return self._emit_error(sequence, error)
        if delta.num_tokens < len(token_ids):
            self._scheduler.truncate(sequence, sequence.num_generated_tokens - len(token_ids) + delta.num_tokens)
            token_ids = token_ids[: delta.num_tokens]
        self._counts.num_generated_tokens += len(token_ids)
        return self._emit(sequence, tuple(token_ids), delta)

    def _fail_step(self, schedule: Schedule, error: Exception) -> list[RequestOutput]:
        """Ends the requests of a failed step. The pool's content may be lost with it, so all others are computed anew."""
        logger.error("a step of %d sequences failed", len(schedule.sequences), exc_info=error)
        self._num_failed_steps += 1
        if self._num_failed_steps == _MOST_FAILED_STEPS:
            raise EngineDeadError(f"{_MOST_FAILED_STEPS} steps in a row have failed, the last with {type(error).__name__}: {error}") from error
        self._scheduler.lose(schedule)
        alive = [scheduled.sequence for scheduled in schedule.sequences if scheduled.sequence.status is not SequenceStatus.FINISHED]
        outputs = [self._emit_error(sequence, error, logged=True) for sequence in alive]
        self._scheduler.forget_pools()
        return outputs

    def _emit_error(self, sequence: Sequence, error: Exception, *, logged: bool = False) -> RequestOutput:
        if not logged:
            logger.error("request %s failed", sequence.request.request_id, exc_info=error)
        return self._emit(sequence, (), Delta("", "error"), to_data(error))

    def _schedule(self, now_s: float) -> Schedule:
        """The next step; and how fast the queue moved in the last one goes into the estimates of waiting times."""
        scheduler = self._scheduler
        if self._last_move is not None:
            since_s, num_tokens = self._last_move
            self._admission.speed.note(num_tokens, now_s - since_s)
        num_queued_tokens = scheduler.num_queued_tokens
        schedule = scheduler.schedule(now_s)
        self._last_move = (now_s, num_queued_tokens - scheduler.num_queued_tokens) if num_queued_tokens and schedule.sequences else None
        return schedule

    def _retry_after_s(self) -> float:
        return self._admission.retry_after_s(self._scheduler.num_queued_tokens)

    def _refuse(self, sequence: Sequence, error: JaxserveError, reason: RefusalReason) -> RequestOutput:
        self._counts.refused[reason] += 1
        return self._emit(sequence, (), Delta("", "error"), to_data(error))

    def _emit(self, sequence: Sequence, token_ids: tuple[int, ...], delta: Delta, error: ErrorData | None = None) -> RequestOutput:
        request_id = sequence.request.request_id
        degraded_max_tokens = self._generations[request_id].degraded_max_tokens
        times = None
        if delta.finish_reason is not None:
            now_s = self._clock()
            self._scheduler.finish(sequence, delta.finish_reason)
            self._admission.leave(sequence, now_s)
            times = self._meter.finish(sequence, delta.finish_reason, now_s)
            del self._generations[request_id]
            self._time_limits.resume(sequence)
            if not self._generations:
                self._last_move = None
            self._counts.finished[delta.finish_reason] += 1
        return RequestOutput(
            request_id=request_id,
            token_ids=token_ids,
            text=delta.text,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            usage=Usage(
                prompt_tokens=sequence.num_prompt_tokens, completion_tokens=sequence.num_generated_tokens, cached_tokens=sequence.num_cached_tokens or 0
            ),
            error=error,
            times=times,
            degraded_max_tokens=degraded_max_tokens,
        )


def fold_seed(seed: int) -> int:
    """Maps a seed in ``[-2**63, 2**63)`` to 32 bits, so that all 64 bits count (the finaliser of splitmix64)."""
    mask = 2**64 - 1
    z = (seed + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 32

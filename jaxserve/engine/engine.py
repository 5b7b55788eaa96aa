"""The synchronous engine: it takes requests, runs steps and returns outputs. It runs on one thread; ``async_engine`` gives it a thread of its own."""

from __future__ import annotations

import dataclasses
import logging
import math
import random
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
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
from jaxserve.request import Request, RequestOptions, RequestOutput, RequestTimes, SamplingParams, Usage

if TYPE_CHECKING:
    from jaxserve.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_MOST_FAILED_STEPS = 3
"""Number of failed steps in a row after which the engine gives the device up."""
_CHECK_INTERVAL_S = 10.0
"""Least time between two integrity checks, in seconds. A check looks at every page, and a request that arrives meanwhile has to wait for it."""


@dataclasses.dataclass(slots=True)
class _Generation:
    """A request in flight: what the scheduler moves, and what turns its tokens into output."""

    sequence: Sequence
    processor: OutputProcessor
    degraded_max_tokens: int | None


class Engine:
    """Serves requests on one runner.

    ``submit`` queues a request if the limits of the configuration allow it; ``add`` queues it in any case. Each call of ``step`` then launches the next step
    on the device, collects the results of the step that is due, and returns the outputs. With overlap, the step that is due is the previous one: the device
    runs the new step while the host turns the previous step's tokens into outputs. A request that ends because of a token (a stop token or a stop string)
    is then still part of one more step, and the token of that step is thrown away.

    ``make_request``, ``stats``, ``measurements`` and ``is_compiling`` may be used from any thread, everything else from one thread only.

    Args:
        runner: Runs the steps; warmed up.
        tokenizer: The model's tokenizer.
        spec: The model's specification: its vocabulary size, longest context and end-of-sequence token ids.
        config: The configuration. The engine reads its sections ``model``, ``scheduler``, ``cache``, ``engine`` and the tenants.
        model_name: The model's name, for messages and answers.
        model_revision: The commit of the model's files; ``None`` if it is not known.
        sampling_defaults: The model's own values for sampling fields that a request leaves out.
        overlap: Whether a step is launched while the one before it runs.
        seed: Seed of the generator that draws a seed for each request without one; ``None`` for an unpredictable one.
        clock: Function that returns the time in seconds; ``Request.arrival_s`` is in the same clock.

    Attributes:
        max_model_len: Largest number of tokens that prompt and output may have together.
        watchdog_s: See ``EngineConfig``.
        reader_buffer: See ``EngineConfig``.

    Raises:
        ConfigError: The configured limits contradict each other or the model.
        ModelError: A sampling default is out of its range.
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
        """Starts from nothing: no request in flight, all pages free, and nothing cached."""
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
        """The runner that runs the steps, for those who ask for its sizes and counts."""
        return self._runner

    @property
    def has_work(self) -> bool:
        """Whether a request is in flight, or a step whose results have not been collected."""
        return bool(self._generations) or self._pipeline.num_steps > 0

    @property
    def idle_s(self) -> float:
        """Seconds for which ``step`` will have nothing to do unless another method is called first; infinity if there is no work to come.

        The value is set by the last ``step`` or ``launch`` that found nothing to run; it is 0 while there is work.
        """
        return max(0.0, self._idle_until_s - self._clock()) if self._generations else 0.0

    @property
    def slack_s(self) -> float:
        """Seconds by which the next ``step`` can be delayed without leaving the device idle. Requests that arrive during the delay can join that step.

        A caller that sleeps in this time reports it to ``note_sleep``.
        """
        return self._pipeline.slack_s

    def note_sleep(self, seconds: float) -> None:
        """Records that the caller slept for ``seconds`` because of ``slack_s``; the measurements count it as time in which the host waited for the device."""
        self._pipeline.note_sleep(seconds)

    @property
    def is_compiling(self) -> bool:
        """Whether the runner is compiling a program at this moment. May be read from any thread."""
        return self._runner.is_compiling

    def make_request(
        self, prompt_token_ids: Iterable[int], sampling_params: SamplingParams, request_id: str | None = None, options: RequestOptions | None = None
    ) -> Request:
        """Checks everything about a request that can be known before it runs; see :class:`Door`.

        Args:
            prompt_token_ids: Token ids of the prompt.
            sampling_params: Sampling parameters and limits of the output.
            request_id: Id that no other request in flight has; ``None`` makes one.
            options: How to treat the request; ``None`` for the defaults.

        Raises:
            InvalidRequestError: The prompt is empty, or an id in the prompt or among the stop tokens is not an integer in ``[0, V)``.
            ContextLengthError: The request has more tokens than the model's context or the page pool can hold.
        """
        token_ids = self._door.check(prompt_token_ids, sampling_params)
        return Request(
            request_id=request_id or uuid.uuid4().hex,
            prompt_token_ids=token_ids,
            sampling_params=sampling_params,
            options=options or RequestOptions(),
            arrival_s=self._clock(),
        )

    def submit(self, request: Request) -> list[RequestOutput]:
        """Queues a request made by ``make_request``, if the limits allow it. Queued requests of lower priority, or of a tenant beyond its share, may be removed
        to make room for it.

        Returns:
            The last output of each request that was removed.

        Raises:
            InvalidRequestError: A request with the same id is in flight already.
            QuotaExceededError: The request's tenant has used up its quota.
            OverloadedError: The queue is full, or too long for the request's deadline.
        """
        self._check_id(request)
        max_tokens = self._door.max_tokens(len(request.prompt_token_ids), request.sampling_params)
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
        """Queues a request made by ``make_request`` without applying the limits on queue length and waiting time.

        Raises:
            InvalidRequestError: A request with the same id is in flight already.
        """
        self._check_id(request)
        max_tokens = self._door.max_tokens(len(request.prompt_token_ids), request.sampling_params)
        self._time_limits.watch(self._queue(request, max_tokens, max_tokens), may_wait_for_ever=True)

    def pause(self, request_id: str) -> None:
        """Stops a request until ``resume``, because its reader does not take its outputs. Its slot and pages become free for other requests.

        The request ends if it stays paused for ``engine.reader_timeout_s``. Does nothing if it is not in flight.
        """
        self._idle_until_s = 0.0
        generation = self._generations.get(request_id)
        if generation is not None and not self._time_limits.is_paused(generation.sequence):
            self._time_limits.pause(generation.sequence, self._clock())
            self._meter.pause(generation.sequence)
            self._scheduler.pause(generation.sequence)

    def resume(self, request_id: str) -> None:
        """Lets a paused request go on. Does nothing if the request is not paused."""
        self._idle_until_s = 0.0
        if (generation := self._generations.get(request_id)) is not None:
            self._time_limits.resume(generation.sequence)
            self._scheduler.resume(generation.sequence)

    def _check_id(self, request: Request) -> None:
        if request.request_id in self._generations:
            raise InvalidRequestError(f"request id {request.request_id!r} is in flight already", param="request_id")

    def _queue(self, request: Request, max_tokens: int, wanted_max_tokens: int) -> Sequence:
        prompt, sampling_params = request.prompt_token_ids, request.sampling_params
        text = (
            TextMaker(sampling_params, self.tokenizer.detokenizer(prompt, skip_special_tokens=sampling_params.skip_special_tokens))
            if request.options.detokenize
            else None
        )
        processor = OutputProcessor(TokenRules(sampling_params, self._eos_token_ids, max_tokens), text)
        seed = self._seeds.getrandbits(32) if sampling_params.seed is None else fold_seed(sampling_params.seed)
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
        """Ends a request in whatever state it is. Its pages are free at once.

        Returns:
            The request's last output, with finish reason "abort" and the text that had been held back so far; ``None`` if the request is not in flight.
        """
        generation = self._generations.get(request_id)
        if generation is None:
            return None
        self._idle_until_s = 0.0
        try:
            return self._end(generation.sequence, (), generation.processor.finish("abort"))
        except Exception as error:  # whatever it is, it is this request's alone
            return self._end_with_error(generation.sequence, error)

    def stop(self, request_id: str, num_tokens: int) -> RequestOutput | None:
        """Ends a request after its first ``num_tokens`` generated tokens, with finish reason "stop".

        For a caller that makes the text itself and found a stop string there. Tokens generated after that place are not counted and do not enter the prefix
        cache.

        Returns:
            The request's last output; ``None`` if the request is not in flight.
        """
        generation = self._generations.get(request_id)
        if generation is None:
            return None
        self._idle_until_s = 0.0
        self._scheduler.truncate(generation.sequence, num_tokens)
        return self._end(generation.sequence, (), Delta("", "stop"))

    def give_back(self, tenant: str, num_tokens: int) -> None:
        """Returns ``num_tokens`` tokens to a tenant's quota, for a request whose text turned out, after the request had ended, to stop that many tokens
        earlier.
        """
        self._admission.give_back(tenant, num_tokens, self._clock())

    def step(self) -> list[RequestOutput]:
        """Launches the next step and collects the one that is due. Does nothing if there is no work.

        An error while a request's output is made ends that request only; an error on the device ends all requests of that step. They end with finish reason
        "error", and the engine goes on.

        Returns:
            The outputs of the collected step, at most one for each request, and the last outputs of requests whose time was up.

        Raises:
            EngineDeadError: The runner cannot go on, or three steps in a row have failed.
        """
        num_steps = self._pipeline.num_steps
        outputs = self.launch()
        if self._pipeline.is_full or self._pipeline.num_steps == num_steps:
            outputs += self.collect()
        return outputs

    def launch(self) -> list[RequestOutput]:
        """Schedules the next step and starts it on the device, without waiting for it. Does nothing if there is nothing to run.

        If a sequence forbids scheduling before its token in flight is known (``Lag.HOLDS_STEP``), the steps in flight are collected first.

        Returns:
            The last outputs of requests whose time was up, and the outputs of the steps that were collected.

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
        """Waits for the oldest step in flight and turns its tokens into outputs. Does nothing if no step is in flight.

        Returns:
            At most one output for each request.

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
        """Checks the engine's integrity, at most every 10 s, if ``engine.check_integrity`` is set. Call it when nothing is in flight and all outputs are
        delivered.

        If the check fails, the failure is logged and the scheduler is made anew with an empty prefix cache, so that later requests are not affected.
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
        """Forgets all keys and values, as must be done when the weights change. Running requests are recomputed."""
        self._scheduler.forget_pools()

    def stats(self) -> EngineStats:
        """A snapshot of the engine's counts. Read from another thread, its numbers may be one step apart from each other."""
        return self._counts.snapshot(self._scheduler, self._runner, self._config.scheduler.max_num_seqs * self._runner.num_ranks)

    def measurements(self) -> Measurements:
        """The measurements made since the start."""
        return self._meter.snapshot()

    def inspect(self) -> SchedulerView:
        """A view of every running and waiting request, for a person to look at. It takes time that grows with the number of requests."""
        return inspect_scheduler(self._scheduler, self._clock())

    def check_integrity(self) -> None:
        """Recomputes the counts and owners of pages, slots and requests, and compares them with those that are kept.

        Raises:
            AssertionError: They differ.
        """
        scheduler = self._scheduler
        scheduler.check_integrity()
        assert len(self._generations) == scheduler.num_running + scheduler.num_waiting + scheduler.num_swapped + scheduler.num_paused
        assert self._counts.num_requests == len(self._generations) + self._counts.finished.total()

    def _namespace(self, options: RequestOptions) -> bytes:
        """The prefix cache's namespace of a request: it covers all that changes the keys and values of the same tokens, and who may share them."""
        model, cache = self._config.model, self._config.cache
        tenant = options.tenant if cache.isolate_tenants else ""
        salt = "" if options.cache_salt is None else f"salt {options.cache_salt}"
        return make_namespace(model.source, model.revision or "", model.dtype, cache.dtype, tenant, salt)

    def _process(self, sequence: Sequence, result: SequenceResult) -> RequestOutput:
        """Makes the output of a sequence that got new tokens, and ends the sequence if one of them is its last. Tokens after that one are dropped."""
        token_ids = result.token_ids
        generation = self._generations[sequence.request.request_id]
        try:
            delta = generation.processor.push(token_ids)
        except Exception as error:  # whatever it is, it is this request's alone
            self._counts.num_generated_tokens += len(token_ids)
            return self._end_with_error(sequence, error)
        if delta.num_tokens < len(token_ids):
            self._scheduler.truncate(sequence, sequence.num_generated_tokens - len(token_ids) + delta.num_tokens)
            token_ids = token_ids[: delta.num_tokens]
        self._counts.num_generated_tokens += len(token_ids)
        if delta.finish_reason is None:
            return _output(generation, token_ids, delta)
        return self._end(sequence, token_ids, delta)

    def _fail_step(self, schedule: Schedule, error: Exception) -> list[RequestOutput]:
        """Ends the requests of a failed step. The failure may have destroyed the pool's content, so all other requests are recomputed."""
        logger.error("a step of %d sequences failed", len(schedule.sequences), exc_info=error)
        self._num_failed_steps += 1
        if self._num_failed_steps == _MOST_FAILED_STEPS:
            raise EngineDeadError(f"{_MOST_FAILED_STEPS} steps in a row have failed, the last with {type(error).__name__}: {error}") from error
        self._scheduler.lose(schedule)
        alive = [scheduled.sequence for scheduled in schedule.sequences if scheduled.sequence.status is not SequenceStatus.FINISHED]
        outputs = [self._end_with_error(sequence, error, logged=True) for sequence in alive]
        self._scheduler.forget_pools()
        return outputs

    def _end_with_error(self, sequence: Sequence, error: Exception, *, logged: bool = False) -> RequestOutput:
        if not logged:
            logger.error("request %s failed", sequence.request.request_id, exc_info=error)
        return self._end(sequence, (), Delta("", "error"), to_data(error))

    def _schedule(self, now_s: float) -> Schedule:
        """Schedules the next step. Also records how fast the queue moved during the previous one, from which waiting times are estimated."""
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
        return self._end(sequence, (), Delta("", "error"), to_data(error))

    def _end(self, sequence: Sequence, token_ids: SequenceOf[int], delta: Delta, error: ErrorData | None = None) -> RequestOutput:
        """Makes the last output of a request, and ends it."""
        request_id, reason, now_s = sequence.request.request_id, delta.finish_reason, self._clock()
        assert reason is not None
        self._scheduler.finish(sequence, reason)
        self._admission.leave(sequence, now_s)
        times = self._meter.finish(sequence, reason, now_s)
        generation = self._generations.pop(request_id)
        self._time_limits.resume(sequence)
        if not self._generations:
            self._last_move = None
        self._counts.finished[reason] += 1
        return _output(generation, token_ids, delta, error, times)


def _output(
    generation: _Generation, token_ids: SequenceOf[int], delta: Delta, error: ErrorData | None = None, times: RequestTimes | None = None
) -> RequestOutput:
    sequence = generation.sequence
    return RequestOutput(
        request_id=sequence.request.request_id,
        token_ids=tuple(token_ids),
        text=delta.text,
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
        usage=Usage(prompt_tokens=sequence.num_prompt_tokens, completion_tokens=sequence.num_generated_tokens, cached_tokens=sequence.num_cached_tokens or 0),
        error=error,
        times=times,
        degraded_max_tokens=generation.degraded_max_tokens,
    )


def fold_seed(seed: int) -> int:
    """Maps a seed in ``[-2**63, 2**63)`` to 32 bits, so that all 64 bits count (the finaliser of splitmix64)."""
    mask = 2**64 - 1
    z = (seed + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 32

"""The synchronous engine: the door, one step after another, and what comes out. One thread; ``async_engine`` puts it into one of its own."""

from __future__ import annotations

import dataclasses
import logging
import math
import random
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args

from jaxserve.config import Config
from jaxserve.engine.observation.inspection import SchedulerView, inspect_scheduler
from jaxserve.engine.observation.meter import Measurements, Meter
from jaxserve.engine.observation.stats import EngineStats, RefusalReason
from jaxserve.engine.pages.prefix_cache.choice import choose_prefix_cache
from jaxserve.engine.pages.prefix_cache.interface import make_namespace
from jaxserve.engine.requests.admission import Admission, Load
from jaxserve.engine.requests.door import Door
from jaxserve.engine.requests.expiry import Expiry
from jaxserve.engine.requests.output import Delta, OutputProcessor, TextMaker, TokenRules
from jaxserve.engine.requests.params import resolve_params
from jaxserve.engine.scheduling.chunking import make_chunking
from jaxserve.engine.scheduling.schedule import Runner, Schedule
from jaxserve.engine.scheduling.scheduler import Scheduler
from jaxserve.engine.scheduling.sequence import Sequence
from jaxserve.errors import (
    ConfigError,
    DeadlineExceededError,
    EngineDeadError,
    ErrorData,
    InvalidRequestError,
    JaxserveError,
    ModelError,
    OverloadedError,
    QuotaExceededError,
    ReaderTimeoutError,
    to_data,
)
from jaxserve.models.spec import ModelSpec
from jaxserve.request import FinishReason, Request, RequestOptions, RequestOutput, SamplingParams, Usage

if TYPE_CHECKING:
    from jaxserve.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_MOST_FAILED_STEPS = 3
"""As many failed steps in a row mean that the device will not recover."""
_CHECK_INTERVAL_S = 10.0
"""Of the books: it takes some passes over all pages, and a request may come meanwhile."""


@dataclasses.dataclass(slots=True)
class _Generation:
    """A request in flight: what the scheduler moves, and what turns its tokens into output."""

    sequence: Sequence
    processor: OutputProcessor
    degraded_max_tokens: int | None


class Engine:
    """Serves requests on one runner.

    ``submit`` takes a request if the bounds of the configuration allow it, ``add`` in any case.

    ``make_request``, ``stats`` and ``measurements`` may be called from any thread, all else from one.

    Args:
        runner: Runs the steps; warmed up.
        tokenizer: Of the model.
        spec: Of the model; gives the vocabulary, the longest context and EOS ids.
        config: ``model.max_model_len``, ``scheduler`` and ``engine.check_integrity`` are read here.
        model_name: What the model is called.
        model_revision: The commit of its files, where one is known.
        sampling_defaults: The model's own values for sampling fields that a request leaves out.
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
        seed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_model_len = config.model.max_model_len or spec.max_position
        if not 2 <= self.max_model_len <= spec.max_position:
            raise ConfigError(f"model.max_model_len must be in [2, {spec.max_position}] (the model's own limit), got {self.max_model_len}")
        try:
            resolve_params({}, sampling_defaults)
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
        self._idle_until_s = 0.0
        self._checked_s = -math.inf
        self._num_failed_steps = 0  # in a row
        self._refused: Counter[RefusalReason] = Counter()
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
        self._finished: Counter[FinishReason] = Counter()
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
        self._generations: dict[str, _Generation] = {}
        self._queue_timeouts = Expiry()
        self._deadlines = Expiry()
        self._paused: dict[Sequence, float] = {}  # since when; in this order
        self._last_move: tuple[float, int] | None = None  # since when the queue has moved by so many tokens; None without a queue or steps
        self._num_requests = self._finished.total()

    @property
    def runner(self) -> Runner:
        """What runs the steps, for its facts."""
        return self._runner

    @property
    def has_work(self) -> bool:
        """Whether requests are in flight."""
        return bool(self._generations)

    @property
    def idle_s(self) -> float:
        """How long ``step`` has nothing to do unless another method is called, in seconds; infinity for ever. Known after it had nothing to do."""
        return max(0.0, self._idle_until_s - self._clock()) if self._generations else 0.0

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
            self._refused["quota"] += 1
            raise
        except OverloadedError:
            self._refused["overload"] += 1
            raise
        # First of all, for it may fail: nobody has to leave for a request that does not come.
        sequence = self._queue(request, self._admission.limit_max_tokens(max_tokens, load), max_tokens)
        if (timeout_s := self._config.scheduler.queue_timeout_s) is not None:
            self._queue_timeouts.add(sequence, request.arrival_s + timeout_s)
        message = f"the queue is full, and another request has taken this one's place (scheduler.order is {self._config.scheduler.order})"
        return [self._refuse(lower, OverloadedError(message, retry_after_s=self._retry_after_s()), "shed") for lower in shed]

    def add(self, request: Request) -> None:
        """Queues a request that came through ``make_request``, however many there are and however long it may wait.

        Raises:
            InvalidRequestError: Its id is in flight already.
        """
        self._check_id(request)
        max_tokens = self._door.max_tokens(len(request.prompt_token_ids), request.params)
        self._queue(request, max_tokens, max_tokens)

    def pause(self, request_id: str) -> None:
        """Stops a request until ``resume``: nobody reads its outputs. What it holds is free for others. Does nothing if it is not in flight.

        After ``engine.reader_timeout_s`` it ends.
        """
        self._idle_until_s = 0.0
        generation = self._generations.get(request_id)
        if generation is not None and generation.sequence not in self._paused:
            self._paused[generation.sequence] = self._clock()
            self._meter.pause(generation.sequence)
            self._scheduler.pause(generation.sequence)

    def resume(self, request_id: str) -> None:
        """Lets a paused request go on. Does nothing to others."""
        self._idle_until_s = 0.0
        if (generation := self._generations.get(request_id)) is not None:
            self._paused.pop(generation.sequence, None)
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
        if (deadline_ms := request.options.deadline_ms) is not None:
            self._deadlines.add(sequence, request.arrival_s + deadline_ms / 1000)
        self._idle_until_s = 0.0
        self._num_requests += 1
        self._num_prompt_tokens += len(prompt)
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
        """Runs one step and returns what it added, at most one output a request, and the ends of requests whose time was up. Does nothing without work.

        What goes wrong while one request's output is made ends that request; what goes wrong on the device ends the requests of that step. Both end
        with reason "error", and the engine goes on.

        Raises:
            EngineDeadError: The runner cannot go on, or steps fail one after the other.
        """
        start_s = self._clock()
        ended = self._expire(start_s)
        scheduler = self._scheduler
        schedule = self._schedule(start_s)
        if not schedule.sequences:
            self._idle_until_s = min(scheduler.wake_at_s, self._queue_timeouts.next_s, self._deadlines.next_s, self._next_reader_timeout_s)
            assert not scheduler.has_work or scheduler.wake_at_s < math.inf, "requests in flight, yet nothing to run"
            return ended
        self._num_steps += 1
        try:
            pending = self._runner.dispatch(schedule)
            dispatched_s = self._clock()
            token_ids = pending.fetch()
            fetched_s = self._clock()
        except EngineDeadError:
            raise
        except Exception as error:
            outputs = self._fail_step(schedule, error)
        else:
            self._num_failed_steps = 0
            grown = scheduler.update(schedule, token_ids)
            self._meter.tokens(grown, fetched_s)
            outputs = [self._process(sequence) for sequence in grown]
            self._meter.step(schedule, pending, total_s=self._clock() - start_s, wait_s=fetched_s - dispatched_s)
        return ended + outputs if ended else outputs

    def on_idle(self) -> None:
        """For when nothing is in flight and all outputs are delivered: checks the books now and then (``engine.check_integrity``).

        If they do not add up, that is logged, and they are opened anew: no request needs them now, and the requests to come must not suffer.
        """
        assert not self._generations
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
        scheduler = self._scheduler
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + scheduler.num_swapped + scheduler.num_paused,
            num_swapped=scheduler.num_swapped,
            num_paused=scheduler.num_paused,
            num_queued_tokens=scheduler.num_queued_tokens,
            num_pages=scheduler.num_pages,
            num_free_pages=scheduler.num_free_pages,
            max_num_seqs=self._config.scheduler.max_num_seqs * self._runner.num_ranks,
            num_requests=self._num_requests,
            num_preemptions=scheduler.num_preemptions,
            num_swap_outs=scheduler.num_swap_outs,
            num_cached_pages=scheduler.num_cached_pages,
            num_evicted_pages=scheduler.num_evicted_pages,
            num_page_copies=scheduler.num_page_copies,
            prefix_hit_tokens=scheduler.num_hit_tokens,
            prefix_miss_tokens=scheduler.num_miss_tokens,
            page_bytes=self._runner.page_bytes,
            num_idle_pages=scheduler.num_idle_pages,
            num_programs=self._runner.num_programs,
            num_late_compiles=self._runner.num_late_compiles,
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=self._num_generated_tokens,
            finished={reason: self._finished[reason] for reason in get_args(FinishReason)},
            refused={reason: self._refused[reason] for reason in get_args(RefusalReason)},
        )

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
        assert self._num_requests == len(self._generations) + self._finished.total()

    def _namespace(self, options: RequestOptions) -> bytes:
        """All that changes the keys and values of the same tokens, and who may share them."""
        model, cache = self._config.model, self._config.cache
        tenant = options.tenant if cache.isolate_tenants else ""
        salt = "" if options.cache_salt is None else f"salt {options.cache_salt}"
        return make_namespace(model.source, model.revision or "", model.dtype, cache.dtype, tenant, salt)

    def _process(self, sequence: Sequence) -> RequestOutput:
        """Makes the output for a sequence that has one more token, and ends it if that was the last."""
        self._num_generated_tokens += 1
        token_id = sequence.token_ids[-1]
        try:
            delta = self._generations[sequence.request.request_id].processor.push(token_id)
        except Exception as error:  # whatever it is, it is this request's alone
            return self._emit_error(sequence, error)
        return self._emit(sequence, (token_id,), delta)

    def _fail_step(self, schedule: Schedule, error: Exception) -> list[RequestOutput]:
        """Ends the requests of a failed step. The pool's content may be lost with it, so all others are computed anew."""
        logger.error("a step of %d sequences failed", len(schedule.sequences), exc_info=error)
        self._num_failed_steps += 1
        if self._num_failed_steps == _MOST_FAILED_STEPS:
            raise EngineDeadError(f"{_MOST_FAILED_STEPS} steps in a row have failed, the last with {type(error).__name__}: {error}") from error
        outputs = [self._emit_error(scheduled.sequence, error, logged=True) for scheduled in schedule.sequences]
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

    def _expire(self, now_s: float) -> list[RequestOutput]:
        """Ends the requests whose time is up."""
        outputs: list[RequestOutput] = []
        for sequence in self._deadlines.take_due(now_s):
            retry_after_s = self._retry_after_s() if sequence.num_cached_tokens is None else None
            message = f"the request was not {'begun' if retry_after_s else 'finished'} within its deadline_ms of {sequence.request.options.deadline_ms}"
            outputs.append(self._refuse(sequence, DeadlineExceededError(message, retry_after_s=retry_after_s), "deadline"))
        for sequence in self._queue_timeouts.take_due(now_s):
            if sequence.num_cached_tokens is None:
                message = f"the request has waited for {now_s - sequence.request.arrival_s:.1f} s and has not begun (scheduler.queue_timeout_s)"
                outputs.append(self._refuse(sequence, OverloadedError(message, retry_after_s=self._retry_after_s()), "queue_timeout"))
        while self._next_reader_timeout_s <= now_s:
            sequence, since_s = next(iter(self._paused.items()))
            message = f"the client has not read its answer for {now_s - since_s:.1f} s, and has more waiting than is kept for it (engine.reader_timeout_s)"
            outputs.append(self._refuse(sequence, ReaderTimeoutError(message), "reader_timeout"))
        return outputs

    @property
    def _next_reader_timeout_s(self) -> float:
        """When the request that has been paused for longest ends; infinity for never."""
        timeout_s = self._config.engine.reader_timeout_s
        return next(iter(self._paused.values())) + timeout_s if self._paused and timeout_s is not None else math.inf

    def _retry_after_s(self) -> float:
        return self._admission.retry_after_s(self._scheduler.num_queued_tokens)

    def _refuse(self, sequence: Sequence, error: JaxserveError, reason: RefusalReason) -> RequestOutput:
        self._refused[reason] += 1
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
            self._paused.pop(sequence, None)
            if not self._generations:
                self._last_move = None
            self._finished[delta.finish_reason] += 1
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

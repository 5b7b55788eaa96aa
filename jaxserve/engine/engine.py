"""The synchronous engine: the door, one step after another, and what comes out. One thread; ``async_engine`` puts it into one of its own."""

from __future__ import annotations

import dataclasses
import logging
import operator
import random
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args

from jaxserve.config import Config
from jaxserve.dims import ceil_div
from jaxserve.engine.output import Delta, OutputProcessor
from jaxserve.engine.params import resolve_params
from jaxserve.engine.prefix_cache.choice import choose_prefix_cache
from jaxserve.engine.prefix_cache.interface import make_namespace
from jaxserve.engine.schedule import Runner, Schedule
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.sequence import Sequence
from jaxserve.engine.stats import EngineStats
from jaxserve.errors import ConfigError, ContextLengthError, EngineDeadError, InvalidRequestError, ModelError
from jaxserve.models.spec import ModelSpec
from jaxserve.request import FinishReason, Request, RequestOptions, RequestOutput, SamplingParams, Usage

if TYPE_CHECKING:
    from jaxserve.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class _Generation:
    """A request in flight: what the scheduler moves, and what turns its tokens into output."""

    sequence: Sequence
    processor: OutputProcessor


class Engine:
    """Serves requests on one runner.

    ``make_request`` and ``stats`` may be called from any thread, all else from one.

    Args:
        runner: Runs the steps; warmed up.
        tokenizer: Of the model.
        spec: Of the model; gives the vocabulary, the longest context and EOS ids.
        config: ``model.max_model_len``, ``scheduler`` and ``engine.check_integrity`` are read here.
        model_name: What the model is called.
        sampling_defaults: The model's own values for sampling fields that a request leaves out.
        seed: Of the generator that gives a seed to each request without one; ``None`` for a fresh one.
        clock: Gives the time in seconds, as ``Request.arrival_s`` has it.

    Attributes:
        max_model_len: Most tokens of prompt and output together.

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
        assert runner.max_num_seqs >= config.scheduler.max_num_seqs
        self.tokenizer = tokenizer
        self.spec = spec
        self.model_name = model_name
        self.sampling_defaults = sampling_defaults
        self._runner = runner
        self._config = config
        self._scheduler = Scheduler(
            runner.num_pages,
            runner.page_size,
            config.scheduler,
            num_ranks=runner.num_ranks,
            make_cache=choose_prefix_cache(config.cache.prefix),
            can_copy_pages=runner.can_copy_pages,
            num_host_pages=runner.num_host_pages,
            costs=runner.costs,
            session_ttl_s=config.cache.session_ttl_s,
        )
        self._eos_token_ids = frozenset(spec.eos_token_ids) | frozenset(tokenizer.eos_token_ids)
        self._clock = clock
        self._seeds = random.Random(seed)  # noqa: S311  (seeds of samples, no secrets)
        self._generations: dict[str, _Generation] = {}
        self._num_steps = 0
        self._num_requests = 0
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
        self._finished: Counter[FinishReason] = Counter()

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has something to do."""
        return bool(self._generations)

    def make_request(
        self, prompt_token_ids: Iterable[int], params: SamplingParams, request_id: str | None = None, options: RequestOptions | None = None
    ) -> Request:
        """The door: checks everything about a request that can be known before it runs.

        Args:
            prompt_token_ids: The prompt.
            params: How to continue it.
            request_id: Unique among the requests in flight; ``None`` makes one.
            options: How to treat it; ``None`` for nothing special.

        Raises:
            InvalidRequestError: Empty prompt, or ids, also to stop at, that are no integers in ``[0, V)``.
            ContextLengthError: More tokens than the model's context or the page pool can hold.
        """
        try:
            token_ids = [operator.index(token_id) for token_id in prompt_token_ids]
        except TypeError as error:
            raise InvalidRequestError(f"the prompt's token ids must be integers: {error}", param="prompt") from error
        if not token_ids:
            raise InvalidRequestError("the prompt is empty; at least one token is needed", param="prompt")
        self._check_vocabulary(token_ids, "prompt")
        self._check_vocabulary(params.stop_token_ids, "stop_token_ids")
        self._resolve_max_tokens(len(token_ids), params)
        return Request(request_id=request_id or uuid.uuid4().hex, prompt_token_ids=token_ids, params=params, options=options or RequestOptions())

    def add(self, request: Request) -> None:
        """Queues a request that came through ``make_request``.

        Raises:
            InvalidRequestError: Its id is in flight already.
        """
        if request.request_id in self._generations:
            raise InvalidRequestError(f"request id {request.request_id!r} is in flight already", param="request_id")
        prompt, params = request.prompt_token_ids, request.params
        max_tokens = self._resolve_max_tokens(len(prompt), params)
        detokenizer = self.tokenizer.detokenizer(prompt, skip_special_tokens=params.skip_special_tokens)
        processor = OutputProcessor(params, detokenizer, self._eos_token_ids, max_tokens)
        seed = self._seeds.getrandbits(32) if params.seed is None else fold_seed(params.seed)
        sequence = Sequence.of(request, seed=seed, max_tokens=max_tokens, namespace=self._namespace(request.options))
        self._scheduler.add(sequence)
        self._generations[request.request_id] = _Generation(sequence, processor)
        self._num_requests += 1
        self._num_prompt_tokens += len(prompt)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request, whatever its state; its pages are free at once.

        Returns:
            Its last output, with reason "abort" and all text held back; ``None`` if it is not in flight (any more).
        """
        generation = self._generations.get(request_id)
        if generation is None:
            return None
        try:
            output = self._emit(generation.sequence, (), generation.processor.finish("abort"))
        except Exception as error:  # whatever it is, it is this request's alone
            output = self._emit_error(generation.sequence, error)
        self._check_if_idle()
        return output

    def step(self) -> list[RequestOutput]:
        """Runs one step and returns what it added, at most one output a request. Does nothing without work.

        What goes wrong while one request's output is made ends that request; what goes wrong on the device ends the requests of that step. Both end
        with reason "error", and the engine goes on.

        Raises:
            EngineDeadError: The runner cannot go on.
        """
        schedule = self._scheduler.schedule(self._clock())
        if not schedule.sequences:
            assert not self._generations, "requests in flight, yet nothing to run"
            return []
        self._num_steps += 1
        try:
            token_ids = self._runner.dispatch(schedule).fetch()
        except EngineDeadError:
            raise
        except Exception as error:
            outputs = self._fail_step(schedule, error)
        else:
            outputs = [self._process(sequence) for sequence in self._scheduler.update(schedule, token_ids)]
        self._check_if_idle()
        return outputs

    def reset_prefix_cache(self) -> None:
        """Forgets all keys and values: for when the weights have changed. Running requests are computed anew."""
        self._scheduler.forget_pools()

    def stats(self) -> EngineStats:
        """A snapshot; taken from another thread its numbers may be a step apart."""
        scheduler = self._scheduler
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_pages=scheduler.num_pages,
            num_free_pages=scheduler.num_free_pages,
            max_num_seqs=self._config.scheduler.max_num_seqs * self._runner.num_ranks,
            num_requests=self._num_requests,
            num_preemptions=scheduler.num_preemptions,
            num_cached_pages=scheduler.num_cached_pages,
            num_evicted_pages=scheduler.num_evicted_pages,
            num_page_copies=scheduler.num_page_copies,
            prefix_hit_tokens=scheduler.num_hit_tokens,
            prefix_miss_tokens=scheduler.num_miss_tokens,
            page_bytes=self._runner.page_bytes,
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=self._num_generated_tokens,
            finished={reason: self._finished[reason] for reason in get_args(FinishReason)},
        )

    def check_integrity(self) -> None:
        """Recomputes the books of pages, slots and requests.

        Raises:
            AssertionError: They do not add up.
        """
        self._scheduler.check_integrity()
        assert len(self._generations) == self._scheduler.num_running + self._scheduler.num_waiting
        assert self._num_requests == len(self._generations) + self._finished.total()

    def _namespace(self, options: RequestOptions) -> bytes:
        """All that changes the keys and values of the same tokens, and who may share them."""
        model, cache = self._config.model, self._config.cache
        tenant = options.tenant if cache.isolate_tenants else ""
        salt = "" if options.cache_salt is None else f"salt {options.cache_salt}"
        return make_namespace(model.source, model.revision or "", model.dtype, cache.dtype, tenant, salt)

    def _check_vocabulary(self, token_ids: SequenceOf[int], param: str) -> None:
        vocab_size = self.spec.vocab_size
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
            raise InvalidRequestError(f"token id {wrong} in {param} is out of range; the vocabulary is [0, {vocab_size})", param=param)

    def _resolve_max_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Most tokens to generate: what was asked for, which must fit, or all that fit.

        Raises:
            ContextLengthError: They do not fit.
        """
        max_len = self.max_model_len
        if num_prompt_tokens >= max_len:
            raise ContextLengthError(
                f"This model's maximum context length is {max_len} tokens. However, your prompt has {num_prompt_tokens} tokens; "
                f"at most {max_len - 1} are allowed, to leave room for one more. Please reduce the length of the prompt.",
                param="prompt",
            )
        num_tokens = num_prompt_tokens + (params.max_tokens or 1)
        if num_tokens > max_len:
            raise ContextLengthError(
                f"This model's maximum context length is {max_len} tokens. However, you requested {num_tokens} tokens "
                f"({num_prompt_tokens} in the prompt, {params.max_tokens} for the completion). Please reduce the length of the prompt or max_tokens.",
                param="max_tokens",
            )
        pool, page_size = self._runner.num_pages, self._runner.page_size
        if num_tokens > pool * page_size:
            raise ContextLengthError(
                f"This server's KV cache can hold at most {pool * page_size} tokens ({pool} pages of {page_size}). However, you requested {num_tokens} "
                f"tokens ({num_prompt_tokens} in the prompt, {params.max_tokens or 'at least 1'} for the completion), which need "
                f"{ceil_div(num_tokens, page_size)} pages. Please reduce the length of the prompt or max_tokens, or serve with a larger cache.num_pages.",
                param="prompt" if params.max_tokens is None else "max_tokens",
            )
        return params.max_tokens or min(max_len, pool * page_size) - num_prompt_tokens

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
        outputs = [self._emit_error(scheduled.sequence, error, logged=True) for scheduled in schedule.sequences]
        self._scheduler.forget_pools()
        return outputs

    def _emit_error(self, sequence: Sequence, error: Exception, *, logged: bool = False) -> RequestOutput:
        if not logged:
            logger.error("request %s failed", sequence.request.request_id, exc_info=error)
        return self._emit(sequence, (), Delta("", "error"), f"{type(error).__name__}: {error}")

    def _emit(self, sequence: Sequence, token_ids: tuple[int, ...], delta: Delta, error: str | None = None) -> RequestOutput:
        request_id = sequence.request.request_id
        if delta.finish_reason is not None:
            self._scheduler.finish(sequence, delta.finish_reason)
            del self._generations[request_id]
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
        )

    def _check_if_idle(self) -> None:
        if not self._generations and self._config.engine.check_integrity:
            self.check_integrity()


def fold_seed(seed: int) -> int:
    """Maps a seed in ``[-2**63, 2**63)`` to 32 bits, so that all 64 bits count (the finaliser of splitmix64)."""
    mask = 2**64 - 1
    z = (seed + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 32

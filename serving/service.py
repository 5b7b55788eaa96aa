"""What both APIs do alike between a parsed request and the engine's outputs: readiness, model name, sampling parameters, tokenisation, running, aborting."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import re
import reprlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from jaxserve import __version__
from jaxserve.config import Config
from jaxserve.engine.requests.sampling_params import resolve_sampling
from jaxserve.errors import ContextLengthError, EngineDeadError, EngineNotReadyError, InvalidRequestError, UnknownModelError, from_data
from jaxserve.request import Request, RequestOptions, RequestOutput, SamplingParams
from jaxserve.serving.auth import require_key
from jaxserve.serving.contract import ServedEngine
from jaxserve.serving.messages import Prompt

LONG_TEXT_CHARS = 4096
"""Longer texts are tokenised in a thread: the event loop serves every stream, and a megabyte takes a second."""

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-.{1,256})?")

_RESERVED_VARIABLES = frozenset({"self", "messages", "add_generation_prompt"})

SAMPLING_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams))
OPTION_FIELDS = tuple(field.name for field in dataclasses.fields(RequestOptions) if field.name not in ("tenant", "traceparent", "detokenize"))
"""What a client may say about the treatment of its request."""

T = TypeVar("T")


class InferenceService:
    """The engine as the front ends see it. Holds no state of requests.

    Args:
        engine: May still be starting; every method that needs it ready says so by ``EngineNotReadyError``.
        config: The resolved configuration.
        started_s: When the server was started, in seconds of the epoch; ``None`` for now.

    Attributes:
        tenants: Of the configuration.
    """

    def __init__(self, engine: ServedEngine, config: Config, started_s: int | None = None) -> None:
        self.engine = engine
        self.config = config
        self.version = __version__
        self.started_s = int(time.time()) if started_s is None else started_s
        self.tenants = config.read_tenants()

    @property
    def model_name(self) -> str:
        return self.config.server.served_model_name or self.engine.model_name

    @property
    def fingerprint(self) -> str:
        """Changes when the same request may get another answer: model, arithmetic or version."""
        model = self.config.model
        parts = (self.version, self.model_name, model.source, model.revision, model.dtype)
        return "fp_" + hashlib.sha256(repr(parts).encode()).hexdigest()[:12]

    def require_ready(self) -> None:
        """Raises:
        EngineNotReadyError: Starting or draining.
        EngineDeadError: Dead.
        """
        state = self.engine.state
        if state == "dead":
            raise EngineDeadError("the engine has stopped after an internal error; restart the server")
        if state != "ready":
            raise EngineNotReadyError(f"the server is {state} and takes no requests now; /ready tells when it does")

    def require_model(self, name: str | None) -> None:
        """Accepts the served model's name, or none.

        Raises:
            UnknownModelError: Any other name.
        """
        if name is not None and name != self.model_name:
            raise UnknownModelError(f"the model {reprlib.repr(name)} does not exist; this server serves {self.model_name!r}", param="model")

    def sampling_params(self, given: Mapping[str, Any]) -> SamplingParams:
        """Validated parameters; what ``given`` omits takes the model's defaults.

        Args:
            given: Values by name of ``SAMPLING_FIELDS``.

        Raises:
            InvalidRequestError: A value out of its range.
        """
        return resolve_sampling(given, self.engine.sampling_defaults)

    def tenant_of(self, authorization: bytes) -> str:
        """Whose key an ``Authorization: Bearer KEY`` is; see ``require_key``."""
        return require_key(authorization, self.tenants.by_key)

    def request_options(self, given: Mapping[str, Any], tenant: str, traceparent: str | None) -> RequestOptions:
        """How a request is to be treated.

        Args:
            given: Values by name of ``OPTION_FIELDS``.
            tenant: Whose it is.
            traceparent: The header of the same name; one that is not well-formed is left out, as W3C Trace Context wants it.

        Raises:
            InvalidRequestError: A value out of its range.
        """
        if traceparent is not None and not _TRACEPARENT.fullmatch(traceparent):
            traceparent = None
        return RequestOptions(**given, tenant=tenant, traceparent=traceparent)

    async def encode(self, prompts: Sequence[Prompt], *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of prompts; those that are ids already stay as they are. Long ones do not hold up the event loop."""

        def encode_all() -> list[list[int]]:
            encode = self.engine.tokenizer.encode
            return [prompt if isinstance(prompt, list) else encode(prompt, add_special_tokens=add_special_tokens) for prompt in prompts]

        return await _off_loop_if_long(sum(len(prompt) for prompt in prompts if isinstance(prompt, str)), encode_all)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        add_special_tokens: bool = False,
        template_vars: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a rendered conversation.

        Args:
            messages: From ``parse_messages``.
            add_generation_prompt: End with the opening of an assistant's turn.
            add_special_tokens: Let the tokenizer add its own on top of the template's.
            template_vars: Further variables of the template.

        Raises:
            InvalidRequestError: No template, or it failed; the message is the template's.
        """
        variables = dict(template_vars or {})
        for name in _RESERVED_VARIABLES & variables.keys():
            raise InvalidRequestError(f"chat_template_kwargs must not hold {name!r}: the request itself decides it", param="chat_template_kwargs")

        def render_and_encode() -> list[int]:
            tokenizer = self.engine.tokenizer
            if not add_special_tokens:
                return tokenizer.encode_chat(messages, add_generation_prompt=add_generation_prompt, **variables)
            text = tokenizer.render_chat(messages, add_generation_prompt=add_generation_prompt, **variables)
            return tokenizer.encode(text, add_special_tokens=True)

        return await _off_loop_if_long(sum(len(message["content"]) for message in messages), render_and_encode)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included.

        Raises:
            InvalidRequestError: An id outside the vocabulary.
        """
        vocab_size = self.engine.tokenizer.vocab_size
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequestError(f"token id {token_id} is outside the vocabulary; ids are in [0, {vocab_size})", param="tokens")
        return await _off_loop_if_long(len(token_ids), lambda: self.engine.tokenizer.decode(token_ids, skip_special_tokens=False))

    def make_request(
        self,
        token_ids: list[int],
        sampling_params: SamplingParams,
        request_id: str,
        options: RequestOptions,
        *,
        truncate_prompt_tokens: int | None = None,
        default_max_tokens: int | None = None,
    ) -> Request:
        """A request that passed every check.

        Args:
            token_ids: The prompt.
            sampling_params: From ``sampling_params``.
            request_id: Unique.
            options: From ``request_options``.
            truncate_prompt_tokens: Keep only that many tokens at the end; -1 keeps as many as leave room for ``max_tokens``.
            default_max_tokens: Limit where ``sampling_params`` has none, as far as the context has room: nobody asked for it, so it is no reason to refuse.

        Raises:
            InvalidRequestError: Empty prompt, ids out of range.
            ContextLengthError: Too long.
        """
        if truncate_prompt_tokens is not None:
            token_ids = self._truncated(token_ids, truncate_prompt_tokens, sampling_params.max_tokens or default_max_tokens or 1)
        room = self.engine.max_model_len - len(token_ids)
        if sampling_params.max_tokens is None and default_max_tokens is not None and room > 0:
            sampling_params = dataclasses.replace(sampling_params, max_tokens=min(default_max_tokens, room))
        return self.engine.make_request(token_ids, sampling_params, request_id, options)

    def _truncated(self, token_ids: list[int], limit: int, num_new_tokens: int) -> list[int]:
        max_model_len = self.engine.max_model_len
        if limit > max_model_len:
            raise ContextLengthError(
                f"truncate_prompt_tokens is {limit}, more than the model's maximum context length of {max_model_len} tokens", param="truncate_prompt_tokens"
            )
        if limit != -1 and limit < 1:
            raise InvalidRequestError(f"truncate_prompt_tokens must be -1 or in [1, {max_model_len}], got {limit}", param="truncate_prompt_tokens")
        return token_ids[-(limit if limit != -1 else max(1, max_model_len - num_new_tokens)) :]

    def check_together(self, requests: Sequence[Request]) -> None:
        """Refuses requests of one call that could not run side by side even if they were alone: one by one they would be told to try again, for ever.

        Args:
            requests: Of one tenant, each with a ``max_tokens``.

        Raises:
            InvalidRequestError: They are more than a limit; the message has the numbers.
        """
        num_requests = len(requests)
        if num_requests == 1:
            return
        limits, scheduler, num_slots = self.tenants.of(requests[0].options.tenant), self.config.scheduler, self.engine.max_num_seqs
        num_tokens = sum(len(request.prompt_token_ids) + (request.sampling_params.max_tokens or 0) for request in requests)
        num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests) if num_requests > num_slots else 0
        for wanted, allowed, what, setting in (
            (num_requests, limits.max_requests, "requests in flight", "tenants.max_requests"),
            (num_tokens, limits.tokens_per_minute, "tokens of prompts and max_tokens", "tenants.tokens_per_minute"),
            (num_requests - num_slots, scheduler.max_queued_requests, f"requests beyond {num_slots} that run", "scheduler.max_queued_requests"),
            (num_prompt_tokens, scheduler.max_queued_tokens, f"prompt tokens of more requests than {num_slots} that run", "scheduler.max_queued_tokens"),
        ):
            if allowed is not None and wanted > allowed:
                raise InvalidRequestError(
                    f"prompt holds {num_requests} prompts, which run as a request each: they are {wanted} {what}, and at most {allowed} are allowed "
                    f"({setting}). Send them in several calls.",
                    param="prompt",
                )

    async def run(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """The request's outputs up to the one with a finish reason. Leaving early, by any way, aborts it.

        Raises:
            InvalidRequestError: The request's id is in flight already.
            QuotaExceededError: Its tenant may not have more now.
            EngineError: The engine could not take it, or not finish it.
        """
        # Closed, not aborted by id: where the id was refused, it is another request's.
        async with contextlib.aclosing(self.engine.generate(request)) as outputs:
            async for output in outputs:
                if output.error is not None:
                    raise from_data(output.error)
                yield output

    async def run_all(self, requests: Sequence[Request]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """The outputs of several requests that run side by side, each with the index of its request. One failure ends them all."""
        if len(requests) == 1:
            async with contextlib.aclosing(self.run(requests[0])) as outputs:
                async for output in outputs:
                    yield 0, output
            return
        # Bounded: a slow client holds the pumps up, and outputs that wait for them are joined by the engine.
        queue: asyncio.Queue[tuple[int, RequestOutput | Exception]] = asyncio.Queue(maxsize=1)
        tasks = [asyncio.create_task(self._pump(index, request, queue)) for index, request in enumerate(requests)]
        try:
            num_running = len(tasks)
            while num_running:
                index, item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                num_running -= item.finish_reason is not None
                yield index, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, index: int, request: Request, queue: asyncio.Queue[tuple[int, RequestOutput | Exception]]) -> None:
        try:
            async with contextlib.aclosing(self.run(request)) as outputs:
                async for output in outputs:
                    await queue.put((index, output))
        except Exception as error:  # handed over: the consumer raises it
            await queue.put((index, error))


@contextlib.contextmanager
def client_names(names: Mapping[str, str]) -> Iterator[None]:
    """Renames ``param`` of a refusal from the engine's word for a field to the one that the client used."""
    try:
        yield
    except InvalidRequestError as error:
        error.param = names.get(error.param or "", error.param)
        raise


async def _off_loop_if_long(length: int, work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work) if length > LONG_TEXT_CHARS else work()

"""``/v1/completions`` and ``/v1/chat/completions``: from a checked body to engine requests, and from outputs to OpenAI's answers and chunks."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from jaxserve.errors import InvalidRequestError
from jaxserve.request import Request, RequestOptions, RequestOutput, Usage
from jaxserve.serving.http_api.front_door import TENANT_KEY
from jaxserve.serving.http_api.responses import CLIENT_GONE_STATUS, DONE_EVENT, ClientGoneError, EventStream, JsonResponse, json_bytes, unless_gone
from jaxserve.serving.http_api.schemas import ChatBody, CompletionBody
from jaxserve.serving.service import InferenceService, client_names

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of ``max_tokens`` for completions. Chat has none: up to the context length."""

Prepare = Callable[[str], Awaitable[list[Request]]]
"""From the answer's id to the requests that make it."""


class AnswerForm(Protocol):
    """How one endpoint words its answers."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def whole(self, text: str) -> dict[str, Any]:
        """Content of a choice of a whole answer."""
        ...

    def opening(self) -> dict[str, Any] | None:
        """Content of a choice's first chunk, before any text."""
        ...

    def delta(self, text: str) -> dict[str, Any]:
        """Content of a chunk of text; empty text for the chunk that carries the finish reason."""
        ...


class CompletionForm:
    """``/v1/completions``."""

    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def whole(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def opening(self) -> dict[str, Any] | None:
        return None

    def delta(self, text: str) -> dict[str, Any]:
        return {"text": text}


class ChatForm:
    """``/v1/chat/completions``."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def opening(self) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}


async def complete(service: InferenceService, http_request: HttpRequest, body: CompletionBody) -> Response:
    """Answers ``/v1/completions``; several prompts run side by side and answer as choices in their order."""

    async def prepare(answer_id: str) -> list[Request]:
        sampling_params = service.sampling_params(body.sampling_given())
        options = _options(service, http_request, body)
        token_ids = await service.encode(body.prompt, add_special_tokens=body.add_special_tokens)
        request_ids = [answer_id] if len(token_ids) == 1 else [f"{answer_id}-{index}" for index in range(len(token_ids))]
        limits = {"truncate_prompt_tokens": body.truncate_prompt_tokens, "default_max_tokens": DEFAULT_COMPLETION_TOKENS}
        requests = [service.make_request(ids, sampling_params, request_id, options, **limits) for ids, request_id in zip(token_ids, request_ids, strict=True)]
        service.check_together(requests)
        return requests

    return await _answer(service, http_request, body, CompletionForm(), prepare)


async def chat(service: InferenceService, http_request: HttpRequest, body: ChatBody) -> Response:
    """Answers ``/v1/chat/completions``."""

    async def prepare(answer_id: str) -> list[Request]:
        given = body.sampling_given()
        names = {"prompt": "messages"}
        if body.max_completion_tokens is not None:
            if body.max_tokens not in (None, body.max_completion_tokens):
                raise InvalidRequestError(
                    f"max_tokens is {body.max_tokens} and max_completion_tokens is {body.max_completion_tokens}; they mean the same, send one",
                    param="max_completion_tokens",
                )
            given["max_tokens"] = body.max_completion_tokens
            names["max_tokens"] = "max_completion_tokens"
        with client_names(names):
            sampling_params = service.sampling_params(given)
            options = _options(service, http_request, body)
            token_ids = await service.encode_chat(
                body.messages,
                add_generation_prompt=body.add_generation_prompt,
                add_special_tokens=body.add_special_tokens,
                template_vars=body.chat_template_kwargs,
            )
            return [service.make_request(token_ids, sampling_params, answer_id, options, truncate_prompt_tokens=body.truncate_prompt_tokens)]

    return await _answer(service, http_request, body, ChatForm(), prepare)


def _options(service: InferenceService, http_request: HttpRequest, body: CompletionBody | ChatBody) -> RequestOptions:
    return service.request_options(body.options_given(), http_request.scope.get(TENANT_KEY, ""), http_request.headers.get("traceparent"))


async def _answer(service: InferenceService, http_request: HttpRequest, body: CompletionBody | ChatBody, form: AnswerForm, prepare: Prepare) -> Response:
    answer_id = form.id_prefix + uuid.uuid4().hex
    requests = await prepare(answer_id)
    head = {
        "id": answer_id,
        "object": form.chunk_object if body.stream else form.whole_object,
        "created": int(time.time()),
        "model": service.model_name,
        "system_fingerprint": service.fingerprint,
    }
    if body.stream:
        return EventStream(_chunks(service, requests, form, head, include_usage=body.include_usage))
    try:
        return JsonResponse(await unless_gone(http_request.receive, _whole(service, requests, form, head)))
    except ClientGoneError:
        return Response(status_code=CLIENT_GONE_STATUS)


async def _whole(service: InferenceService, requests: Sequence[Request], form: AnswerForm, head: dict[str, Any]) -> dict[str, Any]:
    texts: list[list[str]] = [[] for _ in requests]
    last: dict[int, RequestOutput] = {}
    async with contextlib.aclosing(service.run_all(requests)) as outputs:
        async for index, output in outputs:
            texts[index].append(output.text)
            last[index] = output
    choices = [_choice(index, form.whole("".join(parts)), last[index]) for index, parts in enumerate(texts)]
    return head | {"choices": choices, "usage": _usage([output.usage for output in last.values()])} | _degraded(last.values())


async def _chunks(
    service: InferenceService, requests: Sequence[Request], form: AnswerForm, head: dict[str, Any], *, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """The events of a stream: an opening, texts and exactly one finish reason per choice, then the usage if asked for, then ``[DONE]``."""
    prefix, suffix = b"data: " + json_bytes(head)[:-1] + b',"choices":[', b"]}\n\n"
    unopened = set(range(len(requests)))
    ended: list[RequestOutput] = []
    async with contextlib.aclosing(service.run_all(requests)) as outputs:
        async for index, output in outputs:
            choices: list[dict[str, Any]] = []
            if index in unopened:
                unopened.remove(index)
                if (opening := form.opening()) is not None:
                    choices.append(_choice(index, opening))
            if output.text:
                choices.append(_choice(index, form.delta(output.text)))
            events = [prefix + json_bytes(choice) + suffix for choice in choices]
            if output.finish_reason is not None:
                ended.append(output)
                events.append(_event(head | {"choices": [_choice(index, form.delta(""), output)]} | _degraded([output])))
            if events:
                yield b"".join(events)
    if include_usage:
        yield _event(head | {"choices": [], "usage": _usage([output.usage for output in ended])})
    yield DONE_EVENT


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json_bytes(data) + b"\n\n"


def _choice(index: int, content: dict[str, Any], last: RequestOutput | None = None) -> dict[str, Any]:
    if last is None:
        return {"index": index, **content, "logprobs": None, "finish_reason": None}
    return {"index": index, **content, "logprobs": None, "finish_reason": last.finish_reason, "stop_reason": last.stop_reason}


def _degraded(ended: Iterable[RequestOutput]) -> dict[str, Any]:
    """A member of an answer, or of the chunk that ends a choice, that says that the server limited it; none if it did not."""
    limits = [output.degraded_max_tokens for output in ended if output.degraded_max_tokens is not None]
    return {"degraded": {"max_tokens": min(limits)}} if limits else {}


def _usage(usages: Sequence[Usage]) -> dict[str, Any]:
    prompt_tokens = sum(usage.prompt_tokens for usage in usages)
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
    }

"""A server that speaks OpenAI's HTTP API, as a system under test."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, cast

from jaxserve.bench.load.http_client import Answer, HttpClient
from jaxserve.bench.load.sse import EventReader
from jaxserve.bench.load.system_under_test import RequestFailedError, Stream
from jaxserve.bench.workload.plan import PlannedRequest
from jaxserve.bench.workload.prompts import PromptMaker

REFUSAL_STATUSES = (429, 503)

PATHS: Mapping[str, str] = MappingProxyType({"completions": "/v1/completions", "chat": "/v1/chat/completions"})


@dataclasses.dataclass(frozen=True)
class OpenAISystem:
    """Sends completions or chats and reads their streams.

    A piece is a chunk with text, reasoning or tool calls. In a completion an empty chunk in mid-stream counts too: it stands for a token without text of its
    own (half a character), and servers that send one send a chunk for every token.

    Args:
        client: Of the server.
        model: The ``model`` field.
        endpoint: Which API.
        prompts: Makes the prompts.
        fields: Further fields of every body.
    """

    client: HttpClient
    model: str
    endpoint: Literal["completions", "chat"]
    prompts: PromptMaker
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    def prepare(self, request: PlannedRequest) -> bytes:
        body: dict[str, Any] = {"model": self.model, "max_tokens": request.output_len, "stream": True, **self.fields}
        if self.endpoint == "chat":
            body["messages"] = self.prompts.messages(request.segments)
        else:
            body["prompt"] = self.prompts.prompt(request.segments)
        # The plan's tenant and priority travel where the server takes such a field: `fields` holds its neutral value then.
        if "user" in body and request.tenant is not None:
            body["user"] = f"tenant-{request.tenant}"
        if "priority" in body and request.priority is not None:
            body["priority"] = request.priority
        return json.dumps(body, separators=(",", ":")).encode()

    async def run(self, prepared: bytes, stream: Stream) -> None:
        reader = _ChunkReader(stream, chat=self.endpoint == "chat")
        answer = await self.client.request("POST", PATHS[self.endpoint], prepared, reader.feed)
        if not 200 <= answer.status < 300:
            raise failure_of(answer)
        if not stream.piece_times_s and stream.finish_reason is None:
            raise RequestFailedError("the answer ended without a token" if reader.events else "the answer is no stream of events")
        if stream.finish_reason is None and not reader.done:
            raise RequestFailedError("the stream ended without a finish reason")


def failure_of(answer: Answer) -> RequestFailedError:
    """An answer that is no success, in a line: OpenAI's error form, others' ``detail``, or the text."""
    try:
        tree: Any = json.loads(answer.body)
    except ValueError:
        tree = None
    if isinstance(tree, dict):
        fields = cast(dict[str, Any], tree)
        message = _error_text(fields.get("error", fields))
    else:
        message = answer.body[:300].decode("utf-8", "replace").strip()
    outcome = "refused" if answer.status in REFUSAL_STATUSES else "error"
    return RequestFailedError(f"status {answer.status}: {message or 'no message'}", outcome=outcome)


def _error_text(error: Any) -> Any:
    if not isinstance(error, dict):
        return error
    fields = cast(dict[str, Any], error)
    return fields.get("message", fields.get("detail", fields))


class _ChunkReader:
    """From the bytes of an event stream to calls of a :class:`Stream`."""

    def __init__(self, stream: Stream, *, chat: bool) -> None:
        self._stream = stream
        self._chat = chat
        self._events = EventReader()
        self.events = 0
        self.done = False

    def feed(self, data: bytes) -> None:
        for event in self._events.feed(data):
            self.events += 1
            if event == b"[DONE]":
                self.done = True
                continue
            try:
                chunk: Any = json.loads(event)
            except (ValueError, RecursionError):
                raise RequestFailedError(f"an event is no JSON: {event[:100]!r}") from None
            try:
                self._take(_object(chunk))
            except _OddValueError:
                raise RequestFailedError(f"a chunk is not in OpenAI's form: {event[:100].decode('utf-8', 'replace')}") from None

    def _take(self, chunk: dict[str, Any]) -> None:
        if error := chunk.get("error"):
            raise RequestFailedError(f"error in mid-stream: {_error_text(error)}")
        if usage := _object(chunk.get("usage") or {}):
            cached = _object(usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            self._stream.usage(_count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens")), _count(cached))
        choices: Any = chunk.get("choices") or []
        if not isinstance(choices, list):
            raise _OddValueError
        for choice in cast(list[Any], choices):
            self._take_choice(_object(choice))

    def _take_choice(self, choice: dict[str, Any]) -> None:
        finish = choice.get("finish_reason")
        if self._chat:
            delta = _object(choice.get("delta") or {})
            text = _text(delta.get("content")) or _text(delta.get("reasoning_content")) or _text(delta.get("reasoning"))
            new = bool(text or delta.get("tool_calls"))
        else:
            text = _text(choice.get("text"))
            new = bool(text) or finish is None
        if new:
            self._stream.piece(text)
        if finish is not None:
            self._stream.finish(_text(finish))


class _OddValueError(Exception):
    """A value of another kind than OpenAI's form has in its place."""


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _OddValueError
    return cast(dict[str, Any], value)


def _text(value: Any) -> str:
    """``null`` is no text."""
    if value is not None and not isinstance(value, str):
        raise _OddValueError
    return value or ""


def _count(value: Any) -> int | None:
    if value is not None and not isinstance(value, int):
        raise _OddValueError
    return value

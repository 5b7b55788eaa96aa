"""JSON and event-stream responses, and the watch over the client's connection that both kinds of answer are made under."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxserve.serving.error_table import report_error

T = TypeVar("T")

CLIENT_GONE_STATUS = 499
"""For the books alone: nobody is there to see it."""

DONE_EVENT = b"data: [DONE]\n\n"


def json_bytes(value: object) -> bytes:
    """Compact JSON in UTF-8."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # lone surrogates, which a client may have sent and a message quotes
        pass
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")


class JsonResponse(Response):
    """A JSON object as the whole answer."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json_bytes(content)


def error_response(error: Exception) -> JsonResponse:
    """An exception in OpenAI's error form, by the error table."""
    report = report_error(error)
    status = report.row.http_status
    headers: dict[str, str] = {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    elif status == 413:
        headers["Connection"] = "close"  # the rest of the body is not read
    if report.retry_after_s is not None:
        headers["Retry-After"] = str(report.retry_after_s)
    return JsonResponse(report.body(), status, headers)


class ClientGoneError(Exception):
    """The client closed its connection before it had its answer."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Runs ``work`` while the client is there.

    Args:
        receive: The connection's channel, the body already read from it: all that can still come is the disconnect.
        work: Cancelled, and waited for, when the client goes away.

    Raises:
        ClientGoneError: The client went away first.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events.

    The status line waits for the first event, so that an error before it is answered with its own status. An error after it becomes one last event
    ``data: {"error": {...}}``, without ``[DONE]`` after it: OpenAI's clients raise it as an error.

    Args:
        events: Yields whole events as bytes, several at once if it has them. Closed at the end, whatever the end.
    """

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        async with contextlib.aclosing(self._events) as events:
            with contextlib.suppress(ClientGoneError):
                await unless_gone(receive, self._send_all(events, send))

    async def _send_all(self, events: AsyncGenerator[bytes, None], send: Send) -> None:
        first = await anext(events)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        last = b""
        try:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as error:
            last = b"data: " + json_bytes(report_error(error).body()) + b"\n\n"
        await send({"type": "http.response.body", "body": last, "more_body": False})

"""A small HTTP/1.1 client for load: asyncio and h11, answers handed on byte for byte in the moment they arrive.

A stream of events costs no task switch here, which is most of what general clients pay for each chunk.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ssl
import urllib.parse
from collections.abc import Callable, Mapping

import h11

from jaxserve import __version__
from jaxserve.bench.load.system_under_test import RequestFailedError

MAX_KEPT_BYTES = 4 * 1024 * 1024
"""Of an answer that is not streamed to its reader."""

MAX_IDLE_S = 2.0
"""A connection unused for longer is not used again: servers close theirs after 5 seconds, and some sooner."""

_CLOSED_EARLY = "the server closed the connection before the answer was complete"


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """Status, headers (names in lower case) and body; the body is empty where a reader took it."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class HttpClient:
    """Connections to one server, kept alive and used again.

    Args:
        url: ``http://host:port`` or ``https://…``, with an optional path that comes before every path requested.
        headers: Sent with every request.
        timeout_s: Of one request, connecting included; ``None`` waits for ever.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None, *, timeout_s: float | None = None) -> None:
        parts = urllib.parse.urlsplit(url)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/")
        self._headers = {"host": parts.netloc.rpartition("@")[2], "user-agent": f"jaxserve-bench/{__version__}", **(headers or {})}
        self._timeout_s = timeout_s
        self._idle: list[tuple[_Connection, float]] = []

    async def request(self, method: str, path: str, body: bytes = b"", on_data: Callable[[bytes], None] | None = None) -> Answer:
        """One request and its answer. Cancelling closes the connection.

        Args:
            method: GET or POST.
            path: With its leading slash.
            body: JSON, may be empty.
            on_data: Called with each part of a successful (2xx) answer's body as it arrives; what it raises ends the request.

        Raises:
            RequestFailedError: No connection, a broken one, an answer that is not HTTP, or none in time.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._request(method, path, body, on_data)
        except TimeoutError:
            raise RequestFailedError(f"no complete answer within {self._timeout_s:g} s", outcome="timed_out") from None

    async def close(self) -> None:
        """Closes the idle connections."""
        while self._idle:
            self._idle.pop()[0].close()
        await asyncio.sleep(0)  # transports close in the loop's next turn

    async def _request(self, method: str, path: str, body: bytes, on_data: Callable[[bytes], None] | None) -> Answer:
        head = h11.Request(
            method=method,
            target=self._prefix + path,
            headers=[*self._headers.items(), ("content-type", "application/json"), ("content-length", str(len(body)))],
        )
        while True:
            connection, reused = await self._connection()
            try:
                answer = await connection.exchange(head, body, on_data)
            except RequestFailedError:
                if reused and not connection.answered:  # closed by the server while it lay idle: that says nothing about this request
                    continue
                raise
            if connection.reusable:
                self._idle.append((connection, asyncio.get_running_loop().time()))
            return answer

    async def _connection(self) -> tuple[_Connection, bool]:
        loop = asyncio.get_running_loop()
        while self._idle:
            connection, since_s = self._idle.pop()
            if connection.reusable and loop.time() - since_s <= MAX_IDLE_S:
                return connection, True
            connection.close()
        try:
            _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        except OSError as error:
            # Several addresses of a name fail with one message for each.
            reason = error.strerror if error.strerror and not error.strerror.startswith("Multiple") else str(error)
            raise RequestFailedError(f"cannot connect to {self._host}:{self._port}: {reason}", unreachable=True) from None
        return connection, False


class _Connection(asyncio.Protocol):
    """One connection, one exchange at a time."""

    def __init__(self) -> None:
        self._h11 = h11.Connection(h11.CLIENT)
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[Answer] | None = None
        self._on_data: Callable[[bytes], None] | None = None
        self._head: h11.Response | None = None
        self._kept = bytearray()

    @property
    def answered(self) -> bool:
        """Whether anything of the current answer has come."""
        return self._head is not None

    @property
    def reusable(self) -> bool:
        return self._h11.our_state is h11.IDLE and self._transport is not None and not self._transport.is_closing()

    async def exchange(self, head: h11.Request, body: bytes, on_data: Callable[[bytes], None] | None) -> Answer:
        assert self._transport is not None and self._done is None
        self._done = asyncio.get_running_loop().create_future()
        self._on_data, self._head, self._kept = on_data, None, bytearray()
        parts = (self._h11.send(head), self._h11.send(h11.Data(data=body)) if body else b"", self._h11.send(h11.EndOfMessage()))
        self._transport.write(b"".join(part for part in parts if part))
        try:
            return await self._done
        except BaseException:
            self._transport.abort()
            raise
        finally:
            self._done = None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._receive(data)

    def eof_received(self) -> None:
        self._receive(b"")

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(RequestFailedError(f"{_CLOSED_EARLY}{f' ({exc})' if exc else ''}"))

    def _receive(self, data: bytes) -> None:
        if self._done is None or self._done.done():
            return  # nobody waits: an idle connection that the server closes, or the rest of a cancelled answer
        try:
            self._h11.receive_data(data)
            while not self._done.done() and (event := self._h11.next_event()) is not h11.NEED_DATA:
                if isinstance(event, h11.ConnectionClosed):
                    self._fail(RequestFailedError(_CLOSED_EARLY))
                else:
                    self._take(event)
        except h11.RemoteProtocolError as error:
            self._fail(RequestFailedError(f"the answer is not HTTP: {error}" if data else _CLOSED_EARLY))
        except Exception as error:
            self._fail(error)

    def _take(self, event: object) -> None:
        if isinstance(event, h11.Data):
            assert self._head is not None
            if self._on_data is not None and 200 <= self._head.status_code < 300:
                self._on_data(bytes(event.data))
            elif len(self._kept) < MAX_KEPT_BYTES:
                self._kept += event.data
        elif isinstance(event, h11.Response):
            self._head = event
        elif isinstance(event, h11.EndOfMessage):
            assert self._head is not None and self._done is not None
            headers = {name.decode("ascii"): value.decode("latin-1") for name, value in self._head.headers}
            if self._h11.our_state is h11.DONE and self._h11.their_state is h11.DONE:
                self._h11.start_next_cycle()
            else:
                self.close()
            self._done.set_result(Answer(self._head.status_code, headers, bytes(self._kept)))

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)

"""The fleet of front-end processes, as the engine's process manages it: it starts, restarts and drains them and connects them to the engine's thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Callable, Iterator, Sequence

import msgspec

from jaxserve.config import Config, to_yaml
from jaxserve.engine.clients.commands import Delivery
from jaxserve.errors import EngineDeadError, EngineError, ErrorData, from_data
from jaxserve.request import FinishReason, Request, RequestOutput
from jaxserve.serving.contract import HostedEngine
from jaxserve.serving.front_ends.channel import Channel
from jaxserve.serving.front_ends.messages import (
    AskPage,
    AskStats,
    Counted,
    Drain,
    Ended,
    FromFrontEnd,
    Listening,
    Page,
    Ready,
    Setup,
    Stats,
    Step,
    ToFrontEnd,
)
from jaxserve.serving.metrics import MetricsPage, Responses
from jaxserve.serving.observers import Observers
from jaxserve.serving.ports import GRPC_PORT, HTTP_PORT, listen_together, reserve
from jaxserve.serving.service import InferenceService

logger = logging.getLogger(__name__)

_PROCESS_MODULE = "jaxserve.serving.front_ends.process"
_MOST_FAILED_STARTS = 3
"""Number of failed starts of a front end in a row after which serving is given up."""
_RESTART_PAUSE_S = 0.5
_LAST_WORDS_S = 10.0
"""Seconds that front ends have to end after the drain, in which their clients can read finished answers."""
_ABORT_S = 10.0
"""Seconds in which requests that are still in flight at the end of the drain are aborted."""


async def serve_in_processes(config: Config, engine: HostedEngine, stop: asyncio.Event, announce: Callable[[InferenceService, int, int | None], None]) -> None:
    """Serves an engine through ``server.processes`` front ends until ``stop`` is set; then drains them and returns.

    Args:
        config: The whole configuration.
        engine: The engine, which is not started yet.
        stop: Event that ends serving when it is set.
        announce: Called once, when requests are accepted, with the service, the HTTP port and the gRPC port.

    Raises:
        ConfigError: A port is in use, the host cannot be listened on, or traces are wanted and cannot be made.
        EngineDeadError: The engine has stopped.
        EngineError: Front ends cannot be started.
        Exception: What made the engine's start fail.
    """
    server = config.server
    with contextlib.ExitStack() as stack:
        observers = stack.enter_context(contextlib.closing(Observers(config, engine)))
        engine.on_end(observers)
        http_sockets = listen_together(server.host, server.port, HTTP_PORT, server.processes)
        stack.enter_context(_closing(http_sockets))
        grpc_port = None
        if server.grpc_port is not None:
            grpc_port = stack.enter_context(reserve(server.host, server.grpc_port, GRPC_PORT)).getsockname()[1]
        fleet = Fleet(config, engine, http_sockets, grpc_port, observers)
        port = http_sockets[0].getsockname()[1]
        engine.start()
        await fleet.run(stop, lambda: announce(fleet.service, port, grpc_port))


@contextlib.contextmanager
def _closing(sockets: Sequence[socket.socket]) -> Iterator[None]:
    try:
        yield
    finally:
        for each in sockets:
            each.close()


class Fleet:
    """The front-end processes of one engine.

    Args:
        config: The whole configuration.
        engine: The engine, which its owner starts.
        http_sockets: The listening sockets, one for each front end. They stay open while a front end is restarted, so that new connections wait for it.
        grpc_port: The reserved gRPC port; ``None`` for no gRPC.
        observers: Called with each request that ends because its front end is gone, and its last output.

    Attributes:
        service: The service of the engine, in this process.
    """

    def __init__(
        self,
        config: Config,
        engine: HostedEngine,
        http_sockets: Sequence[socket.socket],
        grpc_port: int | None,
        observers: Callable[[Request, RequestOutput], None],
    ) -> None:
        self.service = InferenceService(engine, config)
        self._engine = engine
        self._http_sockets = http_sockets
        self._observers = observers
        self._responses = Responses()
        self._page = MetricsPage(engine, self.service, self._responses)
        self._setup = Setup(to_yaml(config, show_secrets=True), _log_level(), self.service.started_s, grpc_port)
        self._drain_timeout_s = config.server.drain_timeout_s
        self._loop = asyncio.get_running_loop()
        self._front_ends: dict[int, _FrontEnd] = {}
        self._ready: Ready | None = None
        self._is_ending = False
        self._engine_end: asyncio.Future[EngineDeadError | None] = self._loop.create_future()

    async def run(self, stop: asyncio.Event, on_ready: Callable[[], None]) -> None:
        """Keeps the front ends running until ``stop`` is set or the engine ends; then waits until they have ended.

        Args:
            stop: Event that, when it is set, drains and ends the front ends.
            on_ready: Called once, when requests are accepted.

        Raises:
            EngineDeadError: The engine has stopped.
            EngineError: Front ends cannot be started.
            Exception: What made the engine's start fail.
        """
        self._engine.thread.attach(lambda _delivery: None, self._on_engine_end)
        keeping = [asyncio.create_task(self._keep(index)) for index in range(len(self._http_sockets))]
        readying = asyncio.create_task(self._become_ready(on_ready))
        stopping = asyncio.create_task(stop.wait())
        limit_s = _LAST_WORDS_S
        try:
            waited: set[asyncio.Future[object]] = {*keeping, readying, stopping, self._engine_end}  # pyright: ignore[reportAssignmentType]
            while not (stop.is_set() or self._engine_end.done()):
                done, waited = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {self._engine_end}:
                    task.result()  # raises what ended it
            if not self._engine_end.done() and self._ready is not None:
                logger.info("draining: running requests have %g s; a second signal ends the process at once", self._drain_timeout_s)
                limit_s += self._drain_timeout_s + _ABORT_S
                await self._engine.drain(0.0)  # it has no requests of this process: this only says so
        finally:
            self._is_ending = True
            readying.cancel()
            stopping.cancel()
            await self._end(keeping, limit_s)
        if self._engine_end.done() and (error := self._engine_end.result()) is not None:
            await self._engine.wait_ready()  # raises what made the start fail, if that was it
            raise error

    async def _end(self, keeping: Sequence[asyncio.Task[None]], limit_s: float) -> None:
        """Lets the front ends drain and end. Those that have not ended after ``limit_s`` seconds are killed."""
        for each in self._http_sockets:
            each.close()  # the front ends' own are left: none stays open that nobody accepts from
        for front_end in list(self._front_ends.values()):
            front_end.send(Drain())
        _, late = await asyncio.wait(keeping, timeout=limit_s)
        for front_end in list(self._front_ends.values()):
            front_end.kill()
        if late:
            logger.warning("%d front ends did not end within %g s and were killed", len(late), limit_s)
        await asyncio.gather(*keeping, return_exceptions=True)

    async def _become_ready(self, on_ready: Callable[[], None]) -> None:
        await self._engine.wait_ready()
        ready = Ready(self._engine.thread.facts(), self._engine.tokenizer.to_data())
        self._ready = ready
        for front_end in list(self._front_ends.values()):
            front_end.send(ready)
        while not all(index in self._front_ends and self._front_ends[index].is_listening for index in range(len(self._http_sockets))):
            await asyncio.sleep(0.05)
        on_ready()

    async def _keep(self, index: int) -> None:
        """Runs a front end, and starts another one when it has ended, until all front ends should end."""
        num_failed = 0
        while not self._is_ending:
            front_end = await self._start(index)
            status = await front_end.process.wait()
            front_end.close()
            del self._front_ends[index]
            if self._is_ending or self._engine_end.done():
                return
            logger.error("front end %d (process %d) has ended with status %d; another takes its place", index, front_end.process.pid, status)
            num_failed = 0 if front_end.is_listening else num_failed + 1
            if num_failed == _MOST_FAILED_STARTS:
                raise EngineError(f"a front end has ended {num_failed} times in a row before it answered, the last time with status {status}")
            await asyncio.sleep(_RESTART_PAUSE_S)

    async def _start(self, index: int) -> _FrontEnd:
        own, other = socket.socketpair()
        http_socket = self._http_sockets[index]
        with other:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", _PROCESS_MODULE, str(other.fileno()), str(http_socket.fileno()), pass_fds=(other.fileno(), http_socket.fileno())
            )
        front_end = self._front_ends[index] = _FrontEnd(own, process, self._engine, self._page, self._responses, self._observers, self._loop)
        logger.debug("front end %d is process %d", index, process.pid)
        front_end.send(self._setup)
        if self._ready is not None:
            front_end.send(self._ready)
        if self._is_ending:
            front_end.send(Drain())
        return front_end

    def _on_engine_end(self, _reason: FinishReason, error: ErrorData | None) -> None:
        def note() -> None:
            if not self._engine_end.done():
                self._engine_end.set_result(None if error is None else EngineDeadError(str(from_data(error))))

        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(note)


class _FrontEnd:
    """One front-end process, as a client of the engine's thread."""

    def __init__(
        self,
        sock: socket.socket,
        process: asyncio.subprocess.Process,
        engine: HostedEngine,
        page: MetricsPage,
        responses: Responses,
        observers: Callable[[Request, RequestOutput], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.process = process
        self.is_listening = False
        self._engine = engine
        self._page = page
        self._responses = responses
        self._observers = observers
        self._loop = loop
        self._decoder = msgspec.msgpack.Decoder(list[FromFrontEnd])
        self._is_attached = True
        self._tasks: set[asyncio.Task[None]] = set()
        self._channel = Channel(sock, self._take, self.close, loop)
        self._client = engine.thread.attach(self._deliver, self._end_all)

    def send(self, message: ToFrontEnd) -> None:
        """Sends a message to the front end."""
        self._channel.send(msgspec.msgpack.encode(message))

    def kill(self) -> None:
        """Kills the process."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    def close(self) -> None:
        """Ends the requests of a front end whose process is gone or whose channel is lost. The process is killed after 10 s. Does nothing the second time."""
        if self._is_attached:
            self._is_attached = False
            self._channel.close()
            self._engine.thread.detach(self._client, self._on_orphan)
            self._loop.call_later(_LAST_WORDS_S, self.kill)

    def _take(self, frame: bytes) -> None:
        for message in self._decoder.decode(frame):
            match message:
                case Listening():
                    self.is_listening = True
                case Counted(api, endpoint, status):
                    self._responses.count(api, endpoint, status)
                case AskStats(question):
                    self.send(Stats(question, self._engine.stats()))
                case AskPage(question, accept):
                    task = self._loop.create_task(self._send_page(question, accept))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                case _:
                    self._engine.thread.send(self._client, message)

    async def _send_page(self, question: int, accept: str) -> None:
        self.send(Page(question, *await self._page.render(accept)))

    # -- In the engine's thread ---------------------------------------------------------------------------------------------------------------

    def _deliver(self, delivery: Delivery) -> None:
        self._channel.send(msgspec.msgpack.encode(Step.of(delivery)))

    def _end_all(self, reason: FinishReason, error: ErrorData | None) -> None:
        self._channel.send(msgspec.msgpack.encode(Ended(reason, error)))

    def _on_orphan(self, request: Request, last: RequestOutput) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the server with it
            self._loop.call_soon_threadsafe(self._observers, request, last)


def _log_level() -> str:
    return logging.getLevelName(logging.getLogger("jaxserve").getEffectiveLevel()).lower()

"""The engine in a thread of its own, which serves the commands of any number of clients. Knows no event loop and no transport."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from jaxserve.engine.clients.commands import (
    Abort,
    Aborted,
    Add,
    Command,
    Delivery,
    EngineFacts,
    GiveBack,
    Inspect,
    Inspected,
    Leave,
    LeaveAll,
    SetPaused,
    Stop,
)
from jaxserve.engine.engine import Engine
from jaxserve.engine.garbage import FullCollections
from jaxserve.errors import EngineDeadError, ErrorData, JaxserveError, to_data
from jaxserve.request import FinishReason, Request, RequestOutput, ended_output

logger = logging.getLogger(__name__)

_WATCH_PERIOD_S = 1.0
"""Longest time, in seconds, by which a stuck step is noticed later than the limit says."""


Deliver = Callable[[Delivery], None]
EndAll = Callable[[FinishReason, ErrorData | None], None]
OnEnd = Callable[[Request, RequestOutput], None]


class EngineThread:
    """Runs an :class:`Engine` and handles the commands of its clients between two steps.

    Commands of one client are handled in their order. Each request ends with one output that has a finish reason, unless its client has gone. If the engine
    itself ends, each client's ``end_all`` is called instead.

    Args:
        build: Makes the engine, warmed up; called in the thread.

    Attributes:
        engine: The engine; ``None`` until it is built.
        started: Future that is done when the engine is built; holds the exception if that failed.
        is_dead: Whether the engine could not be built, could not go on, or was closed.
    """

    def __init__(self, build: Callable[[], Engine]) -> None:
        self.engine: Engine | None = None
        self.started: Future[None] = Future()
        self.is_dead = False
        self._build = build
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._commands: queue.SimpleQueue[tuple[int, Command] | None] = queue.SimpleQueue()  # None only wakes
        self._closing = False
        self._busy_since_s: float | None = None  # since when the thread has been in a step; None between steps
        self._clients: dict[int, tuple[Deliver, EndAll]] = {}
        self._heirs: dict[int, OnEnd] = {}
        self._num_clients = 0
        self._end: tuple[FinishReason, ErrorData | None] | None = None
        self._end_lock = threading.Lock()
        # In the thread only: whose the requests are that the engine has, and which request a client's stream is.
        self._routes: dict[str, tuple[int, int, Request]] = {}
        self._request_ids: dict[tuple[int, int], str] = {}
        self._deliveries: dict[int, Delivery] = {}

    @property
    def is_closing(self) -> bool:
        """Whether :meth:`close` has been called."""
        return self._closing

    def start(self) -> None:
        """Starts the thread, which builds the engine and then serves. Returns at once; call it once."""
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Aborts all requests in flight and ends the thread. Does nothing the second time.

        Args:
            timeout_s: Longest wait for the current step, in seconds. An engine that is still being built is not waited for: its thread ends with the build,
                or with the process.
        """
        self._closing = True
        self._commands.put(None)
        if self.engine is not None and self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def fail(self, reason: str) -> None:
        """Ends every stream with an error and declares the engine dead. May be called from any thread, since the engine's own thread may be stuck."""
        self._end_clients("error", to_data(EngineDeadError(f"the engine has stopped: {reason}")))

    def attach(self, deliver: Deliver, end_all: EndAll) -> int:
        """Registers a new client. May be called from any thread.

        Args:
            deliver: Takes the messages of one turn of the engine's thread. Called in that thread; must return at once.
            end_all: Called once when the engine has ended and nothing more comes, with the finish reason of all streams and their error, if there is one.
                Called
                in any thread; must return at once.

        Returns:
            The client's number, for :meth:`send`.
        """
        with self._end_lock:
            self._num_clients += 1
            number = self._num_clients
            self._clients[number] = deliver, end_all
            end = self._end
        if end is not None:
            end_all(*end)
        return number

    def detach(self, number: int, on_end: OnEnd) -> None:
        """Aborts a client's requests in flight, and forgets the client. May be called from any thread.

        Args:
            number: The client's number.
            on_end: Called in the engine's thread, in the client's place, with each request that ends in this way and its last output.
        """
        self._clients.pop(number, None)
        self._heirs[number] = on_end
        self._commands.put((number, LeaveAll()))

    def send(self, number: int, command: Command) -> None:
        """Hands a command of a client to the engine's thread. May be called from any thread."""
        self._commands.put((number, command))

    def facts(self) -> EngineFacts:
        """The facts about the engine that clients need. The engine must be built."""
        engine = self.engine
        assert engine is not None
        return EngineFacts(
            model_name=engine.model_name,
            model_revision=engine.model_revision,
            sampling_defaults=dict(engine.sampling_defaults),
            max_model_len=engine.max_model_len,
            vocab_size=engine.spec.vocab_size,
            num_pages=engine.runner.num_pages,
            page_size=engine.runner.page_size,
            max_num_seqs=engine.stats().max_num_seqs,
            reader_buffer=engine.reader_buffer,
        )

    # -- In the thread ------------------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            engine = self._build()
        except BaseException as error:
            if not isinstance(error, JaxserveError):
                logger.exception("the engine could not be started")
            self._end_clients("error", to_data(EngineDeadError("the engine could not be started")))
            self.started.set_exception(error)
            return
        self.engine = engine
        self.started.set_result(None)
        if engine.watchdog_s is not None:
            threading.Thread(target=self._watch, args=(engine, engine.watchdog_s), name="watchdog", daemon=True).start()
        try:
            with FullCollections() as collections:
                self._serve(engine, collections)
        except BaseException as error:
            logger.exception("the engine has stopped")
            self.fail(f"{type(error).__name__}: {error}")
        else:
            self._end_clients("abort", None)

    def _end_clients(self, reason: FinishReason, error: ErrorData | None) -> None:
        self.is_dead = True  # before the streams are ended: one that begins after that is refused
        with self._end_lock:
            if self._end is not None:
                return
            self._end = (reason, error)
            clients = list(self._clients.values())
        for _, end_all in clients:
            end_all(reason, error)

    def _serve(self, engine: Engine, collections: FullCollections) -> None:
        while not (self._closing or self.is_dead):
            commands = self._wait(engine, collections)
            while not self._commands.empty():
                commands.append(self._commands.get())
            self._busy_since_s = time.monotonic()
            for item in commands:
                if item is not None:
                    self._handle(engine, *item)
            if not engine.slack_s:
                self._route(engine.step())
            self._busy_since_s = None
            if self._deliveries:
                deliveries, self._deliveries = self._deliveries, {}
                for number, delivery in deliveries.items():
                    if (client := self._clients.get(number)) is not None:
                        client[0](delivery)

    def _wait(self, engine: Engine, collections: FullCollections) -> list[tuple[int, Command] | None]:
        """Sleeps while the engine has nothing to do, or need not do it yet. Returns the command that ended the sleep, if one did."""
        idle_s = (engine.idle_s or engine.slack_s) if engine.has_work else math.inf
        if not idle_s:
            return []
        if not engine.has_work and self._commands.empty():
            collections.on_idle()
            engine.on_idle()
        began_s = time.monotonic()
        try:
            return [self._commands.get(timeout=None if idle_s == math.inf else idle_s)]
        except queue.Empty:
            return []
        finally:
            engine.note_sleep(time.monotonic() - began_s)

    def _watch(self, engine: Engine, limit_s: float) -> None:
        """Declares the engine dead when a step takes too long. Runs in a thread of its own."""
        busy_since_s, counted_s = None, 0.0
        period_s = min(_WATCH_PERIOD_S, limit_s / 4)
        while not self.is_dead:
            time.sleep(period_s)
            if self._busy_since_s is None or self._busy_since_s != busy_since_s:
                busy_since_s, counted_s = self._busy_since_s, 0.0
            elif not engine.is_compiling:
                counted_s += period_s
            if counted_s > limit_s:
                logger.critical("a step has taken more than %g s (engine.watchdog_s); the engine is given up", limit_s)
                self.fail(f"a step took more than {limit_s:g} s")

    def _handle(self, engine: Engine, number: int, command: Command) -> None:
        match command:
            case Add(stream, request):
                self._add(engine, number, stream, request)
            case Leave(stream):
                if (request_id := self._request_ids.get((number, stream))) is not None:
                    self._route_one(engine.abort(request_id))
            case LeaveAll():
                on_end = self._heirs.pop(number, None)
                for request in [request for client, _, request in self._routes.values() if client == number]:
                    output = engine.abort(request.request_id)
                    self._route_one(output)
                    if on_end is not None and output is not None:
                        on_end(request, output)
            case Abort(question, request_id, tenant):
                route = self._routes.get(request_id)
                was_in_flight = route is not None and tenant in (None, route[2].options.tenant)
                if was_in_flight:
                    self._route_one(engine.abort(request_id))
                self._to(number).answers.append(Aborted(question, was_in_flight))
            case SetPaused(stream, is_paused):
                if (request_id := self._request_ids.get((number, stream))) is not None:
                    (engine.pause if is_paused else engine.resume)(request_id)
            case Stop(stream, num_tokens):
                if (request_id := self._request_ids.get((number, stream))) is not None:
                    self._route_one(engine.stop(request_id, num_tokens))
            case GiveBack(tenant, num_tokens):
                engine.give_back(tenant, num_tokens)
            case Inspect(question):
                self._to(number).answers.append(Inspected(question, engine.inspect()))

    def _add(self, engine: Engine, number: int, stream: int, request: Request) -> None:
        try:
            outputs = engine.submit(request)
        except Exception as error:  # whatever it is, it is this request's alone
            if not isinstance(error, JaxserveError):
                logger.exception("request %s could not be added", request.request_id)
            self._to(number).outputs.append((stream, ended_output(request, 0, "error", to_data(error))))
            return
        self._route(outputs)
        self._routes[request.request_id] = (number, stream, request)
        self._request_ids[number, stream] = request.request_id

    def _route_one(self, output: RequestOutput | None) -> None:
        if output is not None:
            self._route((output,))

    def _route(self, outputs: Iterable[RequestOutput]) -> None:
        """Adds outputs that the engine has just made to the deliveries of their clients. This must happen at once, as the id of an ended request may come
        again.
        """
        for output in outputs:
            number, stream, _ = self._routes[output.request_id]
            if output.finish_reason is not None:
                del self._routes[output.request_id], self._request_ids[number, stream]
            self._to(number).outputs.append((stream, output))

    def _to(self, number: int) -> Delivery:
        delivery = self._deliveries.get(number)
        if delivery is None:
            delivery = self._deliveries[number] = Delivery()
        return delivery

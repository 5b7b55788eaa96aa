"""The engine in a thread of its own, for an asyncio program: streams, cancellation, start, drain and death. No transport here."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import math
import queue
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal

from jaxserve.engine.engine import Engine
from jaxserve.engine.garbage import FullCollections
from jaxserve.engine.observation.inspection import SchedulerView
from jaxserve.engine.observation.meter import Measurements
from jaxserve.engine.observation.stats import EngineStats
from jaxserve.errors import EngineDeadError, EngineError, EngineNotReadyError, InvalidRequestError, JaxserveError
from jaxserve.models.spec import ModelSpec
from jaxserve.request import FinishReason, Request, RequestOptions, RequestOutput, SamplingParams, Usage

if TYPE_CHECKING:
    from jaxserve.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

EngineState = Literal["starting", "ready", "draining", "dead"]

_INSPECT_TIMEOUT_S = 5.0

_ABORT_TIMEOUT_S = 5.0
"""An abort takes effect after the step under way; one that takes longer than this is stuck."""

_WATCH_PERIOD_S = 1.0
"""A stuck step is noticed at most that much later than the limit says."""


@dataclasses.dataclass(slots=True)
class _Stream:
    """One request as its consumer sees it. Lives on the event loop.

    The engine does not wait for a slow reader: when too many outputs wait for it, its request is paused.
    """

    request: Request
    outputs: asyncio.Queue[RequestOutput] = dataclasses.field(default_factory=asyncio.Queue[RequestOutput])
    num_generated_tokens: int = 0
    is_ended: bool = False
    is_paused: bool = False

    async def next_output(self) -> RequestOutput:
        """Waits for an output and joins to it what has come since: a consumer that fell behind catches up with one message."""
        outputs = [await self.outputs.get()]
        while not self.outputs.empty():
            outputs.append(self.outputs.get_nowait())
        if len(outputs) == 1:
            return outputs[0]
        token_ids = tuple(token_id for output in outputs for token_id in output.token_ids)
        return dataclasses.replace(outputs[-1], token_ids=token_ids, text="".join(output.text for output in outputs))

    def last_output(self, reason: FinishReason, error: str | None, refusal: JaxserveError | None = None) -> RequestOutput:
        """The last message of a stream that the engine cannot end any more."""
        usage = Usage(prompt_tokens=len(self.request.prompt_token_ids), completion_tokens=self.num_generated_tokens)
        request_id = self.request.request_id
        return RequestOutput(request_id=request_id, token_ids=(), text="", finish_reason=reason, stop_reason=None, usage=usage, error=error, refusal=refusal)


_Delivery = tuple[_Stream, RequestOutput]

_Command = Callable[[Engine], Iterable[_Delivery]]
"""Runs in the engine's thread; what it returns goes out with the step's outputs."""


class AsyncEngine:
    """Serves an :class:`Engine` to the coroutines of one event loop.

    The engine's thread and the loop meet in two places only: commands go through a queue, on which an idle engine sleeps, and each step's outputs
    come back in one call to the loop, which deals them out to the streams. Every stream ends with an output that has a finish reason, also when the
    engine dies.

    Args:
        build: Makes the engine, warmed up; called in the engine's thread.

    Attributes:
        state: "starting" until the engine is built, then "ready"; "draining" from :meth:`drain` on; "dead" after a failed start, a failure that the
            engine could not contain, or :meth:`close`.
    """

    def __init__(self, build: Callable[[], Engine]) -> None:
        self._build = build
        self._on_end: Callable[[Request, RequestOutput], None] = lambda _request, _output: None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._started: Future[None] = Future()
        self._engine: Engine | None = None
        self._draining = False
        self._closing = False
        self._dead = False
        self._reader_buffer = sys.maxsize
        self._busy_since_s: float | None = None  # since when the engine's thread has been in a step; None between steps
        # In the engine's thread only: the requests that the engine has. Not the dictionary below: an id may be used again while the last outputs of its
        # first use are on their way.
        self._routes: dict[str, _Stream] = {}
        # On the event loop only.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[str, _Stream] = {}
        self._no_streams = asyncio.Event()
        self._no_streams.set()

    # -- Life ---------------------------------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        if self._dead:
            return "dead"
        if self._draining:
            return "draining"
        return "starting" if self._engine is None else "ready"

    def start(self) -> None:
        """Starts the engine's thread, which builds the engine and then serves. Returns at once; call it once."""
        self._thread.start()

    async def wait_ready(self) -> None:
        """Waits until the engine is built.

        Raises:
            JaxserveError: Why it could not be built; any other exception of the build likewise.
        """
        await asyncio.shield(asyncio.wrap_future(self._started))

    async def drain(self, timeout_s: float) -> None:
        """Takes no new requests, and returns when those in flight have ended.

        Args:
            timeout_s: How long they may go on, in seconds; then they are aborted, each with a last output.
        """
        self._draining = True
        try:
            await asyncio.wait_for(self._no_streams.wait(), timeout_s)
        except TimeoutError:
            logger.warning("%d requests did not end within %g s and are aborted", len(self._streams), timeout_s)
            for request_id in self._streams:
                self.abort(request_id)
            try:
                await asyncio.wait_for(self._no_streams.wait(), _ABORT_TIMEOUT_S)
            except TimeoutError:
                logger.error("the engine has not answered for %g s; its streams are ended without it", _ABORT_TIMEOUT_S)
                self._end_all("abort", None)

    def close(self, timeout_s: float = 10.0) -> None:
        """Aborts what is in flight and ends the thread. Does nothing the second time.

        Args:
            timeout_s: How long to wait for the step under way, in seconds. An engine that is still being built is not waited for: its thread ends
                with the build, or with the process.
        """
        self._closing = True
        self._commands.put(_wake)
        if self._engine is not None and self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def fail(self, reason: str) -> None:
        """Ends every stream with an error and answers nothing any more. From any thread; for when the engine's own may be stuck for ever."""
        self._dead = True  # before the streams are ended: one that begins after that is refused
        self._on_loop(self._end_all, "error", f"the engine has stopped: {reason}")

    # -- Requests -----------------------------------------------------------------------------------------------------------------------------

    def make_request(
        self, prompt_token_ids: Iterable[int], params: SamplingParams, request_id: str | None = None, options: RequestOptions | None = None
    ) -> Request:
        """As :meth:`Engine.make_request`; refuses at once what can be known to fail.

        Raises:
            RequestError: The request itself is at fault.
            EngineNotReadyError: The engine is starting or draining.
            EngineDeadError: The engine is dead.
        """
        return self._admitting().make_request(prompt_token_ids, params, request_id, options)

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Runs a request and yields its outputs, the last with a finish reason. Outputs that wait for a slow consumer come as one. A request that the engine
        does not take, or gives up, ends with an output that has a ``refusal``.

        When the consumer goes away (``aclose``, cancellation, or dropping the iterator), the request is aborted. It starts with the first
        ``anext``, which also raises what is listed here.

        Raises:
            InvalidRequestError: The request's id is in flight already.
            EngineNotReadyError: The engine is starting or draining.
            EngineDeadError: The engine is dead.
        """
        self._loop = asyncio.get_running_loop()  # before the check: an engine that dies after it must find the loop, to end this stream
        self._admitting()
        request_id = request.request_id
        if request_id in self._streams:
            raise InvalidRequestError(f"request id {request_id!r} is in flight already", param="request_id")
        stream = self._streams[request_id] = _Stream(request)
        self._no_streams.clear()
        self._commands.put(functools.partial(self._add, stream))
        try:
            finished = False
            while not finished:
                output = await stream.next_output()
                if stream.is_paused:
                    stream.is_paused = False
                    self._commands.put(functools.partial(self._set_paused, stream, False))
                finished = output.finish_reason is not None
                yield output
        finally:
            if self._streams.get(request_id) is stream:
                self._commands.put(functools.partial(self._abort, request_id))
                self._forget(request_id)

    def abort(self, request_id: str, tenant: str | None = None) -> bool:
        """Asks for the end of a request; its stream gets a last output with reason "abort". Call it on the event loop.

        Args:
            request_id: Of the request.
            tenant: Whose request it must be; ``None`` for anybody's.

        Returns:
            Whether such a request was in flight.
        """
        stream = self._streams.get(request_id)
        if stream is None or tenant not in (None, stream.request.options.tenant):
            return False
        self._commands.put(functools.partial(self._abort, request_id))
        return True

    def on_end(self, listener: Callable[[Request, RequestOutput], None]) -> None:
        """Has a listener told, on the event loop, of each request that ends, once, with its last output: also of those whose consumer has gone, and of those
        that the engine did not take. There is one listener; call it before the first request.
        """
        self._on_end = listener

    # -- The engine's facts -------------------------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        return self._built().tokenizer

    @property
    def spec(self) -> ModelSpec:
        return self._built().spec

    @property
    def model_name(self) -> str:
        return self._built().model_name

    @property
    def model_revision(self) -> str | None:
        return self._built().model_revision

    @property
    def max_model_len(self) -> int:
        return self._built().max_model_len

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        return self._built().sampling_defaults

    def stats(self) -> EngineStats:
        """A snapshot of the engine's counts; they may be a step apart from each other.

        Raises:
            EngineNotReadyError: There is no engine yet.
        """
        return self._built().stats()

    def measurements(self) -> Measurements:
        """What the engine has measured; as current as :meth:`stats`.

        Raises:
            EngineNotReadyError: There is no engine yet.
        """
        return self._built().measurements()

    async def inspect(self) -> SchedulerView:
        """What runs and who waits, between two steps.

        Raises:
            EngineNotReadyError: There is no engine yet.
            EngineError: A step has not ended for long, or the engine is dead.
        """
        self._built()
        if self._dead:
            raise EngineDeadError("the engine has stopped; there is nothing to look at")
        view: Future[SchedulerView] = Future()
        self._commands.put(functools.partial(_inspect, view))
        try:
            return await asyncio.wait_for(asyncio.wrap_future(view), _INSPECT_TIMEOUT_S)
        except TimeoutError:
            raise EngineError(f"the engine has been in one step for {_INSPECT_TIMEOUT_S:g} s and cannot be looked at") from None

    def _built(self) -> Engine:
        if self._engine is None:
            raise EngineDeadError("the engine could not be started") if self._dead else EngineNotReadyError("the engine is still starting")
        return self._engine

    def _admitting(self) -> Engine:
        if self._dead:
            raise EngineDeadError("the engine has stopped and answers nothing any more")
        if self._draining or self._closing:
            raise EngineNotReadyError("the server is shutting down and takes no new requests")
        return self._built()

    # -- On the event loop --------------------------------------------------------------------------------------------------------------------

    def _deliver(self, deliveries: list[_Delivery]) -> None:
        for stream, output in deliveries:
            if output.finish_reason is not None and not stream.is_ended:
                stream.is_ended = True
                self._on_end(stream.request, output)
            if self._streams.get(output.request_id) is not stream:  # its consumer has gone
                continue
            stream.num_generated_tokens = output.usage.completion_tokens
            stream.outputs.put_nowait(output)
            if output.finish_reason is not None:
                self._forget(output.request_id)
            elif stream.outputs.qsize() >= self._reader_buffer and not stream.is_paused:
                stream.is_paused = True
                self._commands.put(functools.partial(self._set_paused, stream, True))

    def _end_all(self, reason: FinishReason, error: str | None) -> None:
        self._deliver([(stream, stream.last_output(reason, error)) for stream in self._streams.values()])

    def _forget(self, request_id: str) -> None:
        del self._streams[request_id]
        if not self._streams:
            self._no_streams.set()

    # -- In the engine's thread ---------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            engine = self._build()
        except BaseException as error:
            self._dead = True
            if not isinstance(error, JaxserveError):
                logger.exception("the engine could not be started")
            self._started.set_exception(error)
            return
        self._engine = engine
        self._reader_buffer = engine.reader_buffer
        self._started.set_result(None)
        if engine.watchdog_s is not None:
            threading.Thread(target=self._watch, args=(engine, engine.watchdog_s), name="watchdog", daemon=True).start()
        try:
            with FullCollections() as collections:
                self._serve(engine, collections)
        except BaseException as error:
            logger.exception("the engine has stopped")
            self.fail(f"{type(error).__name__}: {error}")
        else:
            self._dead = True
            self._on_loop(self._end_all, "abort", None)

    def _serve(self, engine: Engine, collections: FullCollections) -> None:
        while not (self._closing or self._dead):
            commands = self._wait(engine, collections)
            while not self._commands.empty():
                commands.append(self._commands.get())
            self._busy_since_s = time.monotonic()
            deliveries = [delivery for command in commands for delivery in command(engine)]
            if not engine.slack_s:
                deliveries += self._route(engine.step())
            self._busy_since_s = None
            if deliveries:
                self._on_loop(self._deliver, deliveries)

    def _wait(self, engine: Engine, collections: FullCollections) -> list[_Command]:
        """Sleeps while the engine has nothing to do, or need not do it yet. Returns the command that ended it, if one did."""
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
        while not self._dead:
            time.sleep(period_s)
            if self._busy_since_s is None or self._busy_since_s != busy_since_s:
                busy_since_s, counted_s = self._busy_since_s, 0.0
            elif not engine.is_compiling:
                counted_s += period_s
            if counted_s > limit_s:
                logger.critical("a step has taken more than %g s (engine.watchdog_s); the engine is given up", limit_s)
                self.fail(f"a step took more than {limit_s:g} s")

    def _route(self, outputs: Iterable[RequestOutput]) -> list[_Delivery]:
        """Finds the streams of outputs that the engine has just made: at once, for an id that has ended may come again."""
        routes = self._routes
        return [(routes[output.request_id] if output.finish_reason is None else routes.pop(output.request_id), output) for output in outputs]

    def _add(self, stream: _Stream, engine: Engine) -> list[_Delivery]:
        request = stream.request
        try:
            deliveries = self._route(engine.submit(request))
        except JaxserveError as error:
            return [(stream, stream.last_output("error", str(error), error))]
        except Exception as error:  # whatever it is, it is this request's alone
            logger.exception("request %s could not be added", request.request_id)
            return [(stream, stream.last_output("error", f"{type(error).__name__}: {error}"))]
        self._routes[request.request_id] = stream
        return deliveries

    def _abort(self, request_id: str, engine: Engine) -> list[_Delivery]:
        output = engine.abort(request_id)
        return [] if output is None else self._route([output])

    def _set_paused(self, stream: _Stream, is_paused: bool, engine: Engine) -> list[_Delivery]:
        request_id = stream.request.request_id
        if self._routes.get(request_id) is stream:  # else it has ended, and the id may be another's
            (engine.pause if is_paused else engine.resume)(request_id)
        return []

    def _on_loop(self, callback: Callable[..., None], *args: object) -> None:
        if self._loop is None:  # no stream has ever been opened
            return
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop is closed, and all consumers with it
            logger.debug("the event loop is closed; outputs are dropped")


def _wake(_: Engine) -> list[_Delivery]:
    """Does nothing, but ends the engine's sleep."""
    return []


def _inspect(view: Future[SchedulerView], engine: Engine) -> list[_Delivery]:
    if view.set_running_or_notify_cancel():
        view.set_result(engine.inspect())
    return []

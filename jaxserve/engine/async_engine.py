"""The engine for an asyncio program in the same process: it runs in a thread of its own and gives streams of outputs. Knows no transport."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from jaxserve.engine.clients.commands import Command, Delivery
from jaxserve.engine.clients.streams import Streams
from jaxserve.engine.clients.thread import EngineThread
from jaxserve.engine.engine import Engine
from jaxserve.engine.observation.inspection import SchedulerView
from jaxserve.engine.observation.meter import Measurements
from jaxserve.engine.observation.stats import EngineStats
from jaxserve.errors import EngineDeadError, EngineNotReadyError, ErrorData
from jaxserve.models.spec import ModelSpec
from jaxserve.request import FinishReason, Request, RequestOptions, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from jaxserve.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

EngineState = Literal["starting", "ready", "draining", "dead"]


class AsyncEngine:
    """Serves an :class:`Engine` to the coroutines of one event loop.

    The engine's thread and the loop meet in two places only: commands go through a queue, on which an idle engine sleeps, and the outputs of each step
    come back in one call to the loop, which hands them to the streams. Every stream ends with an output that has a finish reason, even if the engine dies.

    Args:
        build: Makes the engine, warmed up; called in the engine's thread.

    Attributes:
        state: "starting" until the engine is built, then "ready"; "draining" from :meth:`drain` on; "dead" after a failed start, a failure that the
            engine could not contain, or :meth:`close`.
        thread: The engine's thread, to which other clients can attach too.
    """

    def __init__(self, build: Callable[[], Engine]) -> None:
        self.thread = EngineThread(build)
        self._draining = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams = Streams(self._send, self._open)
        self._client = self.thread.attach(self._deliver, self._end_all)

    # -- Life ---------------------------------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        if self.thread.is_dead:
            return "dead"
        if self._draining:
            return "draining"
        return "starting" if self.thread.engine is None else "ready"

    def start(self) -> None:
        """Starts the engine's thread, which builds the engine and then serves. Returns at once; call it once."""
        self.thread.start()

    async def wait_ready(self) -> None:
        """Waits until the engine is built.

        Raises:
            Exception: Whatever made the build fail, such as a :class:`JaxserveError`.
        """
        await asyncio.shield(asyncio.wrap_future(self.thread.started))

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests from now on, and waits until those in flight have ended.

        Args:
            timeout_s: Seconds that they may go on; then they are aborted, each with a last output.
        """
        self._draining = True
        await self._streams.drain(timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """Aborts all requests in flight and ends the thread; see :meth:`EngineThread.close`."""
        self.thread.close(timeout_s)

    def fail(self, reason: str) -> None:
        """Ends every stream with an error and declares the engine dead; see :meth:`EngineThread.fail`."""
        self.thread.fail(reason)

    # -- Requests -----------------------------------------------------------------------------------------------------------------------------

    def make_request(
        self, prompt_token_ids: Iterable[int], sampling_params: SamplingParams, request_id: str | None = None, options: RequestOptions | None = None
    ) -> Request:
        """A request, checked as far as possible before it runs; see :meth:`Engine.make_request`.

        Raises:
            RequestError: The request can never be served.
            EngineNotReadyError: The engine is starting or draining.
            EngineDeadError: The engine is dead.
        """
        return self._admitting().make_request(prompt_token_ids, sampling_params, request_id, options)

    def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Runs a request and yields its outputs; the last one has a finish reason. Outputs that wait for a slow consumer are joined into one.

        If the engine refuses the request or gives it up, the last output has an ``error``. The request starts with the first ``anext``, which also raises the
        errors listed here. When the consumer leaves (``aclose``, cancellation, or dropping the iterator), the request is aborted.

        Raises:
            InvalidRequestError: The request's id is in flight already.
            EngineNotReadyError: The engine is starting or draining.
            EngineDeadError: The engine is dead.
        """
        return self._streams.generate(request)

    async def abort(self, request_id: str, tenant: str | None = None) -> bool:
        """Asks the engine to abort a request. Its stream gets a last output with finish reason "abort".

        Args:
            request_id: Id of the request.
            tenant: Tenant that the request must belong to; ``None`` for any.

        Returns:
            Whether such a request was in flight.

        Raises:
            EngineError: The request does not belong to this event loop, and the engine does not answer.
        """
        if self.state in ("starting", "dead"):
            return False
        self._loop = asyncio.get_running_loop()
        return await self._streams.abort(request_id, tenant)

    def on_end(self, listener: Callable[[Request, RequestOutput], None]) -> None:
        """Sets the listener that is called, on the event loop, for each request that ends; see :meth:`Streams.on_end`."""
        self._streams.on_end(listener)

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

    @property
    def max_num_seqs(self) -> int:
        return self._built().stats().max_num_seqs

    async def fetch_stats(self) -> EngineStats:
        """The same counts as :meth:`stats`, for callers that must also work with an engine in another process."""
        return self.stats()

    def stats(self) -> EngineStats:
        """A snapshot of the engine's counts, which may be one step apart from each other.

        Raises:
            EngineNotReadyError: There is no engine yet.
        """
        return self._built().stats()

    def measurements(self) -> Measurements:
        """The engine's measurements since its start.

        Raises:
            EngineNotReadyError: There is no engine yet.
        """
        return self._built().measurements()

    async def inspect(self) -> SchedulerView:
        """A view of the running and waiting requests, taken between two steps.

        Raises:
            EngineNotReadyError: There is no engine yet.
            EngineError: The current step takes too long, or the engine is dead.
        """
        self._built()
        if self.thread.is_dead:
            raise EngineDeadError("the engine has stopped; there is nothing to look at")
        self._loop = asyncio.get_running_loop()
        return await self._streams.inspect()

    def _built(self) -> Engine:
        if self.thread.engine is None:
            raise EngineDeadError("the engine could not be started") if self.thread.is_dead else EngineNotReadyError("the engine is still starting")
        return self.thread.engine

    def _admitting(self) -> Engine:
        if self.thread.is_dead:
            raise EngineDeadError("the engine has stopped and answers nothing any more")
        if self._draining or self.thread.is_closing:
            raise EngineNotReadyError("the server is shutting down and takes no new requests")
        return self._built()

    def _open(self) -> None:
        """Checks that a stream may begin, and prepares for it."""
        self._loop = asyncio.get_running_loop()  # before the check: an engine that dies after it must find the loop, to end this stream
        self._streams.reader_buffer = self._admitting().reader_buffer

    # -- To the engine's thread, and from it --------------------------------------------------------------------------------------------------

    def _send(self, command: Command) -> None:
        self.thread.send(self._client, command)

    def _deliver(self, delivery: Delivery) -> None:
        self._on_loop(self._streams.receive, delivery)

    def _end_all(self, reason: FinishReason, error: ErrorData | None) -> None:
        self._on_loop(self._streams.end_all, reason, error)

    def _on_loop(self, callback: Callable[..., None], *args: object) -> None:
        if self._loop is None:  # no stream has ever been opened
            return
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop is closed, and all consumers with it
            logger.debug("the event loop is closed; outputs are dropped")

"""The requests of one event loop as streams of outputs, with slow readers and readers that leave. The engine may be in this process or another."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec

from jaxserve.engine.clients.commands import Abort, Aborted, Add, Command, Delivery, GiveBack, Inspect, Inspected, Leave, SetPaused, Stop
from jaxserve.engine.observation.inspection import SchedulerView
from jaxserve.engine.requests.output import TextMaker
from jaxserve.errors import EngineDeadError, EngineError, ErrorData, InvalidRequestError, from_data
from jaxserve.request import FinishReason, Request, RequestOutput, Usage, ended_output, joined

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 5.0
"""Longest wait for an answer of the engine, in seconds. Commands are handled after the current step, which takes longer only if it is stuck or compiles."""


@dataclasses.dataclass(slots=True)
class _Stream:
    """One request as its consumer sees it.

    The engine does not wait for a slow reader: when too many outputs wait to be read, the request is paused.

    Args:
        number: Number of the stream in commands.
        request: The request.
        text: Makes the request's text, if the engine does not; else ``None``.
        outputs: Outputs that have not been read.
        waiter: Future on which the consumer waits for an output; ``None`` if it does not wait.
        stop: End of its text: the number of generated tokens up to it and the stop string; ``None`` if the text goes on.
    """

    number: int
    request: Request
    text: TextMaker | None
    outputs: list[RequestOutput] = dataclasses.field(default_factory=list[RequestOutput])
    waiter: asyncio.Future[None] | None = None
    num_generated_tokens: int = 0
    is_paused: bool = False
    stop: tuple[int, str] | None = None

    async def next_output(self) -> RequestOutput:
        """Waits for an output and joins it with those that have arrived since, so that a consumer that fell behind catches up with one message."""
        if not self.outputs:
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        outputs, self.outputs = self.outputs, []
        return joined(outputs)

    def put(self, output: RequestOutput) -> None:
        """Adds an output, and wakes the consumer."""
        self.outputs.append(output)
        if (waiter := self.waiter) is not None:
            self.waiter = None
            if not waiter.done():  # else the consumer was cancelled
                waiter.set_result(None)


class Questions:
    """The questions to another thread or process that have not been answered yet. All methods belong to the event loop."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.Future[Any]] = {}

    async def ask(self, send: Callable[[int], None]) -> Any:
        """Asks a question and waits for its answer.

        Args:
            send: Sends the question; called with its number, which :meth:`answer` gets back.

        Raises:
            EngineError: No answer came within ``ANSWER_TIMEOUT_S``.
        """
        question = next(self._numbers)
        future = self._open[question] = asyncio.get_running_loop().create_future()
        send(question)
        try:
            return await asyncio.wait_for(future, ANSWER_TIMEOUT_S)
        except TimeoutError:
            raise EngineError(f"the engine has been in one step for {ANSWER_TIMEOUT_S:g} s and cannot be looked at") from None
        finally:
            del self._open[question]

    def answer(self, question: int, value: Any) -> None:
        """Delivers the answer to a question, if its asker still waits for it."""
        future = self._open.get(question)
        if future is not None and not future.done():
            future.set_result(value)

    def fail(self, error: Exception) -> None:
        """Makes all open questions raise an error."""
        for future in self._open.values():
            if not future.done():
                future.set_exception(error)


class Streams:
    """The streams of one client of the engine's thread. All methods belong to the event loop.

    Args:
        send: Hands a command to the engine's thread; returns at once.
        admit: Raises if no request is accepted now.
        make_text: Gives the maker of a request's text, for clients that make the text themselves; ``None`` if the engine makes it.

    Attributes:
        reader_buffer: Number of outputs that may wait for a slow reader before its request is paused; ``None`` for no limit.
        questions: The open questions to the engine's thread.
    """

    def __init__(self, send: Callable[[Command], None], admit: Callable[[], object], make_text: Callable[[Request], TextMaker] | None = None) -> None:
        self.reader_buffer: int | None = None
        self._send = send
        self._admit = admit
        self._make_text = make_text
        self._numbers = itertools.count(1)
        self._by_id: dict[str, _Stream] = {}  # those that have a consumer
        self._by_number: dict[int, _Stream] = {}  # those that have not ended
        self.questions = Questions()
        self._on_end: Callable[[Request, RequestOutput], None] = lambda _request, _output: None
        self._nobody_reads = asyncio.Event()
        self._nobody_reads.set()

    def __len__(self) -> int:
        """Number of streams that have a consumer and have not ended."""
        return len(self._by_id)

    def on_end(self, listener: Callable[[Request, RequestOutput], None]) -> None:
        """Sets the listener that is called once for each request that ends, with its last output. Call this before the first request.

        The listener is also called for requests whose consumer has left and for those that the engine refused.
        """
        self._on_end = listener

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """See ``AsyncEngine.generate``."""
        self._admit()
        request_id = request.request_id
        if request_id in self._by_id:
            raise InvalidRequestError(f"request id {request_id!r} is in flight already", param="request_id")
        stream = _Stream(next(self._numbers), request, None if self._make_text is None else self._make_text(request))
        self._by_id[request_id] = self._by_number[stream.number] = stream
        self._nobody_reads.clear()
        self._send(Add(stream.number, request))
        try:
            finished = False
            while not finished:
                output = await stream.next_output()
                if stream.is_paused:
                    stream.is_paused = False
                    self._send(SetPaused(stream.number, False))
                finished = output.finish_reason is not None
                yield output
        finally:
            if self._by_id.get(request_id) is stream:
                self._send(Leave(stream.number))
                self._forget(request_id)

    async def abort(self, request_id: str, tenant: str | None) -> bool:
        """See ``AsyncEngine.abort``. Also aborts a request of another client, which takes a question to the engine's thread.

        Raises:
            EngineError: The engine does not answer.
        """
        stream = self._by_id.get(request_id)
        if stream is None:
            return await self.questions.ask(lambda question: self._send(Abort(question, request_id, tenant)))
        if tenant not in (None, stream.request.options.tenant):
            return False
        self._send(Leave(stream.number))
        return True

    async def inspect(self) -> SchedulerView:
        """A view of the running and waiting requests, taken between two steps.

        Raises:
            EngineError: The engine does not answer.
        """
        return await self.questions.ask(lambda question: self._send(Inspect(question)))

    async def drain(self, timeout_s: float) -> None:
        """Waits until all streams have ended. Those that have not ended after ``timeout_s`` seconds are aborted, each with a last output."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._nobody_reads.wait(), timeout_s)
        if self._by_id:
            logger.warning("%d requests did not end within %g s and are aborted", len(self._by_id), timeout_s)
            for stream in self._by_id.values():
                self._send(Leave(stream.number))
            try:
                await asyncio.wait_for(self._nobody_reads.wait(), ANSWER_TIMEOUT_S)
            except TimeoutError:
                logger.error("the engine has not answered for %g s; its streams are ended without it", ANSWER_TIMEOUT_S)
                self.end_all("abort", None)

    # -- From the engine's thread -------------------------------------------------------------------------------------------------------------

    def receive(self, delivery: Delivery) -> None:
        """Hands the outputs and answers of a delivery to those who wait for them."""
        for number, output in delivery.outputs:
            self.take(number, output)
        for answer in delivery.answers:
            match answer:
                case Aborted(question, was_in_flight):
                    self.questions.answer(question, was_in_flight)
                case Inspected(question, view):
                    self.questions.answer(question, view)

    def take_tokens(self, number: int, token_ids: tuple[int, ...]) -> None:
        """Takes new tokens of a stream that goes on. If the text is made here and a stop string ends it, the engine is told."""
        stream = self._by_number.get(number)
        if stream is None or stream.stop is not None:  # what comes after the end of the text is no part of the answer
            return
        text, matched = "", None
        if stream.text is not None:
            text, matched, num_taken = stream.text.push(token_ids)
            token_ids = token_ids[:num_taken]
        request, num_tokens = stream.request, stream.num_generated_tokens + len(token_ids)
        if matched is not None:
            stream.stop = num_tokens, matched
            self._send(Stop(number, num_tokens))
        usage = Usage(prompt_tokens=len(request.prompt_token_ids), completion_tokens=num_tokens)
        request_id = request.request_id
        self._put(stream, RequestOutput(request_id=request_id, token_ids=token_ids, text=text, finish_reason=None, stop_reason=None, usage=usage))

    def take(self, number: int, output: RequestOutput) -> None:
        """Takes one output of a stream; see :meth:`receive`."""
        stream = self._by_number.get(number)
        if stream is None:
            return
        if stream.text is not None:
            if output.finish_reason is None:
                self.take_tokens(number, output.token_ids)
                return
            output = self._with_last_text(stream, stream.text, output, output.finish_reason)
        if output.finish_reason is None:
            self._put(stream, output)
            return
        del self._by_number[number]
        self._on_end(stream.request, output)
        if self._has_consumer(stream):
            stream.put(output)
            self._forget(output.request_id)

    def end_all(self, reason: FinishReason, error: ErrorData | None) -> None:
        """Ends every stream and every open question without the engine.

        Args:
            reason: Finish reason of the streams' last outputs.
            error: Their error, if ``reason`` is "error".
        """
        for stream in list(self._by_id.values()):
            self.take(stream.number, ended_output(stream.request, stream.num_generated_tokens, reason, error))
        self._by_number.clear()
        self.questions.fail(EngineDeadError("the engine has stopped; there is nothing to look at") if error is None else from_data(error))

    # -- Inside -------------------------------------------------------------------------------------------------------------------------------

    def _put(self, stream: _Stream, output: RequestOutput) -> None:
        """Puts an output of a stream that goes on into its queue, and pauses the request if too many wait there."""
        stream.num_generated_tokens = output.usage.completion_tokens
        if not self._has_consumer(stream):
            return
        stream.put(output)
        if self.reader_buffer is not None and len(stream.outputs) >= self.reader_buffer and not stream.is_paused:
            stream.is_paused = True
            self._send(SetPaused(stream.number, True))

    def _with_last_text(self, stream: _Stream, text: TextMaker, output: RequestOutput, reason: FinishReason) -> RequestOutput:
        """The last output of a stream whose text is made here. The engine may have ended it for its own reason, before or after it heard of a stop string."""
        token_ids = output.token_ids
        piece = ""
        if stream.stop is None:
            last_token_id = token_ids[-1] if token_ids and reason in ("stop", "length") else None
            piece, matched, num_taken = text.push(token_ids if last_token_id is None else token_ids[:-1])
            if matched is not None:
                stream.stop = stream.num_generated_tokens + num_taken, matched
            elif reason != "error":
                end = text.end(reason, output.stop_reason, last_token_id)
                return msgspec.structs.replace(output, text=piece + end.text, finish_reason=end.finish_reason, stop_reason=end.stop_reason)
            else:
                return msgspec.structs.replace(output, text=piece)
        num_tokens, stop_string = stream.stop
        if (num_unwanted := output.usage.completion_tokens - num_tokens) > 0:
            self._send(GiveBack(stream.request.options.tenant, num_unwanted))
        return msgspec.structs.replace(
            output,
            token_ids=token_ids[: max(0, num_tokens - stream.num_generated_tokens)],
            text=piece,
            finish_reason="stop",
            stop_reason=stop_string,
            usage=msgspec.structs.replace(output.usage, completion_tokens=num_tokens),
            error=None,
        )

    def _has_consumer(self, stream: _Stream) -> bool:
        return self._by_id.get(stream.request.request_id) is stream

    def _forget(self, request_id: str) -> None:
        del self._by_id[request_id]
        if not self._by_id:
            self._nobody_reads.set()

"""The engine for a front end in another process: tokens come from the engine's process, and their text is made here. Imports no jax."""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from typing import Any

import msgspec

from jaxserve.engine.clients.commands import Delivery, EngineFacts
from jaxserve.engine.clients.streams import Questions, Streams
from jaxserve.engine.observation.inspection import SchedulerView
from jaxserve.engine.observation.stats import EngineStats
from jaxserve.engine.requests.door import Door
from jaxserve.engine.requests.output import TextMaker
from jaxserve.errors import EngineDeadError, EngineNotReadyError
from jaxserve.request import Request, RequestOptions, RequestOutput, SamplingParams
from jaxserve.serving.contract import EngineState
from jaxserve.serving.front_ends.messages import AskPage, AskStats, Counted, Drain, Ended, FromFrontEnd, Page, Ready, Setup, Stats, Step, ToFrontEnd
from jaxserve.tokenizer import Tokenizer


class RemoteEngine:
    """An engine in another process, with the interface ``contract.ServedEngine``. All methods belong to the event loop.

    :meth:`take` must be called with each message of the engine's process.

    Args:
        send: Sends a frame to the engine's process.
        stop: Event that is set when this front end should end.

    Attributes:
        state: "starting" until the engine's process says that it is ready, then "ready"; "draining" from :meth:`drain` on; "dead" once the engine has ended.
    """

    def __init__(self, send: Callable[[bytes], None], stop: asyncio.Event) -> None:
        self._send_frame = send
        self._stop = stop
        self._encoder = msgspec.msgpack.Encoder()
        self._messages: list[FromFrontEnd] = []  # of this turn of the loop
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_draining = False
        self._is_dead = False
        self._facts: EngineFacts | None = None
        self._tokenizer: Tokenizer | None = None
        self._door: Door | None = None
        self._questions = Questions()
        self._streams = Streams(self.send, self._admit, self._make_text)

    @property
    def state(self) -> EngineState:
        if self._is_dead:
            return "dead"
        if self._is_draining:
            return "draining"
        return "starting" if self._facts is None else "ready"

    def start(self) -> None:
        """Does nothing: the engine's process starts the engine."""

    async def wait_ready(self) -> None:
        """Waits until the engine accepts requests. If it never does, this waits for ever, until the process is told to end."""
        await asyncio.shield(self._ready)

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests of this front end, and waits until those in flight have ended. After ``timeout_s`` seconds they are aborted."""
        self._is_draining = True
        await self._streams.drain(timeout_s)

    def close(self) -> None:
        """Does nothing: other front ends use the engine too."""

    # -- Requests -----------------------------------------------------------------------------------------------------------------------------

    def make_request(
        self, prompt_token_ids: Iterable[int], sampling_params: SamplingParams, request_id: str | None = None, options: RequestOptions | None = None
    ) -> Request:
        """A request, checked like that of ``Engine.make_request``.

        Raises:
            RequestError: The request can never be served.
            EngineNotReadyError: The engine is starting or draining.
            EngineDeadError: The engine is dead.
        """
        self._admit()
        assert self._door is not None
        return Request(
            request_id=request_id or uuid.uuid4().hex,
            prompt_token_ids=self._door.check(prompt_token_ids, sampling_params),
            sampling_params=sampling_params,
            options=dataclasses.replace(options or RequestOptions(), detokenize=False),
            arrival_s=time.monotonic(),
        )

    def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """See ``AsyncEngine.generate``."""
        return self._streams.generate(request)

    async def abort(self, request_id: str, tenant: str | None = None) -> bool:
        """See ``AsyncEngine.abort``. Also aborts a request of another front end."""
        return self.state not in ("starting", "dead") and await self._streams.abort(request_id, tenant)

    def on_end(self, listener: Callable[[Request, RequestOutput], None]) -> None:
        """See ``AsyncEngine.on_end``. The listener is called for the requests of this front end only."""
        self._streams.on_end(listener)

    # -- The engine's facts -------------------------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        self._built()
        assert self._tokenizer is not None
        return self._tokenizer

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
    def max_num_seqs(self) -> int:
        return self._built().max_num_seqs

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        return self._built().sampling_defaults

    async def fetch_stats(self) -> EngineStats:
        """The engine's counts.

        Raises:
            EngineError: There is no engine, or it does not answer.
        """
        self._living()
        return await self._questions.ask(lambda question: self.send(AskStats(question)))

    async def inspect(self) -> SchedulerView:
        """A view of the running and waiting requests of all front ends.

        Raises:
            EngineError: There is no engine, or it does not answer.
        """
        self._living()
        return await self._streams.inspect()

    # -- Beside the contract: what else the engine's process does for a front end -------------------------------------------------------------

    def count(self, api: str, endpoint: str, status: str) -> None:
        """Counts an answer; see ``metrics.CountsResponses``."""
        self.send(Counted(api, endpoint, status))

    async def render(self, accept: str) -> tuple[bytes, str]:
        """The page of ``/metrics``; see ``metrics.RendersMetrics``.

        Raises:
            EngineError: The engine's process does not answer.
        """
        return await self._questions.ask(lambda question: self.send(AskPage(question, accept)))

    def send(self, message: FromFrontEnd) -> None:
        """Sends a message, together with the others of this turn of the event loop."""
        if not self._messages:
            asyncio.get_running_loop().call_soon(self._flush)
        self._messages.append(message)

    def take(self, message: ToFrontEnd) -> None:
        """Handles a message from the engine's process."""
        match message:
            case Step(streams, token_ids, outputs, answers):
                for number, tokens in zip(streams, token_ids, strict=True):
                    self._streams.take_tokens(number, tokens)
                if outputs or answers:
                    self._streams.receive(Delivery(outputs, answers))
            case Ready(facts, tokenizer):
                self._tokenizer = Tokenizer.of(tokenizer)
                self._door = Door(facts.vocab_size, facts.max_model_len, num_pages=facts.num_pages, page_size=facts.page_size)
                self._streams.reader_buffer = facts.reader_buffer
                self._facts = facts
                if not self._ready.done():
                    self._ready.set_result(None)
            case Page(question, content, media_type):
                self._questions.answer(question, (content, media_type))
            case Stats(question, stats):
                self._questions.answer(question, stats)
            case Drain():
                self._stop.set()
            case Ended():
                self._is_dead = True
                self._streams.end_all(message.reason, message.error)
                self._questions.fail(EngineDeadError("the engine has stopped; there is nothing to look at"))
                self._stop.set()
            case Setup():
                raise AssertionError("the first message came twice")

    def _flush(self) -> None:
        messages, self._messages = self._messages, []
        self._send_frame(self._encoder.encode(messages))

    def _make_text(self, request: Request) -> TextMaker:
        detokenizer = self.tokenizer.detokenizer(request.prompt_token_ids, skip_special_tokens=request.sampling_params.skip_special_tokens)
        return TextMaker(request.sampling_params, detokenizer)

    def _built(self) -> EngineFacts:
        if self._facts is None:
            raise EngineDeadError("the engine could not be started") if self._is_dead else EngineNotReadyError("the engine is still starting")
        return self._facts

    def _living(self) -> None:
        self._built()
        if self._is_dead:
            raise EngineDeadError("the engine has stopped; there is nothing to look at")

    def _admit(self) -> None:
        if self._is_dead:
            raise EngineDeadError("the engine has stopped and answers nothing any more")
        if self._is_draining:
            raise EngineNotReadyError("the server is shutting down and takes no new requests")
        self._built()

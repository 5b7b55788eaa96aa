"""The interfaces of an engine that front ends need. ``AsyncEngine`` implements them in the engine's process, ``front_ends.remote_engine.RemoteEngine`` those
that another process can have. The front ends themselves import neither of them nor jax.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from jaxserve.engine.clients.commands import Command, Delivery, EngineFacts
from jaxserve.engine.observation.inspection import SchedulerView
from jaxserve.engine.observation.meter import Measurements
from jaxserve.engine.observation.stats import EngineStats
from jaxserve.errors import ErrorData
from jaxserve.request import FinishReason, Request, RequestOptions, RequestOutput, SamplingParams
from jaxserve.tokenizer import TokenizerData

EngineState = Literal["starting", "ready", "draining", "dead"]


class ServedTokenizer(Protocol):
    """The interface of a tokenizer; see ``jaxserve.tokenizer.Tokenizer``. It may be called from several threads."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def chat_template(self) -> str | None: ...

    @property
    def source(self) -> str: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **template_vars: Any) -> str: ...

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]: ...


class ServedEngine(Protocol):
    """The interface of an engine; see ``jaxserve.engine.async_engine.AsyncEngine``. All attributes but ``state`` exist only once the engine has been ready."""

    @property
    def state(self) -> EngineState: ...

    @property
    def tokenizer(self) -> ServedTokenizer: ...

    @property
    def model_name(self) -> str: ...

    @property
    def model_revision(self) -> str | None: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def max_num_seqs(self) -> int: ...

    @property
    def sampling_defaults(self) -> Mapping[str, Any]: ...

    def make_request(
        self, prompt_token_ids: Sequence[int], sampling_params: SamplingParams, request_id: str | None = None, options: RequestOptions | None = None
    ) -> Request:
        """A request, checked as far as possible before it runs.

        Raises:
            InvalidRequestError: The prompt is empty, or an id is out of range.
            ContextLengthError: The request is too long for the context or for the pool.
        """
        ...

    def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """The request's outputs; the last one has a finish reason. Closing it earlier aborts the request.

        Raises:
            InvalidRequestError: The request's id is in flight already.
        """
        ...

    async def abort(self, request_id: str, tenant: str | None = None) -> bool:
        """Ends a request within one step and frees its pages. If ``tenant`` is given, the request must belong to it.

        Returns:
            Whether such a request was in flight.

        Raises:
            EngineError: The engine does not answer.
        """
        ...

    async def fetch_stats(self) -> EngineStats:
        """Counters and gauges.

        Raises:
            EngineError: There is no engine, or it does not answer.
        """
        ...

    async def inspect(self) -> SchedulerView:
        """A view of the running and waiting requests.

        Raises:
            EngineError: There is no engine, or it does not answer.
        """
        ...

    def on_end(self, listener: Callable[[Request, RequestOutput], None]) -> None:
        """Sets the one listener, which is called once for each request that ends, with its last output."""
        ...

    def start(self) -> None: ...

    async def wait_ready(self) -> None:
        """Waits until requests are accepted. Raises whatever made the start fail."""
        ...

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests and waits until none is in flight. After ``timeout_s`` seconds the rest is aborted."""
        ...

    def close(self) -> None: ...


class MeasuredEngine(ServedEngine, Protocol):
    """An engine in this process, whose counts can be read at once."""

    def stats(self) -> EngineStats:
        """The engine's counts. May be called from any thread.

        Raises:
            EngineNotReadyError: There is no engine yet.
        """
        ...

    def measurements(self) -> Measurements:
        """The engine's histograms. May be called from any thread, and raises as :meth:`stats` does."""
        ...


class EngineThread(Protocol):
    """The interface of the engine's thread; see ``jaxserve.engine.clients.thread.EngineThread``."""

    def attach(self, deliver: Callable[[Delivery], None], end_all: Callable[[FinishReason, ErrorData | None], None]) -> int: ...

    def detach(self, number: int, on_end: Callable[[Request, RequestOutput], None]) -> None: ...

    def send(self, number: int, command: Command) -> None: ...

    def facts(self) -> EngineFacts: ...


class HostedEngine(MeasuredEngine, Protocol):
    """An engine in this process that front ends in other processes serve."""

    @property
    def tokenizer(self) -> PortableTokenizer: ...

    @property
    def thread(self) -> EngineThread: ...


class PortableTokenizer(ServedTokenizer, Protocol):
    """A tokenizer that can be made again in another process."""

    def to_data(self) -> TokenizerData: ...

"""An engine whose answers can be computed by hand, with the interface of ``AsyncEngine``: what front ends do is seen without a model."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from jaxserve.errors import ContextLengthError, EngineDeadError, EngineError, InvalidRequestError, to_data
from jaxserve.request import Request, RequestOptions, RequestOutput, SamplingParams, Usage

BOS, EOS = 256, 257


class ByteTokenizer:
    """One token a byte, BOS in front; ``render_chat`` refuses two turns of one role in a row, as many templates do."""

    vocab_size = 258
    bos_token_id = BOS
    eos_token_ids = (EOS,)
    template_source = "test"
    source = "test"

    def __init__(self, chat_template: str | None = "{{ messages }}") -> None:
        self.chat_template = chat_template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        specials = {BOS: "<s>", EOS: "</s>"}
        pieces = [bytes([token_id]) if token_id < 256 else b"" if skip_special_tokens else specials[token_id].encode() for token_id in token_ids]
        return b"".join(pieces).decode("utf-8", "replace")

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **template_vars: Any) -> str:
        if self.chat_template is None:
            raise InvalidRequestError("this model has no chat template; use completions", param="messages")
        for before, after in itertools.pairwise(messages):
            if before["role"] == after["role"]:
                raise InvalidRequestError("the chat template refused the messages: roles must alternate", param="messages")
        turns = [f"<{message['role']}>{message['content']}" for message in messages]
        return "".join([*turns, *(f"[{name}={value}]" for name, value in template_vars.items()), "<assistant>" * add_generation_prompt])

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)


def expected_text(prompt_token_ids: Sequence[int], num_tokens: int) -> str:
    """What the fake generates: the alphabet, from a letter that the prompt decides."""
    return "".join(chr(97 + (sum(prompt_token_ids) + index) % 26) for index in range(num_tokens))


@dataclasses.dataclass
class FakeStats:
    num_running: int = 0
    num_waiting: int = 0
    max_num_seqs: int = 4


class FakeAsyncEngine:
    """Generates ``expected_text``, one token every ``step_s``.

    Args:
        state: At the start; ``start`` turns "starting" into "ready" unless ``start_error`` is given.
        step_s: Seconds a token.
        holds_start: Stay "starting" until this is false.
        fail_after: Tokens after which every request ends with ``finish_reason == "error"``.
    """

    def __init__(
        self,
        *,
        state: str = "ready",
        step_s: float = 0.0,
        fail_after: int | None = None,
        max_model_len: int = 512,
        chat_template: str | None = "{{ messages }}",
        start_error: Exception | None = None,
        holds_start: bool = False,
    ) -> None:
        self.state: Any = state
        self.step_s = step_s
        self.fail_after = fail_after
        self.max_model_len = max_model_len
        self.tokenizer = ByteTokenizer(chat_template)
        self.model_name = "fake"
        self.model_revision: str | None = None
        self.sampling_defaults: Mapping[str, Any] = {"temperature": 0.5}
        self.start_error = start_error
        self.holds_start = holds_start
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.running: dict[str, asyncio.Event] = {}
        self.closed = False
        self._starting: asyncio.Task[None] | None = None

    def make_request(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, request_id: str | None = None, options: RequestOptions | None = None
    ) -> Request:
        if not prompt_token_ids:
            raise InvalidRequestError("the prompt is empty; at least one token is needed", param="prompt")
        if not all(0 <= token_id < self.tokenizer.vocab_size for token_id in prompt_token_ids):
            raise InvalidRequestError("a token id in the prompt is out of range", param="prompt")
        num_tokens = len(prompt_token_ids) + (params.max_tokens or 1)
        if num_tokens > self.max_model_len:
            param = "prompt" if params.max_tokens is None else "max_tokens"
            raise ContextLengthError(f"maximum context length is {self.max_model_len} tokens, got {num_tokens}", param=param)
        return Request(
            request_id=request_id or f"r{len(self.requests)}", prompt_token_ids=prompt_token_ids, sampling_params=params, options=options or RequestOptions()
        )

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        if self.state == "dead":
            raise EngineDeadError("dead")
        if request.request_id in self.running:
            raise InvalidRequestError(f"request id {request.request_id!r} is in flight already", param="request_id")
        self.requests.append(request)
        stopped = self.running[request.request_id] = asyncio.Event()
        num_tokens = request.sampling_params.max_tokens or self.max_model_len - len(request.prompt_token_ids)
        text = expected_text(request.prompt_token_ids, num_tokens)
        try:
            for index, letter in enumerate(text):
                await asyncio.sleep(self.step_s)
                if stopped.is_set():
                    yield self._output(request, index, "", "abort")
                    return
                if index == self.fail_after:
                    yield self._output(request, index, "", "error", error=to_data(EngineError("the step failed")))
                    return
                stop = letter if letter in request.sampling_params.stop else None
                last = stop is not None or index == num_tokens - 1
                reason = "stop" if stop else "length" if last else None
                yield self._output(request, index + 1, "" if stop else letter, reason, stop_reason=stop)
                if last:
                    return
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.append(request.request_id)
            raise
        finally:
            del self.running[request.request_id]

    def _output(self, request: Request, num_tokens: int, text: str, reason: Any, **kw: Any) -> RequestOutput:
        usage = Usage(prompt_tokens=len(request.prompt_token_ids), completion_tokens=num_tokens)
        ids = tuple(text.encode())
        return RequestOutput(request_id=request.request_id, token_ids=ids, text=text, finish_reason=reason, usage=usage, **{"stop_reason": None, **kw})

    async def abort(self, request_id: str, tenant: str | None = None) -> bool:
        self.aborted.append(request_id)
        if request_id in self.running:
            self.running[request_id].set()
            return True
        return False

    def on_end(self, listener: Callable[[Request, RequestOutput], None]) -> None:
        pass

    max_num_seqs = 4

    async def fetch_stats(self) -> FakeStats:
        return self.stats()

    def stats(self) -> FakeStats:
        return FakeStats(num_running=len(self.running))

    def start(self) -> None:
        self._starting = asyncio.get_running_loop().create_task(self._start())

    async def _start(self) -> None:
        while self.holds_start:
            await asyncio.sleep(0.005)
        if self.start_error is not None:
            self.state = "dead"
            raise self.start_error
        self.state = "ready"

    async def wait_ready(self) -> None:
        if self._starting is not None:
            await asyncio.shield(self._starting)

    async def drain(self, timeout_s: float) -> None:
        self.state = "draining"
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self.running and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.005)
        for request_id in list(self.running):
            await self.abort(request_id)

    def close(self) -> None:
        self.closed = True
        self.state = "dead"

"""A server whose delays and capacity are known: the model of one, an in-process system under test around it, and an OpenAI-compatible HTTP server around it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

from jaxserve.bench.load.load import sleep_until
from jaxserve.bench.load.system_under_test import RequestFailedError, Stream
from jaxserve.bench.workload.plan import PlannedRequest

VOCABULARY = 32_000


@dataclasses.dataclass
class FakeModel:
    """Serves up to ``slots`` requests at once, first come, first served; the others wait.

    The first token comes ``ttft_s`` after a slot is free, each further one ``tpot_s`` after the one before, on a schedule that does not drift. Its capacity
    is ``slots / (ttft_s + (n - 1) * tpot_s)`` requests of ``n`` tokens a second.
    """

    ttft_s: float = 0.05
    tpot_s: float = 0.01
    slots: int = 1 << 30
    running: int = dataclasses.field(default=0, init=False)
    waiting: int = dataclasses.field(default=0, init=False)
    served: int = dataclasses.field(default=0, init=False)
    queue_time_s: float = dataclasses.field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._free = asyncio.Semaphore(self.slots)

    async def tokens(self, count: int) -> AsyncIterator[int]:
        loop = asyncio.get_running_loop()
        arrived_s = loop.time()
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        self.queue_time_s += loop.time() - arrived_s
        self.running += 1
        try:
            due_s = loop.time() + self.ttft_s
            for index in range(count):
                await sleep_until(due_s)
                yield index
                due_s += self.tpot_s
        finally:
            self.running -= 1
            self.served += 1
            self._free.release()


class FakeSystem:
    """The model without a network: for a virtual clock. ``fail`` names requests, by index, that are refused."""

    def __init__(self, model: FakeModel, *, refuse: frozenset[int] = frozenset()) -> None:
        self.model = model
        self.refuse = refuse
        self.sent: list[tuple[int, float]] = []

    def prepare(self, request: PlannedRequest) -> PlannedRequest:
        return request

    async def run(self, prepared: PlannedRequest, stream: Stream) -> None:
        self.sent.append((prepared.index, asyncio.get_running_loop().time()))
        if prepared.index in self.refuse:
            raise RequestFailedError("429 full", outcome="refused")
        async with contextlib.aclosing(self.model.tokens(prepared.output_len)) as tokens:
            async for _ in tokens:
                stream.piece("x")
        stream.finish("length")
        stream.usage(prepared.input_len, prepared.output_len)


@dataclasses.dataclass
class FakeServer:
    """HTTP around a :class:`FakeModel`.

    Args:
        model: Its delays.
        name: The one model served.
        usage: Whether streams end with the counts.
        token_ids: Whether prompts may be ids.
        refuses: Body fields answered by 400.
        dies_after: Requests after which it stops answering, in the middle of the next one.
        status: Of every generation request, if not 200.
        metrics: Whether ``/metrics`` is there.
        tokenizer: Whether ``/tokenize`` is there.
    """

    model: FakeModel
    name: str = "fake"
    usage: bool = True
    token_ids: bool = True
    refuses: tuple[str, ...] = ()
    dies_after: int | None = None
    status: int = 200
    metrics: bool = True
    tokenizer: bool = True
    port: int = 0
    bodies: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    streamed_s: list[list[float]] = dataclasses.field(default_factory=list)
    """Of each stream: when it began and when each of its tokens was sent."""

    async def __aenter__(self) -> FakeServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None] | None] = set()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # transports close in the loop's next turn

    def _stop(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        self._tasks.add(asyncio.current_task())
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                request, *lines = head.decode().split("\r\n")
                length = next((int(line.split(":")[1]) for line in lines if line.lower().startswith("content-length:")), 0)
                await self._answer(*request.split(" ")[:2], await reader.readexactly(length), reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            self._tasks.discard(asyncio.current_task())
            writer.close()

    async def _answer(self, method: str, path: str, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            return self._whole(writer, 200, {"object": "list", "data": [{"id": self.name, "object": "model", "max_model_len": 100_000}]})
        if path == "/metrics" and self.metrics:
            return self._whole(writer, 200, self._metrics())
        if path == "/tokenize" and self.tokenizer:
            return self._whole(writer, 200, {"count": len(json.loads(body)["prompt"].split())})
        if path not in ("/v1/completions", "/v1/chat/completions"):
            return self._whole(writer, 404, {"error": {"message": f"unknown path {path}"}})
        given = json.loads(body)
        self.bodies.append(given)
        if self.dies_after is not None and len(self.bodies) > self.dies_after:
            return self._stop()
        if self.status != 200:
            return self._whole(writer, self.status, {"error": {"message": "no"}})
        if given["model"] != self.name:
            return self._whole(writer, 404, {"error": {"message": f"no model {given['model']!r}"}})
        refused = [field for field in self.refuses if field in given]
        if not self.token_ids and not isinstance(given.get("prompt", ""), str):
            refused.append("prompt")
        if refused:
            return self._whole(writer, 400, {"error": {"message": f"{refused[0]} is not supported", "param": refused[0]}})
        await self._generate(given, path.endswith("/chat/completions"), writer)
        return None

    async def _generate(self, given: dict[str, Any], chat: bool, writer: asyncio.StreamWriter) -> None:
        prompt_tokens = 4 + sum(3 + len(message["content"].split()) for message in given["messages"]) if chat else _count(given["prompt"])
        count = given.get("max_tokens", 16)
        stream = given.get("stream", False)
        now_s = asyncio.get_running_loop().time
        times_s = [now_s()]
        if stream:
            self.streamed_s.append(times_s)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        async with contextlib.aclosing(self.model.tokens(count)) as tokens:
            async for index in tokens:
                if writer.transport.is_closing():
                    return None
                if stream:
                    finish = "length" if index == count - 1 else None
                    content = {"delta": {"content": " word"}} if chat else {"text": " word"}
                    _event(writer, {"id": "x", "object": "chunk", "model": self.name, "choices": [{"index": 0, **content, "finish_reason": finish}]})
                    times_s.append(now_s())
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": count, "total_tokens": prompt_tokens + count}
        if not stream:
            return self._whole(writer, 200, {"choices": [{"text": " word" * count, "finish_reason": "length"}], "usage": usage})
        if self.usage and given.get("stream_options", {}).get("include_usage"):
            _event(writer, {"id": "x", "choices": [], "usage": usage})
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        return None

    def _whole(self, writer: asyncio.StreamWriter, status: int, body: dict[str, Any] | str) -> None:
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)

    def _metrics(self) -> str:
        model = self.model
        return (
            "# HELP fake:num_requests_running x\n"
            f'fake:num_requests_running{{model="fake"}} {model.running}\nfake:num_requests_waiting {model.waiting}\n'
            f"fake:request_queue_time_seconds_sum {model.queue_time_s}\nfake:request_queue_time_seconds_count {model.served + model.running}\n"
        )


def _count(prompt: str | list[int]) -> int:
    return len(prompt.split()) if isinstance(prompt, str) else len(prompt)


def _event(writer: asyncio.StreamWriter, value: dict[str, Any]) -> None:
    data = b"data: " + json.dumps(value).encode() + b"\n\n"
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


async def serve(server: FakeServer, *, forever: bool) -> None:
    async with server:
        print(server.port, flush=True)
        if forever:
            await asyncio.Event().wait()
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)  # lives as long as whoever started it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ttft", type=float, default=0.05, help="seconds")
    parser.add_argument("--tpot", type=float, default=0.01, help="seconds")
    parser.add_argument("--slots", type=int, default=1 << 30)
    parser.add_argument("--name", default="fake")
    parser.add_argument("--forever", action="store_true", help="else until stdin ends")
    options = parser.parse_args()

    async def run() -> None:
        await serve(FakeServer(FakeModel(options.ttft, options.tpot, options.slots), name=options.name, port=options.port), forever=options.forever)

    asyncio.run(run())


if __name__ == "__main__":
    main()

"""Real front ends in processes of their own, around an engine of the test's with a runner whose tokens can be computed by hand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

import grpc.aio
import httpx
import psutil
import tokenizers
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tokenizers import decoders, models, pre_tokenizers

from jaxserve.config import CacheConfig, Config, EngineConfig, ModelConfig, SchedulerConfig, ServerConfig
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.engine.engine import Engine, fold_seed
from jaxserve.errors import EngineError
from jaxserve.serving.grpc_api import jaxserve_v1_pb2_grpc as pb_grpc
from jaxserve.serving.launch import serve
from jaxserve.tokenizer import Tokenizer
from tests.engine_host.fakes import EOS, LONG_POSITION, SPECIAL, FakeRunner, SlowRunner, fake_spec, plain_run
from tests.serving.servers import http_client
from tests.waiting import LIMIT_S, until

HEADERS = {"Authorization": "Bearer big-key"}
"""Of a tenant that the tests may have; harmless where there is none."""

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def byte_tokenizer() -> Tokenizer:
    """As ``fakes.FakeTokenizer``, but one that can be sent to another process: ids 0 to 255 are bytes."""
    alphabet = {character: byte for byte, character in enumerate(_byte_characters())}
    backend = tokenizers.Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>", "<special>"])
    assert (backend.token_to_id("<eos>"), backend.token_to_id("<special>")) == (EOS, SPECIAL)
    return Tokenizer(backend, eos_token_ids=(EOS,), chat_template=TEMPLATE, template_source="test", source="test")


def _byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies: itself if it can be seen, else one of those from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in visible else chr(next(others)) for byte in range(256)]


def config_of(
    runner: FakeRunner, *, server: dict[str, Any], scheduler: SchedulerConfig | None = None, engine: EngineConfig | None = None, **sections: Any
) -> Config:
    return Config(
        model=ModelConfig(source="fake"),
        cache=CacheConfig(page_size=runner.page_size, num_pages=runner.num_pages),
        scheduler=scheduler or SchedulerConfig(max_num_seqs=runner.max_num_seqs, max_tokens_per_step=64),
        engine=engine or EngineConfig(),
        server=ServerConfig(**({"port": free_port(), "grpc_port": free_port(), "processes": 2} | server)),
        **sections,
    )


def engine_of(runner: FakeRunner, config: Config, max_position: int) -> Engine:
    clock = runner.clock if isinstance(runner, SlowRunner) else time.monotonic
    overlap = bool(config.engine.overlap)
    return Engine(runner, byte_tokenizer(), fake_spec(max_position), config, model_name="fake", seed=0, overlap=overlap, clock=clock)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class Served:
    """A server that is ready.

    Attributes:
        clients: One for each front end, each with one connection to it.
        stubs: Likewise, over gRPC.
        pids: The process behind each.
    """

    def __init__(self, config: Config, engine: AsyncEngine, task: asyncio.Task[None]) -> None:
        self.config = config
        self.engine = engine
        self.task = task
        self.clients: list[httpx.AsyncClient] = []
        self.stubs: list[pb_grpc.InferenceStub] = []
        self.pids: list[int] = []
        self._channels: list[grpc.aio.Channel] = []

    @property
    def port(self) -> int:
        return self.config.server.port

    async def connect(self) -> None:
        """Makes the clients: connects until the kernel has given a connection of each kind to each front end."""
        clients: dict[int, httpx.AsyncClient] = {}
        stubs: dict[int, pb_grpc.InferenceStub] = {}
        while len(clients) < self.config.server.processes:
            pid, client = await self.connect_http()
            if clients.setdefault(pid, client) is not client:
                await client.aclose()
        while len(stubs) < self.config.server.processes:
            pid, stub, channel = await self._connect_grpc()
            if stubs.setdefault(pid, stub) is not stub:
                await channel.close()
            else:
                self._channels.append(channel)
        self.pids = sorted(clients)
        self.clients = [clients[pid] for pid in self.pids]
        self.stubs = [stubs[pid] for pid in self.pids]

    async def reconnect(self) -> None:
        """Makes them anew: where one has been left in the middle of an answer, its connection is closed, and the next is anybody's."""
        await self.close()
        await self.connect()

    async def connect_http(self, **options: Any) -> tuple[int, httpx.AsyncClient]:
        """A client with one connection, and the front end that has it."""
        limits = httpx.Limits(max_connections=1, keepalive_expiry=None)  # else the next connection, which may be anybody's, comes after 5 idle seconds
        client = http_client(self.port, limits=limits, headers=HEADERS, **options)
        before = _connections(self.port)
        response = await client.get("/version")
        assert response.status_code == 200
        ((pid, _),) = _connections(self.port) - before
        return pid, client

    async def _connect_grpc(self) -> tuple[int, pb_grpc.InferenceStub, grpc.aio.Channel]:
        port = self.config.server.grpc_port
        assert port is not None
        before = _connections(port)
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)])
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        ((pid, _),) = _connections(port) - before
        return pid, pb_grpc.InferenceStub(channel), channel

    async def close(self) -> None:
        """Closes the clients."""
        for each in (*self.clients, *self._channels):
            await (each.aclose() if isinstance(each, httpx.AsyncClient) else each.close())
        self.clients, self.stubs, self._channels = [], [], []

    async def all_free(self) -> None:
        """Waits until nothing is held."""

        def is_free() -> bool:
            stats = self.engine.stats()
            return stats.num_free_pages == stats.num_pages and stats.num_running == stats.num_waiting == 0

        await until(is_free)


def front_end_pids() -> list[int]:
    """The front ends of servers in this process."""
    pids: list[int] = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # one that has just ended
            if "jaxserve.serving.front_ends.process" in child.cmdline():
                pids.append(child.pid)
    return pids


def _connections(port: int) -> set[tuple[int, int]]:
    """Established connections to a port of the front ends: the process, and the other end's port."""
    return {
        (pid, connection.raddr.port)
        for pid in front_end_pids()
        for connection in psutil.Process(pid).net_connections("tcp")
        if connection.status == psutil.CONN_ESTABLISHED and connection.laddr.port == port
    }


async def start(runner: FakeRunner, *, max_position: int = LONG_POSITION, server: dict[str, Any] | None = None, **options: Any) -> Served:
    """A server with front ends, ready, with clients for each."""
    config = config_of(runner, server=server or {}, **options)
    engine = AsyncEngine(lambda: engine_of(runner, config, max_position))
    served = Served(config, engine, asyncio.create_task(serve(config, engine)))
    try:
        async with http_client(config.server.port) as probe:

            async def is_ready() -> bool:
                if served.task.done():
                    served.task.result()
                with contextlib.suppress(httpx.TransportError):
                    return (await probe.get("/ready")).status_code == 200
                return False

            await until(is_ready)
        await until(lambda: len(front_end_pids()) == config.server.processes)
        await served.connect()
    except BaseException:
        await end(served)
        raise
    return served


async def end(served: Served) -> None:
    """Drains and ends a server, unless it has ended already."""
    await served.close()
    if not served.task.done():
        os.kill(os.getpid(), signal.SIGTERM)
    with contextlib.suppress(EngineError):
        await served.task
    assert not front_end_pids()


@contextlib.asynccontextmanager
async def front_ends(runner: FakeRunner, **options: Any) -> AsyncIterator[Served]:
    """As :func:`start`, for a block."""
    served = await start(runner, **options)
    try:
        yield served
    finally:
        await end(served)


def text_of(token_ids: Sequence[int]) -> str:
    """What these bytes say."""
    return bytes(token_ids).decode("utf-8", "replace")


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 5 * LIMIT_S))


def alone(prompt: str, num_tokens: int, seed: int) -> str:
    """What a request alone in the world answers."""
    return text_of(plain_run(list(prompt.encode()), num_tokens, fold_seed(seed)))


async def complete(client: httpx.AsyncClient, prompt: str, **fields: Any) -> dict[str, Any]:
    answer = await client.post("/v1/completions", json={"prompt": prompt, "ignore_eos": True, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


@contextlib.asynccontextmanager
async def streaming(client: httpx.AsyncClient, prompt: str, **fields: Any) -> AsyncIterator[AsyncIterator[Any]]:
    """The events of a stream, parsed; leaving it closes the connection."""

    async def events(response: httpx.Response) -> AsyncIterator[Any]:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                yield data if data == "[DONE]" else json.loads(data)

    body = {"prompt": prompt, "stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}, **fields}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, (await response.aread()).decode()
        yield events(response)


async def rest_of(events: AsyncIterator[Any]) -> list[Any]:
    return [event async for event in events]


def text_in(events: list[Any]) -> str:
    return "".join(choice["text"] for event in events if event != "[DONE]" for choice in event.get("choices", []))

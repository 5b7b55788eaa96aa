"""Real front ends in processes of their own, around an engine of the test's with a runner whose tokens can be computed by hand."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import psutil
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxserve.config import CacheConfig, Config, EngineConfig, ModelConfig, SchedulerConfig, ServerConfig
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.engine.engine import Engine
from jaxserve.serving.launch import serve
from jaxserve.tokenizer import Tokenizer
from tests.engine_host.fakes import EOS, SPECIAL, FakeRunner, fake_spec
from tests.serving.servers import http_client
from tests.waiting import LIMIT_S, until

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
    return Engine(runner, byte_tokenizer(), fake_spec(max_position), config, model_name="fake", seed=0)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class Served:
    """A server that is ready.

    Attributes:
        clients: One for each front end, each with one connection to it.
    """

    def __init__(self, config: Config, engine: AsyncEngine, task: asyncio.Task[None]) -> None:
        self.config = config
        self.engine = engine
        self.task = task
        self.clients: list[httpx.AsyncClient] = []

    @property
    def port(self) -> int:
        return self.config.server.port

    async def connect(self) -> None:
        """Makes the clients: connects until the kernel has given a connection to each front end."""
        while len(self.clients) < self.config.server.processes:
            client = http_client(self.port, limits=httpx.Limits(max_connections=1))
            pid = await pid_behind(client, self.port)
            if pid in [getattr(other, "pid", None) for other in self.clients]:
                await client.aclose()
            else:
                client.pid = pid  # type: ignore[attr-defined]
                self.clients.append(client)

    def pid_of(self, index: int) -> int:
        """The process behind a client."""
        return self.clients[index].pid  # type: ignore[attr-defined]

    async def all_free(self) -> None:
        """Waits until nothing is held."""

        def is_free() -> bool:
            stats = self.engine.stats()
            return stats.num_free_pages == stats.num_pages and stats.num_running == stats.num_waiting == 0

        await until(is_free)


def front_end_pids() -> list[int]:
    """The front ends of servers in this process."""
    return [child.pid for child in psutil.Process().children() if "jaxserve.serving.front_ends.process" in " ".join(child.cmdline())]


async def pid_behind(client: httpx.AsyncClient, port: int) -> int:
    """The front end that has the client's one connection."""
    response = await client.get("/version")
    local = response.extensions["network_stream"].get_extra_info("client_addr")
    for pid in front_end_pids():
        for connection in psutil.Process(pid).net_connections("tcp"):
            if connection.status == psutil.CONN_ESTABLISHED and connection.laddr.port == port and connection.raddr and connection.raddr.port == local[1]:
                return pid
    raise AssertionError("nobody has the connection")


@contextlib.asynccontextmanager
async def front_ends(runner: FakeRunner, *, max_position: int = 4096, **options: Any) -> AsyncIterator[Served]:
    """A server with front ends, ready, with a client for each; drained and ended at the end unless the test has."""
    options.setdefault("server", {})
    config = config_of(runner, **options)
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
        yield served
    finally:
        await asyncio.gather(*(client.aclose() for client in served.clients))
        if not served.task.done():
            os.kill(os.getpid(), signal.SIGTERM)
        with contextlib.suppress(Exception):
            await asyncio.wait_for(served.task, LIMIT_S)


def text_of(token_ids: Sequence[int]) -> str:
    """What these bytes say."""
    return bytes(token_ids).decode("utf-8", "replace")

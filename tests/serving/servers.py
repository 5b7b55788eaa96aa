"""Front ends for tests: the app in process, and both servers on real sockets of the loop at hand."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import fastapi
import httpx
import uvicorn

from jaxserve.config import Config, ServerConfig
from jaxserve.serving.grpc_api.server import GrpcServer
from jaxserve.serving.http_api.app import create_app
from jaxserve.serving.metrics import MetricsPage, Responses
from jaxserve.serving.service import InferenceService
from tests.serving.fake_engine import FakeAsyncEngine
from tests.waiting import LIMIT_S

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def server_config(**fields: Any) -> Config:
    return Config(server=ServerConfig(**{"port": 0, "grpc_port": 0, **fields}))


def app_of(engine: Any, config: Config) -> fastapi.FastAPI:
    service, responses = InferenceService(engine, config), Responses()
    return create_app(service, responses, MetricsPage(engine, service, responses))


def app_client(engine: Any, config: Config | None = None) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app_of(engine, config or server_config()))
    return httpx.AsyncClient(transport=transport, base_url="http://test")


def ask(method: str, path: str, *, engine: Any = None, config: Config | None = None, **kw: Any) -> httpx.Response:
    """One request to a fresh app."""

    async def send() -> httpx.Response:
        async with app_client(engine or FakeAsyncEngine(), config) as client:
            return await client.request(method, path, **kw)

    return asyncio.run(send())


def events_of(text: str) -> list[Any]:
    """The data of server-sent events; ``[DONE]`` stays a string. Checks the framing."""
    assert text.endswith("\n\n")
    blocks = text.removesuffix("\n\n").split("\n\n")
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    payloads = [block.removeprefix("data: ") for block in blocks]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


@contextlib.asynccontextmanager
async def http_server(engine: Any, config: Config | None = None) -> AsyncIterator[int]:
    """uvicorn on a real socket; gives the port."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        app = app_of(engine, config or server_config())
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1))
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await task


@contextlib.asynccontextmanager
async def grpc_server(engine: Any, config: Config | None = None, *, serving: bool = True) -> AsyncIterator[GrpcServer]:
    """A gRPC server on a real socket."""
    server = GrpcServer(InferenceService(engine, config or server_config()), Responses())
    await server.start()
    await server.set_serving(serving)
    try:
        yield server
    finally:
        await server.stop(0)


def http_client(port: int, **options: Any) -> httpx.AsyncClient:
    """A client of such a server that waits for answers, however slow this machine is."""
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT_S, verify=False, **options)  # no TLS: no certificates to load


@dataclasses.dataclass(frozen=True)
class Raw:
    """A connection that speaks plain bytes."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def post(cls, port: int, path: str, body: dict[str, Any]) -> Raw:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        data = json.dumps(body).encode()
        writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()
        return cls(reader, writer)

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()

"""From bound ports to a drained exit."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxserve.config import Config
from jaxserve.errors import ConfigError, EngineDeadError, ModelUnavailableError
from jaxserve.request import Request, RequestOutput
from jaxserve.serving.launch import curl_line, serve
from jaxserve.serving.service import InferenceService
from tests.serving.fake_engine import FakeAsyncEngine
from tests.serving.servers import Raw, http_client, http_server, server_config
from tests.waiting import LIMIT_S, until

REPOSITORY = Path(__file__).parents[2]
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def run_served(
    scenario: Callable[[httpx.AsyncClient, grpc.aio.Channel], Awaitable[None]],
    engine: FakeAsyncEngine,
    *,
    wait_for: Sequence[asyncio.Task[Any]] = (),
    **fields: Any,
) -> float:
    """Runs a scenario beside ``serve``, then SIGTERM; returns the seconds from the signal to the end. ``wait_for`` is what the scenario leaves running."""
    config = server_config(**{"port": free_port(), "grpc_port": free_port(), **fields})

    async def run() -> float:
        served = asyncio.create_task(serve(config, engine))
        async with (
            http_client(config.server.port) as client,
            grpc.aio.insecure_channel(f"127.0.0.1:{config.server.grpc_port}") as channel,
        ):
            await asyncio.sleep(0)
            await scenario(client, channel)
            os.kill(os.getpid(), signal.SIGTERM)
            start = time.monotonic()
            await served
            seconds = time.monotonic() - start
            await asyncio.gather(*wait_for)
            return seconds

    return asyncio.run(run())


async def health_of(channel: grpc.aio.Channel) -> int:
    return (await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)).status


async def until_health(channel: grpc.aio.Channel, status: int) -> None:
    async def is_so() -> bool:
        return await health_of(channel) == status

    await until(is_so)


async def until_ready(client: httpx.AsyncClient) -> None:
    async def is_ready() -> bool:
        return (await client.get("/ready")).status_code == 200

    await until(is_ready)


def test_from_starting_to_ready_to_closed(capfd: pytest.CaptureFixture[str]) -> None:
    engine = FakeAsyncEngine(state="starting", holds_start=True)

    async def scenario(client: httpx.AsyncClient, channel: grpc.aio.Channel) -> None:
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 200
        assert (await client.post("/v1/completions", json={"prompt": "hi"})).status_code == 503
        assert await health_of(channel) == NOT_SERVING
        assert "ready" not in capfd.readouterr().err
        engine.holds_start = False
        await until_ready(client)
        assert (await client.post("/v1/completions", json={"prompt": "hi"})).status_code == 200
        await until_health(channel, SERVING)

    run_served(scenario, engine)
    assert engine.closed
    captured = capfd.readouterr()
    assert captured.out == ""
    ready, curl = captured.err.splitlines()
    assert re.fullmatch(r"ready: fake, HTTP on http://127\.0\.0\.1:\d+, gRPC on port \d+", ready)
    assert curl.startswith("curl -s http://127.0.0.1:")


def test_a_dead_engine_ends_the_server() -> None:
    engine = FakeAsyncEngine(state="starting")
    config = server_config(port=free_port(), grpc_port=free_port())

    async def run() -> None:
        served = asyncio.create_task(serve(config, engine))
        async with http_client(config.server.port) as client, grpc.aio.insecure_channel(f"127.0.0.1:{config.server.grpc_port}") as channel:
            await until_ready(client)
            await until_health(channel, SERVING)
            engine.state = "dead"
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(served, LIMIT_S)

    asyncio.run(run())
    assert engine.closed


def test_running_requests_may_finish_while_new_ones_are_refused() -> None:
    async def scenario(client: httpx.AsyncClient, channel: grpc.aio.Channel) -> None:
        await until_ready(client)

        async def be_refused() -> httpx.Response:
            await until(lambda: engine.state == "draining")
            response = await client.post("/v1/completions", json={"prompt": "hi"})
            assert engine.running
            engine.step_s = 0.0  # until now the other one was far from its end
            return response

        answers.append(asyncio.create_task(client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 500})))
        await until(lambda: engine.running)
        answers.append(asyncio.create_task(be_refused()))

    engine = FakeAsyncEngine(step_s=0.05)
    answers: list[asyncio.Task[httpx.Response]] = []
    # The client lives as long as ``serve`` does: both calls are answered before it ends.
    assert run_served(scenario, engine, drain_timeout_s=10 * LIMIT_S) < 5 * LIMIT_S
    finished, refused = (answer.result() for answer in answers)
    assert finished.json()["usage"]["completion_tokens"] == 500
    assert refused.status_code == 503


def test_requests_that_outlast_the_drain_are_ended() -> None:
    engine = FakeAsyncEngine(step_s=0.01, max_model_len=10_000)
    answers: list[Any] = []

    async def scenario(client: httpx.AsyncClient, channel: grpc.aio.Channel) -> None:
        await until_ready(client)
        answers.append(asyncio.create_task(client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 5000})))
        await until(lambda: engine.running)

    assert run_served(scenario, engine, drain_timeout_s=0.2) < 40  # the request would take 50
    assert answers[0].result().json()["choices"][0]["finish_reason"] == "abort"


def test_what_has_ended_can_be_read_as_long_as_the_drain_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is done at once; its client has not begun to read 16 MiB, more than any buffer between the two takes."""
    monkeypatch.setattr("jaxserve.serving.front_end.LEAST_CLOSING_S", 0.0)

    class Done(FakeAsyncEngine):
        async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
            for index in range(64):
                yield self._output(request, index + 1, "x" * 2**18, "length" if index == 63 else None)

    readers: list[asyncio.Task[bytes]] = []

    async def scenario(client: httpx.AsyncClient, channel: grpc.aio.Channel) -> None:
        await until_ready(client)
        connection = await Raw.post(client.base_url.port or 0, "/v1/completions", {"prompt": "hi", "stream": True})
        await connection.reader.readuntil(b"\r\n\r\n")

        async def read_late() -> bytes:
            await until(lambda: engine.state == "draining")
            await asyncio.sleep(0.6)
            text = await connection.reader.read(-1)
            await connection.close()
            return text

        readers.append(asyncio.create_task(read_late()))

    engine = Done()
    seconds = run_served(scenario, engine, drain_timeout_s=5 * LIMIT_S, wait_for=readers)
    text = readers[0].result()
    assert text.count(b"x" * 2**18) == 64 and b"[DONE]" in text
    assert 0.5 < seconds < LIMIT_S


def test_a_start_that_fails_ends_serve_with_its_error() -> None:
    engine = FakeAsyncEngine(state="starting", start_error=ModelUnavailableError("no such model"))
    with pytest.raises(ModelUnavailableError, match="no such model"):
        asyncio.run(serve(server_config(), engine))
    assert engine.closed


def test_ports_in_use_are_named_with_their_option() -> None:
    async def run() -> None:
        async with http_server(FakeAsyncEngine()) as port:
            engine = FakeAsyncEngine(state="starting")
            with pytest.raises(ConfigError, match=rf"server\.port.*127\.0\.0\.1:{port}.*in use.*--port"):
                await serve(server_config(port=port), engine)
            with pytest.raises(ConfigError, match=rf"server\.grpc_port.*127\.0\.0\.1:{port}.*--grpc-port"):
                await serve(server_config(grpc_port=port), engine)
            with pytest.raises(ConfigError, match=r"server\.host"):
                await serve(server_config(host="no such host"), engine)
            assert engine.state in ("starting", "dead"), "never started"

    asyncio.run(run())


def test_http_alone() -> None:
    async def run() -> None:
        engine = FakeAsyncEngine(state="starting")
        served = asyncio.create_task(serve(server_config(grpc_port=None), engine))
        await until(lambda: engine.state == "ready")
        os.kill(os.getpid(), signal.SIGINT)
        await served

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fields", "template", "has", "lacks"),
    [
        ({}, "t", ["http://127.0.0.1:80/v1/chat/completions", "'Content-Type: application/json'", '"messages"'], ["Authorization"]),
        ({}, None, ["/v1/completions", '"prompt"'], ["messages"]),
        ({"host": "0.0.0.0"}, "t", ["http://localhost:80/"], []),
        ({"host": "::1"}, "t", ["http://[::1]:80/"], []),
        ({"api_keys": ("a key's",), "served_model_name": "it's"}, "t", ["Authorization: Bearer a key"], []),
    ],
)
def test_curl_line(fields: dict[str, Any], template: str | None, has: list[str], lacks: list[str]) -> None:
    line = curl_line(InferenceService(FakeAsyncEngine(chat_template=template), server_config(**fields)), 80, show_key=True)
    assert "\n" not in line
    assert all(part in line for part in has)
    assert not any(part in line for part in lacks)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("template", ["t", None])
def test_the_curl_line_can_be_pasted_into_a_shell(template: str | None) -> None:
    async def run() -> bytes:
        config = server_config(api_keys=("a key's",), served_model_name="it's")
        engine = FakeAsyncEngine(chat_template=template)
        async with http_server(engine, config) as port:
            command = curl_line(InferenceService(engine, config), port, show_key=True)
            shell = await asyncio.create_subprocess_shell(command, stdout=subprocess.PIPE)
            return (await shell.communicate())[0]

    assert json.loads(asyncio.run(run()))["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(("num_signals", "status"), [(1, 0), (2, 130)])
def test_exit_status(num_signals: int, status: int) -> None:
    """The first signal drains and exits 0, the second exits at once."""
    program = textwrap.dedent("""
        import asyncio
        from jaxserve.serving.launch import serve
        from tests.serving.fake_engine import FakeAsyncEngine
        from tests.serving.servers import server_config

        class NeverDrains(FakeAsyncEngine):
            async def drain(self, timeout_s):
                print("draining", flush=True)
                await asyncio.sleep(TIMEOUT)

        asyncio.run(serve(server_config(), NeverDrains(state="starting")))
    """).replace("TIMEOUT", "0" if num_signals == 1 else "600")
    command = [sys.executable, "-W", "error", "-c", program]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        assert process.stderr.readline().startswith("ready: fake")
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "draining\n"
        if num_signals == 2:
            process.send_signal(signal.SIGINT)
        assert process.wait(timeout=LIMIT_S) == status, process.stderr.read()


def test_a_signal_while_the_engine_starts_does_not_wait_for_it() -> None:
    program = textwrap.dedent("""
        import asyncio, threading, time
        from jaxserve.serving.launch import serve
        from tests.serving.fake_engine import FakeAsyncEngine
        from tests.serving.servers import server_config

        class Compiles(FakeAsyncEngine):
            def start(self):
                threading.Thread(target=time.sleep, args=(600,)).start()
                super().start()
                print("starting", flush=True)

        asyncio.run(serve(server_config(), Compiles(state="starting", holds_start=True)))
    """)
    with subprocess.Popen([sys.executable, "-c", program], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "starting\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=LIMIT_S) == 0


def test_serving_imports_no_jax() -> None:
    program = "import sys, jaxserve.serving.launch; assert not {'jax', 'numpy', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, check=True)


def test_config_defaults_serve_both_ports() -> None:
    assert (Config().server.port, Config().server.grpc_port) == (8000, 8001)


def test_a_log_file_holds_no_key() -> None:
    line = curl_line(InferenceService(FakeAsyncEngine(), server_config(api_keys=("secret",))), 80, show_key=False)
    assert "secret" not in line and '"Authorization: Bearer $JAXSERVE_API_KEY"' in line

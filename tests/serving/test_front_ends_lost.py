"""What happens to a server with front ends as processes of their own when one of them, a reader or the engine is gone or slow, and when it is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import httpx
import psutil
import pytest

from jaxserve.config import EngineConfig
from jaxserve.errors import EngineDeadError, EngineError
from tests.engine_host.fakes import LONG, SlowRunner, long_runner
from tests.serving.front_ends import alone, complete, free_port, front_end_pids, front_ends, rest_of, run, start, streaming, text_in
from tests.serving.servers import http_client
from tests.waiting import LIMIT_S, until

REPOSITORY = Path(__file__).parents[2]


def test_a_front_end_that_is_killed_harms_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    """Its requests end and are reported, the other's tokens are what they would have been, and another takes its place."""

    async def body() -> None:
        async with front_ends(long_runner(), engine=EngineConfig(overlap=True)) as served:
            lost, kept = served.clients
            async with streaming(lost, "lost", max_tokens=LONG) as dying, streaming(kept, "kept", max_tokens=3000, seed=1) as living:
                (request_id,) = {(await anext(dying))["id"]}
                events = [await anext(living)]
                os.kill(served.pids[0], signal.SIGKILL)
                with pytest.raises(httpx.TransportError):
                    await rest_of(dying)
                await until(lambda: served.engine.stats().finished["abort"] == 1)
                events += await rest_of(living)
            assert text_in(events) == alone("kept", 3000, 1) and events[-2]["usage"]["completion_tokens"] == 3000
            await served.all_free()
            await until(lambda: f"request={request_id} finish=abort" in caplog.text)
            await until(lambda: len(front_end_pids()) == 2 and served.pids[0] not in front_end_pids())
            await served.reconnect()  # to each of the two: the new one answers
            for client in served.clients:
                assert (await complete(client, "again", max_tokens=9, seed=2))["choices"][0]["text"] == alone("again", 9, 2)

    caplog.set_level("INFO", "jaxserve")
    run(body())
    assert "another takes its place" in caplog.text


def test_an_engine_that_dies_ends_the_streams_of_every_front_end_and_the_server() -> None:
    async def body() -> None:
        runner = long_runner()
        async with front_ends(runner, engine=EngineConfig(overlap=True)) as served:
            async with streaming(served.clients[0], "a", max_tokens=LONG) as first, streaming(served.clients[1], "b", max_tokens=LONG) as second:
                streams = [[await anext(first)], [await anext(second)]]
                runner.errors = [EngineDeadError("the device is gone")]
                for events, stream in zip(streams, (first, second), strict=True):
                    events += await rest_of(stream)
                    assert events[-1]["error"]["code"] == "engine_dead" and "the device is gone" in events[-1]["error"]["message"]
            with pytest.raises(EngineDeadError, match="the device is gone"):
                await served.task

    run(body())


def test_a_server_whose_engine_has_died_exits_with_an_error() -> None:
    program = textwrap.dedent("""
        import sys, urllib.request
        from jaxserve.cli import app
        from jaxserve.engine.async_engine import AsyncEngine
        from jaxserve.errors import EngineDeadError
        from jaxserve.serving import launch
        from tests.engine_host.fakes import FakeRunner
        from tests.serving.front_ends import config_of, engine_of
        import asyncio, threading

        def dies(token_ids, seed):
            raise EngineDeadError("the device is gone")

        runner = FakeRunner(next_token=dies)
        config = config_of(runner, server={"grpc_port": None})
        engine = AsyncEngine(lambda: engine_of(runner, config, 128))

        def ask():
            request = urllib.request.Request(f"http://127.0.0.1:{config.server.port}/v1/completions", b'{"prompt": "hi"}', {"Content-Type": "application/json"})
            try:
                urllib.request.urlopen(request)
            except urllib.error.HTTPError as error:
                print(error.code, error.read().decode(), flush=True)

        launch.announce = lambda *_: threading.Thread(target=ask).start()
        app.app = lambda **_: asyncio.run(launch.serve(config, engine))
        app.main()
    """)
    ended = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=2 * LIMIT_S)
    assert ended.returncode == 1, ended.stderr
    assert "503" in ended.stdout and "engine_dead" in ended.stdout and "the device is gone" in ended.stdout
    assert "error: the engine has stopped" in ended.stderr


def test_a_stuck_step_is_told_through_every_front_end() -> None:
    """vllm#45414: who waits gets an error, health does not stay good, and the server ends."""

    async def body() -> None:
        runner = long_runner()
        runner.hold()
        async with front_ends(runner, engine=EngineConfig(overlap=True, watchdog_s=1.0)) as served:  # only the step that is held can take so long
            try:
                body = {"prompt": "hi", "max_tokens": 5}
                asking = [client.post("/v1/completions", json=body | {"stream": index == 0}) for index, client in enumerate(served.clients)]
                for answer in await asyncio.gather(*asking):
                    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
                    assert "a step took more than 1 s" in answer.json()["error"]["message"]
            finally:
                runner.release()

            async def is_healthy() -> bool:
                with contextlib.suppress(httpx.TransportError):
                    async with http_client(served.port) as client:
                        return (await client.get("/health")).status_code == 200
                return False

            assert not await is_healthy()
            with pytest.raises(EngineDeadError, match="a step took more than 1 s"):
                await served.task

    run(body())


def test_the_engine_s_process_is_killed() -> None:
    """text-generation-inference#2593: streams end with an error, no front end outlives it, and the port is free for the next server."""
    program = textwrap.dedent("""
        import asyncio, sys
        from jaxserve.config import EngineConfig
        from jaxserve.engine.async_engine import AsyncEngine
        from jaxserve.serving import launch
        from tests.engine_host.fakes import LONG_POSITION, long_runner
        from tests.serving.front_ends import config_of, engine_of

        runner = long_runner()
        config = config_of(runner, server={"port": int(sys.argv[1]), "grpc_port": None}, engine=EngineConfig(overlap=True))
        asyncio.run(launch.serve(config, AsyncEngine(lambda: engine_of(runner, config, LONG_POSITION))))
    """)
    port = free_port()

    async def body() -> None:
        process = subprocess.Popen([sys.executable, "-c", program, str(port)], cwd=REPOSITORY)
        try:
            async with http_client(port) as client:

                async def is_ready() -> bool:
                    assert process.poll() is None
                    with contextlib.suppress(httpx.TransportError):
                        return (await client.get("/ready")).status_code == 200
                    return False

                await until(is_ready)
                await until(lambda: len(psutil.Process(process.pid).children()) == 2)
                front_end_processes = psutil.Process(process.pid).children()
                async with streaming(client, "lost", max_tokens=LONG) as stream:
                    events = [await anext(stream)]
                    process.kill()
                    events += await rest_of(stream)
                assert events[-1]["error"]["code"] == "engine_dead"
        finally:
            process.kill()
            process.wait()
        for each in front_end_processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                await until(lambda each=each: each.status() == psutil.STATUS_ZOMBIE)  # where nobody collects orphans
        socket.create_server(("127.0.0.1", port)).close()

    run(body())


def test_a_slow_reader_is_paused_and_others_go_on() -> None:
    async def body() -> None:
        async with front_ends(long_runner(), engine=EngineConfig(reader_buffer=4), server={"served_model_name": "x" * 8000}) as served:  # in each event
            with socket.socket() as slow:
                slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
                slow.connect(("127.0.0.1", served.port))
                body = json.dumps({"prompt": "slow", "stream": True, "max_tokens": LONG, "ignore_eos": True}).encode()
                head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                slow.sendall(head.encode() + body)
                await until(lambda: served.engine.stats().num_paused == 1)
                for client in served.clients:
                    assert (await complete(client, "quick", max_tokens=50, seed=1))["choices"][0]["text"] == alone("quick", 50, 1)
                assert served.engine.stats().num_paused == 1
                before = served.engine.stats().num_generated_tokens
                slow.setblocking(False)
                loop, received = asyncio.get_running_loop(), 0
                while served.engine.stats().num_generated_tokens == before or received < 2**20:  # it goes on when it is read
                    received += len(await loop.sock_recv(slow, 2**16))
            await served.all_free()

    run(body())


def test_a_signal_lets_running_requests_finish_through_every_front_end() -> None:
    async def body() -> None:
        runner = long_runner()
        async with front_ends(runner, server={"drain_timeout_s": 5 * LIMIT_S}) as served:
            async with streaming(served.clients[0], "a", max_tokens=500, seed=1) as first, streaming(served.clients[1], "b", max_tokens=500, seed=2) as second:
                runner.hold()
                streams = [[await anext(first)], [await anext(second)]]
                os.kill(os.getpid(), signal.SIGTERM)
                await until(lambda: served.engine.state == "draining")
                runner.release()
                for events, stream in zip(streams, (first, second), strict=True):
                    events += await rest_of(stream)
            assert [text_in(events) for events in streams] == [alone("a", 500, 1), alone("b", 500, 2)]
            await served.task
            assert served.engine.state == "dead" and not front_end_pids()

    run(body())


def test_front_ends_that_cannot_start_end_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.serving.front_ends.fleet._PROCESS_MODULE", "jaxserve.no_such_module")
    monkeypatch.setattr("jaxserve.serving.front_ends.fleet._RESTART_PAUSE_S", 0.0)

    async def body() -> None:
        with pytest.raises(EngineError, match="3 times in a row"):
            await start(SlowRunner())

    run(body())

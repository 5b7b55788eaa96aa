"""The front ends on the real asynchronous engine (its runner is a fake): nothing is left behind, whoever leaves, and both APIs give the same texts."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio
import pytest

from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.engine.engine import Engine
from jaxserve.request import RequestOutput, SamplingParams
from jaxserve.serving.contract import ServedEngine
from jaxserve.serving.grpc_api import jaxserve_v1_pb2 as pb
from jaxserve.serving.grpc_api import jaxserve_v1_pb2_grpc as pb_grpc
from jaxserve.serving.launch import serve
from tests.engine_host.fakes import LONG, LONG_POSITION, FakeRunner, fake_engine, long_runner
from tests.serving.servers import Raw, grpc_server, http_client, http_server, server_config
from tests.waiting import LIMIT_S, until


def with_servers(scenario: Callable[[int, pb_grpc.InferenceStub], Awaitable[None]]) -> None:
    """Runs a scenario on both servers, then checks that the engine is as free as it was."""
    built: list[Engine] = []

    def build() -> Engine:
        built.append(fake_engine(FakeRunner(num_pages=128, page_size=4, max_num_seqs=16), max_position=256))
        return built[0]

    async def run() -> None:
        engine: ServedEngine = AsyncEngine(build)  # pyright checks here that the real engine is what the front ends expect
        engine.start()
        await engine.wait_ready()
        try:
            async with (
                http_server(engine) as port,
                grpc_server(engine) as server,
                grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
            ):
                await scenario(port, pb_grpc.InferenceStub(channel))
                await until(lambda: engine.stats().num_running == engine.stats().num_waiting == 0)
                assert engine.stats().num_free_pages == 128
        finally:
            engine.close()
        built[0].check_integrity()

    asyncio.run(run())


def test_both_apis_give_the_texts_of_one_by_one() -> None:
    fields = {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True}

    async def scenario(port: int, stub: pb_grpc.InferenceStub) -> None:
        async with http_client(port) as client:

            async def over_http(index: int) -> str:
                response = await client.post("/v1/completions", json={"prompt": f"prompt {index}", "seed": index, **fields})
                return response.json()["choices"][0]["text"]

            async def over_grpc(index: int) -> str:
                request = pb.GenerateRequest(text=f"prompt {index}", seed=index, **fields)
                return "".join([response.text async for response in stub.Generate(request)])

            alone = [await over_http(index) for index in range(32)]
            together = await asyncio.gather(*map(over_http, range(32)), *map(over_grpc, range(32)))
            assert together == alone * 2
            assert len(set(alone)) > 16

    with_servers(scenario)


def test_1000_random_disconnects_and_aborts_leave_all_pages_free() -> None:
    rng = random.Random(0)

    async def leave_http(port: int, stream: bool) -> None:
        connection = await Raw.post(port, "/v1/completions", {"prompt": ["one", "two"], "max_tokens": 200, "ignore_eos": True, "stream": stream})
        await asyncio.sleep(rng.random() * 0.1)
        await connection.close()

    async def leave_grpc(stub: pb_grpc.InferenceStub) -> None:
        call = stub.Generate(pb.GenerateRequest(text="three", max_tokens=200, ignore_eos=True))
        await asyncio.sleep(rng.random() * 0.1)
        call.cancel()

    async def abort(stub: pb_grpc.InferenceStub, name: str) -> None:
        call = stub.Generate(pb.GenerateRequest(text="four", max_tokens=200, ignore_eos=True, request_id=name))
        await asyncio.sleep(rng.random() * 0.1)
        await stub.Abort(pb.AbortRequest(request_id=name))
        responses = [response async for response in call]
        assert responses[-1].finish_reason in ("abort", "length")

    async def scenario(port: int, stub: pb_grpc.InferenceStub) -> None:
        def one(index: int) -> Awaitable[None]:
            if index % 4 < 2:
                return leave_http(port, index % 4 == 1)
            return leave_grpc(stub) if index % 4 == 2 else abort(stub, f"a{index}")

        for first in range(0, 1000, 50):
            await asyncio.gather(*map(one, range(first, first + 50)))

    with_servers(scenario)


def test_a_signal_lets_a_running_request_finish() -> None:
    async def run() -> None:
        engine = AsyncEngine(lambda: fake_engine(max_position=256))
        served = asyncio.create_task(serve(server_config(grpc_port=None, drain_timeout_s=LIMIT_S), engine))
        await until(lambda: engine.state == "ready")
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        outputs: list[RequestOutput] = []
        async for output in engine.generate(engine.make_request([1], params)):
            if not outputs:
                os.kill(os.getpid(), signal.SIGTERM)
            outputs.append(output)
        await served
        assert outputs[-1].finish_reason == "length"
        await until(lambda: engine.state == "dead")

    asyncio.run(run())


def test_a_signal_under_load_ends_every_stream_within_the_limit() -> None:
    """More run and wait than can be finished in time: each stream has a last output, and the server returns."""

    async def run() -> None:
        engine = AsyncEngine(lambda: fake_engine(long_runner(max_num_seqs=8), max_position=LONG_POSITION))
        served = asyncio.create_task(serve(server_config(grpc_port=None, drain_timeout_s=0.5), engine))
        await until(lambda: engine.state == "ready")

        async def stream(index: int) -> list[RequestOutput]:
            params = SamplingParams(max_tokens=(20, LONG)[index % 2], ignore_eos=True)
            return [output async for output in engine.generate(engine.make_request([index], params))]

        streams = [asyncio.create_task(stream(index)) for index in range(60)]
        await until(lambda: engine.stats().finished["length"])
        start_s = asyncio.get_running_loop().time()
        os.kill(os.getpid(), signal.SIGTERM)
        lasts = [(await task)[-1] for task in streams]
        await served
        assert asyncio.get_running_loop().time() - start_s < 50  # alone, one of the long ones takes a minute
        assert {last.finish_reason for last in lasts} == {"length", "abort"}

    asyncio.run(run())


def test_a_session_goes_on_after_a_disconnect() -> None:
    """What was computed before the client left is still there for its next turn."""

    async def scenario(port: int, stub: pb_grpc.InferenceStub) -> None:
        async with http_client(port) as client:
            body = {"prompt": "a long first turn of a conversation", "max_tokens": 200, "ignore_eos": True, "session_id": "s"}
            async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
                async for _ in answer.aiter_bytes():
                    break
            answer = await client.post("/v1/completions", json=body | {"prompt": f"{body['prompt']} and a second", "max_tokens": 2})
            assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32

    with_servers(scenario)


def test_cached_tokens_are_reported_to_who_may_share_them() -> None:
    """Over both APIs, agreeing with the engine's counts."""
    prompt = "the same long beginning of every prompt"

    async def scenario(port: int, stub: pb_grpc.InferenceStub) -> None:
        async with http_client(port) as client:

            async def over_http(**fields: object) -> int:
                answer = await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2, **fields})
                assert answer.status_code == 200, answer.text
                return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

            async def over_grpc(**fields: object) -> int:
                return [response async for response in stub.Generate(pb.GenerateRequest(text=prompt, max_tokens=2, **fields))][-1].usage.cached_tokens  # pyright: ignore[reportArgumentType]

            assert await over_http() == 0
            assert await over_http() == await over_grpc() == len(prompt) - 1
            assert await over_http(cache_salt="mine") == 0
            assert await over_grpc(cache_salt="mine") == len(prompt) - 1
            stats = (await stub.GetServerInfo(pb.GetServerInfoRequest())).stats
            assert (stats["prefix_hit_tokens"], stats["prefix_miss_tokens"]) == (3 * (len(prompt) - 1), 2 * len(prompt) + 3)

    with_servers(scenario)


def test_options_out_of_range_are_refused() -> None:
    wrong = {"priority": 1001, "deadline_ms": 0, "cache_salt": "x" * 257, "session_id": ""}

    async def scenario(port: int, stub: pb_grpc.InferenceStub) -> None:
        async with http_client(port) as client:
            for name, value in wrong.items():
                answer = await client.post("/v1/completions", json={"prompt": "hi", name: value})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
                with pytest.raises(grpc.aio.AioRpcError, match=name) as caught:
                    await anext(aiter(stub.Generate(pb.GenerateRequest(text="hi", **{name: value}))))  # pyright: ignore[reportArgumentType]
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    with_servers(scenario)

"""Refusals, tenants and limits as clients of both APIs see them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio
import pytest

from jaxserve.config import Config, SchedulerConfig, TenantsConfig
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.serving.grpc_api import jaxserve_v1_pb2 as pb
from jaxserve.serving.grpc_api import jaxserve_v1_pb2_grpc as pb_grpc
from tests.engine_host.fakes import SlowRunner, fake_engine
from tests.serving.servers import events_of, grpc_server, http_client, http_server, server_config
from tests.waiting import LIMIT_S, until

TENANTS = TenantsConfig(keys=("acme=key-a", "beta=key-b", "gamma=key-c"), limits=("beta.max_requests=1", "gamma.tokens_per_minute=49"))
LONG = {"prompt": "hi", "max_tokens": 200, "ignore_eos": True}
SLOW_S = 0.05
"""A step of this length makes such a request outlast any stall of the client."""
DEADLINE_MS = 600_000
"""Passes only when a test lets it."""


def with_servers(scheduler: SchedulerConfig, scenario: Callable[[int, pb_grpc.InferenceStub, SlowRunner, AsyncEngine], Awaitable[None]]) -> None:
    runner = SlowRunner(num_pages=256, page_size=4, max_num_seqs=scheduler.max_num_seqs)

    async def run() -> None:
        engine = AsyncEngine(lambda: fake_engine(runner, max_position=256, scheduler=scheduler, tenants=TENANTS, clock=runner.clock))
        engine.start()
        await engine.wait_ready()
        config = Config(server=server_config().server, scheduler=scheduler, tenants=TENANTS)
        try:
            async with (
                http_server(engine, config) as port,
                grpc_server(engine, config) as server,
                grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
            ):
                await scenario(port, pb_grpc.InferenceStub(channel), runner, engine)
                runner.step_s = 0.0
                runner.release()
                await until(lambda: engine.stats().num_running == engine.stats().num_waiting == 0)
        finally:
            engine.close()

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))


def auth(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def grpc_error(stub: pb_grpc.InferenceStub, key: str, **fields: object) -> tuple[grpc.StatusCode, dict[str, str]]:
    request = pb.GenerateRequest(text="hi", max_tokens=4, **fields)  # pyright: ignore[reportArgumentType]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(aiter(stub.Generate(request, metadata=(("authorization", f"Bearer {key}"),))))
    return caught.value.code(), {name: str(value) for name, value in caught.value.trailing_metadata() or ()}


def test_a_full_queue_is_503_with_retry_after() -> None:
    async def scenario(port: int, stub: pb_grpc.InferenceStub, runner: SlowRunner, engine: AsyncEngine) -> None:
        async with http_client(port, headers=auth("key-a")) as client:
            runner.step_s = SLOW_S
            busy = [asyncio.create_task(client.post("/v1/completions", json=LONG)) for _ in range(2)]
            await until(lambda: engine.stats().num_running == 2)
            for stream in (False, True):
                answer = await client.post("/v1/completions", json=LONG | {"stream": stream})
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
                assert int(answer.headers["Retry-After"]) >= 1
            code, metadata = await grpc_error(stub, "key-a")
            assert code is grpc.StatusCode.UNAVAILABLE
            assert int(metadata["retry-after"]) * 1000 == int(metadata["grpc-retry-pushback-ms"]) >= 1000
            runner.step_s = 0.0
            assert [(await task).status_code for task in busy] == [200, 200]

    with_servers(SchedulerConfig(max_num_seqs=2, max_tokens_per_step=64, max_queued_requests=0), scenario)


def test_a_used_up_quota_is_429_and_others_are_served() -> None:
    async def scenario(port: int, stub: pb_grpc.InferenceStub, runner: SlowRunner, engine: AsyncEngine) -> None:
        async with http_client(port) as client:
            runner.step_s = SLOW_S
            busy = asyncio.create_task(client.post("/v1/completions", json=LONG, headers=auth("key-b")))
            await until(lambda: engine.stats().num_running == 1)
            answer = await client.post("/v1/completions", json=LONG, headers=auth("key-b"))
            assert (answer.status_code, answer.json()["error"]["code"], answer.json()["error"]["type"]) == (429, "rate_limit_exceeded", "rate_limit_error")
            assert "tenant 'beta': 1 requests are in flight; at most 1" in answer.json()["error"]["message"] and answer.headers["Retry-After"] == "1"
            code, metadata = await grpc_error(stub, "key-b")
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and metadata["error-code"] == "rate_limit_exceeded" and metadata["retry-after"] == "1"
            for key, status in (("key-a", 200), ("key-x", 401)):
                assert (await client.post("/v1/completions", json=LONG | {"max_tokens": 2}, headers=auth(key))).status_code == status
            runner.step_s = 0.0
            assert (await busy).status_code == 200

    with_servers(SchedulerConfig(max_num_seqs=4, max_tokens_per_step=64), scenario)


def test_a_deadline_is_504_before_the_first_token_and_an_error_event_after_it() -> None:
    async def scenario(port: int, stub: pb_grpc.InferenceStub, runner: SlowRunner, engine: AsyncEngine) -> None:
        runner.step_s = SLOW_S
        body = LONG | {"deadline_ms": DEADLINE_MS}
        async with http_client(port, headers=auth("key-a")) as client:
            whole = asyncio.create_task(client.post("/v1/completions", json=body))
            await until(lambda: engine.stats().num_running == 1)
            runner.skipped_s += DEADLINE_MS / 1000
            answer = await whole
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
            async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
                assert answer.status_code == 200
                runner.skipped_s += DEADLINE_MS / 1000
                text = (await answer.aread()).decode()
            assert "deadline_exceeded" in text.strip().rpartition("data: ")[2] and "[DONE]" not in text
        request = pb.GenerateRequest(text="hi", max_tokens=200, deadline_ms=DEADLINE_MS)
        responses = aiter(stub.Generate(request, metadata=(("authorization", "Bearer key-a"),)))
        await anext(responses)
        runner.skipped_s += DEADLINE_MS / 1000
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in responses:
                pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert engine.stats().refused["deadline"] == 3

    with_servers(SchedulerConfig(max_num_seqs=4, max_tokens_per_step=64), scenario)


def test_a_deadline_that_passes_in_the_queue_says_when_to_try_again() -> None:
    async def scenario(port: int, stub: pb_grpc.InferenceStub, runner: SlowRunner, engine: AsyncEngine) -> None:
        async with http_client(port, headers=auth("key-a")) as client:
            runner.step_s = SLOW_S
            busy = asyncio.create_task(client.post("/v1/completions", json=LONG))
            await until(lambda: engine.stats().num_running == 1)
            late = [asyncio.create_task(client.post("/v1/completions", json=LONG | {"deadline_ms": DEADLINE_MS, "stream": stream})) for stream in (False, True)]
            also_late = asyncio.create_task(grpc_error(stub, "key-a", deadline_ms=DEADLINE_MS))
            await until(lambda: engine.stats().num_waiting == 3)
            runner.skipped_s += DEADLINE_MS / 1000
            for answer in [await task for task in late]:
                assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
                assert "not begun" in answer.json()["error"]["message"] and int(answer.headers["Retry-After"]) >= 1
            code, metadata = await also_late
            assert code is grpc.StatusCode.DEADLINE_EXCEEDED and int(metadata["retry-after"]) >= 1
            busy.cancel()
            await until(lambda: engine.stats().num_running == 0)
            running = asyncio.create_task(client.post("/v1/completions", json=LONG | {"deadline_ms": DEADLINE_MS}))
            await until(lambda: engine.stats().num_running == 1)
            runner.skipped_s += DEADLINE_MS / 1000
            answer = await running
            assert answer.status_code == 504 and "Retry-After" not in answer.headers  # it ran: the queue has nothing to do with it

    with_servers(SchedulerConfig(max_num_seqs=1, max_tokens_per_step=64, queue_timeout_s=None), scenario)


@pytest.mark.parametrize(
    ("limits", "key", "prompts", "message"),
    [
        ({}, "key-b", ["hi"] * 2, r"2 prompts.* 2 requests in flight, and at most 1 are allowed \(tenants\.max_requests\)"),
        ({}, "key-c", ["hi"] * 5, r"5 prompts.* 50 tokens of prompts and max_tokens, and at most 49 .*tenants\.tokens_per_minute"),
        ({"max_queued_requests": 3}, "key-a", ["hi"] * 6, r"6 prompts.* 4 requests beyond 2 that run, and at most 3 .*scheduler\.max_queued_requests"),
        ({"max_queued_tokens": 9}, "key-a", ["hi"] * 5, r"5 prompts.* 10 prompt tokens of more requests than 2 .* at most 9 .*scheduler\.max_queued_tokens"),
    ],
)
def test_a_list_of_prompts_that_no_limit_will_ever_let_in_is_refused(limits: dict[str, int], key: str, prompts: list[str], message: str) -> None:
    async def scenario(port: int, stub: pb_grpc.InferenceStub, runner: SlowRunner, engine: AsyncEngine) -> None:
        async with http_client(port, headers=auth(key)) as client:
            for stream in (False, True):
                answer = await client.post("/v1/completions", json={"prompt": prompts, "max_tokens": 8, "stream": stream})
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (400, "prompt") and re.search(message, error["message"])
            assert engine.stats().num_requests == 0
            answer = await client.post("/v1/completions", json={"prompt": prompts[:-1], "max_tokens": 8})
            assert answer.status_code == 200

    with_servers(SchedulerConfig(max_num_seqs=2, max_tokens_per_step=64, **limits), scenario)


def test_a_limit_under_load_is_visible_in_the_answer() -> None:
    async def scenario(port: int, stub: pb_grpc.InferenceStub, runner: SlowRunner, engine: AsyncEngine) -> None:
        async with http_client(port, headers=auth("key-a")) as client:
            runner.hold()
            tasks = [asyncio.create_task(client.post("/v1/completions", json=LONG | {"max_tokens": 20})) for _ in range(4)]
            await until(lambda: runner.is_held and len(engine._streams) == 4)
            runner.release()
            answers = [(await task).json() for task in tasks]
            whole = [answer for answer in answers if "degraded" not in answer]
            limited = [answer for answer in answers if "degraded" in answer]
            assert len(whole) >= 1 and limited
            assert {answer["usage"]["completion_tokens"] for answer in whole} == {20}
            assert {(answer["usage"]["completion_tokens"], answer["degraded"]["max_tokens"]) for answer in limited} == {(3, 3)}

            await until(lambda: engine.stats().num_running == 0)
            runner.hold()
            body = LONG | {"max_tokens": 20, "stream": True}
            tasks = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(3)]
            await until(lambda: runner.is_held and len(engine._streams) == 3)
            options = [None, {"include_usage": True}]
            streams = [asyncio.create_task(client.post("/v1/completions", json=body | {"stream_options": option})) for option in options]
            await until(lambda: len(engine._streams) == 5)
            runner.release()
            for stream in streams:
                chunks = [chunk for chunk in events_of((await stream).text) if chunk != "[DONE]"]
                (end,) = (chunk for chunk in chunks if "degraded" in chunk)
                assert end["choices"][0]["finish_reason"] == "length" and end["degraded"] == {"max_tokens": 3}
            assert [(await task).status_code for task in tasks] == [200] * 3

    with_servers(SchedulerConfig(max_num_seqs=1, max_tokens_per_step=64, max_queued_requests=4, degrade_at=0.25, degraded_max_tokens=3), scenario)


def test_nobody_aborts_anothers_request() -> None:
    async def scenario(port: int, stub: pb_grpc.InferenceStub, runner: SlowRunner, engine: AsyncEngine) -> None:
        runner.step_s = SLOW_S
        call = stub.Generate(pb.GenerateRequest(text="hi", max_tokens=200, request_id="mine"), metadata=(("authorization", "Bearer key-a"),))
        await anext(aiter(call))
        for key, aborted in (("key-b", False), ("key-a", True)):
            answer = await stub.Abort(pb.AbortRequest(request_id="mine"), metadata=(("authorization", f"Bearer {key}"),))
            assert answer.aborted == aborted
        assert [response async for response in call][-1].finish_reason == "abort"

    with_servers(SchedulerConfig(max_num_seqs=4, max_tokens_per_step=64), scenario)

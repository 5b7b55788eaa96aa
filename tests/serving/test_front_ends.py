"""Front ends as processes of their own, around one server: the same answers, aborts, quotas, metrics and sessions through any of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from jaxserve.cli.scrape import parse_page
from jaxserve.config import EngineConfig, TenantsConfig
from jaxserve.serving.grpc_api import jaxserve_v1_pb2 as pb
from tests.engine_host.fakes import LONG, long_runner
from tests.serving.front_ends import HEADERS, alone, complete, end, rest_of, start, streaming, text_in
from tests.waiting import LIMIT_S


class Bench:
    """One server for several tests, whose loop runs while a test does."""

    def __init__(self, loop: asyncio.Runner) -> None:
        self.loop = loop
        self.runner = long_runner()
        tenants = TenantsConfig(keys=("small=small-key", "big=big-key"), limits=("small.max_requests=2",))
        self.served = loop.run(start(self.runner, tenants=tenants, engine=EngineConfig(overlap=True), server={"admin_keys": ("root",)}))

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        async def body() -> None:
            await asyncio.wait_for(coroutine, 2 * LIMIT_S)
            await self.served.all_free()

        self.loop.run(body())


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with asyncio.Runner() as loop:
        bench = Bench(loop)
        try:
            yield bench
        finally:
            loop.run(end(bench.served))


def test_both_front_ends_answer_as_one_process_does(bench: Bench) -> None:
    async def body() -> None:
        async def one(index: int) -> None:
            prompt, seed, client = f"prompt {index}", index, bench.served.clients[index % 2]
            if index % 4 < 2:
                answer = await complete(client, prompt, max_tokens=20 + index, seed=seed)
                text, usage = answer["choices"][0]["text"], answer["usage"]
            else:
                async with streaming(client, prompt, max_tokens=20 + index, seed=seed) as stream:
                    events = await rest_of(stream)
                text, usage = text_in(events), events[-2]["usage"]
                assert events[-1] == "[DONE]"
            assert text == alone(prompt, 20 + index, seed)
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), 20 + index)

        await asyncio.gather(*map(one, range(16)))

    bench.run(body())


def test_a_front_end_runs_no_jax(bench: Bench) -> None:
    """Seen in what a front end that has answered has mapped, not in what its modules say."""
    for pid in bench.served.pids:
        mapped = Path(f"/proc/{pid}/maps").read_text()
        assert "tokenizers" in mapped and "jaxlib" not in mapped and "numpy" not in mapped


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("at", [0, 7, 38])
def test_a_stop_string_ends_the_text_and_the_usage_where_it_stands(bench: Bench, at: int, kept: bool) -> None:
    """At the first token, in the middle, with the last; what the engine has generated since is nobody's."""
    text = alone("stop here", 40, 5)
    stop = text[at : at + 2]
    first = text.index(stop)

    async def body() -> None:
        fields = {"max_tokens": 40, "seed": 5, "stop": [stop], "include_stop_str_in_output": kept}
        for client in bench.served.clients:
            answer = await complete(client, "stop here", **fields)
            choice = answer["choices"][0]
            assert choice["text"] == text[: first + 2 * kept]
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
            assert answer["usage"]["completion_tokens"] == first + 2
            async with streaming(client, "stop here", **fields) as stream:
                events = await rest_of(stream)
            assert text_in(events) == choice["text"] and events[-2]["usage"]["completion_tokens"] == first + 2

    bench.run(body())


def test_a_request_is_aborted_through_the_other_front_end_by_its_tenant_alone(bench: Bench) -> None:
    async def body() -> None:
        served = bench.served

        def abort(index: int, request_id: str, key: str) -> Any:
            return served.stubs[index].Abort(pb.AbortRequest(request_id=request_id), metadata=(("authorization", f"Bearer {key}"),))

        async with streaming(served.clients[0], "to be aborted", max_tokens=LONG) as events:
            request_id = (await anext(events))["id"]
            assert not (await abort(1, request_id, "small-key")).aborted
            assert (await abort(1, request_id, "big-key")).aborted
            rest = await rest_of(events)
            assert [event["choices"][0]["finish_reason"] for event in rest if event != "[DONE]" and event["choices"]][-1] == "abort"
        for index in (0, 1):
            assert not (await abort(index, request_id, "big-key")).aborted

    bench.run(body())


def test_an_id_in_flight_is_refused_by_every_front_end(bench: Bench) -> None:
    async def body() -> None:
        served, metadata = bench.served, (("authorization", "Bearer big-key"),)
        first = served.stubs[0].Generate(pb.GenerateRequest(text="hi", request_id="one", max_tokens=LONG, ignore_eos=True), metadata=metadata)
        await anext(aiter(first))
        for stub in served.stubs:
            with pytest.raises(grpc.aio.AioRpcError, match="in flight already") as caught:
                await anext(aiter(stub.Generate(pb.GenerateRequest(text="hi", request_id="one"), metadata=metadata)))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await served.stubs[1].Abort(pb.AbortRequest(request_id="one"), metadata=metadata)).aborted  # it is the first one's still
        assert [response async for response in first][-1].finish_reason == "abort"

    bench.run(body())


def test_quotas_are_the_engine_s(bench: Bench) -> None:
    """Two of a tenant that may have two run, one through each front end: neither takes a third."""

    async def body() -> None:
        clients, small = bench.served.clients, {"Authorization": "Bearer small-key"}
        others = [(await bench.served.connect_http())[1] for _ in clients]
        for client in (*clients, *others):
            client.headers.update(small)
        try:
            async with streaming(clients[0], "a", max_tokens=LONG) as first, streaming(clients[1], "b", max_tokens=LONG) as second:
                await anext(first)
                await anext(second)
                for other in others:
                    refused = await other.post("/v1/completions", json={"prompt": "c"})
                    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        finally:
            for client in (*clients, *others):
                client.headers.update(HEADERS)
            for other in others:
                await other.aclose()

    bench.run(body())
    bench.loop.run(bench.served.reconnect())


def test_metrics_are_the_same_through_every_front_end(bench: Bench) -> None:
    async def body() -> None:
        served = bench.served

        async def read(index: int) -> dict[str, str]:
            page = (await served.clients[index].get("/metrics")).text
            lines = [line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#")]
            return {name: value for name, value in lines if not name.startswith("process_") and "/metrics" not in name}

        before = parse_page((await served.clients[0].get("/metrics")).text, 0.0)
        await asyncio.gather(*(complete(client, "count me", max_tokens=5) for client in served.clients for _ in range(2)))
        await served.all_free()
        pages = [await read(index) for index in (0, 1)]
        assert pages[0] == pages[1]
        after = parse_page((await served.clients[1].get("/metrics")).text, 0.0)
        assert after.value("jaxserve_requests_total") - before.value("jaxserve_requests_total") == 4
        assert after.value("jaxserve_generated_tokens_total") - before.value("jaxserve_generated_tokens_total") == 20
        name = 'jaxserve_responses_total{api="http",endpoint="/v1/completions",status="200"}'
        assert float(pages[0][name]) >= 4
        stats = [(await stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=(("authorization", "Bearer big-key"),))).stats for stub in served.stubs]
        assert stats[0] == stats[1] and stats[0]["num_requests"] == after.value("jaxserve_requests_total")

    bench.run(body())


def test_what_one_front_end_s_request_left_in_the_prefix_cache_serves_the_other_s(bench: Bench) -> None:
    prompt = "the same long beginning of every prompt, " * 10

    async def body() -> None:
        first, second = [(await complete(client, prompt, max_tokens=2, session_id="s"))["usage"] for client in bench.served.clients]
        assert first["prompt_tokens_details"]["cached_tokens"] == 0
        assert second["prompt_tokens_details"]["cached_tokens"] == (len(prompt) - 1) // 64 * 64  # whole pages

    bench.run(body())


def test_the_scheduler_s_state_and_health_through_every_front_end(bench: Bench) -> None:
    async def body() -> None:
        others = [(await bench.served.connect_http())[1] for _ in range(2)]
        async with streaming(bench.served.clients[0], "seen", max_tokens=LONG) as events:
            request_id = (await anext(events))["id"]
            for other in others:
                view = (await other.get("/debug/scheduler", headers={"Authorization": "Bearer root"})).json()
                assert [item["request_id"] for item in view["running"]] == [request_id]
                assert ((await other.get("/ready")).status_code, (await other.get("/health")).json()) == (200, {"status": "ready"})
        for other in others:
            await other.aclose()

    bench.run(body())
    bench.loop.run(bench.served.reconnect())


def test_whatever_way_a_client_goes_its_pages_are_free(bench: Bench) -> None:
    """Streams and whole answers left at once, after a while, or while they wait; each with a connection of its own."""

    async def body() -> None:
        async def leave(index: int) -> None:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{bench.served.port}", headers=HEADERS, timeout=LIMIT_S) as client:
                if index % 3 == 0:
                    async with streaming(client, f"leaves {index}", max_tokens=LONG) as events:
                        for _ in range(1 + index % 7):
                            await anext(events)
                    return
                asking = asyncio.create_task(complete(client, f"leaves {index}", max_tokens=LONG))
                if index % 3 == 1:
                    await asyncio.sleep(0.02 * (index % 5))
                asking.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asking

        await asyncio.gather(*map(leave, range(40)))
        await bench.served.all_free()
        stats = bench.served.engine.stats()
        assert stats.num_requests == sum(stats.finished.values())

    bench.run(body())

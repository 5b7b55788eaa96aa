"""What ``/metrics`` says agrees with what has happened, whatever the end of each request; and docs/metrics.md explains every name."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from jaxserve.cli.scrape import Reading, parse_page
from jaxserve.config import Config, SchedulerConfig, ServerConfig
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.engine.engine import Engine
from jaxserve.engine.observation.meter import Histogram, Meter
from jaxserve.engine.scheduling.schedule import SequenceResult
from jaxserve.engine.scheduling.sequence import Sequence
from jaxserve.request import Request, SamplingParams
from jaxserve.serving.grpc_api import jaxserve_v1_pb2 as pb
from jaxserve.serving.grpc_api import jaxserve_v1_pb2_grpc as pb_grpc
from jaxserve.serving.grpc_api.server import GrpcServer
from jaxserve.serving.http_api.app import create_app
from jaxserve.serving.metrics import MetricsPage, Responses
from jaxserve.serving.service import InferenceService
from tests.engine_host.fakes import LONG, LONG_POSITION, FakeRunner, FakeTokenizer, fake_engine, fake_spec, long_runner
from tests.serving.servers import Raw, app_client, http_client, http_server, server_config
from tests.waiting import until

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def ended(reading: Reading, name: str = "jaxserve_requests_finished_total") -> dict[str, float]:
    return {labels["finish_reason"]: value for labels, value in reading.samples[name]}


async def read(client: httpx.AsyncClient) -> Reading:
    response = await client.get("/metrics")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain; version=")
    return parse_page(response.text, 0.0)


def check_books(reading: Reading) -> None:
    """The identities that docs/metrics.md promises."""
    value = reading.value
    in_flight = sum(value(f"jaxserve_num_requests_{state}") for state in ("running", "waiting", "paused"))
    num_ended = sum(ended(reading).values())
    assert value("jaxserve_requests_total") == in_flight + num_ended
    assert value("jaxserve_num_requests_aborted_total") == ended(reading)["abort"]
    assert ended(reading) == ended(reading, "jaxserve_e2e_request_latency_seconds_count")
    for family in ("jaxserve_request_prompt_tokens", "jaxserve_request_generated_tokens", "vllm:e2e_request_latency_seconds"):
        assert value(f"{family}_count") == num_ended
    assert sum(value(f"jaxserve_kv_pages_{kind}") for kind in ("used", "cached", "free")) == value("jaxserve_kv_pages")
    for family in ("jaxserve_prefill_seconds", "vllm:time_to_first_token_seconds"):
        assert value(f"{family}_count") == value("jaxserve_time_to_first_token_seconds_count")
    # Each token is a request's first or comes after another.
    assert value("jaxserve_generated_tokens_total") == sum(value(f"jaxserve_{name}_seconds_count") for name in ("time_to_first_token", "inter_token_latency"))
    assert value("jaxserve_step_tokens_count") == value("jaxserve_step_seconds_count") <= value("jaxserve_steps_total")


def on_engine(scenario: Callable[[AsyncEngine, httpx.AsyncClient, pb_grpc.InferenceStub], Awaitable[None]], runner: FakeRunner, config: Config) -> None:
    """Runs a scenario on one engine with both APIs, which share their counts of responses; then all is idle, and the books are checked."""

    async def run() -> None:
        def build() -> Engine:
            return Engine(runner, FakeTokenizer(), fake_spec(LONG_POSITION), config, model_name="fake", seed=0)  # pyright: ignore[reportArgumentType]

        engine, responses = AsyncEngine(build), Responses()
        engine.start()
        await engine.wait_ready()
        service = InferenceService(engine, config)
        server = GrpcServer(service, responses)
        await server.start()
        transport = httpx.ASGITransport(create_app(service, responses, MetricsPage(engine, service, responses)))
        try:
            async with (
                httpx.AsyncClient(transport=transport, base_url="http://test") as client,
                grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
            ):
                await scenario(engine, client, pb_grpc.InferenceStub(channel))
                await until(lambda: engine.stats().num_running == engine.stats().num_waiting == 0)
                reading = await read(client)
                check_books(reading)
                for gauge in ("jaxserve_num_requests_running", "jaxserve_num_requests_waiting", "vllm:num_requests_running", "jaxserve_kv_pages_used"):
                    assert reading.value(gauge) == 0
        finally:
            await server.stop(0)
            engine.close()

    asyncio.run(run())


def test_every_request_counts_once_whatever_its_end() -> None:
    """Finished, aborted in every state, failed, refused by the engine and by the front end, over both APIs."""
    runner = long_runner(max_num_seqs=4)
    config = Config(
        scheduler=SchedulerConfig(max_num_seqs=4, max_tokens_per_step=16, max_queued_requests=6), server=ServerConfig(port=0, grpc_port=0)
    )  # fmt: skip

    async def scenario(engine: AsyncEngine, client: httpx.AsyncClient, stub: pb_grpc.InferenceStub) -> None:
        async def complete(**fields: object) -> int:
            return (await client.post("/v1/completions", json={"prompt": "some prompt", "ignore_eos": True, "max_tokens": 5, **fields})).status_code

        async def leave_when(num_requests: int) -> None:
            leaving = asyncio.create_task(complete(max_tokens=LONG))
            await until(lambda: engine.stats().num_requests >= num_requests)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)

        assert [await complete() for _ in range(3)] == [200] * 3
        assert await complete(temperature=-1) == 400
        assert await complete(model="another") == 404
        assert [response async for response in stub.Generate(pb.GenerateRequest(text="over gRPC", max_tokens=3, ignore_eos=True))]
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Generate(pb.GenerateRequest(text="x", top_p=7)).read()
        await until(lambda: not engine._streams)
        runner.hold()
        tasks = [asyncio.create_task(complete(max_tokens=30)) for _ in range(24)]
        await until(lambda: len(engine._streams) == 24)
        runner.release()
        statuses = await asyncio.gather(*tasks)
        assert set(statuses) == {200, 503}
        num_requests = engine.stats().num_requests
        await asyncio.gather(*(leave_when(num_requests + 5) for _ in range(5)))
        await until(lambda: engine.stats().num_running == engine.stats().num_waiting == 0)
        runner.errors = [RuntimeError("the device failed")]
        assert await complete() == 500

        reading = await read(client)
        check_books(reading)
        num_refused = sum(value for labels, value in reading.samples["jaxserve_requests_refused_total"] if labels["reason"] == "overload")
        assert num_refused == statuses.count(503) > 0
        counts = ended(reading)
        assert counts["error"] == 1 and counts["length"] == 4 + statuses.count(200) and counts["stop"] == 0
        responses = {(labels["api"], labels["endpoint"], labels["status"]): value for labels, value in reading.samples["jaxserve_responses_total"]}
        posts = {status: value for (api, endpoint, status), value in responses.items() if endpoint == "/v1/completions"}
        assert posts == {"200": 3 + statuses.count(200), "400": 1, "404": 1, "500": 1, "503": statuses.count(503), "499": 5}
        assert responses["grpc", "Generate", "INVALID_ARGUMENT"] == 1

    on_engine(scenario, runner, config)


def test_five_aborts_are_five_at_the_next_scrape() -> None:
    """Running and waiting ones, as soon as the engine knows that their clients have gone."""

    async def run() -> None:
        engine = AsyncEngine(lambda: fake_engine(long_runner(max_num_seqs=2), max_position=LONG_POSITION))
        engine.start()
        await engine.wait_ready()
        try:
            async with http_server(engine) as port, http_client(port) as client:
                connections = [
                    await Raw.post(port, "/v1/completions", {"prompt": "hi", "max_tokens": LONG, "ignore_eos": True, "stream": index % 2 == 0})
                    for index in range(5)
                ]
                await until(lambda: engine.stats().num_requests == 5)
                await asyncio.gather(*(connection.close() for connection in connections))
                await until(lambda: engine.stats().finished["abort"] == 5)
                reading = await read(client)
                check_books(reading)
                assert reading.value("jaxserve_num_requests_aborted_total") == 5
                assert ended(reading) == {"stop": 0, "length": 0, "abort": 5, "error": 0}
                assert reading.value("jaxserve_num_requests_running") == reading.value("vllm:num_requests_waiting") == 0
        finally:
            engine.close()

    asyncio.run(run())


def test_both_formats_parse_and_the_documentation_lists_every_name() -> None:
    async def run() -> tuple[str, str]:
        engine = AsyncEngine(fake_engine)
        engine.start()
        await engine.wait_ready()
        try:
            async with app_client(engine) as client:
                assert (await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 3})).status_code == 200
                text = await client.get("/metrics")
                openmetrics = await client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
                assert openmetrics.headers["content-type"].startswith("application/openmetrics-text")
                return text.text, openmetrics.text
        finally:
            engine.close()

    text, openmetrics = asyncio.run(run())
    families = {family.name: family for family in parse_text(text)}
    assert {family.name for family in parse_openmetrics(openmetrics)} == {name.removesuffix("_info") for name in families}
    names = {f"{name}_total" if family.type == "counter" else name for name, family in families.items()}
    assert len(names) == len(families) and all(family.documentation for family in families.values())
    rows = re.findall(r"^\| (`.+?) \| (.*?) \| (.*?) \|$", DOCS.read_text("utf-8"), re.MULTILINE)
    documented = [name for cell, _, _ in rows for name in re.findall(r"`((?:jaxserve_|vllm:|process_)\w+)`", cell)]
    assert sorted(documented) == sorted(names)
    assert all(unit and meaning for _, unit, meaning in rows)


def test_an_engine_that_starts_or_is_dead_has_a_page() -> None:
    async def run() -> None:
        gate = asyncio.Event()
        loop = asyncio.get_running_loop()

        def build() -> Engine:
            asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()
            return fake_engine()

        engine = AsyncEngine(build)
        engine.start()
        async with app_client(engine) as client:
            reading = await read(client)
            assert reading.label("jaxserve_engine_state", "state") == "starting" and "jaxserve_requests_total" not in reading.samples
            gate.set()
            await engine.wait_ready()
            engine.close()
            reading = await read(client)
            assert reading.label("jaxserve_engine_state", "state") == "dead" and reading.value("jaxserve_kv_pages_free") == 64

    asyncio.run(run())


def test_metrics_need_no_key_and_other_paths_add_no_labels() -> None:
    async def run() -> None:
        engine = AsyncEngine(fake_engine)
        engine.start()
        await engine.wait_ready()
        try:
            async with app_client(engine, server_config(api_keys=("secret",))) as client:
                for index in range(50):
                    await client.get(f"/path/{index}", headers={"Authorization": "Bearer secret"})
                    await client.get(f"/v1/models/model-{index}", headers={"Authorization": "Bearer secret"})
                await client.get("/v1/models")
                responses = {(labels["endpoint"], labels["status"]): value for labels, value in (await read(client)).samples["jaxserve_responses_total"]}
                assert responses == {("other", "404"): 50, ("/v1/models/{name:path}", "404"): 50, ("other", "401"): 1}
        finally:
            engine.close()

    asyncio.run(run())


def test_a_histogram_puts_a_value_into_the_bucket_that_it_does_not_pass() -> None:
    histogram = Histogram((1.0, 2.0))
    for value, count in ((0.5, 1), (1.0, 2), (1.5, 1), (2.5, 3)):
        histogram.observe(value, count)
    snapshot = histogram.snapshot()
    assert snapshot.counts == (3, 1, 3) and snapshot.total == 0.5 + 2.0 + 1.5 + 7.5 and snapshot.num_values == 7


ONE = SequenceResult([7])


def test_times_between_tokens_are_each_request_s_own() -> None:
    """Two in every step, one of which misses one; another begins meanwhile."""

    def sequence(arrival_s: float) -> Sequence:
        request = Request(request_id=str(arrival_s), prompt_token_ids=[1], sampling_params=SamplingParams(), arrival_s=arrival_s)
        new = Sequence.of(request, seed=0, max_tokens=9)
        new.scheduled_s = arrival_s + 0.25
        return new

    meter, steady, patient, late = Meter(), sequence(0.0), sequence(0.5), sequence(2.0)
    meter.tokens([(each, ONE) for each in (steady, patient)], 1.0)
    meter.tokens([(each, ONE) for each in (steady,)], 1.75)
    meter.tokens([(each, ONE) for each in (steady, patient, late)], 4.0)
    meter.tokens([(each, ONE) for each in (steady, patient, late)], 4.5)
    snapshot = meter.snapshot()
    assert snapshot.first_token_s.num_values == snapshot.queue_s.num_values == 3 and snapshot.first_token_s.total == 1.0 + 0.5 + 2.0
    assert snapshot.inter_token_s.num_values == 6 and snapshot.inter_token_s.total == 0.75 + 2.25 + 3.0 + 3 * 0.5
    for own in (steady, patient, late):
        own.token_ids += [7] * 3
        times = meter.finish(own, "length", 5.0)
        assert (times.last_token_s, times.finished_s) == (4.5, 5.0)
    assert meter.snapshot().per_token_s.total == pytest.approx((3.5 + 3.5 + 0.5) / 2)

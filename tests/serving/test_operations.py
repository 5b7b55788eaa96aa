"""The scheduler's state for admins, the request log and traces: what they tell of each request, and that they tell no prompt."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import grpc
import grpc.aio
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from jaxserve.cli.scrape import parse_page
from jaxserve.config import Config, ServerConfig
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.errors import ConfigError, OverloadedError, to_data
from jaxserve.request import Request, RequestOptions, RequestOutput, RequestTimes, SamplingParams, Usage
from jaxserve.serving.grpc_api import jaxserve_v1_pb2 as pb
from jaxserve.serving.grpc_api import jaxserve_v1_pb2_grpc as pb_grpc
from jaxserve.serving.launch import serve
from jaxserve.serving.observers import Observers
from jaxserve.serving.request_log import RequestLog
from tests.engine.tiny import tiny_engine
from tests.engine_host.fakes import LONG, LONG_POSITION, SlowRunner, fake_engine, long_runner
from tests.serving.fake_engine import FakeAsyncEngine
from tests.serving.servers import app_client, ask, grpc_server, http_client, server_config
from tests.waiting import LIMIT_S, until

TRACE_ID, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """An OTLP collector that keeps the spans of all that is posted to it."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.paths: set[str] = set()
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
                collector.paths.add(self.path)
                collector.spans += [span for resource in body.resource_spans for scope in resource.scope_spans for span in scope.spans]
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextlib.contextmanager
    def running(self) -> Iterator[Collector]:
        thread = threading.Thread(target=self._server.serve_forever)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()


def fields_of(line: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in shlex.split(line))


def ended(request: Request, **fields: object) -> RequestOutput:
    plain = {"token_ids": (), "text": "", "finish_reason": "length", "stop_reason": None, "usage": Usage(prompt_tokens=3, completion_tokens=5, cached_tokens=2)}
    return RequestOutput(request_id=request.request_id, **(plain | fields))  # pyright: ignore[reportArgumentType]


def test_a_served_request_is_measured_logged_and_traced(caplog: pytest.LogCaptureFixture) -> None:
    """From end to end: a real engine with a tiny model, both observers, ``jaxserve top`` as another process, an orderly end."""
    prompt = "a secret prompt"
    caplog.set_level(logging.INFO, "jaxserve.serving")

    async def run(collector: Collector) -> None:
        with socket_port() as port:
            config = server_config(port=port, grpc_port=None, otlp_endpoint=collector.url, admin_keys=("root",))
        engine = AsyncEngine(tiny_engine)
        served = asyncio.create_task(serve(config, engine))
        await until(lambda: engine.state == "ready")
        url = f"http://127.0.0.1:{port}"
        async with http_client(port) as client:
            body = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True, "temperature": 0}
            answer = await client.post("/v1/completions", json=body, headers={"traceparent": f"00-{TRACE_ID}-{CALLER}-01"})
            assert answer.status_code == 200, answer.text
            reading = parse_page((await client.get("/metrics")).text, 0.0)
            assert reading.value("jaxserve_generated_tokens_total") == 8 and reading.value("jaxserve_prompt_tokens_total") == len(prompt)
            assert reading.value("jaxserve_inter_token_latency_seconds_count") == 7 and reading.value("jaxserve_steps_total") == 8
            assert reading.value("jaxserve_compiles_total") == 2 and 0 < reading.value("jaxserve_padding_share") < 1
            state = (await client.get("/debug/scheduler", headers={"Authorization": "Bearer root"})).json()
            assert state["running"] == state["waiting"] == [] and state["ranks"][0]["num_used_pages"] == 0
        command = [sys.executable, "-m", "jaxserve", "top", "--once", "--url", url]
        shown = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
        assert "model, jaxserve" in shown.stdout and "1 requests ended" in shown.stdout and not shown.stderr
        os.kill(os.getpid(), signal.SIGTERM)
        await served

        line = next(record.getMessage() for record in caplog.records if record.name == "jaxserve.serving.request_log")
        assert prompt not in line
        logged = fields_of(line)
        expected = {"request": answer.json()["id"], "finish": "length", "prompt_tokens": str(len(prompt)), "cached_tokens": "0", "generated_tokens": "8"}
        expected |= {"temperature": "0", "max_tokens": "8", "ignore_eos": "true", "revision": "none", "tokenizer": "fake/258"}
        assert expected.items() <= logged.items()
        assert 0 <= float(logged["queue_ms"]) < float(logged["ttft_ms"]) < float(logged["e2e_ms"])

    with Collector().running() as collector:
        asyncio.run(run(collector))
    assert collector.paths == {"/v1/traces"}
    spans = {span.name: span for span in collector.spans}
    whole = spans.pop("llm_request")
    assert whole.trace_id.hex() == TRACE_ID and whole.parent_span_id.hex() == CALLER and whole.kind == Span.SPAN_KIND_SERVER
    assert list(spans) == ["queue", "prefill", "decode"] and all(span.parent_span_id == whole.span_id for span in spans.values())
    ends = [whole.start_time_unix_nano]
    for span in spans.values():  # one begins where the other ends
        assert span.start_time_unix_nano == ends[-1]
        ends.append(span.end_time_unix_nano)
    assert ends == sorted(ends) and ends[-1] == whole.end_time_unix_nano
    assert all(prompt.encode() not in span.SerializeToString() for span in collector.spans)


@contextlib.contextmanager
def socket_port() -> Iterator[int]:
    """A port that was free a moment ago."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        yield listener.getsockname()[1]


def test_the_log_has_one_line_for_each_end_and_quotes_what_clients_wrote(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxserve.serving")
    log = RequestLog(Config(), FakeAsyncEngine())  # pyright: ignore[reportArgumentType]
    params = SamplingParams(temperature=0.25, stop=("a stop text",), seed=7)
    request = Request(
        request_id="one\nfinish=stop", prompt_token_ids=[1, 2, 3], sampling_params=params, options=RequestOptions(tenant="team", session_id="hidden")
    )
    times = RequestTimes(arrival_s=10.0, scheduled_s=10.5, first_token_s=11.0, last_token_s=12.0, finished_s=12.25)
    log(request, ended(request, times=times))
    never_ran = RequestTimes(arrival_s=10.0, scheduled_s=None, first_token_s=None, last_token_s=None, finished_s=12.0)
    log(request, ended(request, times=never_ran, finish_reason="abort"))
    log(request, ended(request, finish_reason="error", error=to_data(OverloadedError("full", retry_after_s=1.0))))
    log(request, ended(request, finish_reason="error", error=to_data(KeyError("text of a prompt"))))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 4 and not any("\n" in line or "stop text" in line or "hidden" in line or "text of" in line for line in lines)
    first, aborted, refused, failed = map(fields_of, lines)
    assert first["request"] == r"one\nfinish=stop" and first["tenant"] == "team" and first["seed"] == "7" and first["num_stops"] == "1"
    assert [first[name] for name in ("queue_ms", "ttft_ms", "tpot_ms", "e2e_ms")] == ["500", "1000", "250", "2250"]
    assert aborted["finish"] == "abort" and aborted["e2e_ms"] == "2000" and "ttft_ms" not in aborted
    assert refused["error"] == "OverloadedError" and failed["error"] == "unexpected" and "e2e_ms" not in refused


def test_the_log_can_be_switched_off_and_a_failing_observer_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxserve.serving")
    request = Request(request_id="r", prompt_token_ids=[1], sampling_params=SamplingParams())
    Observers(server_config(log_requests=False), FakeAsyncEngine())(request, ended(request))  # pyright: ignore[reportArgumentType]
    assert not caplog.records
    engine = FakeAsyncEngine()
    del engine.tokenizer
    Observers(server_config(), engine)(request, ended(request))  # pyright: ignore[reportArgumentType]
    assert "could not be reported" in caplog.text


def test_those_who_left_are_reported_too() -> None:
    """Once each, whoever ended them: the client, the engine, or its door."""

    async def run() -> None:
        engine = AsyncEngine(lambda: fake_engine(long_runner(max_num_seqs=2), max_position=LONG_POSITION))
        reported: list[tuple[str, str | None]] = []
        engine.on_end(lambda request, last: reported.append((request.request_id, last.finish_reason)))
        engine.start()
        await engine.wait_ready()
        try:
            async for _ in engine.generate(engine.make_request([1], SamplingParams(max_tokens=2, ignore_eos=True), "finished")):
                pass
            leaving = engine.generate(engine.make_request([1], SamplingParams(max_tokens=LONG, ignore_eos=True), "left"))
            await anext(leaving)
            await leaving.aclose()
            await until(lambda: len(reported) == 2)
            assert reported == [("finished", "length"), ("left", "abort")]
        finally:
            engine.close()

    asyncio.run(run())


def test_the_caller_s_trace_is_handed_on_by_both_apis_if_it_is_well_formed() -> None:
    async def run() -> None:
        engine = FakeAsyncEngine()
        right = f"00-{TRACE_ID}-{CALLER}-01"
        async with app_client(engine) as client, grpc_server(engine) as server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            for value in (right, "00-xyz", ""):
                await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1}, headers={"traceparent": value})
                call = pb_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(text="hi", max_tokens=1), metadata=(("traceparent", value),))
                assert [response async for response in call]
        assert [request.options.traceparent for request in engine.requests] == [right] * 2 + [None] * 4

    asyncio.run(run())


def test_traces_that_cannot_be_made_are_configuration_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    for endpoint in ("localhost:4317", "grpc://host:4317", "http://"):
        with pytest.raises(ConfigError, match="otlp_endpoint"):
            Observers(server_config(otlp_endpoint=endpoint), FakeAsyncEngine())  # pyright: ignore[reportArgumentType]
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'jaxserve\[otel\]'"):
        Observers(server_config(otlp_endpoint="http://localhost:4318"), FakeAsyncEngine())  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("server", "key", "status"),
    [
        (ServerConfig(), None, 404),
        (ServerConfig(api_keys=("api",)), None, 404),
        (ServerConfig(admin_keys=("root",)), None, 401),
        (ServerConfig(admin_keys=("root",)), "wrong", 401),
        (ServerConfig(admin_keys=("root",), api_keys=("api",)), "api", 403),
        (ServerConfig(admin_keys=("root",), api_keys=("api",)), "root", 503),  # the fake one has no engine to look at
    ],
)
def test_the_scheduler_s_state_takes_an_admin_key(server: ServerConfig, key: str | None, status: int) -> None:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    engine = AsyncEngine(lambda: fake_engine())
    assert ask("GET", "/debug/scheduler", engine=engine, config=Config(server=server), headers=headers).status_code == status
    if key == "root":
        assert ask("GET", "/v1/models", engine=engine, config=Config(server=server), headers=headers).status_code == 401


def test_the_scheduler_s_state_shows_who_runs_and_who_waits() -> None:
    async def run() -> None:
        runner = SlowRunner(step_s=0.1, num_pages=64, page_size=4, max_num_seqs=2)
        engine = AsyncEngine(lambda: fake_engine(runner, max_position=256))
        engine.start()
        await engine.wait_ready()
        try:
            async with app_client(engine, server_config(admin_keys=("root",))) as client:
                body = {"prompt": "the prompt", "max_tokens": 100, "ignore_eos": True}
                posts = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(4)]
                await until(lambda: engine.stats().num_running == 2 and engine.stats().num_waiting == 2)
                answer = await client.get("/debug/scheduler", headers={"Authorization": "Bearer root"})
                state = answer.json()
                assert "the prompt" not in answer.text
                assert [item["status"] for item in state["running"]] == ["running"] * 2 and state["num_waiting"] == len(state["waiting"]) == 2
                first = state["running"][0]
                assert first["num_prompt_tokens"] == 10 and first["rank"] == 0 and first["num_pages"] >= 3 and first["max_tokens"] == 100
                assert state["waiting"][0]["rank"] is None and state["waiting"][0]["num_cached_tokens"] is None
                (rank,) = state["ranks"]
                assert rank["num_used_pages"] + rank["num_idle_pages"] + rank["num_free_pages"] == rank["num_pages"] == 64
                assert json.dumps(state)
                runner.step_s = 0.0
                assert [answer.status_code for answer in await asyncio.gather(*posts)] == [200] * 4
        finally:
            engine.close()

    asyncio.run(run())

"""The HTTP client and the OpenAI API as a system under test, against a real socket: transport, streams, and what a server refuses."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from jaxserve.bench.load import server_metrics
from jaxserve.bench.load.http_client import HttpClient
from jaxserve.bench.load.load import Run, run_load
from jaxserve.bench.load.metrics import measure
from jaxserve.bench.load.openai_system import OpenAISystem
from jaxserve.bench.load.server_metrics import compare_samples, parse_samples, read_samples
from jaxserve.bench.load.session import Result, RunOptions, ServerOptions, normalize_url, open_session
from jaxserve.bench.load.sse import EventReader
from jaxserve.bench.load.system_under_test import RequestFailedError, Stream
from jaxserve.bench.report.report import warnings_of
from jaxserve.bench.workload.plan import plan
from jaxserve.bench.workload.prompts import IdPrompts, WordPrompts
from jaxserve.bench.workload.workload import Workload
from jaxserve.errors import BenchmarkError, ConfigError
from tests.bench.fake_server import FakeModel, FakeServer
from tests.instructions import count_instructions
from tests.waiting import LIMIT_S, longer_and_longer

QUICK = FakeModel(0.002, 0.001)
ONE = Workload(arrival="closed", concurrency=1, num_requests=1, output_len="3", input_len="40")


async def bench(server: FakeServer, workload: Workload = ONE, run: RunOptions = RunOptions(num_warmup=0), **options: Any) -> Result:
    async with server, open_session(ServerOptions(url=server.url, **options), workload) as session:
        return await session.run(workload, run)


def fake(**options: Any) -> FakeServer:
    return FakeServer(FakeModel(QUICK.ttft_s, QUICK.tpot_s), **options)


def test_events_in_any_cut() -> None:
    data = b'data: {"a": 1}\n\n: ping\n\ndata:x\r\n\r\nevent: y\ndata: [DONE]\n\n'
    for size in range(1, len(data) + 1):
        reader = EventReader()
        events = [event for start in range(0, len(data), size) for event in reader.feed(data[start : start + size])]
        assert events == [b'{"a": 1}', b"x", b"[DONE]"]


@contextlib.asynccontextmanager
async def raw_server(answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> AsyncIterator[str]:
    ended: list[asyncio.Event] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended.append(asyncio.Event())
        end = ended[-1]
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await answer(reader, writer)
        writer.close()
        end.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await asyncio.gather(*(event.wait() for event in ended))
        await asyncio.sleep(0)  # transports close in the loop's next turn


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "closed the connection"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc", "closed the connection"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n", "closed the connection"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "not HTTP"),
    ],
)
def test_broken_answers(answer: bytes, message: str) -> None:
    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)

        async with raw_server(serve) as url:
            with pytest.raises(RequestFailedError, match=message):
                await HttpClient(url).request("GET", "/")

    asyncio.run(main())


def test_connections_are_used_again_and_replaced_when_the_server_closed_them() -> None:
    connections: list[int] = []

    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.append(0)
            for _ in range(2):  # then it closes without saying so
                await reader.readuntil(b"\r\n\r\n")
                connections[-1] += 1
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

        async with raw_server(serve) as url:
            client = HttpClient(url)
            for _ in range(5):
                assert (await client.request("GET", "/")).body == b"ok"
            await client.close()

    asyncio.run(main())
    assert connections == [2, 2, 1]


def test_cancelling_closes_the_connection() -> None:
    async def main() -> None:
        asked, gone = asyncio.Event(), asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            asked.set()
            await reader.read()
            gone.set()

        async with raw_server(serve) as url:
            request = asyncio.create_task(HttpClient(url).request("GET", "/"))
            await asked.wait()
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request
            await asyncio.wait_for(gone.wait(), LIMIT_S)

    asyncio.run(main())


def chunk(**choice: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, **choice}]}).encode() + b"\n\n"


@pytest.mark.parametrize(
    ("chat", "body", "pieces", "finish"),
    [
        # jaxserve: text, then an empty chunk with the reason
        (False, chunk(text="a") + chunk(text="b") + chunk(text="", finish_reason="stop"), 2, "stop"),
        # vLLM: a token of half a character is an empty chunk
        (False, chunk(text="a") + chunk(text="") + chunk(text="é", finish_reason="length"), 3, "length"),
        # the role comes before any token
        (True, chunk(delta={"role": "assistant", "content": ""}) + chunk(delta={"content": "a"}) + chunk(delta={}, finish_reason="stop"), 1, "stop"),
        (
            True,
            chunk(delta={"reasoning_content": "hm"}) + chunk(delta={"tool_calls": [{}]}) + chunk(delta={"content": None}, finish_reason="tool_calls"),
            2,
            "tool_calls",
        ),
    ],
)
def test_pieces_of_a_stream(chat: bool, body: bytes, pieces: int, finish: str) -> None:
    async def main() -> Stream:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + body + b"data: [DONE]\n\n")

        async with raw_server(serve) as url:
            stream = Stream()
            await OpenAISystem(HttpClient(url), "m", "chat" if chat else "completions", IdPrompts()).run(b"{}", stream)
            return stream

    stream = asyncio.run(main())
    assert (len(stream.piece_times_s), stream.finish_reason) == (pieces, finish)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"data: {", "closed|without a token|no stream"),
        (b"data: {\n\n", "no JSON"),
        (b'data: {"error": {"message": "out of memory"}}\n\n', "out of memory"),
        (chunk(text="a"), "without a finish reason"),
        (b'{"choices": []}', "no stream of events"),
    ],
)
def test_bad_streams(body: bytes, message: str) -> None:
    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + body)

        async with raw_server(serve) as url:
            with pytest.raises(RequestFailedError, match=message):
                await OpenAISystem(HttpClient(url), "m", "completions", IdPrompts()).run(b"{}", Stream())

    asyncio.run(main())


def test_prompts_are_ids_where_they_are_taken() -> None:
    server = fake()
    result = asyncio.run(bench(server))
    assert result.metrics.input_mismatches == 0
    assert result.info.prompt_source == "token ids"
    assert len(server.bodies[-1]["prompt"]) == 40
    assert server.bodies[-1]["ignore_eos"] is True


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize("how", ["tokenize", "usage", "local"])
def test_text_prompts_have_true_lengths(endpoint: Any, how: str) -> None:
    """The fake server's chat adds four tokens and three a message, as templates do: they count as part of the length."""
    server = fake(token_ids=False, tokenizer=how == "tokenize")
    count = (lambda text: len(text.split())) if how == "local" else None
    work = Workload(arrival="closed", concurrency=1, num_requests=3, output_len="3", input_len="40", prefix_len=20, turns=3, endpoint=endpoint)
    result = asyncio.run(bench(server, work, count_tokens=count))
    assert [record.prompt_tokens for record in result.run.records] == [60, 103, 146]
    assert result.info.exact_prompts


def test_fields_that_the_server_does_not_take_are_left_out_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    server = fake(refuses=("priority", "ignore_eos"))
    work = Workload(arrival="closed", concurrency=1, num_requests=4, output_len="3", tenants=2, priorities=(3,))
    result = asyncio.run(bench(server, work))
    assert result.metrics.completed == 4
    assert {body["user"] for body in server.bodies[-4:]} <= {"tenant-0", "tenant-1"}
    assert not any("priority" in body or "ignore_eos" in body for body in server.bodies[-4:])
    assert "does not take 'ignore_eos'" in caplog.text
    assert "does not take 'priority'" in caplog.text


def test_answers_without_usage_are_counted_by_their_pieces() -> None:
    result = asyncio.run(bench(fake(usage=False)))
    assert result.metrics.uncounted == 1
    assert result.metrics.output_tokens == 3


def test_a_tokenizer_counts_answers_too() -> None:
    def count(text: str) -> int:
        return len(text.split())

    silent = asyncio.run(bench(fake(usage=False), count_tokens=count))
    assert (silent.metrics.uncounted, silent.metrics.output_tokens, silent.metrics.recount) == (1, 3, None)
    assert asyncio.run(bench(fake(), count_tokens=count)).metrics.recount == 1
    wrong = asyncio.run(bench(fake(), count_tokens=lambda text: 2 * count(text)))
    assert wrong.metrics.recount == 2
    assert any("is it the served model's?" in warning for warning in warnings_of(wrong))


def test_figures_of_the_server_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_metrics, "READ_TIMEOUT_S", LIMIT_S)
    work = Workload(arrival="closed", concurrency=4, num_requests=8, output_len="5")
    model = FakeModel(0.02, 0.001, slots=1)

    async def main() -> tuple[Result, float]:
        server = FakeServer(model)
        async with server, open_session(ServerOptions(url=server.url), work) as session:
            before_s = model.queue_time_s
            return await session.run(work, RunOptions(num_warmup=0)), (model.queue_time_s - before_s) / 8

    result, queue_time_s = asyncio.run(main())
    assert result.server.queue_time_ms == pytest.approx(1e3 * queue_time_s) and queue_time_s > 0
    assert asyncio.run(bench(fake(metrics=False))).server.queue_time_ms is None


def test_a_server_that_dies_in_mid_run_leaves_a_report() -> None:
    work = Workload(arrival="closed", concurrency=5, num_requests=100, output_len="3")
    server = fake()

    async def main() -> Result:
        async with server, open_session(ServerOptions(url=server.url), work) as session:
            server.dies_after = len(server.bodies) + 20
            return await session.run(work, RunOptions(num_warmup=0))

    result = asyncio.run(main())
    assert result.metrics.completed >= 15
    assert "cannot connect" in (result.metrics.interrupted or "")


@pytest.mark.parametrize(
    ("server", "options", "message"),
    [
        ({}, {"model": "other"}, "model 'other' is not served .* served: fake"),
        ({"status": 500}, {}, "refuses a first small request: status 500: no"),
        ({"token_ids": False}, {"prompts": "ids"}, "does not take token ids"),
    ],
)
def test_servers_that_cannot_be_measured(server: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(BenchmarkError, match=message):
        asyncio.run(bench(fake(**server), **options))


def live_medians() -> dict[str, tuple[float, float]]:
    """At 4 requests/s: the client's medians, and those of what the server did; both in milliseconds. No token comes early, though two may come close."""
    server = FakeServer(FakeModel(0.08, 0.02))
    latencies = asyncio.run(bench(server, Workload(arrival="steady", rate=4, num_requests=10, output_len="8"))).metrics.latencies
    streams = server.streamed_s[-10:]
    sent = {
        "ttft": [first - start for start, first, *_ in streams],
        "tpot": [(last - first) / 7 for _, first, *_, last in streams],
        "itl": [after - before for _, *tokens in streams for before, after in itertools.pairwise(tokens)],
        "e2el": [last - start for start, *_, last in streams],
    }
    medians = {name: (latencies[name].median, 1e3 * statistics.median(values)) for name, values in sent.items()}
    assert all(medians[name][0] >= value - 1 for name, value in {"ttft": 80, "e2el": 220}.items()), medians
    return medians


def test_live_medians_do_not_come_early() -> None:
    assert live_medians().keys() == {"ttft", "tpot", "itl", "e2el"}


@pytest.mark.slow
def test_live_medians_are_within_3_ms() -> None:
    """What a busy machine delays between server and client is neither's fault, so the best of some tries counts: a wrong client would be wrong in each."""
    tries: list[dict[str, tuple[float, float]]] = []
    while len(tries) < 8 and not (tries and all(abs(seen - given) <= 3 for seen, given in tries[-1].values())):
        tries.append(live_medians())
    assert all(abs(seen - given) <= 3 for seen, given in tries[-1].values()), tries


def test_a_stream_costs_little() -> None:
    """500 streams of 10 tokens/s are 5,000 events a second; half a core leaves 100 µs for each, which 2,000 instructions keep on any machine of these days.

    The server's half runs in another process.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.fake_server", "--ttft", "0.1", "--tpot", "0.05"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdin is not None
        url = f"http://127.0.0.1:{process.stdout.readline().strip()}"

        def tokens(output_len: int) -> int:
            async def main() -> Run:
                client = HttpClient(url)
                system = OpenAISystem(client, "fake", "completions", IdPrompts())
                work = Workload(arrival="closed", concurrency=50, num_requests=50, output_len=str(output_len))
                run = await run_load(plan(work), system, concurrency=50)
                await client.close()
                return run

            return measure(asyncio.run(main())).output_tokens

        assert tokens(5) == 250
        short, long = (count_instructions(lambda output_len=output_len: tokens(output_len)) for output_len in (5, 25))
        assert (long - short) / (50 * 20) < 2000, (short, long)
    finally:
        process.stdin.close()  # type: ignore[union-attr]
        process.wait(LIMIT_S)
        process.stdout.close()  # type: ignore[union-attr]


async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Takes what comes and never answers."""
    await reader.read()


def test_a_server_that_never_answers_is_not_waited_for() -> None:
    async def main() -> None:
        async with raw_server(silence) as url, open_session(ServerOptions(url=url, timeout_s=0.1), ONE):
            pass

    with pytest.raises(BenchmarkError, match=r"cannot be reached: no complete answer within 0.1 s"):
        asyncio.run(asyncio.wait_for(main(), LIMIT_S))


@pytest.mark.parametrize("silent", ["/v1/completions", "/tokenize"])
def test_a_server_that_answers_some_things_is_not_waited_for(silent: str) -> None:
    class Partly(FakeServer):
        async def _answer(self, method: str, path: str, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await (silence(reader, writer) if path == silent else super()._answer(method, path, body, reader, writer))

    server = Partly(FakeModel(QUICK.ttft_s, QUICK.tpot_s), token_ids=False)
    if silent == "/v1/completions":
        with pytest.raises(BenchmarkError, match=r"no complete answer within 0.1 s"):
            asyncio.run(asyncio.wait_for(bench(server, timeout_s=0.1), LIMIT_S))
        return
    for timeout_s in longer_and_longer(0.5):
        with contextlib.suppress(BenchmarkError):  # this machine stood still for so long
            assert asyncio.run(asyncio.wait_for(bench(server, timeout_s=timeout_s), LIMIT_S)).info.exact_prompts  # there are other ways to count
            return
    pytest.fail("waited for /tokenize")


def test_metrics_that_never_come_are_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_metrics, "READ_TIMEOUT_S", 0.05)

    async def main() -> None:
        async with raw_server(silence) as url:
            assert await read_samples(HttpClient(url)) is None

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


@pytest.mark.parametrize(
    "odd",
    [
        b"null",
        b'"text"',
        b"[]",
        b'{"choices": [null]}',
        b'{"choices": {"0": 1}}',
        b'{"choices": [{"delta": {"content": ["a"]}}]}',
        b'{"usage": {"prompt_tokens": "7"}}',
    ],
)
def test_an_odd_chunk_fails_its_request_alone(odd: bytes) -> None:
    async def main() -> Run:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + chunk(delta={"content": "a"}) + b"data: " + odd + b"\n\n")

        async with raw_server(serve) as url:
            system = OpenAISystem(HttpClient(url), "m", "chat", WordPrompts())
            return await run_load(plan(ONE), system, concurrency=1)

    (record,) = asyncio.run(main()).records
    assert record.outcome == "error"
    assert record.error == f"a chunk is not in OpenAI's form: {odd.decode()}"


@pytest.mark.parametrize("url", ["http://host:80x", "ftp://host", "http://", "http://[::1", "http://host/a b", "http://hôte", "http://host:0"])
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match="must be one such as"):
        normalize_url(url)


def test_what_a_page_of_metrics_says() -> None:
    def page(count: int) -> str:
        return (
            'vllm:kv_cache_usage_perc{engine="0"} 0.8\nvllm:kv_cache_usage_perc{engine="1"} 0.6\nvllm:num_requests_running{engine="0",name="{x}"} 3\n'
            'vllm:num_requests_running{engine="1"} 4\nvllm:request_queue_time_seconds_sum 7\n'
            + "".join(
                f'vllm:request_queue_time_seconds_bucket{{engine="{engine}",le="{bound}"}} {share * count}\n'
                for engine in (0, 1)
                for bound, share in (("0.1", 0), ("0.2", 1), ("+Inf", 1))
            )
            + f"vllm:request_queue_time_seconds_count {2 * count}\nnot a sample\n"
        )

    found = compare_samples(parse_samples(page(0)), [], parse_samples(page(50)))
    assert (found.peak_kv_cache_usage, found.peak_running) == (0.8, 7)  # the fuller engine's share, the requests of both
    expected = {"median": 150, "std": 100 / 12**0.5, "p50": 150, "p90": 190, "p95": 195, "p99": 199}  # evenly between 100 and 200 ms
    assert found.estimated_queue_time_ms == pytest.approx(expected)

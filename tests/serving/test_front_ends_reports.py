"""What users of other servers reported of aborts, hangs and streams, held against two front ends and an engine whose steps overlap.

The docstrings name the reports. Those for which a server has to end are in ``test_front_ends_lost.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import signal
import socket
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest

from jaxserve.cli.scrape import parse_page
from jaxserve.config import EngineConfig, SchedulerConfig
from jaxserve.engine.clients.commands import Abort, Add, Command, Leave
from jaxserve.engine.scheduling.schedule import Schedule, SequenceResult
from jaxserve.serving.grpc_api import jaxserve_v1_pb2 as pb
from tests.engine_host.fakes import EOS, SPECIAL, FakeStep, SlowRunner, weighted_sum
from tests.serving.front_ends import Served, alone, complete, end, rest_of, start, streaming, text_in
from tests.serving.servers import http_client
from tests.waiting import LIMIT_S, until

REPOSITORY = Path(__file__).parents[2]
NUM_PAGES = 256
PAGE_SIZE = 16
POOL_TOKENS = NUM_PAGES * PAGE_SIZE


def to_say(script: Sequence[int], tail: bytes = b"") -> list[int]:
    """A prompt that ends with ``tail``, after which the runner's tokens are ``script``."""
    return [SPECIAL, len(script), len(tail), *script, *tail]


def next_token(token_ids: Sequence[int], seed: int) -> int:
    """As :func:`to_say` says it; as the other fake runners after any other prompt."""
    if token_ids[0] != SPECIAL:
        return weighted_sum(token_ids, seed)
    if len(token_ids) < 3:  # a chunk of a prompt, whose sample nobody sees
        return 0
    _, num_script, num_tail = token_ids[:3]
    index = len(token_ids) - 3 - num_script - num_tail
    return token_ids[3 + index] if 0 <= index < num_script else ord(".")


class Runner(SlowRunner):
    """One that can be told to lose the step that comes next, when it is fetched."""

    def __init__(self) -> None:
        super().__init__(num_pages=NUM_PAGES, page_size=PAGE_SIZE, max_num_seqs=4, num_host_pages=NUM_PAGES, next_token=next_token)
        self.loses_next = False

    def dispatch(self, schedule: Schedule) -> FakeStep:
        step = super().dispatch(schedule)
        if self.loses_next:
            self.loses_next = False

            def fetch() -> list[SequenceResult]:
                self.lose_pools()
                raise RuntimeError("a step is lost")

            step.fetch = fetch  # pyright: ignore[reportAttributeAccessIssue]
        return step


class Bench:
    """One server for most tests.

    Attributes:
        sent: The commands of both front ends to the engine, since the test began.
    """

    def __init__(self, loop: asyncio.Runner) -> None:
        self.loop = loop
        self.runner = Runner()
        self.sent: list[Command] = []
        scheduler = SchedulerConfig(max_num_seqs=4, max_tokens_per_step=64, preemption="swap", queue_timeout_s=None)
        options = EngineConfig(overlap=True, reader_buffer=4)
        self.served = loop.run(start(self.runner, scheduler=scheduler, engine=options, server={"served_model_name": "x" * 8000}))  # in each event

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        async def body() -> None:
            self.sent.clear()
            await self.served.reconnect()  # one that a test has left, or that was idle for long, is closed, and the next may go to the other front end
            try:
                await asyncio.wait_for(coroutine, 2 * LIMIT_S)
                await self.served.all_free()
            finally:
                self.runner.release()

        self.loop.run(body())

    async def has_sent(self, kind: type[Command], number: int) -> None:
        """Waits until the front ends have sent so many commands of a kind; the engine need not have seen them."""
        await until(lambda: sum(isinstance(command, kind) for command in self.sent) >= number)

    async def hold(self) -> None:
        """Returns when a step is held."""
        self.runner.hold()
        await until(lambda: self.runner.is_held)

    @contextlib.asynccontextmanager
    async def connections(self, index: int, number: int) -> AsyncIterator[list[httpx.AsyncClient]]:
        """So many connections more to a front end."""
        found: list[httpx.AsyncClient] = []
        async with contextlib.AsyncExitStack() as stack:
            while len(found) < number:
                pid, client = await self.served.connect_http()
                stack.push_async_callback(client.aclose)
                if pid == self.served.pids[index]:
                    found.append(client)
            yield found

    @contextlib.asynccontextmanager
    async def slow_reader(self) -> AsyncIterator[int]:
        """A client that reads nothing, until its request is paused; gives the process of its front end."""
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            slow.connect(("127.0.0.1", self.served.port))
            body = json.dumps({"prompt": "slow", "stream": True, "max_tokens": POOL_TOKENS - 10, "ignore_eos": True}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            slow.sendall(head.encode() + body)
            await until(lambda: self.served.engine.stats().num_paused == 1)
            port = slow.getsockname()[1]
            (pid,) = [pid for pid in self.served.pids if any(port in each.raddr for each in psutil.Process(pid).net_connections("tcp"))]
            yield pid

    def check_books(self) -> None:
        """Call it when nothing is in flight."""
        stats = self.served.engine.stats()
        assert stats.num_requests == sum(stats.finished.values()) and stats.num_swapped == stats.num_paused == 0
        assert self.served.engine.thread.engine is not None
        self.served.engine.thread.engine.check_integrity()


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with asyncio.Runner() as loop, pytest.MonkeyPatch.context() as patch:
        bench = Bench(loop)
        thread = bench.served.engine.thread
        send = thread.send

        def note(number: int, command: Command) -> None:
            send(number, command)
            bench.sent.append(command)

        patch.setattr(thread, "send", note)
        try:
            yield bench
        finally:
            loop.run(end(bench.served))


async def leave(*asking: asyncio.Task[Any]) -> None:
    """Cancels what waits for whole answers, which closes its connections."""
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """A process that does nothing meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


class TestAborts:
    def test_a_client_that_leaves_costs_no_step_more(self, bench: Bench) -> None:
        """vllm#54947: streams and whole answers, through each front end; the gauges say so through both."""

        async def body() -> None:
            served, runner = bench.served, bench.runner
            before = served.engine.stats().finished["abort"]
            async with bench.connections(0, 2) as first, bench.connections(1, 2) as second:
                asking = [asyncio.create_task(complete(client, "whole", max_tokens=POOL_TOKENS // 4)) for client in (first[0], second[0])]
                async with streaming(first[1], "a", max_tokens=POOL_TOKENS // 4) as a, streaming(second[1], "b", max_tokens=POOL_TOKENS // 4) as b:
                    await asyncio.gather(anext(a), anext(b))
                    await until(lambda: served.engine.stats().num_running == 4)
                    await bench.hold()
                    num_steps = runner.num_steps
                    await leave(*asking)
                await bench.has_sent(Leave, 4)
            runner.let(1)  # the one that was held
            await served.all_free()
            assert runner.num_steps == num_steps + 1
            for client in served.clients:
                page = parse_page((await client.get("/metrics")).text, 0.0)
                assert page.value("jaxserve_num_requests_running") == page.value("jaxserve_num_requests_waiting") == 0
                assert page.value("jaxserve_num_requests_aborted_total") == before + 4

        bench.run(body())

    def test_a_client_that_leaves_before_its_first_token(self, bench: Bench) -> None:
        """vllm#50425: after each chunk of its prompt. Who comes next takes the pages that a step under way still writes to, and gets its own tokens."""

        async def body() -> None:
            for num_steps in range(5):
                async with bench.connections(0, 1) as (client,):
                    bench.runner.hold()
                    asking = asyncio.create_task(complete(client, f"{num_steps}" * 150, max_tokens=1000))
                    await until(lambda: bench.runner.is_held)
                    if num_steps:
                        bench.runner.let(num_steps)
                        await until(lambda: bench.runner.is_held)
                    await leave(asking)
                    await bench.has_sent(Leave, num_steps + 1)
                kept = asyncio.create_task(complete(bench.served.clients[1], f"kept {num_steps}", max_tokens=20, seed=num_steps))
                await bench.has_sent(Add, 2 * (num_steps + 1))
                bench.runner.release()
                assert (await kept)["choices"][0]["text"] == alone(f"kept {num_steps}", 20, num_steps)
                await bench.served.all_free()
            bench.check_books()

        bench.run(body())

    def test_a_session_goes_on_through_the_other_front_end(self, bench: Bench) -> None:
        """sglang#36475: after a disconnect at the first event, and aborts of what has been aborted."""
        prompt = "the first turn of a conversation of which every page is kept"

        async def body() -> None:
            served = bench.served
            before = served.engine.stats().finished["abort"]
            async with bench.connections(0, 1) as (client,):
                async with streaming(client, prompt, max_tokens=3000, session_id="s") as events:
                    request_id = (await anext(events))["id"]
                await asyncio.gather(*(stub.Abort(pb.AbortRequest(request_id=request_id)) for stub in served.stubs * 2))
            await until(lambda: served.engine.stats().finished["abort"] == before + 1)
            for stub in served.stubs:
                assert not (await stub.Abort(pb.AbortRequest(request_id=request_id))).aborted
            answer = await complete(served.clients[1], f"{prompt} and the second", max_tokens=20, seed=3, session_id="s")
            assert answer["choices"][0]["text"] == alone(f"{prompt} and the second", 20, 3)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(prompt) // PAGE_SIZE * PAGE_SIZE
            assert served.engine.stats().finished["abort"] == before + 1

        bench.run(body())

    def test_wrong_books_cost_no_answer_and_no_server(self, bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        """sglang#36475: what an abort might have left wrong does not end the process."""
        monkeypatch.setattr("jaxserve.engine.engine._CHECK_INTERVAL_S", 0.0)

        async def body() -> None:
            engine = bench.served.engine.thread.engine
            assert engine is not None
            engine._scheduler.ranks[0].pool._free.pop()
            for client in bench.served.clients:
                assert (await complete(client, "books", max_tokens=9, seed=1))["choices"][0]["text"] == alone("books", 9, 1)
            await until(lambda: "do not add up" in caplog.text)
            await bench.served.all_free()
            bench.check_books()
            assert bench.served.engine.state == "ready"

        bench.run(body())

    def test_a_request_ends_in_whatever_queue_it_is(self, bench: Bench) -> None:
        """sglang#8352: running, swapped out, not begun, paused; by their clients' going and by their ids through the other front end."""

        async def last_of(call: Any) -> pb.GenerateResponse:
            return [response async for response in call][-1]

        async def body() -> None:
            served = bench.served
            async with bench.slow_reader():
                calls = [
                    served.stubs[index % 2].Generate(
                        pb.GenerateRequest(text=f"{index}" * 1300, request_id=f"big {index}", max_tokens=2500, ignore_eos=True, seed=index)
                    )
                    for index in range(6)
                ]  # three of them fill the pool
                lasts = [asyncio.create_task(last_of(call)) for call in calls]

                def all_states() -> bool:
                    stats = served.engine.stats()
                    return stats.num_running > 0 and stats.num_swapped > 0 and stats.num_paused == 1 and stats.num_queued_tokens >= 1300

                await until(all_states)
                await bench.hold()
                assert all_states()
                for call in calls[::2]:
                    call.cancel()
            await bench.has_sent(Leave, 4)
            aborts = [served.stubs[(index + 1) % 2].Abort(pb.AbortRequest(request_id=f"big {index}")) for index in (1, 3, 5)]  # they are under way
            await bench.has_sent(Abort, 3)
            bench.runner.release()
            assert all([(await abort).aborted for abort in aborts])
            assert [(await last).finish_reason for last in lasts[1::2]] == ["abort"] * 3
            for last in lasts[::2]:
                with pytest.raises(asyncio.CancelledError):
                    await last
            await served.all_free()
            bench.check_books()

        bench.run(body())

    def test_random_ends_leave_all_pages_free(self, bench: Bench) -> None:
        """sglang#8352, vllm-metal#479: a third is left or aborted after some events, in a pool that is too small; the others get what they would alone."""
        rng = random.Random(0)

        async def one(index: int, places: asyncio.Semaphore, client: httpx.AsyncClient) -> None:
            prompt, num_tokens, num_events = f"{index:03} " * rng.randrange(1, 200), rng.randrange(1, 200), rng.randrange(1, 20)
            async with places, client:
                async with streaming(client, prompt, max_tokens=num_tokens, seed=index) as stream:
                    events = [await anext(stream)]
                    if index % 3 == 0:
                        while len(events) < num_events and events[-1] != "[DONE]":
                            events.append(await anext(stream))
                        if index % 2:
                            await bench.served.stubs[index // 2 % 2].Abort(pb.AbortRequest(request_id=events[0]["id"]))
                            assert (await rest_of(stream) or events)[-1] == "[DONE]"
                        return
                    events += await rest_of(stream)
                assert text_in(events) == alone(prompt, num_tokens, index)

        async def body() -> None:
            places = asyncio.Semaphore(12)
            await asyncio.gather(*(one(index, places, http_client(bench.served.port)) for index in range(60)))
            await bench.served.all_free()
            bench.check_books()

        bench.run(body())

    def test_a_front_end_that_does_nothing_holds_no_pages(self, bench: Bench) -> None:
        """vllm#46283: its requests go to their end without it, and it catches up."""

        async def body() -> None:
            served = bench.served
            before = served.engine.stats().finished["length"]
            async with bench.connections(0, 1) as (client,), bench.connections(1, 1) as (other,):
                bench.runner.hold()
                bench.runner.let(3)  # too few for the reader to be called slow
                async with streaming(client, "frozen", max_tokens=100, seed=4) as events:
                    got = [await anext(events)]
                    await until(lambda: bench.runner.is_held)
                    with frozen(served.pids[0]):
                        bench.runner.release()
                        assert (await complete(other, "other", max_tokens=20, seed=1))["choices"][0]["text"] == alone("other", 20, 1)
                        await until(lambda: served.engine.stats().finished["length"] == before + 2)
                        await served.all_free()
                    got += await rest_of(events)
                assert text_in(got) == alone("frozen", 100, 4) and got[-1] == "[DONE]"

        bench.run(body())

    def test_a_paused_request_of_such_a_front_end_has_a_deadline(self, bench: Bench) -> None:
        """vllm#46283: nobody will ever say that its client reads again."""

        async def body() -> None:
            served = bench.served
            before = served.engine.stats().refused["reader_timeout"]
            async with bench.slow_reader() as pid, bench.connections(1 - served.pids.index(pid), 1) as (other,):
                with frozen(pid):
                    bench.runner.skipped_s += 301.0
                    assert (await complete(other, "other", max_tokens=20, seed=1))["choices"][0]["text"] == alone("other", 20, 1)
                    await until(lambda: served.engine.stats().refused["reader_timeout"] == before + 1)
                    await served.all_free()
            bench.check_books()

        bench.run(body())


class TestHangs:
    def test_what_can_never_fit_is_refused_and_what_just_fits_is_served(self, bench: Bench) -> None:
        """vllm#35541, vllm-rbln#957: the pool is smaller than the model's context."""

        async def body() -> None:
            for client, stub in zip(bench.served.clients, bench.served.stubs, strict=True):
                for num_prompt_tokens, num_tokens in ((POOL_TOKENS, 1), (POOL_TOKENS + 500, 1), (10, POOL_TOKENS)):
                    prompt = [65] * num_prompt_tokens
                    refused = await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": num_tokens})
                    assert refused.status_code == 400 and f"{NUM_PAGES} pages" in refused.json()["error"]["message"]
                    with pytest.raises(grpc.aio.AioRpcError, match=f"{NUM_PAGES} pages") as caught:
                        await anext(aiter(stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), max_tokens=num_tokens))))
                    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                answer = await complete(client, "z" * (POOL_TOKENS - 1), max_tokens=1)
                assert answer["usage"]["total_tokens"] == POOL_TOKENS
                to_the_end = stub.Generate(pb.GenerateRequest(text="y" * (POOL_TOKENS - 5), ignore_eos=True))
                assert [response async for response in to_the_end][-1].usage.completion_tokens == 5

        bench.run(body())

    def test_a_step_that_is_lost_ends_its_own_requests_with_an_error(self, bench: Bench) -> None:
        """text-generation-inference#3050: streams and whole answers, through each front end; one that only the step behind it had is computed anew."""

        async def body() -> None:
            async with bench.connections(0, 1) as (other,), streaming(bench.served.clients[0], "a", max_tokens=3000) as first:
                events = [await anext(first)]
                asking = asyncio.create_task(bench.served.clients[1].post("/v1/completions", json={"prompt": "b", "max_tokens": 3000, "ignore_eos": True}))
                await until(lambda: bench.served.engine.stats().num_running == 2)
                await bench.hold()
                bench.runner.loses_next = True
                kept = asyncio.create_task(complete(other, "kept", max_tokens=20, seed=7))
                await bench.has_sent(Add, 3)
                bench.runner.release()
                events += await rest_of(first)
                assert events[-1]["error"]["type"] == "server_error" and (await asking).status_code == 500
                assert (await kept)["choices"][0]["text"] == alone("kept", 20, 7)
            for client in bench.served.clients:
                assert (await complete(client, "after", max_tokens=20, seed=7))["choices"][0]["text"] == alone("after", 20, 7)
            bench.check_books()

        bench.run(body())


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a client of either API makes of an answer."""

    text: str
    finish_reason: str
    stop_reason: str | int | None
    num_tokens: int


async def ask_whole(client: httpx.AsyncClient, prompt: list[int], fields: dict[str, Any]) -> Answer:
    answer = await complete(client, prompt, **fields)  # pyright: ignore[reportArgumentType]
    choice = answer["choices"][0]
    return Answer(choice["text"], choice["finish_reason"], choice["stop_reason"], answer["usage"]["completion_tokens"])


async def ask_stream(client: httpx.AsyncClient, prompt: list[int], fields: dict[str, Any]) -> Answer:
    async with streaming(client, prompt, **fields) as stream:  # pyright: ignore[reportArgumentType]
        *events, usage, done = await rest_of(stream)
    assert done == "[DONE]"
    last = events[-1]["choices"][0]
    return Answer(text_in(events), last["finish_reason"], last["stop_reason"], usage["usage"]["completion_tokens"])


async def ask_grpc(stub: Any, prompt: list[int], fields: dict[str, Any]) -> Answer:
    """Tokens in, tokens out: they end where the text does."""
    options: dict[str, Any] = {"ignore_eos": True, **fields}
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), **options)
    responses = [response async for response in stub.Generate(request)]
    last = responses[-1]
    stop = last.WhichOneof("stop_reason")
    token_ids = [token_id for response in responses for token_id in response.token_ids]
    assert token_ids == prompt[3 : 3 + len(token_ids)] and len(token_ids) == last.usage.completion_tokens
    return Answer("".join(response.text for response in responses), last.finish_reason, getattr(last, stop) if stop else None, len(token_ids))


async def ask_everywhere(served: Served, script: Sequence[int], tail: bytes, fields: dict[str, Any]) -> list[Answer]:
    """Whole and streamed, over both APIs, through both front ends."""
    prompt = to_say(script, tail)

    async def through(index: int) -> list[Answer]:
        client, stub = served.clients[index], served.stubs[index]
        return [await ask_whole(client, prompt, fields), await ask_stream(client, prompt, fields), await ask_grpc(stub, prompt, fields)]

    return [answer for answers in await asyncio.gather(through(0), through(1)) for answer in answers]


LONG_STOP = "a long stop string " * 6
EMOJI = "😀".encode()
CHARACTERS = "日本😀é".encode()
CASES: dict[str, tuple[Sequence[int], bytes, dict[str, Any], Answer]] = {
    "vllm#48853 a prompt that ends inside a character": ([*EMOJI[2:], ord("!")], b"hi" + EMOJI[:2], {"max_tokens": 3}, Answer("😀!", "length", None, 3)),
    "vllm#8627 a character of several tokens": (CHARACTERS, b"", {"max_tokens": len(CHARACTERS)}, Answer("日本😀é", "length", None, len(CHARACTERS))),
    "vllm#8627 half a character at the end": (CHARACTERS, b"", {"max_tokens": 5}, Answer("日\ufffd", "length", None, 5)),
    "vllm#3574 the beginning of a stop string is held back": (
        b"xDEFGHIJy", b"", {"max_tokens": 9, "stop": ["DEFGHIJ"]}, Answer("x", "stop", "DEFGHIJ", 8),
    ),
    "vllm#3574 and given out once it is none": (b"xDEFGHIKy", b"", {"max_tokens": 9, "stop": ["DEFGHIJ"]}, Answer("xDEFGHIKy", "length", None, 9)),
    "vllm#2577 a long stop string": (
        f"before {LONG_STOP}after".encode(), b"", {"max_tokens": 130, "stop": [LONG_STOP]}, Answer("before ", "stop", LONG_STOP, 7 + len(LONG_STOP)),
    ),
    "vllm#3672 a stop token that is special": ([97, 98, SPECIAL, 99], b"", {"max_tokens": 4, "stop_token_ids": [SPECIAL]}, Answer("ab", "stop", SPECIAL, 3)),
    "vllm#3672 a stop token that is not skipped": (
        [97, 98, SPECIAL, 99], b"", {"max_tokens": 4, "stop_token_ids": [SPECIAL], "skip_special_tokens": False}, Answer("ab", "stop", SPECIAL, 3),
    ),
    "vllm#3672 EOS": ([97, EOS, 99], b"", {"max_tokens": 3, "ignore_eos": False}, Answer("a", "stop", None, 2)),
    "vllm#11089 a stop string at once": (b"Hello", b"", {"max_tokens": 5, "stop": ["H"]}, Answer("", "stop", "H", 1)),
    "vllm#11089 the prompt's own text is none": (b"ing", b"END", {"max_tokens": 3, "stop": ["END"]}, Answer("ing", "length", None, 3)),
    "vllm#11089 nor is the end of it": (b"D.", b"EN", {"max_tokens": 2, "stop": ["END"]}, Answer("D.", "length", None, 2)),
    "vllm#1973 which of two": (b"hello", b"", {"max_tokens": 5, "stop": ["q", "lo"]}, Answer("hel", "stop", "lo", 5)),
    "vllm#1973 kept": (b"hello", b"", {"max_tokens": 5, "stop": ["q", "lo"], "include_stop_str_in_output": True}, Answer("hello", "stop", "lo", 5)),
    "vllm#1973 a token": (b"hello", b"", {"max_tokens": 5, "stop": ["q"], "stop_token_ids": [ord("l")]}, Answer("he", "stop", ord("l"), 3)),
}  # fmt: skip


class TestStreams:
    @pytest.mark.parametrize("case", CASES)
    def test_one_answer_whatever_the_way(self, bench: Bench, case: str) -> None:
        """The reports that the case names; and vllm#57052: where tokens go in and out, stop strings hold too."""
        script, tail, fields, expected = CASES[case]

        async def body() -> None:
            assert await ask_everywhere(bench.served, script, tail, fields) == [expected] * 6

        bench.run(body())

    def test_random_stop_strings(self, bench: Bench) -> None:
        """vllm#2577: streamed and whole answers end alike, where a stop string first is complete."""
        rng = random.Random(0)

        async def body() -> None:
            num_stopped = 0
            for _ in range(25):
                script = "".join(rng.choices("abc", k=rng.randrange(1, 60)))
                stops = ["".join(rng.choices("abc", k=rng.randrange(2, 6))) for _ in range(2)]
                fields = {"max_tokens": len(script), "stop": stops}
                first, *others = await ask_everywhere(bench.served, script.encode(), b"", fields)
                assert others == [first] * 5
                num_tokens = min((script.index(stop) + len(stop) for stop in stops if stop in script), default=len(script))
                assert first.num_tokens == num_tokens
                if first.finish_reason == "stop":
                    num_stopped += 1
                    assert isinstance(first.stop_reason, str) and script[:num_tokens] == first.text + first.stop_reason
                else:
                    assert first.text == script
            assert num_stopped > 5

        bench.run(body())

"""The engine in its thread: streams, disconnects, start, drain, death."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.config import EngineConfig, SchedulerConfig
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.engine.engine import Engine, fold_seed
from jaxserve.errors import (
    ContextLengthError,
    DeadlineExceededError,
    EngineDeadError,
    EngineNotReadyError,
    InvalidRequestError,
    ModelUnavailableError,
    OverloadedError,
    ReaderTimeoutError,
)
from jaxserve.request import RequestOptions, RequestOutput, SamplingParams
from tests.engine_host.fakes import LONG, FakeRunner, SlowRunner, fake_engine, long_runner, plain_run, refusal_of
from tests.waiting import LIMIT_S, until


async def step_until(runner: SlowRunner, condition: Callable[[], object]) -> None:
    """Lets a runner that is held go on until a condition is met: a step for each turn of the loop, so that it runs ahead of no loop that stands still."""

    def go_on() -> object:
        if not (found := condition()) and runner.is_held:
            runner.let()
        return found

    await until(go_on)


@contextlib.asynccontextmanager
async def serving(runner: FakeRunner | None = None, **options: Any) -> AsyncIterator[AsyncEngine]:
    runner = runner or SlowRunner(num_pages=64, page_size=4, max_num_seqs=16)
    options = {"max_tokens_per_step": 64, "max_position": max(128, runner.num_pages * runner.page_size)} | options
    engine = AsyncEngine(lambda: fake_engine(runner, **options))
    engine.start()
    try:
        await engine.wait_ready()
        yield engine
    finally:
        engine.close()


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, LIMIT_S))


async def collect(engine: AsyncEngine, prompt: list[int], request_id: str | None = None, **fields: Any) -> list[RequestOutput]:
    return [output async for output in engine.generate(engine.make_request(prompt, SamplingParams(**fields), request_id))]


async def all_free(engine: AsyncEngine) -> None:
    """Waits until nothing is held."""

    def is_free() -> bool:
        stats = engine.stats()
        return stats.num_free_pages == stats.num_pages and stats.num_running == stats.num_waiting == 0

    await until(is_free)


def test_64_concurrent_streams_give_the_texts_of_one_by_one() -> None:
    async def body() -> None:
        async with serving() as engine:
            prompts = [[i, i + 1, *range(i % 9)] for i in range(64)]
            streams = await asyncio.gather(*(collect(engine, prompt, max_tokens=5 + i % 20, seed=i) for i, prompt in enumerate(prompts)))
            for i, (prompt, outputs) in enumerate(zip(prompts, streams, strict=True)):
                assert [t for output in outputs for t in output.token_ids] == plain_run(prompt, 5 + i % 20, fold_seed(i))
                assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + ["length"]
            await all_free(engine)

    run(body())


def test_outputs_that_wait_for_a_slow_consumer_come_as_one() -> None:
    async def body() -> None:
        runner = SlowRunner()
        async with serving(runner) as engine:
            ended = asyncio.Event()
            engine.on_end(lambda request, last: ended.set())
            runner.hold()
            runner.let(1)
            stream = engine.generate(engine.make_request([1], SamplingParams(max_tokens=30, seed=3)))
            first = await anext(stream)
            runner.release()
            await ended.wait()
            (rest,) = [output async for output in stream]
            alone = await collect(engine, [1], max_tokens=30, seed=3)
            assert first.token_ids + rest.token_ids == tuple(plain_run([1], 30, fold_seed(3)))
            assert first.text + rest.text == "".join(output.text for output in alone)
            assert (rest.finish_reason, rest.usage) == ("length", alone[-1].usage)

    run(body())


def test_disconnects_free_all_pages() -> None:
    async def body() -> None:
        async with serving() as engine:

            async def leave_early(i: int) -> None:
                prompt = [i % 256] * (1 + i % 30)
                request = engine.make_request(prompt, SamplingParams(max_tokens=60 if i % 6 == 4 else 200))  # 200 outlast any stall: few fit at once
                if i % 3 == 0:  # cancelled
                    task = asyncio.create_task(collect(engine, prompt, max_tokens=60))
                    await asyncio.sleep(0.001 * (i % 20))
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await task
                elif i % 3 == 1:  # closed
                    async with contextlib.aclosing(engine.generate(request)) as outputs:
                        async for _ in outputs:
                            if i % 2:
                                break
                else:  # dropped
                    async for _ in engine.generate(request):
                        break

            await asyncio.gather(*(leave_early(i) for i in range(200)))
            await all_free(engine)
            stats = engine.stats()
            assert stats.num_requests == sum(stats.finished.values())
            assert stats.finished["abort"] > 50
            assert (await collect(engine, [1], max_tokens=2))[-1].finish_reason == "length"

    run(body())


def test_abort_by_id_gives_a_last_output() -> None:
    async def body() -> None:
        async with serving(long_runner()) as engine:
            stream = engine.generate(engine.make_request([1], SamplingParams(max_tokens=LONG), "x"))
            await anext(stream)
            assert await engine.abort("x") and await engine.abort("x")
            rest = [output async for output in stream]
            assert rest[-1].finish_reason == "abort"
            assert not await engine.abort("x")
            assert engine.stats().finished["abort"] == 1

    run(body())


def test_refusals() -> None:
    async def body() -> None:
        async with serving(long_runner()) as engine:
            with pytest.raises(ContextLengthError):
                engine.make_request([1] * 70_000, SamplingParams())
            stream = engine.generate(engine.make_request([1], SamplingParams(max_tokens=LONG), "x"))
            await anext(stream)
            with pytest.raises(InvalidRequestError, match="in flight already"):
                await collect(engine, [1], "x")
            await stream.aclose()
            assert (await collect(engine, [1], "x", max_tokens=1))[-1].finish_reason == "length"  # the id is free again at once

    run(body())


def test_an_id_whose_request_gave_way_can_be_used_again_at_once() -> None:
    """One batch of commands holds a request that takes the other's place, the other client's leaving, and its second try."""

    async def body() -> None:
        runner = SlowRunner(max_num_seqs=1)
        limits = SchedulerConfig(max_num_seqs=1, max_tokens_per_step=16, max_queued_requests=1, order="priority")
        async with serving(runner, scheduler=limits) as engine:
            runner.hold()
            running = asyncio.create_task(collect(engine, [1], max_tokens=50))
            await until(lambda: runner.is_held)
            first = asyncio.create_task(collect(engine, [2], "x", max_tokens=5))
            await step_until(runner, lambda: engine.stats().num_waiting == 1)
            await until(lambda: runner.is_held)
            urgent = engine.make_request([3], SamplingParams(max_tokens=5), None, RequestOptions(priority=-1))
            stream = engine.generate(urgent)
            taking = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            first.cancel()
            await asyncio.sleep(0)
            second = asyncio.create_task(collect(engine, [2], "x", max_tokens=5))
            await asyncio.sleep(0)
            runner.release()
            assert isinstance(refusal_of((await second)[-1]), OverloadedError)
            assert [await taking, *[output async for output in stream]][-1].finish_reason == "length"
            assert (await running)[-1].finish_reason == "length" and first.cancelled()
            assert (await collect(engine, [2], "x", max_tokens=5))[-1].finish_reason == "length"
            assert engine.stats().refused["shed"] == 1 and not engine.thread._routes and not engine.thread._request_ids
            await all_free(engine)

    run(body())


def test_wrong_books_cost_no_answer_and_no_server(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("jaxserve.engine.engine._CHECK_INTERVAL_S", 0.0)

    async def body() -> None:
        async with serving() as engine:
            inner = engine.thread.engine
            assert inner is not None
            inner._scheduler.ranks[0].pool._free.pop()
            assert (await collect(engine, [1], max_tokens=5))[-1].finish_reason == "length"
            await until(lambda: "books" in caplog.text)
            assert (await collect(engine, [1], max_tokens=5))[-1].finish_reason == "length"
            assert engine.state == "ready" and engine.stats().num_requests == 2
            inner.check_integrity()
            await all_free(engine)

    run(body())
    assert [record.levelname for record in caplog.records] == ["CRITICAL"]


def test_an_idle_engine_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with serving() as engine:
            inner, num_turns = engine.thread.engine, 0
            assert inner is not None
            step = inner.step

            def counting() -> list[RequestOutput]:
                nonlocal num_turns
                num_turns += 1
                return step()

            monkeypatch.setattr(inner, "step", counting)
            await collect(engine, [1], max_tokens=2)
            before = num_turns
            await asyncio.sleep(0.2)
            assert 2 <= before == num_turns
            assert (await collect(engine, [1], max_tokens=2))[-1].finish_reason == "length"

    run(body())


def test_states_before_the_engine_is_there() -> None:
    async def body() -> None:
        gate = threading.Event()

        def build() -> Engine:
            gate.wait()
            return fake_engine()

        engine = AsyncEngine(build)
        engine.start()
        assert engine.state == "starting"
        for use in (lambda: engine.make_request([1], SamplingParams()), engine.stats, lambda: engine.tokenizer):
            with pytest.raises(EngineNotReadyError, match="still starting"):
                use()
        waiter = asyncio.create_task(engine.wait_ready())
        await asyncio.sleep(0)
        waiter.cancel()  # one waiter that gives up is no concern of the others
        gate.set()
        await engine.wait_ready()
        assert engine.state == "ready"
        assert (engine.model_name, engine.max_model_len) == ("fake", 128)
        engine.close()
        assert engine.state == "dead"
        with pytest.raises(EngineDeadError):
            engine.make_request([1], SamplingParams())
        engine.close()

    run(body())


def test_a_failed_start_tells_why() -> None:
    async def body() -> None:
        def build() -> Engine:
            raise ModelUnavailableError("no model 'nix'")

        engine = AsyncEngine(build)
        engine.start()
        for _ in range(2):
            with pytest.raises(ModelUnavailableError, match="no model 'nix'"):
                await engine.wait_ready()
        assert engine.state == "dead"
        with pytest.raises(EngineDeadError, match="has stopped"):
            engine.make_request([1], SamplingParams())
        engine.close()

    run(body())


def test_a_failed_step_reaches_its_streams_and_the_engine_goes_on() -> None:
    async def body() -> None:
        runner = SlowRunner()
        async with serving(runner) as engine:
            runner.errors = [None, None, RuntimeError("once")]
            outputs = await collect(engine, [1], max_tokens=9)
            assert (outputs[-1].finish_reason, str(refusal_of(outputs[-1]))) == ("error", "RuntimeError: once")
            assert (await collect(engine, [1], max_tokens=9))[-1].finish_reason == "length"
            assert engine.state == "ready"

    run(body())


def test_when_the_engine_dies_every_stream_is_told() -> None:
    async def body() -> None:
        runner = SlowRunner()
        async with serving(runner) as engine:
            runner.errors = [None, None, EngineDeadError("the device is gone")]
            runner.hold()
            tasks = [asyncio.create_task(collect(engine, [i], max_tokens=50)) for i in range(12)]
            await asyncio.sleep(0)  # all have begun
            runner.release()
            for task in tasks:
                outputs = await task
                last = outputs[-1]
                assert last.finish_reason == "error" and isinstance(refusal_of(last), EngineDeadError) and "the device is gone" in str(refusal_of(last))
                assert last.usage.completion_tokens == sum(len(output.token_ids) for output in outputs)
            assert engine.state == "dead"
            with pytest.raises(EngineDeadError):
                await collect(engine, [1])
            await engine.drain(1.0)

    run(body())


def test_drain_lets_requests_finish() -> None:
    async def body() -> None:
        runner = SlowRunner()
        async with serving(runner) as engine:
            runner.hold()
            task = asyncio.create_task(collect(engine, [1], max_tokens=40))
            await until(lambda: runner.is_held)
            draining = asyncio.create_task(engine.drain(LIMIT_S))
            await asyncio.sleep(0.01)
            assert engine.state == "draining" and not draining.done()
            runner.release()
            await draining
            assert (await task)[-1].finish_reason == "length"
            with pytest.raises(EngineNotReadyError, match="shutting down"):
                engine.make_request([1], SamplingParams())

    run(body())


def test_drain_aborts_at_its_limit() -> None:
    async def body() -> None:
        runner = SlowRunner(num_pages=2048, page_size=64, max_num_seqs=2)
        async with serving(runner) as engine:
            tasks = [asyncio.create_task(collect(engine, [1], max_tokens=LONG)) for _ in range(5)]  # two run, three wait
            await until(lambda: engine.stats().num_running == 2)
            await engine.drain(0.02)
            assert {(await task)[-1].finish_reason for task in tasks} == {"abort"}
            await all_free(engine)

    run(body())


def test_drain_ends_even_if_the_engine_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.engine.clients.streams.ANSWER_TIMEOUT_S", 0.05)

    async def body() -> None:
        runner = SlowRunner()
        async with serving(runner) as engine:
            runner.hold()
            task = asyncio.create_task(collect(engine, [1], max_tokens=10))
            await until(lambda: runner.is_held)
            await engine.drain(0.02)
            assert (await task)[-1].finish_reason == "abort"
            runner.release()

    run(body())


def test_close_ends_streams() -> None:
    async def body() -> None:
        async with serving(long_runner()) as engine:
            task = asyncio.create_task(collect(engine, [1], max_tokens=LONG))
            await until(lambda: engine.stats().num_running == 1)
            engine.close()
            assert (await task)[-1].finish_reason == "abort"

    run(body())


def test_a_slow_reader_is_paused_and_others_go_on() -> None:
    async def body() -> None:
        runner = SlowRunner()
        async with serving(runner, engine=EngineConfig(reader_buffer=4)) as engine:
            runner.hold()
            runner.let(1)
            slow = engine.generate(engine.make_request([1], SamplingParams(max_tokens=60, seed=3)))
            got = [await anext(slow)]
            await step_until(runner, lambda: engine.stats().num_paused == 1)
            runner.release()
            before = engine.stats()
            assert len(await collect(engine, [2], max_tokens=50)) > 1
            after = engine.stats()
            assert after.num_paused == 1 and after.num_running == 0
            assert after.num_generated_tokens - before.num_generated_tokens <= 50 + 4
            got += [output async for output in slow]
            assert [t for output in got for t in output.token_ids] == plain_run([1], 60, fold_seed(3))
            assert got[-1].finish_reason == "length"
            await all_free(engine)

    run(body())


def test_a_paused_reader_that_goes_away_leaves_nothing() -> None:
    async def body() -> None:
        async with serving(long_runner(), engine=EngineConfig(reader_buffer=4)) as engine:
            slow = engine.generate(engine.make_request([1], SamplingParams(max_tokens=LONG)))
            await anext(slow)
            await until(lambda: engine.stats().num_paused == 1)
            await slow.aclose()
            await all_free(engine)
            assert engine.stats().finished["abort"] == 1

    run(body())


def test_a_reader_that_does_not_come_back_is_given_up() -> None:
    async def body() -> None:
        async with serving(long_runner(), engine=EngineConfig(reader_buffer=2, reader_timeout_s=0.2)) as engine:
            stream = engine.generate(engine.make_request([1], SamplingParams(max_tokens=LONG)))
            got = [await anext(stream)]
            await until(lambda: engine.stats().refused["reader_timeout"] == 1)
            await all_free(engine)
            got += [output async for output in stream]
            assert isinstance(refusal_of(got[-1]), ReaderTimeoutError) and "engine.reader_timeout_s" in str(refusal_of(got[-1]))
            assert sum(len(output.token_ids) for output in got) == got[-1].usage.completion_tokens < LONG

    run(body())


def test_refusals_come_as_what_they_are() -> None:
    async def body() -> None:
        runner = SlowRunner(max_num_seqs=2)
        limits = SchedulerConfig(max_num_seqs=2, max_tokens_per_step=16, max_queued_requests=2, queue_timeout_s=600)
        async with serving(runner, scheduler=limits, clock=runner.clock) as engine:
            runner.hold()
            tasks: list[asyncio.Task[list[RequestOutput]]] = []

            async def add(count: int, condition: Callable[[], object]) -> None:
                tasks.extend(asyncio.create_task(collect(engine, [len(tasks)], max_tokens=100)) for _ in range(count))
                await step_until(runner, condition)

            await add(2, lambda: engine.stats().num_running == 2)
            await add(2, lambda: engine.stats().num_waiting == 2)
            await add(3, lambda: engine.stats().refused["overload"] == 3)
            runner.skipped_s += 600
            runner.release()
            lasts = [(await task)[-1] for task in tasks]
            assert [last.finish_reason for last in lasts] == ["length"] * 2 + ["error"] * 5
            assert all(isinstance(refusal_of(last), OverloadedError) for last in lasts[2:])
            refused = engine.stats().refused
            assert (refused["overload"], refused["queue_timeout"], sum(refused.values())) == (3, 2, 5)
            await all_free(engine)

    run(body())


def test_a_deadline_ends_a_request_though_nothing_else_happens() -> None:
    """Its reader is slow, so it is paused and the engine sleeps: the deadline wakes it."""

    async def body() -> None:
        async with serving(long_runner(), engine=EngineConfig(reader_buffer=2)) as engine:
            request = engine.make_request([1], SamplingParams(max_tokens=LONG), None, RequestOptions(deadline_ms=800))
            stream = engine.generate(request)
            outputs = [await anext(stream)]  # on a busy machine the deadline may be up by now, and this is all
            await until(lambda: engine.stats().refused["deadline"] == 1)
            outputs += [output async for output in stream]
            assert isinstance(refusal_of(outputs[-1]), DeadlineExceededError)
            await all_free(engine)

    run(body())


class WatchdogTime:
    """Stands for the time that the watchdog sleeps: it passes when a test says so, not when a machine stands still."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._slept = threading.Semaphore(0)
        self._asleep = threading.Semaphore(0)
        monkeypatch.setattr("jaxserve.engine.clients.thread.time", SimpleNamespace(monotonic=time.monotonic, sleep=self._sleep))

    def _sleep(self, seconds: float) -> None:
        self._asleep.release()
        self._slept.acquire()

    def wake(self) -> None:
        """For one look."""
        self._slept.release()

    def pass_(self, num_looks: int) -> None:
        """Returns when it has looked so many times and sleeps again."""
        assert self._asleep.acquire(timeout=LIMIT_S)
        for _ in range(num_looks):
            self.wake()
            assert self._asleep.acquire(timeout=LIMIT_S)
        self._asleep.release()


def test_a_stuck_step_is_a_dead_engine_unless_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    watchdog_time = WatchdogTime(monkeypatch)

    async def body() -> None:
        runner = SlowRunner()
        async with serving(runner, engine=EngineConfig(watchdog_s=2.0)) as engine:  # it looks every half second
            runner.hold()
            runner.is_compiling = True
            task = asyncio.create_task(collect(engine, [1], max_tokens=5))
            await until(lambda: runner.is_held)
            watchdog_time.pass_(50)
            assert engine.state == "ready"
            runner.is_compiling = False
            watchdog_time.pass_(4)
            assert engine.state == "ready"
            watchdog_time.wake()
            last = (await task)[-1]
            assert last.finish_reason == "error" and "a step took more than 2 s" in str(refusal_of(last))
            assert engine.state == "dead"
            runner.release()

    run(body())


def test_an_idle_engine_does_not_upset_the_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    watchdog_time = WatchdogTime(monkeypatch)

    async def body() -> None:
        async with serving(engine=EngineConfig(watchdog_s=2.0)) as engine:
            for _ in range(2):
                watchdog_time.pass_(50)
                assert engine.state == "ready"
                assert (await collect(engine, [1], max_tokens=2))[-1].finish_reason == "length"
                await all_free(engine)
            engine.close()
            watchdog_time.wake()  # and it ends

    run(body())


def test_full_collections_wait_for_an_idle_engine() -> None:
    thresholds, frozen = gc.get_threshold(), gc.get_freeze_count()

    async def body() -> None:
        async with serving() as engine:
            await collect(engine, [1], max_tokens=2)
            assert gc.get_threshold()[2] > 100 and gc.get_freeze_count() > frozen

    run(body())
    assert gc.get_threshold() == thresholds

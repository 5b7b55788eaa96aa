"""What goes between the engine's thread and its clients: data that another process could have sent, and streams whose text is made outside the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from jaxserve import errors
from jaxserve.config import SchedulerConfig, TenantsConfig
from jaxserve.engine.clients.commands import Answer, Command, Delivery, GiveBack, Stop
from jaxserve.engine.clients.streams import Streams
from jaxserve.engine.engine import Engine
from jaxserve.engine.requests.output import TextMaker
from jaxserve.errors import ERROR_CODES, JaxserveError, from_data, to_data
from jaxserve.request import RequestOptions, RequestOutput, SamplingParams
from tests.engine_host.fakes import EOS, FakeRunner, FakeTokenizer, fake_engine, scripted

ALPHABET = list(b"abcdefghijklmnopqrstuvwxyz")


def test_every_error_class_has_a_code_of_its_own() -> None:
    declared = {cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, JaxserveError)}
    assert declared == set(ERROR_CODES) and len(set(ERROR_CODES.values())) == len(ERROR_CODES)


@pytest.mark.parametrize("cls", ERROR_CODES)
def test_errors_survive_the_way_through_another_process(cls: type[JaxserveError]) -> None:
    values = {"param": "max_tokens", "code": "a_code", "retry_after_s": 2.5}
    error = cls("what, how much, what is allowed", **{name: values[name] for name in cls.FIELDS})
    data = to_data(error)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(data), type=errors.ErrorData) == data
    back = from_data(data)
    assert type(back) is cls and str(back) == str(error)
    assert vars(back) == vars(error)


def test_an_error_of_nobody_s_becomes_an_unexpected_one() -> None:
    back = from_data(to_data(KeyError("x")))
    assert type(back) is errors.UnexpectedError and str(back) == "KeyError: 'x'"


class Loop:
    """An engine, and the streams of one client whose text is made outside, without threads: commands and deliveries go as bytes, when a test says so."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.streams = Streams(self._send, lambda: None, lambda request: TextMaker(request.sampling_params, FakeTokenizer().detokenizer(())))
        self.commands: list[Command] = []
        self._thread = engine_thread(engine)
        self._client = 1

    def _send(self, command: Command) -> None:
        self.commands.append(msgspec.msgpack.decode(msgspec.msgpack.encode(command), type=Command))

    def turn(self, *, hears: bool = True) -> None:
        """A turn of the engine's thread; the engine may not have heard yet what the client has sent."""
        if hears:
            commands, self.commands = self.commands, []
            for command in commands:
                self._thread._handle(self.engine, self._client, command)
        self._thread._route(self.engine.step())
        for delivery in self._thread._deliveries.values():
            self.streams.receive(msgspec.msgpack.decode(msgspec.msgpack.encode(delivery), type=Delivery))
        self._thread._deliveries.clear()


def engine_thread(engine: Engine) -> Any:
    from jaxserve.engine.clients.thread import EngineThread

    return EngineThread(lambda: engine)


async def run_stream(loop: Loop, lag: Callable[[], bool], **fields: Any) -> list[RequestOutput]:
    """The outputs of one request; ``lag`` says whether a turn does not hear what was sent before it."""
    request = loop.engine.make_request([0], SamplingParams(**fields), "r", RequestOptions(detokenize=False, tenant="t"))
    stream = loop.streams.generate(request)
    reading = asyncio.ensure_future(collect(stream))
    await asyncio.sleep(0)
    loop.turn()
    for _ in range(200):
        if reading.done():
            break
        loop.turn(hears=not lag())
        for _ in range(3):
            await asyncio.sleep(0)
    loop.turn()
    return await asyncio.wait_for(reading, 10)


async def collect(stream: Any) -> list[RequestOutput]:
    return [output async for output in stream]


def in_process(script: list[int], **fields: Any) -> list[RequestOutput]:
    engine = fake_engine(FakeRunner(next_token=scripted(script)))
    engine.add(engine.make_request([0], SamplingParams(**fields)))
    outputs: list[RequestOutput] = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


def summary(outputs: list[RequestOutput]) -> tuple[Any, ...]:
    last = outputs[-1]
    tokens = tuple(token_id for output in outputs for token_id in output.token_ids)
    usage = msgspec.structs.replace(last.usage, cached_tokens=0)
    return "".join(output.text for output in outputs), tokens, last.finish_reason, last.stop_reason, usage, [o.finish_reason for o in outputs].count(None)


CASES: list[tuple[list[int], dict[str, Any]]] = [
    (ALPHABET, {"max_tokens": 12}),
    (ALPHABET, {"max_tokens": 12, "stop": ("zz",)}),
    (ALPHABET, {"max_tokens": 20, "stop": ("a",)}),  # at the first token
    (ALPHABET, {"max_tokens": 20, "stop": ("efg",)}),  # in the middle
    (ALPHABET, {"max_tokens": 20, "stop": ("efg",), "include_stop_str_in_output": True}),
    (ALPHABET, {"max_tokens": 7, "stop": ("efg",)}),  # with the last token
    (ALPHABET, {"max_tokens": 8, "stop": ("efg",)}),  # one before it
    (ALPHABET, {"max_tokens": 7, "stop": ("gh",)}),  # half of it
    (ALPHABET, {"max_tokens": 20, "stop": ("h",), "stop_token_ids": (ord("i"),)}),
    (ALPHABET, {"max_tokens": 20, "stop": ("h",), "stop_token_ids": (ord("h"),)}),
    ([*b"abc", EOS], {"max_tokens": 20, "stop": ("c",)}),
    ([*b"abc", EOS], {"max_tokens": 20, "stop": ("cd",)}),
    ([*b"abc", EOS], {"max_tokens": 20}),
    (list("aé😀b".encode()) * 3, {"max_tokens": 20, "stop": ("😀b",)}),
    (list("aé😀b".encode()) * 3, {"max_tokens": 5}),  # within a character
    (list("aé😀b".encode()) * 3, {"max_tokens": 5, "stop": ("\ufffd",)}),
]


@pytest.mark.parametrize("num_lagging", [0, 1, 3])
@pytest.mark.parametrize(("script", "fields"), CASES)
def test_text_made_outside_is_that_of_the_engine_however_late_it_hears_of_a_stop(script: list[int], fields: dict[str, Any], num_lagging: int) -> None:
    expected = in_process(script * 3, **fields)

    async def body() -> None:
        tenants = TenantsConfig(tokens_per_minute=10_000)
        scheduler = SchedulerConfig(max_num_seqs=8, max_tokens_per_step=16)
        engine = fake_engine(FakeRunner(next_token=scripted(script * 3)), tenants=tenants, scheduler=scheduler, clock=lambda: 0.0)
        loop = Loop(engine)
        lags = iter([])

        def lag() -> bool:
            nonlocal lags
            if any(isinstance(command, Stop | GiveBack) for command in loop.commands):
                lags = lags or iter([True] * num_lagging)
                return next(lags, False)
            return False

        outputs = await run_stream(loop, lag, **fields)
        assert summary(outputs)[:5] == summary(expected)[:5]
        usage = expected[-1].usage
        assert engine._admission._account("t", 0.0).level == 10_000 - usage.total_tokens  # billed what was shown
        assert not engine.has_work and len(loop.streams) == 0 and not loop.streams._by_number
        engine.check_integrity()

    asyncio.run(body())


def test_what_was_generated_after_a_stop_is_not_in_the_prefix_cache() -> None:
    async def body() -> None:
        engine = fake_engine(FakeRunner(next_token=scripted(ALPHABET), page_size=2))
        loop = Loop(engine)
        turns = iter([True] * 5)
        outputs = await run_stream(loop, lambda: any(isinstance(command, Stop) for command in loop.commands) and next(turns, False), max_tokens=20, stop=("d",))
        assert (outputs[-1].stop_reason, outputs[-1].usage.completion_tokens) == ("d", 4)
        # The prompt, a to c: the key of the last token is never computed. Five more were generated before the engine heard.
        assert engine.stats().num_generated_tokens >= 9 and engine.stats().num_cached_pages == 2

    asyncio.run(body())


def test_every_command_and_answer_is_plain_data() -> None:
    for kind in (Command, Answer):
        msgspec.msgpack.Decoder(kind)  # raises for what it could not read

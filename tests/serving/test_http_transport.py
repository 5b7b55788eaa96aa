"""What only a real socket shows: clients that leave, many streams at once, and the openai client."""

from __future__ import annotations

import asyncio
import contextlib
import random

import openai
import pytest

from jaxserve.request import RequestOptions, SamplingParams
from jaxserve.serving.service import InferenceService
from tests.serving.fake_engine import BOS, FakeAsyncEngine, expected_text
from tests.serving.servers import CHAT, Raw, http_client, http_server, server_config
from tests.waiting import until


def client_of(port: int, **kw: object) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", max_retries=0, **{"api_key": "none", **kw})  # type: ignore[arg-type]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_request(stream: bool) -> None:
    engine = FakeAsyncEngine(step_s=0.01, max_model_len=4096)

    async def scenario() -> None:
        async with http_server(engine) as port:
            for path, body in (("/v1/completions", {"prompt": ["hi", "ho"], "max_tokens": 2000}), ("/v1/chat/completions", CHAT)):
                connection = await Raw.post(port, path, body | {"stream": stream})
                await until(lambda: engine.running)
                if stream:
                    await connection.reader.readuntil(b"data: ")
                running = set(engine.running)
                await connection.close()
                await until(lambda: not engine.running)
                assert running <= set(engine.aborted)

    asyncio.run(scenario())


def test_a_slow_reader_of_several_streams_holds_them_up() -> None:
    """So that what waits stays in the engine's queues, where it is joined."""
    engine = FakeAsyncEngine()
    service = InferenceService(engine, server_config())

    async def scenario() -> None:
        params = SamplingParams(max_tokens=100)
        async with contextlib.aclosing(service.run_all([service.make_request([index], params, str(index), RequestOptions()) for index in range(3)])) as outputs:
            await anext(outputs)
            await asyncio.sleep(0.05)
            assert len(engine.running) == 3
            assert len([output async for output in outputs]) == 299
            assert not engine.running

    asyncio.run(scenario())


def test_random_disconnects_leave_nothing_running() -> None:
    engine = FakeAsyncEngine(step_s=0.001, max_model_len=4096)
    rng = random.Random(0)

    async def visit(port: int, index: int) -> None:
        connection = await Raw.post(port, "/v1/completions", {"prompt": f"hi {index}", "max_tokens": 2000, "stream": index % 2 == 0})
        await asyncio.sleep(rng.random() * 0.05)
        await connection.close()

    async def scenario() -> None:
        async with http_server(engine) as port:
            for start in range(0, 200, 50):
                await asyncio.gather(*(visit(port, index) for index in range(start, start + 50)))
            await until(lambda: not engine.running)
            async with http_client(port) as client:
                assert (await client.get("/ready")).status_code == 200

    asyncio.run(scenario())


def test_64_streams_at_once_give_the_texts_of_one_by_one() -> None:
    async def scenario() -> None:
        async with http_server(FakeAsyncEngine(step_s=0.002)) as port, client_of(port) as client:

            async def text_of(prompt: str) -> str:
                stream = await client.completions.create(model="fake", prompt=prompt, max_tokens=20, stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            prompts = [f"prompt {index}" for index in range(64)]
            texts = await asyncio.gather(*map(text_of, prompts))
            assert texts == [expected_text([BOS, *prompt.encode()], 20) for prompt in prompts]

    asyncio.run(scenario())


def test_the_openai_client() -> None:
    async def scenario() -> None:
        async with http_server(FakeAsyncEngine(), server_config(api_keys=("secret",))) as port, client_of(port, api_key="secret") as client:
            assert [model.id async for model in client.models.list()] == ["fake"]
            assert (await client.models.retrieve("fake")).id == "fake"
            answer = await client.chat.completions.create(model="fake", messages=CHAT["messages"], max_completion_tokens=4, temperature=0)  # type: ignore[arg-type]
            text = answer.choices[0].message.content
            assert text == expected_text(b"<user>hi<assistant>", 4)
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 4
            chunks = [
                chunk
                async for chunk in await client.chat.completions.create(
                    model="fake",
                    messages=CHAT["messages"],  # type: ignore[arg-type]
                    max_tokens=4,
                    stream=True,
                    stream_options={"include_usage": True},
                    extra_body={"top_k": 5, "repetition_penalty": 1.0},
                )
            ]
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
            assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
            history = [*CHAT["messages"], answer.choices[0].message, {"role": "user", "content": [{"type": "text", "text": "more"}]}]
            assert (await client.chat.completions.create(model="fake", messages=history)).choices  # type: ignore[arg-type]
            completion = await client.completions.create(model="fake", prompt=["a", "b"], max_tokens=3)
            assert [choice.index for choice in completion.choices] == [0, 1]

    asyncio.run(scenario())


def test_the_openai_client_raises_its_own_errors() -> None:
    async def scenario() -> None:
        async with http_server(FakeAsyncEngine(fail_after=3), server_config(api_keys=("secret",))) as port, client_of(port, api_key="secret") as client:
            with pytest.raises(openai.BadRequestError) as bad:
                await client.completions.create(model="fake", prompt="x" * 600)
            assert bad.value.code == "context_length_exceeded"
            with pytest.raises(openai.NotFoundError) as missing:
                await client.completions.create(model="gpt-5", prompt="x")
            assert missing.value.code == "model_not_found"
            with pytest.raises(openai.AuthenticationError):
                await client.with_options(api_key="wrong").models.list()
            stream = await client.completions.create(model="fake", prompt="x", stream=True)
            with pytest.raises(openai.APIError, match="the step failed"):
                async for _ in stream:
                    pass

    asyncio.run(scenario())


def test_one_connection_serves_many_requests() -> None:
    async def scenario() -> None:
        async with http_server(FakeAsyncEngine()) as port, http_client(port) as client:
            for stream in (False, True, False):
                response = await client.post("/v1/completions", json={"prompt": "hi", "stream": stream})
                assert response.status_code == 200
                assert "connection" not in response.headers

    asyncio.run(scenario())

"""What good requests get, in one piece and as streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from typing import Any
from unittest.mock import ANY

import pytest

from jaxserve.errors import EngineError
from jaxserve.request import SamplingParams
from tests.serving.fake_engine import BOS, EOS, ByteTokenizer, FakeAsyncEngine, expected_text
from tests.serving.servers import CHAT, app_client, ask, events_of, server_config

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
HI = [BOS, *b"hi"]
CHAT_HI = list(b"<user>hi<assistant>")


def stream(path: str, body: dict[str, Any], engine: FakeAsyncEngine | None = None) -> list[Any]:
    response = ask("POST", path, engine=engine, json=body | {"stream": True})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    return events_of(response.text)


def test_models() -> None:
    listing = ask("GET", "/v1/models").json()
    assert [card["id"] for card in listing["data"]] == ["fake"]
    assert ask("GET", "/v1/models/fake").json() == listing["data"][0] | {"created": ANY}
    named = server_config(served_model_name="org/name")
    assert ask("GET", "/v1/models/org/name", config=named).json()["id"] == "org/name"
    assert ask("POST", COMPLETIONS, config=named, json={"prompt": "hi", "model": "org/name"}).json()["model"] == "org/name"


def test_probes_and_version() -> None:
    for path in ("/health", "/ready"):
        assert ask("GET", path).json() == {"status": "ready"}
    assert set(ask("GET", "/version").json()) == {"version"}
    assert set(ask("GET", "/openapi.json").json()["paths"]) >= {COMPLETIONS, CHATS, "/tokenize", "/detokenize"}


def test_completion() -> None:
    answer = ask("POST", COMPLETIONS, json={"model": "fake", "prompt": "hi", "max_tokens": 5}).json()
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", "fake")
    assert answer["system_fingerprint"].startswith("fp_")
    assert answer["choices"] == [{"index": 0, "text": expected_text(HI, 5), "logprobs": None, "finish_reason": "length", "stop_reason": None}]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8, "prompt_tokens_details": {"cached_tokens": 0}}


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hi", [HI]),
        (["hi"], [HI]),
        (["hi", "ho", "hi"], [HI, [BOS, *b"ho"], HI]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
def test_every_form_of_prompt(prompt: Any, prompts: list[list[int]]) -> None:
    body = {"prompt": prompt, "max_tokens": 4}
    texts = [expected_text(token_ids, 4) for token_ids in prompts]
    answer = ask("POST", COMPLETIONS, json=body).json()
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == list(enumerate(texts))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert answer["usage"]["completion_tokens"] == 4 * len(prompts)

    events = stream(COMPLETIONS, body | {"stream_options": {"include_usage": True}})
    assert events[-1] == "[DONE]"
    assert events[-2]["usage"] == answer["usage"]
    for index, text in enumerate(texts):
        choices = [choice for event in events[:-1] for choice in event["choices"] if choice["index"] == index]
        assert "".join(choice["text"] for choice in choices) == text
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]


def test_prompts_of_one_request_run_side_by_side() -> None:
    events = stream(COMPLETIONS, {"prompt": ["hi", "ho"], "max_tokens": 3}, FakeAsyncEngine(step_s=0.01))
    assert [event["choices"][0]["index"] for event in events[:-1]] != [0, 0, 0, 0, 1, 1, 1, 1]


def test_chat() -> None:
    answer = ask("POST", CHATS, json=CHAT | {"max_completion_tokens": 5}).json()
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected_text(CHAT_HI, 5), "refusal": None}
    assert choice["finish_reason"] == "length"


def test_chat_stream_opens_with_the_role_and_ends_with_one_finish_reason() -> None:
    events = stream(CHATS, CHAT | {"max_tokens": 5})
    chunks = events[:-1]
    assert events[-1] == "[DONE]"
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"].get("content", "") for choice in choices) == expected_text(CHAT_HI, 5)
    assert [choice["finish_reason"] for choice in choices] == [None] * 6 + ["length"]
    assert choices[-1]["delta"] == {}


@pytest.mark.parametrize(("options", "wants_usage"), [(None, False), ({}, False), ({"include_usage": False}, False), ({"include_usage": True}, True)])
def test_usage_comes_only_when_asked_for_and_only_in_the_last_chunk(options: Any, wants_usage: bool) -> None:
    chunks = stream(CHATS, CHAT | {"max_tokens": 3, "stream_options": options})[:-1]
    assert ["usage" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [wants_usage]
    if wants_usage:
        assert chunks[-1]["choices"] == []
        usage = chunks[-1]["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (len(CHAT_HI), 3, len(CHAT_HI) + 3)


def test_stop_reason_tells_which_stop_ended_it() -> None:
    text = expected_text(HI, 5)
    answer = ask("POST", COMPLETIONS, json={"prompt": "hi", "stop": [text[3], "zzz"]}).json()
    assert answer["choices"] == [{"index": 0, "text": text[:3], "logprobs": None, "finish_reason": "stop", "stop_reason": text[3]}]
    by_ids = ask("POST", COMPLETIONS, json={"prompt": HI, "stop": text[3]}).json()
    assert by_ids["choices"] == answer["choices"]
    last = stream(COMPLETIONS, {"prompt": "hi", "stop": text[0]})[-2]["choices"][0]
    assert (last["text"], last["finish_reason"], last["stop_reason"]) == ("", "stop", text[0])


def test_sampling_fields_reach_the_engine_and_omitted_ones_take_the_models_defaults() -> None:
    engine = FakeAsyncEngine()
    given = {"top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": -7, "stop": ["x"], "stop_token_ids": [9], "ignore_eos": True}
    given |= {"include_stop_str_in_output": True, "skip_special_tokens": False}
    ask("POST", COMPLETIONS, engine=engine, json={"prompt": "hi", **given, "temperature": None})
    assert engine.requests[0].sampling_params == SamplingParams(**given | {"stop": ("x",), "stop_token_ids": (9,)}, max_tokens=16, temperature=0.5)
    ask("POST", CHATS, engine=engine, json=CHAT | {"temperature": 0, "max_tokens": None})
    assert engine.requests[1].sampling_params == SamplingParams(temperature=0.0)


@pytest.mark.parametrize(("num_prompt_tokens", "num_tokens"), [(10, 16), (500, 12), (511, 1)])
def test_the_default_limit_of_completions_is_no_reason_to_refuse(num_prompt_tokens: int, num_tokens: int) -> None:
    usage = ask("POST", COMPLETIONS, json={"prompt": [1] * num_prompt_tokens}).json()["usage"]
    assert usage["completion_tokens"] == num_tokens


def test_a_generation_to_the_end_of_the_context() -> None:
    answer = ask("POST", CHATS, engine=FakeAsyncEngine(max_model_len=24), json=CHAT).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 24


@pytest.mark.parametrize(("limit", "num_tokens"), [(10, 10), (-1, 508), (1, 1)])
def test_truncate_prompt_tokens_keeps_the_end(limit: int, num_tokens: int) -> None:
    engine = FakeAsyncEngine()
    ask("POST", COMPLETIONS, engine=engine, json={"prompt": list(range(250)) * 3, "truncate_prompt_tokens": limit, "max_tokens": 4})
    assert list(engine.requests[0].prompt_token_ids) == (list(range(250)) * 3)[-num_tokens:]
    ask("POST", CHATS, engine=engine, json=CHAT | {"truncate_prompt_tokens": 5})
    assert list(engine.requests[-1].prompt_token_ids) == CHAT_HI[-5:]


def test_special_tokens_come_once() -> None:
    assert ask("POST", "/tokenize", json={"prompt": "hi"}).json() == {"count": 3, "max_model_len": 512, "tokens": HI, "token_strs": None}
    assert ask("POST", "/tokenize", json={"prompt": "hi", "add_special_tokens": False}).json()["tokens"] == HI[1:]
    assert ask("POST", "/tokenize", json=CHAT).json()["tokens"] == CHAT_HI
    assert ask("POST", "/tokenize", json=CHAT | {"add_generation_prompt": False}).json()["tokens"] == list(b"<user>hi")
    assert ask("POST", "/tokenize", json=CHAT | {"chat_template_kwargs": {"thinking": False}}).json()["count"] > len(CHAT_HI)
    assert ask("POST", "/detokenize", json={"tokens": [*HI, EOS]}).json() == {"prompt": "<s>hi</s>"}


def test_long_prompts_are_tokenised_beside_the_event_loop() -> None:
    engine = FakeAsyncEngine(max_model_len=100_000)
    assert ask("POST", COMPLETIONS, engine=engine, json={"prompt": "é" * 20_000, "max_tokens": 1}).json()["usage"]["prompt_tokens"] == 40_001
    chat = {"messages": [{"role": "user", "content": "x" * 50_000}], "max_tokens": 1}
    assert ask("POST", CHATS, engine=engine, json=chat).json()["usage"]["prompt_tokens"] > 50_000


def test_the_event_loop_goes_on_while_a_long_prompt_is_tokenised() -> None:
    released = threading.Event()

    class Slow(ByteTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            assert released.wait(30), "the other request had to wait for this one"
            return super().encode(text, add_special_tokens=add_special_tokens)

    engine = FakeAsyncEngine(max_model_len=100_000)
    engine.tokenizer = Slow()

    async def scenario() -> None:
        async with app_client(engine) as client:
            for path, body in ((COMPLETIONS, {"prompt": "x" * 50_000}), (CHATS, {"messages": [{"role": "user", "content": "x" * 50_000}], "max_tokens": 1})):
                released.clear()
                long = asyncio.create_task(client.post(path, json=body))
                assert (await client.post(COMPLETIONS, json={"prompt": [5, 6], "max_tokens": 1})).status_code == 200
                assert not long.done()
                released.set()
                assert (await long).status_code == 200

    asyncio.run(scenario())


def test_request_ids_come_back_if_they_are_harmless() -> None:
    assert ask("GET", "/health", headers={"X-Request-Id": "abc-1.2"}).headers["x-request-id"] == "abc-1.2"
    for bad in ("a b", "x" * 129, "<script>", ""):
        given = ask("GET", "/health", headers={"X-Request-Id": bad}).headers["x-request-id"]
        assert given != bad
        assert len(given) == 32
    assert ask("GET", "/v1/models/none", headers={"X-Request-Id": "err"}).headers["x-request-id"] == "err"


def test_ids_are_unique_whatever_the_client_sends() -> None:
    async def scenario() -> set[str]:
        async with app_client(FakeAsyncEngine()) as client:
            calls = [client.post(COMPLETIONS, json={"prompt": "hi"}, headers={"X-Request-Id": "same"}) for _ in range(20)]
            return {response.json()["id"] for response in await asyncio.gather(*calls)}

    assert len(asyncio.run(scenario())) == 20


def test_a_stream_that_breaks_ends_with_an_error_event() -> None:
    events = stream(CHATS, CHAT | {"max_tokens": 9}, FakeAsyncEngine(fail_after=2))
    assert "[DONE]" not in events
    assert events[-1] == {"error": {"message": "the step failed", "type": "server_error", "param": None, "code": "engine_error"}}
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1]) == expected_text(CHAT_HI, 2)


def test_an_error_before_the_first_event_has_its_own_status() -> None:
    response = ask("POST", CHATS, engine=FakeAsyncEngine(fail_after=0), json=CHAT | {"stream": True})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "engine_error"


def test_one_prompt_that_fails_ends_the_others() -> None:
    class FailsSecond(FakeAsyncEngine):
        async def generate(self, request: Any) -> Any:
            async with contextlib.aclosing(super().generate(request)) as outputs:
                async for output in outputs:
                    yield output
                    if request.request_id.endswith("-1"):
                        raise EngineError("the second failed")

    engine = FailsSecond(step_s=0.01)
    assert ask("POST", COMPLETIONS, engine=engine, json={"prompt": ["a", "b", "c"], "max_tokens": 400}).status_code == 500
    assert engine.running == {}
    assert {request_id.rsplit("-", 1)[1] for request_id in engine.aborted} == {"0", "1", "2"}


def test_text_is_sent_as_it_is() -> None:
    class Speaks(FakeAsyncEngine):
        async def generate(self, request: Any) -> Any:
            async for output in super().generate(request):
                yield self._output(request, output.usage.completion_tokens, 'é\n\n\u2028"😀', output.finish_reason)

    text = 'é\n\n\u2028"😀' * 2
    body = {"prompt": "hi", "max_tokens": 2}
    response = ask("POST", COMPLETIONS, engine=Speaks(), json=body)
    assert response.json()["choices"][0]["text"] == text
    assert "😀" in response.text
    assert "".join(event["choices"][0]["text"] for event in stream(COMPLETIONS, body, Speaks())[:-1]) == text
    assert json.loads(response.content)["choices"][0]["finish_reason"] == "length"

"""Every kind of bad input is answered in OpenAI's error form with its own status, and the server serves on."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from typing import Any

import httpx
import pytest

from jaxserve.chat_template import ChatTemplate
from tests.serving.fake_engine import ByteTokenizer, FakeAsyncEngine
from tests.serving.servers import CHAT, Raw, app_client, ask, http_server, server_config
from tests.waiting import LIMIT_S

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}

BAD_FIELDS: list[tuple[str, dict[str, Any], str, str]] = [
    # path, body, param, code
    (COMPLETIONS, {}, "prompt", "missing_required_parameter"),
    (COMPLETIONS, {"prompt": None}, "prompt", "missing_required_parameter"),
    (COMPLETIONS, {"prompt": []}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": "", "add_special_tokens": False}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": 5}, "prompt", "invalid_type"),
    (COMPLETIONS, {"prompt": ["a", 5]}, "prompt", "invalid_type"),
    (COMPLETIONS, {"prompt": [1, True]}, "prompt", "invalid_type"),
    (COMPLETIONS, {"prompt": [1.0]}, "prompt", "invalid_type"),
    (COMPLETIONS, {"prompt": ["a"] * 1025}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": [258]}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": [10**30]}, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": [1] * 600}, "prompt", "context_length_exceeded"),
    (COMPLETIONS, {"prompt": "hi", "max_tokens": 511}, "max_tokens", "context_length_exceeded"),
    (COMPLETIONS, {"prompt": "hi", "max_tokens": 0}, "max_tokens", "invalid_value"),
    (COMPLETIONS, {"prompt": "hi", "max_tokens": -1}, "max_tokens", "invalid_value"),
    (COMPLETIONS, {"prompt": "hi", "max_tokens": 1.5}, "max_tokens", "invalid_type"),
    (COMPLETIONS, {"prompt": "hi", "max_tokens": "5"}, "max_tokens", "invalid_type"),
    (COMPLETIONS, {"prompt": "hi", "max_tokens": True}, "max_tokens", "invalid_type"),
    (COMPLETIONS, {"prompt": "hi", "temperature": -1}, "temperature", "invalid_value"),
    (COMPLETIONS, {"prompt": "hi", "temperature": "1"}, "temperature", "invalid_type"),
    (COMPLETIONS, {"prompt": "hi", "temperature": True}, "temperature", "invalid_type"),
    (COMPLETIONS, {"prompt": "hi", "temperature": 10**400}, "temperature", "invalid_type"),
    (COMPLETIONS, {"prompt": "hi", "top_p": 0}, "top_p", "invalid_value"),
    (COMPLETIONS, {"prompt": "hi", "top_k": -2}, "top_k", "invalid_value"),
    (COMPLETIONS, {"prompt": "hi", "top_k": 10**400}, "top_k", "invalid_value"),
    (COMPLETIONS, {"prompt": "hi", "min_p": 1.5}, "min_p", "invalid_value"),
    (COMPLETIONS, {"prompt": "hi", "seed": 2**63}, "seed", "invalid_value"),
    (COMPLETIONS, {"prompt": "hi", "stop": [""]}, "stop", "invalid_value"),
    (COMPLETIONS, {"prompt": "hi", "stop": ["a", 5]}, "stop[1]", "invalid_type"),
    (COMPLETIONS, {"prompt": "hi", "stop_token_ids": [-1]}, "stop_token_ids", "invalid_value"),
    (COMPLETIONS, {"prompt": "hi", "stream": 1}, "stream", "invalid_type"),
    (COMPLETIONS, {"prompt": "hi", "stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    (COMPLETIONS, {"prompt": "hi", "stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter"),
    (COMPLETIONS, {"prompt": "hi", "stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "invalid_type"),
    (
        COMPLETIONS,
        {"prompt": "hi", "stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats",
        "unsupported_parameter",
    ),
    (COMPLETIONS, {"prompt": "hi", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
    (COMPLETIONS, {"prompt": "hi", "truncate_prompt_tokens": 513}, "truncate_prompt_tokens", "context_length_exceeded"),
    (COMPLETIONS, {"prompt": "hi", "n": 2}, "n", "unsupported_parameter"),
    (COMPLETIONS, {"prompt": "hi", "logprobs": 25}, "logprobs", "unsupported_parameter"),
    (COMPLETIONS, {"prompt": "hi", "messages": []}, "messages", "unknown_parameter"),
    (COMPLETIONS, {"prompt": "hi", "model": 5}, "model", "invalid_type"),
    (CHATS, {}, "messages", "missing_required_parameter"),
    (CHATS, {"messages": []}, "messages", "invalid_value"),
    (CHATS, {"messages": "hi"}, "messages", "invalid_value"),
    (CHATS, {"messages": ["hi"]}, "messages[0]", "invalid_type"),
    (CHATS, {"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role", "invalid_value"),
    (CHATS, {"messages": [{"role": "user"}]}, "messages[0].content", "invalid_type"),
    (CHATS, {"messages": [USER | {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages[0].content[0]", "invalid_value"),
    (CHATS, {"messages": [USER | {"tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls", "unsupported_parameter"),
    (CHATS, {"messages": [USER | {"colour": "red"}]}, "messages[0].colour", "unknown_parameter"),
    (CHATS, {"messages": [USER, USER]}, "messages", "invalid_value"),  # the template refuses
    (CHATS, {"messages": [{"role": "user", "content": "x" * 600}]}, "messages", "context_length_exceeded"),
    (CHATS, CHAT | {"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
    (CHATS, CHAT | {"max_completion_tokens": 512}, "max_completion_tokens", "context_length_exceeded"),
    (CHATS, CHAT | {"max_completion_tokens": 5, "max_tokens": 6}, "max_completion_tokens", "invalid_value"),
    (CHATS, CHAT | {"tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
    (CHATS, CHAT | {"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
    (CHATS, CHAT | {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "invalid_value"),
    (CHATS, CHAT | {"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "invalid_value"),
    ("/tokenize", {}, "prompt", "missing_required_parameter"),
    ("/tokenize", {"prompt": "a", "messages": [USER]}, "prompt", "missing_required_parameter"),
    ("/detokenize", {"tokens": [258]}, "tokens", "invalid_value"),
    ("/detokenize", {"tokens": ["a"]}, "tokens[0]", "invalid_type"),
]

BAD_BODIES: list[tuple[bytes, str]] = [
    (b"", "not valid JSON"),
    (b'{"prompt": "hi"', "not valid JSON"),
    (b'{"prompt": "hi", "temperature": NaN}', "NaN"),
    (b'{"prompt": "hi", "temperature": -Infinity}', "-Infinity"),
    (b'{"prompt": "hi", "temperature": 1e999}', "finite"),
    (b'{"prompt": "hi", "prompt": "ho"}', "more than once"),
    (b"{" + b",".join(b'"%d": 1' % index for index in range(50_000)) + b', "49999": 1}', "'49999' appears more than once"),
    (b'{"prompt": "\\ud800"}', "surrogate"),
    (b'{"prompt": "\xff"}', "UTF-8"),
    (b'["prompt"]', "JSON object"),
    (b'{"prompt": ' + b"[" * 65 + b"]" * 65 + b"}", "nested"),
    (b'{"user": ' + b"[" * 100_000, "not valid JSON|nested"),
    (b'{"user": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested"),
    (b'{"seed": ' + b"9" * 10_000 + b"}", "not valid JSON"),
]


def check_error(response: httpx.Response, status: int, param: str | None, code: str) -> str:
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (status, param, code), response.text
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    return error["message"]


def test_bad_fields_are_named_and_the_server_serves_on() -> None:
    engine = FakeAsyncEngine()

    async def scenario() -> None:
        async with app_client(engine) as client:
            for path, body, param, code in BAD_FIELDS:
                for stream in (False, True) if path.startswith("/v1") and "stream" not in body and "stream_options" not in body else (False,):
                    data = json.dumps(body | ({"stream": True} if stream else {}))
                    response = await client.post(path, content=data)
                    message = check_error(response, 400, param, code)
                    assert len(message) < 500, "messages quote values in short"
            assert engine.requests == []
            assert (await client.post(COMPLETIONS, json={"prompt": "hi"})).status_code == 200

    asyncio.run(scenario())


def test_bad_bodies() -> None:
    async def scenario() -> None:
        async with app_client(FakeAsyncEngine()) as client:
            for body, reason in BAD_BODIES:
                response = await client.post(COMPLETIONS, content=body)
                assert response.status_code == 400
                assert any(part in response.json()["error"]["message"] for part in reason.split("|")), response.text

    asyncio.run(scenario())


def test_escaped_surrogate_pairs_are_text() -> None:
    response = ask("POST", "/tokenize", content=b'{"prompt": "\\uD83D\\ude00", "add_special_tokens": false}')
    assert response.json()["tokens"] == list("😀".encode())


def test_unknown_model() -> None:
    message = check_error(ask("POST", COMPLETIONS, json={"prompt": "hi", "model": "gpt-5"}), 404, "model", "model_not_found")
    assert "'gpt-5'" in message
    assert "'fake'" in message
    check_error(ask("GET", "/v1/models/gpt-5"), 404, "model", "model_not_found")


def test_unknown_paths_and_methods() -> None:
    check_error(ask("GET", "/v2/completions"), 404, None, "not_found")
    assert len(check_error(ask("GET", "/" + "x" * 10_000), 404, None, "not_found")) < 500
    response = ask("GET", COMPLETIONS)
    check_error(response, 405, None, "method_not_allowed")
    assert response.headers["allow"] == "POST"


def test_api_keys() -> None:
    config = server_config(api_keys=("first", "sécond"))
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "first"}, {"Authorization": "Bearer "}, {"Authorization": "Basic first"}):
        for method, path in (("POST", COMPLETIONS), ("GET", "/v1/models"), ("POST", "/tokenize"), ("GET", "/nowhere"), ("GET", "/docs")):
            response = ask(method, path, config=config, headers=headers)
            check_error(response, 401, None, "invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"
    for key in (b"Bearer first", "bearer sécond".encode()):
        assert ask("GET", "/v1/models", config=config, headers=[(b"authorization", key)]).status_code == 200
    for path in ("/health", "/ready", "/version"):
        assert ask("GET", path, config=config).status_code == 200


@pytest.mark.parametrize("state", ["starting", "draining", "dead"])
def test_states_that_take_no_requests(state: str) -> None:
    for method, path in (("POST", COMPLETIONS), ("POST", CHATS), ("POST", "/tokenize"), ("GET", "/v1/models")):
        response = ask(method, path, engine=FakeAsyncEngine(state=state), json={"prompt": "hi"})
        check_error(response, 503, None, "engine_dead" if state == "dead" else "not_ready")
    assert ask("GET", "/ready", engine=FakeAsyncEngine(state=state)).status_code == 503
    assert ask("GET", "/health", engine=FakeAsyncEngine(state=state)).status_code == (503 if state == "dead" else 200)


def test_a_compressed_body() -> None:
    response = ask("POST", COMPLETIONS, content=gzip.compress(b'{"prompt": "hi"}'), headers={"Content-Encoding": "gzip"})
    assert "'gzip'" in check_error(response, 400, None, "unsupported_encoding")


def test_body_too_large_announced() -> None:
    response = ask("POST", COMPLETIONS, config=server_config(max_body_bytes=1024), json={"prompt": "x" * 1024})
    check_error(response, 413, None, "request_too_large")


def test_body_too_large_in_chunks_is_refused_while_it_arrives() -> None:
    async def scenario() -> None:
        async with http_server(FakeAsyncEngine(), server_config(max_body_bytes=10_000)) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            for _ in range(3):  # the body never ends
                writer.write(b"1000\r\n" + b"x" * 4096 + b"\r\n")
            await writer.drain()
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), LIMIT_S)
            assert b"413" in head.splitlines()[0]
            assert b"request_too_large" in await asyncio.wait_for(reader.read(), LIMIT_S)  # up to the close
            await Raw(reader, writer).close()

    asyncio.run(scenario())


def test_a_model_without_template_refuses_chat_and_completes() -> None:
    engine = FakeAsyncEngine(chat_template=None)
    assert "no chat template" in check_error(ask("POST", CHATS, engine=engine, json=CHAT), 400, "messages", "invalid_value")
    assert ask("POST", COMPLETIONS, engine=engine, json={"prompt": "hi"}).status_code == 200


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('roles must alternate') }}", "{{ messages[7].content.x }}", "{{ 1 // 0 }}", "{{ messages[0].content + 1 }}", "{% include 'x' %}"],
)
def test_a_template_that_fails_to_render(template: str) -> None:
    class Templated(ByteTokenizer):
        def render_chat(self, messages: Any, **variables: Any) -> str:
            return ChatTemplate(template, "test").render(messages, variables)

    engine = FakeAsyncEngine()
    engine.tokenizer = Templated()
    for path in (CHATS, "/tokenize"):
        message = check_error(ask("POST", path, engine=engine, json=CHAT), 400, "messages", "invalid_value")
        assert "chat template" in message
    assert "raise_exception" not in template or "roles must alternate" in message


def test_unexpected_errors_show_an_id_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeAsyncEngine):
        def make_request(self, *args: Any) -> Any:
            raise RuntimeError("secret path")

    with caplog.at_level(logging.ERROR):
        response = ask("POST", COMPLETIONS, engine=Broken(), json={"prompt": "hi"})
    message = check_error(response, 500, None, "internal_error")
    assert "secret" not in message
    error_id = message.rsplit(" ", 1)[1]
    assert error_id in caplog.text
    assert "secret path" in caplog.text


def test_an_engine_that_fails_a_request() -> None:
    check_error(ask("POST", COMPLETIONS, engine=FakeAsyncEngine(fail_after=2), json={"prompt": "hi"}), 500, None, "engine_error")

"""The gRPC API through a real server: answers, every status, cancellation, health, and a client that knows nothing but reflection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from jaxserve.config import Config
from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.request import SamplingParams
from jaxserve.serving.grpc_api import jaxserve_v1_pb2 as pb
from jaxserve.serving.grpc_api import jaxserve_v1_pb2_grpc as pb_grpc
from jaxserve.serving.grpc_api.server import SERVICE_NAME, GrpcServer
from jaxserve.serving.metrics import Responses
from jaxserve.serving.service import InferenceService
from tests.serving.fake_engine import BOS, EOS, FakeAsyncEngine, expected_text
from tests.serving.servers import grpc_server, server_config
from tests.waiting import until

HI = [BOS, *b"hi"]
CHAT = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])
CHAT_HI = list(b"<user>hi<assistant>")
Stub = Any


def with_stub(scenario: Callable[[Stub], Awaitable[None]], engine: FakeAsyncEngine | None = None, config: Config | None = None) -> None:
    async def run() -> None:
        async with (
            grpc_server(engine or FakeAsyncEngine(), config) as server,
            grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
        ):
            await scenario(pb_grpc.InferenceStub(channel))

    asyncio.run(run())


async def generate(stub: Stub, **fields: Any) -> list[pb.GenerateResponse]:
    return [response async for response in stub.Generate(pb.GenerateRequest(**fields))]


async def refusal_of(call: Awaitable[Any]) -> tuple[grpc.StatusCode, str, dict[str, str]]:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    error = refused.value
    return error.code(), error.details() or "", dict(tuple(error.trailing_metadata()))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [({"text": "hi"}, HI), ({"token_ids": pb.TokenIds(ids=[5, 6])}, [5, 6]), ({"messages": CHAT}, CHAT_HI), ({"text": "hi", "model": "fake"}, HI)],
)
def test_generate(fields: dict[str, Any], prompt: list[int]) -> None:
    async def scenario(stub: Stub) -> None:
        responses = await generate(stub, **fields, max_tokens=5)
        text = expected_text(prompt, 5)
        assert "".join(response.text for response in responses) == text
        assert [token_id for response in responses for token_id in response.token_ids] == list(text.encode())
        assert [response.finish_reason for response in responses] == ["", "", "", "", "length"]
        assert [response.HasField("usage") for response in responses] == [False] * 4 + [True]
        assert responses[-1].usage == pb.Usage(prompt_tokens=len(prompt), completion_tokens=5, total_tokens=len(prompt) + 5)
        assert len({response.request_id for response in responses}) == 1

    with_stub(scenario)


def test_sampling_fields_have_presence() -> None:
    engine = FakeAsyncEngine()

    async def scenario(stub: Stub) -> None:
        given = {"temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": -7, "max_tokens": 4, "stop": ["x"], "stop_token_ids": [9]}
        given |= {"ignore_eos": True, "include_stop_str_in_output": True, "skip_special_tokens": False}
        await generate(stub, text="hi", **given, n=1, repetition_penalty=1.0, presence_penalty=0.0, min_tokens=0)
        await generate(stub, text="hi", truncate_prompt_tokens=2, add_special_tokens=False, request_id="mine")
        assert engine.requests[0].sampling_params == SamplingParams(**given | {"stop": ("x",), "stop_token_ids": (9,)})
        assert engine.requests[1].sampling_params == SamplingParams(temperature=0.5)
        assert (engine.requests[1].request_id, list(engine.requests[1].prompt_token_ids)) == ("mine", list(b"hi"))

    with_stub(scenario, engine)


def test_stop_reason() -> None:
    async def scenario(stub: Stub) -> None:
        for prompt in ({"text": "hi"}, {"token_ids": pb.TokenIds(ids=HI)}):
            last = (await generate(stub, **prompt, stop=[expected_text(HI, 3)[2]]))[-1]
            assert (last.finish_reason, last.WhichOneof("stop_reason"), last.stop_string) == ("stop", "stop_string", expected_text(HI, 3)[2])

    with_stub(scenario)


BAD_REQUESTS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "input", "missing_required_parameter"),
    ({"text": "", "add_special_tokens": False}, "text", "invalid_value"),
    ({"token_ids": pb.TokenIds()}, "token_ids", "invalid_value"),
    ({"token_ids": pb.TokenIds(ids=[258])}, "token_ids", "invalid_value"),
    ({"token_ids": pb.TokenIds(ids=[-1])}, "token_ids", "invalid_value"),
    ({"token_ids": pb.TokenIds(ids=[1] * 512)}, "token_ids", "context_length_exceeded"),
    ({"text": "hi", "max_tokens": 510}, "max_tokens", "context_length_exceeded"),
    ({"text": "hi", "max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"text": "hi", "temperature": -1}, "temperature", "invalid_value"),
    ({"text": "hi", "temperature": float("nan")}, "temperature", "invalid_value"),
    ({"text": "hi", "top_p": float("inf")}, "top_p", "invalid_value"),
    ({"text": "hi", "n": 2}, "n", "unsupported_parameter"),
    ({"text": "hi", "request_id": "x" * 129}, "request_id", "invalid_value"),
    ({"messages": pb.ChatMessages()}, "messages", "invalid_value"),
    ({"messages": pb.ChatMessages(messages=[pb.ChatMessage(role="robot", content="hi")])}, "messages[0].role", "invalid_value"),
    ({"messages": pb.ChatMessages(messages=[*CHAT.messages, *CHAT.messages])}, "messages", "invalid_value"),
]


def test_bad_requests_are_refused_by_name_and_the_server_serves_on() -> None:
    engine = FakeAsyncEngine()

    async def scenario(stub: Stub) -> None:
        for fields, param, code in BAD_REQUESTS:
            status, message, metadata = await refusal_of(generate(stub, **fields))
            assert (status, metadata.get("error-param"), metadata["error-code"]) == (grpc.StatusCode.INVALID_ARGUMENT, param, code), message
        assert (await refusal_of(generate(stub, text="hi", model="gpt-5")))[0] == grpc.StatusCode.NOT_FOUND
        assert engine.requests == []
        assert await generate(stub, text="hi", max_tokens=1)

    with_stub(scenario, engine)


def test_fields_that_the_proto_does_not_have_are_refused() -> None:
    async def scenario(stub: Stub) -> None:
        request = pb.GenerateRequest(text="hi")
        request.MergeFromString(b"\xa0\x06\x01")  # field 100, varint 1
        with pytest.raises(grpc.aio.AioRpcError, match="GenerateRequest has no field number 100") as refused:
            await anext(aiter(stub.Generate(request)))
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT

    with_stub(scenario)


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x1a\x02\xff\xfe", b"\x1a\x05a"], ids=["garbage", "invalid UTF-8", "truncated"])
def test_bytes_that_are_no_message(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with grpc_server(FakeAsyncEngine()) as server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            streaming = channel.unary_stream(f"/{SERVICE_NAME}/Generate")(data)
            for call in (anext(aiter(streaming)), channel.unary_unary(f"/{SERVICE_NAME}/Tokenize")(data)):
                status, message, metadata = await refusal_of(call)
                assert (status, metadata["error-code"]) == (grpc.StatusCode.INVALID_ARGUMENT, "invalid_message"), message
            assert await generate(pb_grpc.InferenceStub(channel), text="hi", max_tokens=1)

    asyncio.run(run())
    assert not caplog.records


def test_tokenize_and_detokenize() -> None:
    async def scenario(stub: Stub) -> None:
        assert (await stub.Tokenize(pb.TokenizeRequest(text="hi"))).token_ids == HI
        assert (await stub.Tokenize(pb.TokenizeRequest(text="hi", add_special_tokens=False))).token_ids == HI[1:]
        assert (await stub.Tokenize(pb.TokenizeRequest(messages=CHAT))).token_ids == CHAT_HI
        assert (await stub.Detokenize(pb.DetokenizeRequest(token_ids=[*HI, EOS]))).text == "<s>hi</s>"
        status, _, metadata = await refusal_of(stub.Detokenize(pb.DetokenizeRequest(token_ids=[258])))
        assert (status, metadata["error-param"]) == (grpc.StatusCode.INVALID_ARGUMENT, "token_ids")
        assert (await refusal_of(stub.Tokenize(pb.TokenizeRequest())))[0] == grpc.StatusCode.INVALID_ARGUMENT

    with_stub(scenario)


def test_infos() -> None:
    async def scenario(stub: Stub) -> None:
        model = await stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (model.model, model.max_model_len, model.vocab_size, model.has_chat_template) == ("fake", 512, 258, True)
        server = await stub.GetServerInfo(pb.GetServerInfoRequest())
        assert server.state == "ready"
        assert server.stats["num_running"] == 0 and server.stats["finished_abort"] == 0

    with_stub(scenario)


@pytest.mark.parametrize("state", ["starting", "draining", "dead"])
def test_states_that_take_no_requests(state: str) -> None:
    async def scenario(stub: Stub) -> None:
        for call in (generate(stub, text="hi"), stub.Tokenize(pb.TokenizeRequest(text="hi")), stub.GetModelInfo(pb.GetModelInfoRequest())):
            assert (await refusal_of(call))[0] == grpc.StatusCode.UNAVAILABLE
        assert (await stub.GetServerInfo(pb.GetServerInfoRequest())).state == state

    with_stub(scenario, FakeAsyncEngine(state=state))


def test_cancelling_a_call_frees_its_request() -> None:
    engine = FakeAsyncEngine(step_s=0.01, max_model_len=4096)

    async def scenario(stub: Stub) -> None:
        call = stub.Generate(pb.GenerateRequest(text="hi", request_id="one"))
        await call.read()
        call.cancel()
        await until(lambda: not engine.running)
        assert engine.aborted == ["one"]

    with_stub(scenario, engine)


def test_an_id_in_flight_is_refused_and_its_owner_runs_on() -> None:
    engine = FakeAsyncEngine(step_s=0.05)

    async def scenario(stub: Stub) -> None:
        request = pb.GenerateRequest(text="hi", request_id="one", max_tokens=500)
        owner = aiter(stub.Generate(request))
        await anext(owner)
        status, message, _ = await refusal_of(generate(stub, text="hi", request_id="one"))
        assert status == grpc.StatusCode.INVALID_ARGUMENT and "in flight already" in message
        engine.step_s = 0.0
        assert [response.finish_reason async for response in owner][-1] == "length"
        assert engine.aborted == []

    with_stub(scenario, engine)


def test_abort_ends_a_generation_with_a_last_response() -> None:
    engine = FakeAsyncEngine(step_s=0.01, max_model_len=4096)

    async def scenario(stub: Stub) -> None:
        responses = aiter(stub.Generate(pb.GenerateRequest(text="hi", request_id="one")))
        await anext(responses)
        assert (await stub.Abort(pb.AbortRequest(request_id="one"))).aborted
        assert [response.finish_reason async for response in responses][-1] == "abort"
        assert not (await stub.Abort(pb.AbortRequest(request_id="one"))).aborted
        assert (await refusal_of(stub.Abort(pb.AbortRequest())))[0] == grpc.StatusCode.INVALID_ARGUMENT

    with_stub(scenario, engine)


def test_a_generation_that_fails() -> None:
    async def scenario(stub: Stub) -> None:
        status, message, _ = await refusal_of(generate(stub, text="hi"))
        assert (status, message) == (grpc.StatusCode.INTERNAL, "the step failed")

    with_stub(scenario, FakeAsyncEngine(fail_after=2))


def test_a_very_long_reason_arrives() -> None:
    class Verbose(FakeAsyncEngine):
        def make_request(self, *args: Any) -> Any:
            raise InvalidRequestError("ß" * 100_000, param="messages")

    async def scenario(stub: Stub) -> None:
        status, message, metadata = await refusal_of(generate(stub, text="hi"))
        assert (status, metadata["error-param"]) == (grpc.StatusCode.INVALID_ARGUMENT, "messages")
        assert message.startswith("ßßß")

    with_stub(scenario, Verbose())


def test_unexpected_errors_show_an_id_and_nothing_else() -> None:
    class Broken(FakeAsyncEngine):
        def make_request(self, *args: Any) -> Any:
            raise RuntimeError("secret path")

    async def scenario(stub: Stub) -> None:
        status, message, _ = await refusal_of(generate(stub, text="hi"))
        assert status == grpc.StatusCode.INTERNAL
        assert "secret" not in message
        assert "id" in message

    with_stub(scenario, Broken())


def test_messages_larger_than_a_body_may_be() -> None:
    async def scenario(stub: Stub) -> None:
        assert (await refusal_of(generate(stub, text="x" * 5000)))[0] == grpc.StatusCode.RESOURCE_EXHAUSTED

    with_stub(scenario, config=server_config(max_body_bytes=4096))


def test_api_keys_guard_all_but_health() -> None:
    async def run() -> None:
        async with (
            grpc_server(FakeAsyncEngine(), server_config(api_keys=("secret",))) as server,
            grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
        ):
            stub = pb_grpc.InferenceStub(channel)
            for metadata in (None, (("authorization", "Bearer wrong"),), (("authorization", "secret"),)):
                for call in (
                    stub.Generate(pb.GenerateRequest(text="hi"), metadata=metadata).read(),
                    stub.Tokenize(pb.TokenizeRequest(text="hi"), metadata=metadata),
                ):
                    assert (await refusal_of(call))[0] == grpc.StatusCode.UNAUTHENTICATED
            right = (("authorization", "Bearer secret"),)
            assert (await stub.Tokenize(pb.TokenizeRequest(text="hi"), metadata=right)).token_ids == HI
            health = health_pb2_grpc.HealthStub(channel)
            assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING

    asyncio.run(run())


def test_health() -> None:
    async def run() -> None:
        async with (
            grpc_server(FakeAsyncEngine(), serving=False) as server,
            grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
        ):
            health = health_pb2_grpc.HealthStub(channel)
            for serving in (False, True, False):
                await server.set_serving(serving)
                for name in ("", SERVICE_NAME):
                    status = (await health.Check(health_pb2.HealthCheckRequest(service=name))).status
                    assert status == (health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING)

    asyncio.run(run())


def test_a_client_made_from_reflection() -> None:
    def talk(port: int) -> str:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            assert set(database.get_services()) >= {SERVICE_NAME, "grpc.health.v1.Health"}
            pool = descriptor_pool.DescriptorPool(database)
            method = pool.FindServiceByName(SERVICE_NAME).FindMethodByName("Generate")
            request_class = message_factory.GetMessageClass(method.input_type)
            response_class = message_factory.GetMessageClass(method.output_type)
            call = channel.unary_stream(
                f"/{SERVICE_NAME}/{method.name}", request_serializer=request_class.SerializeToString, response_deserializer=response_class.FromString
            )
            return "".join(response.text for response in call(request_class(text="hi", max_tokens=6, temperature=0.0)))

    async def run() -> None:
        async with grpc_server(FakeAsyncEngine()) as server:
            assert await asyncio.to_thread(talk, server.port) == expected_text(HI, 6)

    asyncio.run(run())


def test_64_streams_at_once_give_the_texts_of_one_by_one() -> None:
    async def scenario(stub: Stub) -> None:
        async def text_of(prompt: str) -> str:
            return "".join(response.text for response in await generate(stub, text=prompt, max_tokens=20))

        prompts = [f"prompt {index}" for index in range(64)]
        assert await asyncio.gather(*map(text_of, prompts)) == [expected_text([BOS, *prompt.encode()], 20) for prompt in prompts]

    with_stub(scenario, FakeAsyncEngine(step_s=0.002))


def test_port_in_use() -> None:
    async def run() -> None:
        async with grpc_server(FakeAsyncEngine()) as server:
            with pytest.raises(ConfigError, match=rf"server\.grpc_port.*:{server.port}.*--grpc-port"):
                GrpcServer(InferenceService(FakeAsyncEngine(), server_config(grpc_port=server.port)), Responses())

    asyncio.run(run())

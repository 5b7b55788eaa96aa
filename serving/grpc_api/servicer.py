"""The service ``jaxserve.v1.Inference``: from messages to engine requests and back, with the checks of the HTTP API."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Container, Iterable
from contextvars import ContextVar
from typing import Any

import grpc.aio
import msgspec
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from jaxserve.errors import InvalidRequestError
from jaxserve.request import RequestOutput
from jaxserve.serving import fields
from jaxserve.serving.error_table import report_error
from jaxserve.serving.grpc_api import jaxserve_v1_pb2 as pb
from jaxserve.serving.grpc_api import jaxserve_v1_pb2_grpc as pb_grpc
from jaxserve.serving.messages import parse_messages
from jaxserve.serving.metrics import CountsResponses
from jaxserve.serving.service import OPTION_FIELDS, SAMPLING_FIELDS, InferenceService, client_names

MAX_REQUEST_ID_CHARS = 128
MAX_MESSAGE_CHARS = 1000
"""Clients drop a status whose trailers pass 8 KiB; a character may take nine bytes there. What a chat template says can be of any length."""

TENANT: ContextVar[str] = ContextVar("jaxserve.tenant")
"""Whose key the call at hand came with. The server's interceptor sets it, in the task that then runs the method."""

Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServicer(pb_grpc.InferenceServicer):
    """Answers the methods of ``jaxserve_v1.proto``.

    Args:
        service: What both APIs share.
        responses: Told how each call was answered.
    """

    def __init__(self, service: InferenceService, responses: CountsResponses) -> None:
        self._service = service
        self._responses = responses

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncGenerator[pb.GenerateResponse, None]:
        async with _answering(context, self._responses, "Generate"):
            service = self._service
            _check_message(request)
            self._check(request.model)
            given = _sampling_given(request)
            with client_names({"prompt": request.WhichOneof("input") or "input"}):
                sampling_params = service.sampling_params(given)
                traceparent = metadata_value(context.invocation_metadata(), "traceparent") or None
                options = service.request_options(_given(request, OPTION_FIELDS), TENANT.get(), traceparent)
                token_ids = await self._prompt(request)
                truncate = request.truncate_prompt_tokens if request.HasField("truncate_prompt_tokens") else None
                request_id = _request_id(request.request_id)
                engine_request = service.make_request(token_ids, sampling_params, request_id, options, truncate_prompt_tokens=truncate)
            async with contextlib.aclosing(service.run(engine_request)) as outputs:
                async for output in outputs:
                    yield _response(output)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        async with _answering(context, self._responses, "Tokenize"):
            _check_message(request)
            self._check(request.model)
            return pb.TokenizeResponse(token_ids=await self._prompt(request), max_model_len=self._service.engine.max_model_len)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        async with _answering(context, self._responses, "Detokenize"):
            _check_message(request)
            self._check(request.model)
            with client_names({"tokens": "token_ids"}):
                return pb.DetokenizeResponse(text=await self._service.decode(request.token_ids))

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        async with _answering(context, self._responses, "Abort"):
            _check_message(request)
            if not request.request_id:
                raise InvalidRequestError("request_id is required", param="request_id", code="missing_required_parameter")
            return pb.AbortResponse(aborted=await self._service.engine.abort(request.request_id, TENANT.get()))

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        async with _answering(context, self._responses, "GetModelInfo"):
            _check_message(request)
            self._check(request.model)
            engine, model = self._service.engine, self._service.config.model
            return pb.GetModelInfoResponse(
                model=self._service.model_name,
                source=model.source,
                dtype=model.dtype,
                max_model_len=engine.max_model_len,
                vocab_size=engine.tokenizer.vocab_size,
                has_chat_template=engine.tokenizer.chat_template is not None,
            )

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        async with _answering(context, self._responses, "GetServerInfo"):
            _check_message(request)
            service = self._service
            state = service.engine.state
            return pb.GetServerInfoResponse(
                version=service.version,
                state=state,
                uptime_s=time.time() - service.started_s,
                stats=_numbers(await service.engine.fetch_stats()) if state in ("ready", "draining") else {},
            )

    def _check(self, model: str) -> None:
        self._service.require_ready()
        self._service.require_model(model or None)

    async def _prompt(self, request: pb.GenerateRequest | pb.TokenizeRequest) -> list[int]:
        kind = request.WhichOneof("input")
        add_special_tokens = request.add_special_tokens if request.HasField("add_special_tokens") else kind == "text"
        if kind == "text":
            (token_ids,) = await self._service.encode([request.text], add_special_tokens=add_special_tokens)
            return token_ids
        if kind == "messages":
            chat = request.messages
            return await self._service.encode_chat(
                parse_messages([_message(message) for message in chat.messages]),
                add_generation_prompt=chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True,
                add_special_tokens=add_special_tokens,
            )
        if isinstance(request, pb.GenerateRequest) and kind == "token_ids":
            return list(request.token_ids.ids)
        raise InvalidRequestError("input is required: text, token_ids or messages", param="input", code="missing_required_parameter")


@contextlib.asynccontextmanager
async def _answering(context: Context, responses: CountsResponses, method: str) -> AsyncIterator[None]:
    """Ends the call by the error table if the block raises, and counts it."""
    status = "CANCELLED"  # whatever ends the block in another way: the client went away
    try:
        yield
        status = "OK"
    except grpc.aio.AbortError:
        raise
    except Exception as error:
        report = report_error(error)
        status = report.row.grpc_code
        details = [("error-code", report.code), ("error-param", report.param)]
        if report.retry_after_s is not None:
            details += [("retry-after", str(report.retry_after_s)), ("grpc-retry-pushback-ms", str(1000 * report.retry_after_s))]
        # Metadata is ASCII; a field's name from the client may not be.
        metadata = tuple((name, value.encode("ascii", "replace").decode()) for name, value in details if value)
        await context.abort(getattr(grpc.StatusCode, status), report.message[:MAX_MESSAGE_CHARS], metadata)
    finally:
        responses.count("grpc", method, status)


def metadata_value(metadata: Iterable[tuple[str, str | bytes]] | None, name: str) -> str:
    """A value of a call's metadata; empty without one."""
    value = dict(metadata or ()).get(name, "")
    return value if isinstance(value, str) else value.decode("latin-1")


def parse_or_error(parse: Callable[[bytes], Message]) -> Callable[[bytes], Message | DecodeError]:
    """A deserializer whose failure the method answers: gRPC itself would end the call with UNKNOWN and log a traceback."""

    def parse_leniently(data: bytes) -> Message | DecodeError:
        try:
            return parse(data)
        except DecodeError as error:
            return error

    return parse_leniently


def _check_message(message: Message | DecodeError, path: str = "") -> None:
    """Refuses what is no message, and fields that the .proto does not have: a newer client's, which protobuf would drop in silence."""
    if isinstance(message, DecodeError):
        raise InvalidRequestError(f"the message cannot be read: {message}", code="invalid_message")
    for field in UnknownFieldSet(message):
        raise InvalidRequestError(f"{message.DESCRIPTOR.name} has no field number {field.field_number}", param=path or None, code="unknown_parameter")
    for descriptor, value in message.ListFields():
        if descriptor.message_type is not None:
            for item in value if descriptor.is_repeated else (value,):
                _check_message(item, descriptor.name)


def _sampling_given(request: pb.GenerateRequest) -> dict[str, Any]:
    """The sampling fields that the client set, the unimplemented ones checked to be neutral."""
    given = _given(request, {*SAMPLING_FIELDS, *fields.GRPC_FIELDS})
    return fields.select_fields(given, implemented=SAMPLING_FIELDS, neutral=fields.GRPC_FIELDS)


def _given(request: pb.GenerateRequest, names: Container[str]) -> dict[str, Any]:
    """The fields of these names that the client set."""
    present = ((field, value) for field, value in request.ListFields() if field.name in names)
    return {field.name: list(value) if field.is_repeated else value for field, value in present}


def _request_id(given: str) -> str:
    if len(given) > MAX_REQUEST_ID_CHARS:
        raise InvalidRequestError(f"request_id has {len(given)} characters; at most {MAX_REQUEST_ID_CHARS} are allowed", param="request_id")
    return given or f"grpc-{uuid.uuid4().hex}"


def _message(message: pb.ChatMessage) -> dict[str, Any]:
    return {"role": message.role, "content": message.content} | {name: getattr(message, name) for name in ("name", "tool_call_id") if message.HasField(name)}


def _response(output: RequestOutput) -> pb.GenerateResponse:
    response = pb.GenerateResponse(request_id=output.request_id, text=output.text, token_ids=output.token_ids)
    if output.finish_reason is None:
        return response
    response.finish_reason = output.finish_reason
    if output.degraded_max_tokens is not None:
        response.degraded_max_tokens = output.degraded_max_tokens
    if isinstance(output.stop_reason, str):
        response.stop_string = output.stop_reason
    elif output.stop_reason is not None:
        response.stop_token_id = output.stop_reason
    usage = output.usage
    response.usage.CopyFrom(pb.Usage(**msgspec.structs.asdict(usage), total_tokens=usage.total_tokens))
    return response


def _numbers(stats: Any) -> dict[str, float]:
    """The numbers of a stats dataclass by field name; those of a mapping by field and key, as in ``finished_stop``."""
    numbers: dict[str, float] = {}
    for name, value in dataclasses.asdict(stats).items():
        numbers |= {f"{name}_{key}": float(count) for key, count in value.items()} if isinstance(value, dict) else {name: float(value)}
    return numbers

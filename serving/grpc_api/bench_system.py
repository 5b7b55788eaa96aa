"""jaxserve's gRPC API as a system under test of ``jaxserve bench``."""

from __future__ import annotations

import contextlib
import dataclasses
import urllib.parse
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import grpc
import grpc.aio

from jaxserve.bench.load.session import ServerInfo, ServerOptions, Session, normalize_url
from jaxserve.bench.load.system_under_test import RequestFailedError, Stream
from jaxserve.bench.workload.plan import PlannedRequest
from jaxserve.bench.workload.prompts import IdPrompts
from jaxserve.bench.workload.workload import Workload
from jaxserve.errors import BenchmarkError, ConfigError
from jaxserve.serving.grpc_api import jaxserve_v1_pb2 as pb
from jaxserve.serving.grpc_api import jaxserve_v1_pb2_grpc as pb_grpc

_REFUSALS = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
_CONNECT_TIMEOUT_S = 10.0


@dataclasses.dataclass(frozen=True)
class GrpcSystem:
    """Sends token ids to ``Generate`` and reads its stream; a response with new ids is a piece, with or without text.

    Args:
        stub: Of the service.
        metadata: Sent with every call.
        fields: Further fields of every ``GenerateRequest``.
        prompts: Makes the ids.
    """

    stub: pb_grpc.InferenceStub
    model: str
    metadata: tuple[tuple[str, str], ...]
    fields: Mapping[str, Any]
    prompts: IdPrompts

    def prepare(self, request: PlannedRequest) -> pb.GenerateRequest:
        fields = dict(self.fields)
        if "priority" in fields and request.priority is not None:
            fields["priority"] = request.priority
        ids = pb.TokenIds(ids=self.prompts.prompt(request.segments))
        return pb.GenerateRequest(model=self.model, token_ids=ids, max_tokens=request.output_len, **fields)

    async def run(self, prepared: pb.GenerateRequest, stream: Stream) -> None:
        try:
            async for response in self.stub.Generate(prepared, metadata=self.metadata):
                if response.token_ids:
                    stream.piece(response.text)
                if response.finish_reason:
                    stream.usage(response.usage.prompt_tokens, response.usage.completion_tokens, response.usage.cached_tokens)
                    stream.finish(response.finish_reason)
        except grpc.aio.AioRpcError as error:
            outcome = "refused" if error.code() in _REFUSALS else "error"
            raise RequestFailedError(f"{error.code().name}: {error.details()}", outcome=outcome, unreachable=_no_connection(error)) from None
        if stream.finish_reason is None:
            raise RequestFailedError("the stream ended without a finish reason")


def _no_connection(error: grpc.aio.AioRpcError) -> bool:
    return error.code() is grpc.StatusCode.UNAVAILABLE and "connect" in (error.details() or "").lower()


@contextlib.asynccontextmanager
async def open_grpc_session(options: ServerOptions, workload: Workload) -> AsyncGenerator[Session]:
    """Reaches a jaxserve server over gRPC.

    Args:
        options: ``url`` is ``host:port``; ``http://`` before it is ignored.
        workload: Its priorities are sent.

    Raises:
        BenchmarkError: No server, no such model, or it refuses a first small request.
        ConfigError: A chat, or prompts as text: over gRPC the benchmark sends ids. Or fields that no ``GenerateRequest`` has.
    """
    if workload.endpoint == "chat" or options.prompts == "text":
        raise ConfigError("--grpc sends completions of token ids; leave out the chat endpoint and text prompts")
    address = urllib.parse.urlsplit(normalize_url(options.url)).netloc
    fields: dict[str, Any] = {**options.fields, **({"ignore_eos": True} if options.ignore_eos else {})}
    if workload.priorities:
        fields["priority"] = workload.priorities[0]
    _check_fields(fields)
    metadata = (("authorization", f"Bearer {options.api_key}"),) if options.api_key else ()
    async with grpc.aio.insecure_channel(address) as channel:
        stub = pb_grpc.InferenceStub(channel)
        try:
            info = await stub.GetModelInfo(pb.GetModelInfoRequest(model=options.model or ""), metadata=metadata, timeout=_CONNECT_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise BenchmarkError(f"{address}: {error.code().name}: {error.details()}") from None
        system = GrpcSystem(stub, info.model, metadata, fields, IdPrompts.within(info.vocab_size))
        yield Session(system, ServerInfo(address, info.model, "grpc", "token ids", True, fields), _no_metrics, options.count_tokens)


def _check_fields(fields: Mapping[str, Any]) -> None:
    own = fields.keys() & {"model", "request_id", "text", "token_ids", "messages", "max_tokens"}
    if own:
        raise ConfigError(f"--extra-body holds {', '.join(sorted(own))}, which the benchmark sets itself")
    try:
        pb.GenerateRequest(**fields)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"--extra-body with --grpc holds fields of a GenerateRequest: {error}") from None


async def _no_metrics() -> None:
    """The figures of this API are not Prometheus's."""

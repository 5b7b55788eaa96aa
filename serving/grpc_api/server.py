"""The gRPC server around the service: ports, API keys, health and reflection."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jaxserve.errors import ConfigError, UnauthenticatedError
from jaxserve.serving.error_table import report_error
from jaxserve.serving.grpc_api import jaxserve_v1_pb2 as pb
from jaxserve.serving.grpc_api import jaxserve_v1_pb2_grpc as pb_grpc
from jaxserve.serving.grpc_api.servicer import TENANT, InferenceServicer, metadata_value, parse_or_error
from jaxserve.serving.metrics import CountsResponses
from jaxserve.serving.ports import GRPC_PORT, listen
from jaxserve.serving.service import InferenceService

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Inference"].full_name


KEEP_ALIVE_MS = 60_000
"""A client that vanished without a word is pinged after that long; its calls end when no answer comes."""


class GrpcServer:
    """A gRPC server bound to its port.

    Health says NOT_SERVING, for the server ("") and for the service alike, until ``set_serving(True)``. Reflection is on, behind the API keys as all but
    health is: load balancers have no key.

    Args:
        service: Its engine may still be starting. ``server.host``, ``grpc_port`` and ``max_body_bytes`` of its configuration are read here.
        responses: Where all APIs of the server count their answers.
        shared_port: A port that is reserved for this server and others, which share its calls; ``None`` takes the configuration's for this one alone.

    Attributes:
        port: The port bound, also where the configuration asked for any free one.

    Raises:
        ConfigError: The port is in use, or the address cannot be listened on.
    """

    def __init__(self, service: InferenceService, responses: CountsResponses, *, shared_port: int | None = None) -> None:
        config = service.config
        options = (
            ("grpc.so_reuseport", int(shared_port is not None)),  # two servers on one port would share its calls in silence
            ("grpc.max_receive_message_length", config.server.max_body_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.keepalive_time_ms", KEEP_ALIVE_MS),
        )
        self._server = grpc.aio.server(interceptors=[_KeyGuard(service, responses), _Parser()], options=options)
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        pb_grpc.add_InferenceServicer_to_server(InferenceServicer(service, responses), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        if shared_port is None:
            # gRPC says in its log alone why it could not bind: a socket of our own finds it out first.
            listen(config.server.host, config.server.grpc_port or 0, GRPC_PORT).close()
        self.port: int = self._bind(config.server.host, shared_port or config.server.grpc_port or 0)

    def _bind(self, host: str, port: int) -> int:
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            bound = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"server.grpc_port: cannot listen on {address}; choose another port with --grpc-port") from error
        assert bound > 0
        return bound

    async def start(self) -> None:
        """Begins to answer; health says NOT_SERVING."""
        await self.set_serving(False)
        await self._server.start()

    async def set_serving(self, serving: bool) -> None:
        """What health answers from now on."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Takes no new calls and cancels those still running after ``grace_s``."""
        await self._server.stop(grace_s)


class _KeyGuard(grpc.aio.ServerInterceptor):
    """Refuses calls without an API key, health aside, before their message is read; leaves the key's tenant in ``TENANT``."""

    def __init__(self, service: InferenceService, responses: CountsResponses) -> None:
        self._service = service
        self._responses = responses

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        if not handler_call_details.method.startswith(f"/{health.SERVICE_NAME}/"):
            try:
                TENANT.set(self._service.tenant_of(metadata_value(handler_call_details.invocation_metadata, "authorization").encode()))
            except UnauthenticatedError as error:
                self._responses.count("grpc", "other", "UNAUTHENTICATED")
                return _refusal(error)
        return await continuation(handler_call_details)


class _Parser(grpc.aio.ServerInterceptor):
    """Lets the service's own methods answer bytes that are no message."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler: Any = await continuation(handler_call_details)  # a named tuple, which the stubs do not know
        if handler is None or not handler_call_details.method.startswith(f"/{SERVICE_NAME}/"):
            return handler
        return handler._replace(request_deserializer=parse_or_error(handler.request_deserializer))


def _refusal(error: UnauthenticatedError) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler that ends any kind of call with the error's status."""
    report = report_error(error)

    async def refuse(_request: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(getattr(grpc.StatusCode, report.row.grpc_code), report.message)

    return grpc.unary_unary_rpc_method_handler(refuse)

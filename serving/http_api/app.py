"""The HTTP application: routes and error handlers around an engine. OpenAI's API, plus vLLM's ``/tokenize`` and ``/detokenize``, plus probes."""

from __future__ import annotations

from typing import Any, TypeVar

import fastapi
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.errors import InvalidRequestError, JaxserveError
from jaxserve.serving.http_api import generation
from jaxserve.serving.http_api.front_door import FrontDoor
from jaxserve.serving.http_api.json_body import parse_object, read_body
from jaxserve.serving.http_api.operations import operations
from jaxserve.serving.http_api.responses import JsonResponse, error_response
from jaxserve.serving.http_api.schemas import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, parse_body
from jaxserve.serving.metrics import CountsResponses, RendersMetrics
from jaxserve.serving.service import InferenceService

MAX_PATH_CHARS = 200
"""Of an unknown path, in the message that names it."""

B = TypeVar("B", bound=Body)


def create_app(service: InferenceService, responses: CountsResponses, page: RendersMetrics) -> fastapi.FastAPI:
    """Builds the application; it holds no state beyond its arguments.

    Args:
        service: Its engine may still be starting: all but the probes answer 503 until it is ready.
        responses: Where all APIs of the server count their answers.
        page: What ``/metrics`` gives.
    """
    app = fastapi.FastAPI(title="jaxserve", version=service.version, redirect_slashes=False)
    app.add_middleware(FrontDoor, tenants_by_key=service.tenants.by_key, admin_keys=service.config.server.admin_keys, responses=responses)
    app.add_exception_handler(JaxserveError, _on_jaxserve_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.include_router(_probes(service))
    app.include_router(operations(service, page))
    app.include_router(_models(service))
    app.include_router(_generation(service))
    app.include_router(_tokens(service))
    return app


def _probes(service: InferenceService) -> fastapi.APIRouter:
    router = fastapi.APIRouter(tags=["probes"])

    @router.get("/health")
    async def health() -> Response:
        """200 while the process is worth keeping: starting, ready or draining. 503 when the engine is dead."""
        state = service.engine.state
        return JsonResponse({"status": state}, 503 if state == "dead" else 200)

    @router.get("/ready")
    async def ready() -> Response:
        """200 when requests are taken; 503 while starting, draining or dead."""
        state = service.engine.state
        return JsonResponse({"status": state}, 200 if state == "ready" else 503)

    @router.get("/version")
    async def version() -> Response:
        """The version of jaxserve."""
        return JsonResponse({"version": service.version})

    return router


def _models(service: InferenceService) -> fastapi.APIRouter:
    router = fastapi.APIRouter(prefix="/v1/models", tags=["models"])

    def card() -> dict[str, Any]:
        return {
            "id": service.model_name,
            "object": "model",
            "created": service.started_s,
            "owned_by": "jaxserve",
            "root": service.config.model.source,
            "parent": None,
            "max_model_len": service.engine.max_model_len,
        }

    @router.get("")
    async def models() -> Response:
        """The served model, as a list of one."""
        service.require_ready()
        return JsonResponse({"object": "list", "data": [card()]})

    @router.get("/{name:path}")
    async def model(name: str) -> Response:
        """The served model, by name."""
        service.require_ready()
        service.require_model(name)
        return JsonResponse(card())

    return router


def _generation(service: InferenceService) -> fastapi.APIRouter:
    router = fastapi.APIRouter(tags=["generation"])

    @router.post("/v1/completions", openapi_extra=_body_schema(CompletionBody))
    async def completions(request: Request) -> Response:
        """Continues one or more prompts."""
        return await generation.complete(service, request, await _body(service, request, CompletionBody))

    @router.post("/v1/chat/completions", openapi_extra=_body_schema(ChatBody))
    async def chat_completions(request: Request) -> Response:
        """Answers a conversation."""
        return await generation.chat(service, request, await _body(service, request, ChatBody))

    return router


def _tokens(service: InferenceService) -> fastapi.APIRouter:
    router = fastapi.APIRouter(tags=["tokens"])

    @router.post("/tokenize", openapi_extra=_body_schema(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        """Token ids of a prompt, or of messages as the chat template renders them."""
        body = await _body(service, request, TokenizeBody)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("send either prompt or messages", param="prompt", code="missing_required_parameter")
        if body.messages is None:
            (token_ids,) = await service.encode([body.prompt or ""], add_special_tokens=body.add_special_tokens is not False)
        else:
            token_ids = await service.encode_chat(
                body.messages,
                add_generation_prompt=body.add_generation_prompt,
                add_special_tokens=body.add_special_tokens is True,
                template_vars=body.chat_template_kwargs,
            )
        return JsonResponse({"count": len(token_ids), "max_model_len": service.engine.max_model_len, "tokens": token_ids, "token_strs": None})

    @router.post("/detokenize", openapi_extra=_body_schema(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        """Text of token ids, special tokens included."""
        body = await _body(service, request, DetokenizeBody)
        return JsonResponse({"prompt": await service.decode(body.tokens)})

    return router


async def _body(service: InferenceService, request: Request, schema: type[B]) -> B:
    service.require_ready()
    body = parse_body(schema, parse_object(await read_body(request, service.config.server.max_body_bytes)))
    service.require_model(body.model)
    return body


def _body_schema(schema: type[Body]) -> dict[str, Any]:
    """The OpenAPI entry of a body that FastAPI does not parse itself."""
    json_schema = schema.model_json_schema()
    definitions = json_schema.pop("$defs", {})
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _inline(json_schema, definitions)}}}}


def _inline(node: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(node, dict):
        if "$ref" in node:
            return _inline(definitions[node["$ref"].rpartition("/")[2]], definitions)
        return {name: _inline(value, definitions) for name, value in node.items()}
    return [_inline(item, definitions) for item in node] if isinstance(node, list) else node


async def _on_jaxserve_error(_request: Request, error: Exception) -> Response:
    return error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """The router's own refusals: no such path, or not with this method."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path[:MAX_PATH_CHARS]}"
    if error.status_code == 404:
        message, code = f"unknown path: {where}", "not_found"
    elif error.status_code == 405:
        message, code = f"method not allowed: {where}; allowed is {(error.headers or {}).get('Allow', 'another')}", "method_not_allowed"
    else:
        message, code = str(error.detail), None
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    return JsonResponse(body, error.status_code, dict(error.headers or {}))

"""The outermost layer of the HTTP API: request ids, API keys, and the last catch for errors that nobody expected. Plain ASGI: it costs a stream nothing."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.serving.auth import require_key
from jaxserve.serving.http_api.responses import error_response

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ready", "/version"})
"""Answered without an API key: load balancers have none."""

TENANT_KEY = "jaxserve.tenant"

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


class FrontDoor:
    """Wraps the application.

    A client's ``X-Request-Id`` comes back in the answer if it is at most 128 harmless characters; else a new one does.

    Args:
        app: The application.
        tenants_by_key: See ``require_key``. The tenant is left in the scope as ``TENANT_KEY``.
    """

    def __init__(self, app: ASGIApp, *, tenants_by_key: Mapping[str, str]) -> None:
        self._app = app
        self._tenants_by_key = tenants_by_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given_id = headers.get("x-request-id", "")
        request_id = given_id if _REQUEST_ID.fullmatch(given_id) else uuid.uuid4().hex
        status: int | None = None
        start_s = time.monotonic()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            if scope["path"] not in OPEN_PATHS:
                scope[TENANT_KEY] = require_key(headers.get("authorization", "").encode("latin-1"), self._tenants_by_key)
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            response = error_response(error)  # logs it if it is unexpected
            if status is None:
                await response(scope, receive, send_with_id)
        finally:
            logger.debug("%s %s: %s after %.0f ms, request %s", scope["method"], scope["path"], status, (time.monotonic() - start_s) * 1000, request_id)

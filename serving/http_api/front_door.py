"""The outermost layer of the HTTP API: request ids, API keys, and the last catch for errors that nobody expected. Plain ASGI: it costs a stream nothing."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Mapping, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.serving.auth import require_admin, require_key
from jaxserve.serving.http_api.responses import CLIENT_GONE_STATUS, error_response
from jaxserve.serving.metrics import CountsResponses

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/metrics"})
"""Answered without an API key: load balancers and Prometheus have none."""

ADMIN_PREFIX = "/debug/"
"""Takes an admin key instead."""

TENANT_KEY = "jaxserve.tenant"

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


class FrontDoor:
    """Wraps the application.

    A client's ``X-Request-Id`` comes back in the answer if it is at most 128 harmless characters; else a new one does.

    Args:
        app: The application.
        tenants_by_key: See ``require_key``. The tenant is left in the scope as ``TENANT_KEY``.
        admin_keys: See ``require_admin``; without any, the application has nothing under ``ADMIN_PREFIX``.
        responses: Told how each request was answered.
    """

    def __init__(self, app: ASGIApp, *, tenants_by_key: Mapping[str, str], admin_keys: Sequence[str], responses: CountsResponses) -> None:
        self._app = app
        self._tenants_by_key = tenants_by_key
        self._admin_keys = tuple(admin_keys)
        self._responses = responses

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
            self._check_key(scope, headers.get("authorization", "").encode("latin-1"))
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            response = error_response(error)  # logs it if it is unexpected
            if status is None:
                await response(scope, receive, send_with_id)
        finally:
            self._responses.count("http", getattr(scope.get("route"), "path", "other"), str(status or CLIENT_GONE_STATUS))
            logger.debug("%s %s: %s after %.0f ms, request %s", scope["method"], scope["path"], status, (time.monotonic() - start_s) * 1000, request_id)

    def _check_key(self, scope: Scope, authorization: bytes) -> None:
        path: str = scope["path"]
        if path.startswith(ADMIN_PREFIX):
            if self._admin_keys:
                require_admin(authorization, self._admin_keys, self._tenants_by_key)
        elif path not in OPEN_PATHS:
            scope[TENANT_KEY] = require_key(authorization, self._tenants_by_key)

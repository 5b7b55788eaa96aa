"""What an operator asks: ``/metrics`` for Prometheus, ``/debug/scheduler`` for a person with an admin key."""

from __future__ import annotations

import dataclasses

import fastapi
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.serving.http_api.responses import JsonResponse
from jaxserve.serving.metrics import RendersMetrics
from jaxserve.serving.service import InferenceService


def operations(service: InferenceService, page: RendersMetrics) -> fastapi.APIRouter:
    """The routes. ``/debug`` has none unless the configuration has an admin key; the front door checks it.

    Args:
        service: May still be starting.
        page: What ``/metrics`` gives.
    """
    router = fastapi.APIRouter(tags=["operations"])

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        """All metrics, in Prometheus's text format or as OpenMetrics."""
        content, media_type = await page.render(request.headers.get("accept", ""))
        return Response(content, headers={"Content-Type": media_type})

    if service.config.server.admin_keys:

        @router.get("/debug/scheduler")
        async def scheduler() -> Response:
            """Running and waiting requests, and each data rank's pages; no prompts."""
            return JsonResponse(dataclasses.asdict(await service.engine.inspect()))

    return router

"""Who is told of each request that has ended: the request log and the tracer, as the configuration says."""

from __future__ import annotations

import logging
from collections.abc import Callable

from jaxserve import __version__
from jaxserve.config import Config
from jaxserve.request import Request, RequestOutput
from jaxserve.serving.contract import ServedEngine
from jaxserve.serving.request_log import RequestLog
from jaxserve.serving.tracing import RequestTracer, open_tracer

logger = logging.getLogger(__name__)


class Observers:
    """What ``ServedEngine.on_end`` is given. A failure of one of them is logged and harms no request.

    Args:
        config: ``server`` is read here.
        engine: Whose requests they are; may still be starting.

    Raises:
        ConfigError: Traces are wanted and cannot be made.
    """

    def __init__(self, config: Config, engine: ServedEngine) -> None:
        endpoint = config.server.otlp_endpoint
        self._engine = engine
        self._tracer: RequestTracer | None = None if endpoint is None else open_tracer(endpoint, __version__)
        self._observers: list[Callable[[Request, RequestOutput], None]] = []
        if config.server.log_requests:
            self._observers.append(RequestLog(config, engine))
        if self._tracer is not None:
            self._observers.append(self._trace)

    def __call__(self, request: Request, last: RequestOutput) -> None:
        for observe in self._observers:
            try:
                observe(request, last)
            except Exception:
                logger.exception("request %r was served, but could not be reported", request.request_id)

    def close(self) -> None:
        """Sends what waits to be sent; waits for a few seconds at most."""
        if self._tracer is not None:
            self._tracer.close()

    def _trace(self, request: Request, last: RequestOutput) -> None:
        assert self._tracer is not None
        self._tracer.trace(request, last, self._engine.model_name)

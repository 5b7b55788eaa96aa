"""OpenTelemetry traces: a span for each request, with a child for each phase. Made when the request has ended, from its times; nothing is imported without
``server.otlp_endpoint``.
"""

from __future__ import annotations

import logging
import threading
import time
import urllib.parse
from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxserve.errors import ConfigError, UnexpectedError
from jaxserve.request import Request, RequestOutput, RequestTimes

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter

logger = logging.getLogger(__name__)

_TRACES_PATH = "/v1/traces"
_EXPORT_TIMEOUT_S = 5.0
_MAX_WAITING_SPANS = 16_384
"""Spans that wait for the collector; later ones are dropped."""


class RequestTracer:
    """Sends spans through an exporter, from a thread of its own. The process's global tracer provider is left alone.

    The trace is that of the caller where the request has a ``traceparent``, which also decides whether it is recorded.

    Args:
        exporter: Of OpenTelemetry.
        version: Of jaxserve.
        clock: Gave the requests' times.
    """

    def __init__(self, exporter: SpanExporter, *, version: str, clock: Callable[[], float] = time.monotonic) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = TracerProvider(resource=Resource.create({"service.name": "jaxserve", "service.version": version}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=_MAX_WAITING_SPANS))
        self._tracer = self._provider.get_tracer("jaxserve", version)
        self._propagator = TraceContextTextMapPropagator()
        self._clock = clock

    def trace(self, request: Request, last: RequestOutput, model: str) -> None:
        """Makes the spans of a request that has ended.

        Args:
            request: The request.
            last: Its last output.
            model: Its name.
        """
        from opentelemetry import trace

        traceparent = request.options.traceparent
        caller = self._propagator.extract({} if traceparent is None else {"traceparent": traceparent})
        now_s = self._clock()
        epoch_ns = time.time_ns() - int(now_s * 1e9)  # of the clock's zero
        start_ns = epoch_ns + int(request.arrival_s * 1e9)
        end_ns = epoch_ns + int((now_s if last.times is None else last.times.finished_s) * 1e9)
        span = self._tracer.start_span("llm_request", caller, trace.SpanKind.SERVER, attributes=_attributes(request, last, model), start_time=start_ns)
        if last.error is not None:
            span.set_status(trace.StatusCode.ERROR, "unexpected error" if last.error.error_class is UnexpectedError else last.error.message)
        if last.times is not None:
            self._trace_phases(last.times, epoch_ns, trace.set_span_in_context(span))
        span.end(end_ns)

    def close(self, timeout_s: float = _EXPORT_TIMEOUT_S) -> None:
        """Sends what waits, for ``timeout_s`` at most."""
        thread = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)  # it may wait for its collector for minutes
        thread.start()
        thread.join(timeout_s)
        if thread.is_alive():
            logger.warning("the last spans could not be sent within %g s", timeout_s)

    def _trace_phases(self, times: RequestTimes, epoch_ns: int, parent: Context) -> None:
        """The phases that were reached; the last one lasts to the end."""
        phases = (
            ("queue", times.arrival_s, times.scheduled_s),
            ("prefill", times.scheduled_s, times.first_token_s),
            ("decode", times.first_token_s, times.finished_s),
        )
        for name, start_s, end_s in phases:
            if start_s is not None:
                span = self._tracer.start_span(name, parent, start_time=epoch_ns + int(start_s * 1e9))
                span.end(epoch_ns + int((times.finished_s if end_s is None else end_s) * 1e9))


def open_tracer(endpoint: str, version: str) -> RequestTracer:
    """A tracer that sends to a collector over OTLP/HTTP.

    Args:
        endpoint: As ``server.otlp_endpoint``; without a path it gets OTLP's own.
        version: Of jaxserve.

    Raises:
        ConfigError: It is no HTTP URL, or OpenTelemetry is not installed.
    """
    url = urllib.parse.urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.netloc:
        raise ConfigError(f"server.otlp_endpoint is {endpoint!r}; must be a URL such as http://localhost:4318 (OTLP over HTTP)")
    if url.path in ("", "/"):
        url = url._replace(path=_TRACES_PATH)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(f"server.otlp_endpoint is {endpoint!r}, and OpenTelemetry is not installed: pip install 'jaxserve[otel]'") from error
    return RequestTracer(OTLPSpanExporter(url.geturl(), timeout=_EXPORT_TIMEOUT_S), version=version)


def _attributes(request: Request, last: RequestOutput, model: str) -> dict[str, str | int | float | list[str]]:
    sampling_params, usage = request.sampling_params, last.usage
    attributes: dict[str, str | int | float | list[str]] = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.response.model": model,
        "gen_ai.response.id": request.request_id,
        "gen_ai.response.finish_reasons": [str(last.finish_reason)],
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.request.temperature": sampling_params.temperature,
        "gen_ai.request.top_p": sampling_params.top_p,
        "gen_ai.request.top_k": sampling_params.top_k,
        "jaxserve.cached_tokens": usage.cached_tokens,
    }
    return attributes if sampling_params.max_tokens is None else attributes | {"gen_ai.request.max_tokens": sampling_params.max_tokens}

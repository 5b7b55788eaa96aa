"""What ``/metrics`` says: an engine's plain counts and histograms as Prometheus families. Read when somebody asks; nothing is recorded here but responses.

Every family is declared once, in one of the tables below; docs/metrics.md explains them all.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, get_args

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import generate_latest as generate_text
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from jaxserve.engine.observation.meter import HistogramSnapshot, Measurements
from jaxserve.engine.observation.stats import EngineStats
from jaxserve.errors import EngineDeadError, EngineNotReadyError
from jaxserve.serving.contract import EngineState, MeasuredEngine
from jaxserve.serving.service import InferenceService

_OPENMETRICS = "application/openmetrics-text"

_Family = type[CounterMetricFamily] | type[GaugeMetricFamily]


@dataclasses.dataclass(frozen=True, slots=True)
class Number:
    """A family of one sample.

    Args:
        kind: Counter or gauge.
        name: Without the counter's ``_total``.
        help: One sentence.
        value: From the engine's counts.
        vllm: The name that vLLM has for it, which gateways and dashboards ask for.
    """

    kind: _Family
    name: str
    help: str
    value: Callable[[EngineStats], float]
    vllm: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Distribution:
    """A family of one histogram; the arguments are those of :class:`Number`."""

    name: str
    help: str
    value: Callable[[Measurements], HistogramSnapshot]
    vllm: tuple[str, ...] = ()


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


NUMBERS = (
    Number(GaugeMetricFamily, "jaxserve_num_requests_running", "Requests that hold a slot and pages.", lambda s: s.num_running, "vllm:num_requests_running"),
    Number(
        GaugeMetricFamily, "jaxserve_num_requests_waiting", "Requests that wait for a slot or for pages, preempted ones included.",
        lambda s: s.num_waiting - s.num_paused, "vllm:num_requests_waiting",
    ),
    Number(GaugeMetricFamily, "jaxserve_num_requests_swapped", "Waiting requests whose keys and values are in host memory.", lambda s: s.num_swapped),
    Number(GaugeMetricFamily, "jaxserve_num_requests_paused", "Requests that stand still because their clients read too slowly.", lambda s: s.num_paused),
    Number(GaugeMetricFamily, "jaxserve_queued_prompt_tokens", "Prompt tokens of requests that have not begun.", lambda s: s.num_queued_tokens),
    Number(GaugeMetricFamily, "jaxserve_max_requests_running", "Sequence slots.", lambda s: s.max_num_seqs),
    Number(CounterMetricFamily, "jaxserve_requests", "Requests that the engine has taken.", lambda s: s.num_requests),
    Number(CounterMetricFamily, "jaxserve_num_requests_aborted", "Requests ended by their clients or by a drain.", lambda s: s.finished["abort"]),
    Number(
        CounterMetricFamily, "jaxserve_num_requests_preempted", "Times that a request lost its pages to another.",
        lambda s: s.num_preemptions, "vllm:num_preemptions",
    ),
    Number(CounterMetricFamily, "jaxserve_num_requests_swapped_out", "Those times in which its pages went to host memory.", lambda s: s.num_swap_outs),
    Number(CounterMetricFamily, "jaxserve_prompt_tokens", "Prompt tokens of the requests taken.", lambda s: s.num_prompt_tokens, "vllm:prompt_tokens"),
    Number(CounterMetricFamily, "jaxserve_generated_tokens", "Tokens generated.", lambda s: s.num_generated_tokens, "vllm:generation_tokens"),
    Number(GaugeMetricFamily, "jaxserve_kv_pages", "Pages of the KV pool.", lambda s: s.num_pages),
    Number(GaugeMetricFamily, "jaxserve_kv_pages_used", "Pages that requests hold.", lambda s: s.num_pages - s.num_free_pages),
    Number(GaugeMetricFamily, "jaxserve_kv_pages_cached", "Pages that no request holds and that the prefix cache keeps.", lambda s: s.num_idle_pages),
    Number(GaugeMetricFamily, "jaxserve_kv_pages_free", "Pages that hold nothing.", lambda s: s.num_free_pages - s.num_idle_pages),
    Number(
        GaugeMetricFamily, "jaxserve_kv_usage", "Share of the pages that requests hold.",
        lambda s: _share(s.num_pages - s.num_free_pages, s.num_pages), "vllm:kv_cache_usage_perc",
    ),
    Number(
        CounterMetricFamily, "jaxserve_prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache.",
        lambda s: s.prefix_hit_tokens, "vllm:prefix_cache_hits",
    ),
    Number(CounterMetricFamily, "jaxserve_prefix_cache_miss_tokens", "Prompt tokens not found there.", lambda s: s.prefix_miss_tokens),
    Number(
        CounterMetricFamily, "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.",
        lambda s: s.prefix_hit_tokens + s.prefix_miss_tokens,
    ),
    Number(
        GaugeMetricFamily, "jaxserve_prefix_cache_hit_rate", "Share of prompt tokens found in the prefix cache since the start.",
        lambda s: _share(s.prefix_hit_tokens, s.prefix_hit_tokens + s.prefix_miss_tokens),
    ),
    Number(
        GaugeMetricFamily, "jaxserve_prefix_cache_size_bytes",
        "Bytes that the prefix cache keeps, whether requests hold them too or not: on one device, or of several data ranks on one device of each, together.",
        lambda s: s.num_cached_pages * s.page_bytes,
    ),
    Number(CounterMetricFamily, "jaxserve_prefix_cache_evictions", "Cached pages given up for others.", lambda s: s.num_evicted_pages),
    Number(CounterMetricFamily, "jaxserve_prefix_cache_page_copies", "Cached pages copied for a request that goes on within one.", lambda s: s.num_page_copies),
    Number(CounterMetricFamily, "jaxserve_steps", "Device steps, failed ones included.", lambda s: s.num_steps),
    Number(CounterMetricFamily, "jaxserve_compiles", "Programs compiled, or found compiled on disk.", lambda s: s.num_programs),
    Number(CounterMetricFamily, "jaxserve_late_compiles", "Those that held up requests although all should have been ready.", lambda s: s.num_late_compiles),
)  # fmt: skip

DISTRIBUTIONS = (
    Distribution("jaxserve_queue_seconds", "From arrival to the first step.", lambda m: m.queue_s, ("vllm:request_queue_time_seconds",)),
    Distribution("jaxserve_prefill_seconds", "From the first step to the first token.", lambda m: m.prefill_s, ("vllm:request_prefill_time_seconds",)),
    Distribution(
        "jaxserve_time_to_first_token_seconds", "TTFT: from arrival to the first token.", lambda m: m.first_token_s, ("vllm:time_to_first_token_seconds",)
    ),
    Distribution(
        "jaxserve_inter_token_latency_seconds", "ITL: from one token of a request to the next, pauses for a slow reader aside.",
        lambda m: m.inter_token_s, ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    ),
    Distribution(
        "jaxserve_time_per_output_token_seconds", "TPOT: from the first token to the last, divided by the tokens after the first, pauses aside.",
        lambda m: m.per_token_s, ("vllm:request_time_per_output_token_seconds",),
    ),
    Distribution("jaxserve_decode_seconds", "From the first token to the last, pauses aside.", lambda m: m.decode_s, ("vllm:request_decode_time_seconds",)),
    Distribution("jaxserve_request_prompt_tokens", "Prompt tokens of a request.", lambda m: m.prompt_tokens, ("vllm:request_prompt_tokens",)),
    Distribution("jaxserve_request_generated_tokens", "Tokens that a request generated.", lambda m: m.generated_tokens, ("vllm:request_generation_tokens",)),
    Distribution("jaxserve_step_seconds", "A step: scheduling, device and output together.", lambda m: m.step_s),
    Distribution("jaxserve_step_host_seconds", "Those parts of a step in which the device was not waited for.", lambda m: m.step_host_s),
    Distribution("jaxserve_step_sequences", "Sequences of a step: the batch size.", lambda m: m.step_sequences),
    Distribution("jaxserve_step_bucket_sequences", "Sequences that the step's program has room for.", lambda m: m.bucket_sequences),
    Distribution("jaxserve_step_tokens", "Tokens of a step.", lambda m: m.step_tokens),
    Distribution("jaxserve_step_bucket_tokens", "Tokens that the step's program computes, padding included.", lambda m: m.bucket_tokens),
)  # fmt: skip


class CountsResponses(Protocol):
    """Is told how calls of both APIs are answered."""

    def count(self, api: str, endpoint: str, status: str) -> None:
        """Notes one answer.

        Args:
            api: "http" or "grpc".
            endpoint: A route or a method.
            status: An HTTP status or the name of a gRPC code.
        """
        ...


class RendersMetrics(Protocol):
    """Gives the page of ``/metrics``."""

    async def render(self, accept: str) -> tuple[bytes, str]:
        """The page, and its media type.

        Args:
            accept: The ``Accept`` header: Prometheus asks for OpenMetrics, others get the plain text format.
        """
        ...


class Responses:
    """Counts how calls of both APIs were answered. Endpoints and statuses come from the server's own tables, so there are few."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, str]] = Counter()

    def count(self, api: str, endpoint: str, status: str) -> None:
        """Notes one answer; see :class:`CountsResponses`."""
        self._counts[api, endpoint, status] += 1

    def items(self) -> list[tuple[tuple[str, str, str], int]]:
        return sorted(self._counts.copy().items())


class MetricsPage:
    """All that one server exports, in a registry of its own.

    Args:
        engine: May still be starting: then its families are missing.
        service: Of the engine.
        responses: Of all APIs of the server.
    """

    def __init__(self, engine: MeasuredEngine, service: InferenceService, responses: Responses) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_ServiceCollector(engine, service, responses))
        ProcessCollector(registry=self._registry)

    async def render(self, accept: str) -> tuple[bytes, str]:
        """See :class:`RendersMetrics`. In a thread: a page of some thousand lines would hold up the streams."""
        return await asyncio.to_thread(self._render, accept)

    def _render(self, accept: str) -> tuple[bytes, str]:
        # No name here needs escaping. Whoever asks for it gets them as they are all the same: the library would also write vllm_x for vllm:x.
        if _OPENMETRICS in accept:
            return generate_openmetrics(self._registry, escaping=ALLOWUTF8), f"{_OPENMETRICS}; version=1.0.0; charset=utf-8"
        return generate_text(self._registry, escaping=ALLOWUTF8), "text/plain; version=0.0.4; charset=utf-8"


class _ServiceCollector(Collector):
    def __init__(self, engine: MeasuredEngine, service: InferenceService, responses: Responses) -> None:
        self._engine = engine
        self._service = service
        self._responses = responses

    def collect(self) -> Iterator[Metric]:
        state = self._engine.state
        states = GaugeMetricFamily("jaxserve_engine_state", "1 for the state that the engine is in.", labels=("state",))
        for name in get_args(EngineState):
            states.add_metric((name,), float(name == state))
        yield states
        responses = CounterMetricFamily("jaxserve_responses", "Answers of the server by API, endpoint and status.", labels=("api", "endpoint", "status"))
        for labels, count in self._responses.items():
            responses.add_metric(labels, count)
        yield responses
        try:
            stats, measured = self._engine.stats(), self._engine.measurements()
        except (EngineNotReadyError, EngineDeadError):  # there is no engine
            return
        yield from _engine_families(self._service, stats, measured)


def _engine_families(service: InferenceService, stats: EngineStats, measured: Measurements) -> Iterator[Metric]:
    name, config = service.model_name, service.config
    info = InfoMetricFamily("jaxserve", "What is served.")
    facts = {"version": service.version, "source": config.model.source, "revision": service.engine.model_revision or "", "dtype": config.model.dtype}
    info.add_metric((), {"model": name, **facts})
    yield info
    pool = InfoMetricFamily("vllm:cache_config", "The KV pool in vLLM's words.")
    pool.add_metric((), {"model_name": name, "block_size": str(config.cache.page_size), "num_gpu_blocks": str(stats.num_pages)})
    yield pool
    for number in NUMBERS:
        yield _number(number.kind, number.name, number.help, name, number.value(stats))
        if number.vllm is not None:
            yield _number(number.kind, number.vllm, number.help, name, number.value(stats))
    padding = 1 - _share(measured.step_tokens.total, measured.bucket_tokens.total) if measured.bucket_tokens.total else 0.0
    yield _number(GaugeMetricFamily, "jaxserve_padding_share", "Share of the computed tokens that were padding since the start.", name, padding)
    for distribution in DISTRIBUTIONS:
        for family in (distribution.name, *distribution.vllm):
            yield _histogram(family, distribution.help, name, {(): distribution.value(measured)})
    ended = {(reason,): count for reason, count in stats.finished.items()}
    refused = {(reason,): count for reason, count in stats.refused.items()}
    yield _counters("jaxserve_requests_finished", "Requests ended, by reason.", name, "finish_reason", ended)
    yield _counters("vllm:request_success", "Requests ended, by reason.", name, "finished_reason", ended)
    yield _counters("jaxserve_requests_refused", "Requests that got an error for want of room or time, by reason.", name, "reason", refused)
    latencies = {(reason,): histogram for reason, histogram in measured.end_to_end_s.items()}
    text = "E2E: from arrival to the end, by its reason."
    yield _histogram("jaxserve_e2e_request_latency_seconds", text, name, latencies, ("finish_reason",))
    yield _histogram("vllm:e2e_request_latency_seconds", text, name, {(): _sum(measured.end_to_end_s.values())})


def _model_label(family: str) -> str:
    return "model_name" if family.startswith("vllm:") else "model"


def _number(kind: _Family, family: str, text: str, model: str, value: float) -> Metric:
    metric = kind(family, text, labels=(_model_label(family),))
    metric.add_metric((model,), value)
    return metric


def _counters(family: str, text: str, model: str, label: str, values: Mapping[tuple[str], int]) -> Metric:
    metric = CounterMetricFamily(family, text, labels=(_model_label(family), label))
    for labels, value in values.items():
        metric.add_metric((model, *labels), value)
    return metric


def _histogram(family: str, text: str, model: str, values: Mapping[tuple[str, ...], HistogramSnapshot], labels: Sequence[str] = ()) -> Metric:
    metric = HistogramMetricFamily(family, text, labels=(_model_label(family), *labels))
    for label_values, histogram in values.items():
        ends = (*map(floatToGoString, histogram.bounds), "+Inf")
        buckets = list(zip(ends, map(float, itertools.accumulate(histogram.counts)), strict=True))
        metric.add_metric((model, *label_values), buckets, histogram.total)
    return metric


def _sum(histograms: Iterable[HistogramSnapshot]) -> HistogramSnapshot:
    """One histogram of the values of several with the same bounds."""
    each = list(histograms)
    counts = tuple(sum(column) for column in zip(*(histogram.counts for histogram in each), strict=True))
    return HistogramSnapshot(each[0].bounds, counts, sum(histogram.total for histogram in each))

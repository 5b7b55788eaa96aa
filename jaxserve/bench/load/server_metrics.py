"""A server's own figures, read from its Prometheus page before and after a run."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Mapping, Sequence

from jaxserve.bench.load.buckets import Buckets
from jaxserve.bench.load.http_client import HttpClient
from jaxserve.bench.load.metrics import PERCENTILES
from jaxserve.bench.load.system_under_test import RequestFailedError

READ_TIMEOUT_S = 5.0

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*?)\})?\s+(\S+)")
_BOUND = re.compile(r'(?:^|,)\s*le="([^"]+)"')

_QUEUE_TIME = ("request_queue_time_seconds", "queue_time_seconds")
_SHARES = ("kv_cache_usage_perc", "gpu_cache_usage_perc", "kv_cache_usage_ratio", "kv_cache_usage")
_GAUGES: Mapping[str, Sequence[str]] = {
    "kv_cache_usage": _SHARES,
    "running": ("num_requests_running", "requests_processing", "requests_running"),
    "waiting": ("num_requests_waiting", "requests_deferred", "requests_waiting"),
}
_COUNTERS: Mapping[str, Sequence[str]] = {
    "prefix_cache_queries": ("prefix_cache_queries_total", "prefix_cache_queries"),
    "prefix_cache_hits": ("prefix_cache_hits_total", "prefix_cache_hits"),
    "preemptions": ("num_preemptions_total", "preemptions_total"),
}
"""Our name -> names in use, without the part before the colon (or our own prefix): vLLM's, llama.cpp's, jaxserve's."""


@dataclasses.dataclass(frozen=True)
class Samples:
    """A page.

    Args:
        values: Name -> value: of a share the largest of its series (the fullest of several engines), of all others their sum.
        totals: Name of a histogram -> upper end of a bucket -> values up to there, summed over its series.
    """

    values: Mapping[str, float]
    totals: Mapping[str, Mapping[float, float]]


@dataclasses.dataclass(frozen=True)
class ServerFigures:
    """What the server said about itself. ``None``: it does not say.

    Args:
        queue_time_ms: Mean over the run's requests.
        estimated_queue_time_ms: ``median``, ``std`` and percentiles as far as the buckets of the server's histogram tell, each value being anywhere in its
            bucket; empty without one.
        peak_kv_cache_usage: Highest share seen; sampled, so short peaks are missed. Also the next two.
        prefix_cache_hit_rate: Over the run.
        preemptions: Over the run.
    """

    queue_time_ms: float | None = None
    estimated_queue_time_ms: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    peak_kv_cache_usage: float | None = None
    peak_running: float | None = None
    peak_waiting: float | None = None
    prefix_cache_hit_rate: float | None = None
    preemptions: float | None = None


async def read_samples(client: HttpClient) -> Samples | None:
    """The page as it is now; ``None`` where there is none, or none within ``READ_TIMEOUT_S``."""
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            answer = await client.request("GET", "/metrics")
    except (RequestFailedError, TimeoutError):
        return None
    return parse_samples(answer.body.decode("utf-8", "replace")) if answer.status == 200 else None


def parse_samples(page: str) -> Samples:
    """Reads Prometheus's text format; lines that are none of it are skipped."""
    values: dict[str, float] = {}
    totals: dict[str, dict[float, float]] = {}
    for line in page.splitlines():
        if line.startswith("#") or (match := _SAMPLE.match(line)) is None:
            continue
        try:
            value = float(match[3])
            bound = _BOUND.search(match[2] or "")
            if match[1].endswith("_bucket") and bound is not None:
                buckets = totals.setdefault(match[1].removesuffix("_bucket"), {})
                buckets[float(bound[1])] = buckets.get(float(bound[1]), 0.0) + value
            elif _plain(match[1]) in _SHARES:
                values[match[1]] = max(values.get(match[1], value), value)
            else:
                values[match[1]] = values.get(match[1], 0.0) + value
        except ValueError:
            continue
    # jaxserve says the same under its own name and under vLLM's: one of them is enough.
    return Samples({_plain(name): value for name, value in values.items()}, {_plain(name): buckets for name, buckets in totals.items()})


def compare_samples(before: Samples, during: Sequence[Samples], after: Samples) -> ServerFigures:
    """What happened between two readings, with the peaks of those taken in between."""
    queue_time_ms, estimated = None, dict[str, float]()
    for name in _QUEUE_TIME:
        count = _grown(before, after, (f"{name}_count",))
        if count:
            queue_time_ms = (_grown(before, after, (f"{name}_sum",)) or 0.0) / count * 1e3
            estimated = _estimated_ms(Buckets.of_totals(after.totals.get(name, {})).since(Buckets.of_totals(before.totals.get(name, {}))))
            break
    queries, hits = (_grown(before, after, _COUNTERS[name]) for name in ("prefix_cache_queries", "prefix_cache_hits"))
    peaks = {name: max((value for page in (*during, after) if (value := _first(page, names)) is not None), default=None) for name, names in _GAUGES.items()}
    return ServerFigures(
        queue_time_ms=queue_time_ms,
        estimated_queue_time_ms=estimated,
        peak_kv_cache_usage=peaks["kv_cache_usage"],
        peak_running=peaks["running"],
        peak_waiting=peaks["waiting"],
        prefix_cache_hit_rate=hits / queries if queries and hits is not None else None,
        preemptions=_grown(before, after, _COUNTERS["preemptions"]),
    )


def _grown(before: Samples, after: Samples, names: Sequence[str]) -> float | None:
    value = _first(after, names)
    return None if value is None else value - (_first(before, names) or 0.0)


def _first(samples: Samples, names: Sequence[str]) -> float | None:
    return next((samples.values[name] for name in names if name in samples.values), None)


def _estimated_ms(buckets: Buckets) -> dict[str, float]:
    found = {"median": buckets.quantile(0.5), "std": buckets.std(), **{f"p{percent}": buckets.quantile(percent / 100) for percent in PERCENTILES}}
    return {name: value * 1e3 for name, value in found.items() if value is not None}


def _plain(name: str) -> str:
    return name.rpartition(":")[2].removeprefix("jaxserve_")

"""A server's own figures, read from its Prometheus page before and after a run."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from jaxserve.bench.http_client import HttpClient
from jaxserve.bench.target import RequestFailedError

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{[^}]*\})?\s+(\S+)")

Samples = Mapping[str, float]
"""Name -> value, summed over labels."""

_QUEUE_TIME = ("request_queue_time_seconds", "queue_time_seconds")
_GAUGES: Mapping[str, Sequence[str]] = {
    "kv_cache_usage": ("kv_cache_usage_perc", "gpu_cache_usage_perc", "kv_cache_usage_ratio", "kv_cache_usage"),
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
class ServerFigures:
    """What the server said about itself. ``None``: it does not say.

    Args:
        queue_time_ms: Mean over the run's requests.
        peak_kv_cache_usage: Highest share seen; sampled, so short peaks are missed. Also the next two.
        prefix_cache_hit_rate: Over the run.
        preemptions: Over the run.
    """

    queue_time_ms: float | None = None
    peak_kv_cache_usage: float | None = None
    peak_running: float | None = None
    peak_waiting: float | None = None
    prefix_cache_hit_rate: float | None = None
    preemptions: float | None = None


async def read_samples(client: HttpClient) -> Samples | None:
    """The page as it is now; ``None`` where there is none."""
    try:
        answer = await client.request("GET", "/metrics")
    except RequestFailedError:
        return None
    return parse_samples(answer.body.decode("utf-8", "replace")) if answer.status == 200 else None


def parse_samples(page: str) -> Samples:
    """Reads Prometheus's text format; lines that are none of it are skipped."""
    samples: dict[str, float] = {}
    for line in page.splitlines():
        if line.startswith("#") or (match := _SAMPLE.match(line)) is None:
            continue
        try:
            value = float(match[2])
        except ValueError:
            continue
        samples[match[1]] = samples.get(match[1], 0.0) + value
    # jaxserve says the same under its own name and under vLLM's: one of them is enough.
    return {name.rpartition(":")[2].removeprefix("jaxserve_"): value for name, value in samples.items()}


def compare_samples(before: Samples, during: Sequence[Samples], after: Samples) -> ServerFigures:
    """What happened between two readings, with the peaks of those taken in between."""
    queue_time_ms = None
    for name in _QUEUE_TIME:
        count = _grown(before, after, (f"{name}_count",))
        if count:
            queue_time_ms = (_grown(before, after, (f"{name}_sum",)) or 0.0) / count * 1e3
            break
    queries, hits = (_grown(before, after, _COUNTERS[name]) for name in ("prefix_cache_queries", "prefix_cache_hits"))
    peaks = {name: max((value for page in (*during, after) if (value := _first(page, names)) is not None), default=None) for name, names in _GAUGES.items()}
    return ServerFigures(
        queue_time_ms=queue_time_ms,
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
    return next((samples[name] for name in names if name in samples), None)

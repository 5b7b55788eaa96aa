"""From records to figures. docs/benchmarking.md defines each of them in words."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from jaxserve.bench.load.load import Record, Run
from jaxserve.bench.load.system_under_test import OUTCOMES
from jaxserve.errors import ConfigError

PERCENTILES = (50, 90, 95, 99)

LATENCIES: Mapping[str, str] = MappingProxyType({"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"})
"""Key -> name, in the order of reports."""

SLO_METRICS = ("ttft", "tpot", "e2el")


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """A distribution in a few numbers; milliseconds for latencies. ``std`` is that of the population."""

    count: int
    mean: float
    median: float
    std: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Between the two nearest ranks in a straight line, as numpy's default. ``ordered`` is ascending and not empty."""
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Iterable[float]) -> Spread | None:
    """``None`` for no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    p50, p90, p95, p99 = (percentile(ordered, percent) for percent in PERCENTILES)
    return Spread(len(ordered), statistics.fmean(ordered), p50, statistics.pstdev(ordered), p50, p90, p95, p99, ordered[-1])


def output_tokens(record: Record) -> int:
    """As the server counted, else as our own tokenizer did, else the pieces of text: a lower bound."""
    counts = (record.completion_tokens, record.own_tokens, len(record.piece_times_s))
    return next(count for count in counts if count is not None)


def input_tokens(record: Record) -> int:
    """As the server counted, else as planned."""
    return record.request.input_len if record.prompt_tokens is None else record.prompt_tokens


def ttft_s(record: Record) -> float | None:
    """From sending to the first piece of text; to the end of an answer without any."""
    if record.piece_times_s:
        return record.piece_times_s[0] - record.sent_s
    return record.end_s - record.sent_s if record.outcome == "success" else None


def tpot_s(record: Record) -> float | None:
    """Time a token after the first one; ``None`` for answers of one token."""
    tokens = output_tokens(record)
    first = ttft_s(record)
    return None if tokens < 2 or first is None else (record.end_s - record.sent_s - first) / (tokens - 1)


def e2el_s(record: Record) -> float | None:
    """From sending to the last token."""
    return record.end_s - record.sent_s if record.outcome == "success" else None


_MEASURES: Mapping[str, Callable[[Record], float | None]] = MappingProxyType({"ttft": ttft_s, "tpot": tpot_s, "e2el": e2el_s})


@dataclasses.dataclass(frozen=True)
class Slo:
    """Limits in milliseconds that a good request keeps, and how many must be good.

    Args:
        limits_ms: Of some of :data:`SLO_METRICS`.
        attainment: Share of requests that must be good for a rate to count as sustained; in (0, 1].
    """

    limits_ms: Mapping[str, float]
    attainment: float = 0.99

    def admits(self, record: Record) -> bool:
        """Whether a request succeeded within the limits. An answer of one token has no TPOT and keeps any limit on it."""
        if record.outcome != "success":
            return False
        return all((value := _MEASURES[name](record)) is None or value * 1e3 <= limit for name, limit in self.limits_ms.items())

    def __str__(self) -> str:
        return ", ".join(f"{LATENCIES[name]} <= {limit:g} ms" for name, limit in self.limits_ms.items())


def parse_slo(text: str, attainment: float = 0.99) -> Slo:
    """Reads ``ttft:500,tpot:50`` (milliseconds).

    Raises:
        ConfigError: Not of this form, an unknown metric, or a limit that nothing can keep.
    """
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, separator, number = part.strip().partition(":")
        name = {"e2e": "e2el"}.get(name, name)
        try:
            limit = float(number)
        except ValueError:
            limit = math.nan
        if not separator or name not in SLO_METRICS or name in limits or not 0 < limit < math.inf:
            raise ConfigError(f"goodput is {text!r}; must be metric:milliseconds separated by commas, each of {', '.join(SLO_METRICS)} once, above 0")
        limits[name] = limit
    if not 0 < attainment <= 1:
        raise ConfigError(f"slo attainment is {attainment}; must be in (0, 1]")
    return Slo(limits, attainment)


@dataclasses.dataclass(frozen=True)
class Metrics:
    """All figures of one run. Throughputs are over ``duration_s``, tokens and latencies those of successful requests.

    Args:
        outcomes: Outcome -> requests.
        input_tokens: Of successful requests; also the next.
        latencies: ``ttft``, ``tpot``, ``itl``, ``e2el`` in ms; a key is missing where there are no values.
        good_requests: Within the SLO; ``None`` without one.
        requests_per_s: Successful ones.
        peak_output_tokens_per_s: Pieces in the busiest second.
        peak_concurrency: Most requests at once.
        late_ms: How late requests were sent; an open loop's own fault.
        client_cores: Processor cores that this client used.
        input_mismatches: Successful requests whose prompt the server counted otherwise than planned.
        output_mismatches: Those whose answer did not have the planned length.
        uncounted: Successful requests without usage from the server.
        miscounted: Those for which it counted fewer tokens than it sent pieces, which cannot be.
        recount: Output tokens by our own tokenizer over those that the server counted; near 1, as texts do not always come apart as they were put together.
            ``None`` without both.
        cached_tokens: Prompt tokens that the server had in its cache; ``None`` where it never says.
        usd_per_million_tokens: Of output, at the given price; ``None`` without one.
    """

    duration_s: float
    outcomes: Mapping[str, int]
    unfinished: int
    input_tokens: int
    output_tokens: int
    latencies: Mapping[str, Spread]
    good_requests: int | None
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    goodput_per_s: float | None
    peak_output_tokens_per_s: int
    peak_concurrency: int
    late_ms: Spread | None
    client_cores: float
    input_mismatches: int
    output_mismatches: int
    uncounted: int
    miscounted: int
    recount: float | None
    cached_tokens: int | None
    usd_per_million_tokens: float | None
    interrupted: str | None

    @property
    def completed(self) -> int:
        """Successful requests."""
        return self.outcomes["success"]

    @property
    def failed(self) -> int:
        """Requests that ended otherwise than wanted: cancelled ones did as planned."""
        return sum(self.outcomes.values()) - self.outcomes["success"] - self.outcomes["cancelled"]


def measure(run: Run, slo: Slo | None = None, price_per_hour: float | None = None) -> Metrics:
    """All figures of a run.

    Args:
        run: What to measure.
        slo: For goodput.
        price_per_hour: Of the server, in dollars or what you like.
    """
    good = [record for record in run.records if record.outcome == "success"]
    duration_s = run.duration_s
    tokens_out, tokens_in = sum(map(output_tokens, good)), sum(map(input_tokens, good))
    cached = [record.cached_tokens for record in good if record.cached_tokens is not None]
    admitted = None if slo is None else sum(map(slo.admits, run.records))
    return Metrics(
        duration_s=duration_s,
        outcomes={outcome: sum(record.outcome == outcome for record in run.records) for outcome in OUTCOMES},
        unfinished=run.unfinished,
        input_tokens=tokens_in,
        output_tokens=tokens_out,
        latencies={name: found for name, values in latency_values_ms(good).items() if (found := spread(values)) is not None},
        good_requests=admitted,
        requests_per_s=_rate(len(good), duration_s),
        output_tokens_per_s=_rate(tokens_out, duration_s),
        total_tokens_per_s=_rate(tokens_in + tokens_out, duration_s),
        goodput_per_s=None if admitted is None else _rate(admitted, duration_s),
        peak_output_tokens_per_s=max(pieces_per_second(good), default=0),
        peak_concurrency=max((count for _, count in concurrency_over_time(run.records)), default=0),
        late_ms=spread(record.late_s * 1e3 for record in run.records if record.request.arrival_s is not None),
        client_cores=_rate(run.cpu_s, duration_s),
        input_mismatches=sum(record.prompt_tokens not in (None, record.request.input_len) for record in good),
        output_mismatches=sum(output_tokens(record) != record.request.output_len for record in good),
        uncounted=sum(record.completion_tokens is None for record in good),
        miscounted=sum(record.completion_tokens is not None and record.completion_tokens < len(record.piece_times_s) for record in good),
        recount=_recount(good),
        cached_tokens=sum(cached) if cached else None,
        usd_per_million_tokens=None if price_per_hour is None or not tokens_out else price_per_hour * duration_s / 3600 / tokens_out * 1e6,
        interrupted=run.interrupted,
    )


def latency_values_ms(records: Iterable[Record]) -> dict[str, list[float]]:
    """All values of each of :data:`LATENCIES`, in their order; some may have none."""
    values: dict[str, list[float]] = {name: [] for name in LATENCIES}
    for record in records:
        for name, of in _MEASURES.items():
            if (value := of(record)) is not None:
                values[name].append(value * 1e3)
        values["itl"] += [(after - before) * 1e3 for before, after in itertools.pairwise(record.piece_times_s)]
    return values


def pieces_per_second(records: Iterable[Record]) -> list[int]:
    """Pieces of text in each whole second from the start of the run."""
    seconds = [int(time_s) for record in records for time_s in record.piece_times_s]
    counts = [0] * (max(seconds, default=-1) + 1)
    for second in seconds:
        counts[second] += 1
    return counts


def concurrency_over_time(records: Iterable[Record]) -> list[tuple[float, int]]:
    """(time, requests under way from then on), a point at each change."""
    return _levels((record.sent_s, record.end_s) for record in records)


def waiting_over_time(records: Iterable[Record]) -> list[tuple[float, int]]:
    """(time, requests sent but without a first token from then on)."""
    return _levels((record.sent_s, record.piece_times_s[0] if record.piece_times_s else record.end_s) for record in records)


def _levels(spans: Iterable[tuple[float, float]]) -> list[tuple[float, int]]:
    # Ends before starts: a request that follows another in the same moment does not run beside it.
    changes = sorted(change for start, end in spans for change in ((start, 1), (end, -1)))
    levels = itertools.accumulate(change for _, change in changes)
    return [(time_s, level) for (time_s, _), level in zip(changes, levels, strict=True)]


def _recount(good: Sequence[Record]) -> float | None:
    both = [(record.own_tokens, record.completion_tokens) for record in good if record.own_tokens is not None and record.completion_tokens]
    return sum(own for own, _ in both) / sum(served for _, served in both) if both else None


def _rate(amount: float, duration_s: float) -> float:
    return amount / duration_s if duration_s > 0 else 0.0

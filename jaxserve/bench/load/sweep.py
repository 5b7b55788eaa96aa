"""Several runs for one answer: a sweep over load levels, and the search for the highest rate that keeps an SLO."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Awaitable, Callable, Sequence

from jaxserve.bench.load.metrics import Slo
from jaxserve.bench.load.session import Result
from jaxserve.bench.workload.workload import Workload
from jaxserve.errors import BenchmarkError, ConfigError

MIN_TRIAL_S = 10.0
MAX_TRIAL_S = 60.0
MIN_LOAD = 0.1
"""Requests under way on average, below which a search for a sustainable rate gives up."""

NUM_UNLOADED = 5
MAX_LATE_MS = 100.0
"""Of the client's own sending, 99th percentile: beyond it a trial says more about the client than about the server."""

RunWorkload = Callable[[Workload], Awaitable[Result]]

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Trial:
    """One rate that was tried.

    Args:
        rate: Requests per second.
        good_share: Of all requests sent, those within the SLO.
        sustained: Whether that is enough, and the answers keep up.
    """

    rate: float
    good_share: float
    sustained: bool
    result: Result


@dataclasses.dataclass(frozen=True)
class MaxRate:
    """The answer of a search and its evidence.

    Args:
        rate: Highest rate that was tried and sustained; 0 where none was.
        above: Lowest rate that was not; ``None`` where the search ended before it met one.
        trials: In the order they were run.
        unloaded: One request at a time, as a reference.
        note: What to know about the answer.
        interrupted: Why the search ended before it had one; ``None`` when it did not.
    """

    slo: Slo
    rate: float
    above: float | None
    trials: tuple[Trial, ...]
    unloaded: Result
    note: str
    interrupted: str | None = None


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Runs at several levels of load.

    Args:
        results: At least one, in order; the last one may have been cut off.
        interrupted: Why there are not more; ``None`` when all were run.
    """

    results: tuple[Result, ...]
    interrupted: str | None = None


async def run_levels(levels: Sequence[Workload], run: RunWorkload) -> Sweep:
    """Runs one level after the other, until one is cut off or fails. What was measured before is kept.

    Raises:
        BenchmarkError: As ``run``, at the first level.
    """
    results: list[Result] = []
    for level in levels:
        try:
            result = await run(level)
        except BenchmarkError as error:
            if not results:
                raise
            return Sweep(tuple(results), str(error))
        if result.run.records or not results:
            results.append(result)
        if (interrupted := result.metrics.interrupted) is not None:
            return Sweep(tuple(results), interrupted)
    return Sweep(tuple(results))


def at_rate(workload: Workload, rate: float) -> Workload:
    """The workload at another rate; a closed loop becomes Poisson arrivals.

    Raises:
        ConfigError: A trace has its own times.
    """
    if workload.arrival == "trace":
        raise ConfigError("a rate cannot be varied where arrival is 'trace'; use trace_speedup")
    arrival = "poisson" if workload.arrival == "closed" else workload.arrival
    end_rate = None if workload.end_rate is None or workload.rate is None else workload.end_rate / workload.rate * rate
    return dataclasses.replace(workload, arrival=arrival, rate=rate, concurrency=None, end_rate=end_rate)


def at_concurrency(workload: Workload, concurrency: int) -> Workload:
    """The workload as a closed loop."""
    own = dict.fromkeys(("rate", "burstiness", "burst_size", "period_s", "swing", "end_rate"))
    trace = workload.trace if workload.lengths == "trace" else None
    return dataclasses.replace(workload, arrival="closed", concurrency=concurrency, trace=trace, **own)


async def find_max_rate(workload: Workload, slo: Slo, run: RunWorkload, *, start_rate: float | None = None, tolerance: float = 0.05) -> MaxRate:
    """Bisects for the highest rate that a server sustains.

    A rate is sustained where ``slo.attainment`` of all requests are good and the answers keep up: once the last request is sent they end within
    ``tolerance / 2`` of the trial and two answers' time. First comes one request at a time: it shows whether the SLO can be kept at all, and where to begin.
    Then doublings until a rate is too much, then halves of the bracket (of its logarithm) until its ends are within ``tolerance / 2``. A trial that is cut
    off, or in which nothing succeeds for errors, ends the search with what is known.

    Args:
        workload: Its arrivals; its own rate plays no part. Without a number and a duration a trial is as long as it takes an overload of ``tolerance`` to
            fill the largest limit four times over, in ``[MIN_TRIAL_S, MAX_TRIAL_S]``.
        slo: What to keep.
        run: Runs a workload.
        start_rate: Where to begin; ``None`` begins where one request at a time would keep the server busy.
        tolerance: Relative error wanted, in (0, 1).

    Raises:
        ConfigError: A trace, or a tolerance out of range.
        BenchmarkError: As ``run``, with one request at a time.
    """
    if not 0 < tolerance < 1:
        raise ConfigError(f"tolerance is {tolerance}; must be in (0, 1)")
    trial_of = at_rate(workload, 1.0)
    if workload.num_requests is None and workload.duration_s is None:
        trial_of = dataclasses.replace(trial_of, duration_s=_trial_s(slo, tolerance))
    unloaded = await run(dataclasses.replace(at_concurrency(workload, 1), num_requests=NUM_UNLOADED * workload.turns, duration_s=None))
    trials: list[Trial] = []
    low, high = 0.0, math.inf

    def answer(note: str, interrupted: str | None = None) -> MaxRate:
        return MaxRate(slo, low, None if high == math.inf else high, tuple(trials), unloaded, note, interrupted)

    def cut_off(reason: str) -> MaxRate:
        return answer(f"ended early ({reason}), before the bracket was narrow enough", reason)

    if unloaded.metrics.interrupted is not None:
        return cut_off(unloaded.metrics.interrupted)
    if not unloaded.metrics.good_requests:
        return answer(f"impossible: not even one request at a time keeps {slo}")
    answer_s = unloaded.metrics.latencies["e2el"].max / 1e3
    rate = start_rate or 1 / answer_s
    while True:
        try:
            result = await run(at_rate(trial_of, rate))
        except BenchmarkError as error:
            return cut_off(str(error))
        if result.metrics.interrupted is not None:
            return cut_off(result.metrics.interrupted)
        trial = _judge(rate, result, slo, tolerance, answer_s)
        trials.append(trial)
        if trial.sustained:
            low = rate
        else:
            high = rate
        logger.info("%.4g requests/s: %.1f%% good, %s", rate, trial.good_share * 100, "sustained" if trial.sustained else "too much")
        late = result.metrics.late_ms
        if late is not None and late.p99 > MAX_LATE_MS:
            return answer(f"this client was {late.p99:.0f} ms late at {rate:.4g} requests/s: its machine is too busy or too slow to narrow it further")
        if low and high <= low * (1 + tolerance / 2):
            return answer(f"{low:.4g} is sustained, {high:.4g} is not")
        if trial.sustained and _last_arrival_s(result) < answer_s:
            return answer(f"at {rate:.4g} all requests of a trial are sent before the first can be answered: higher rates need more requests to be told apart")
        if not low and rate < MIN_LOAD / answer_s:
            return answer(f"even {rate:.4g} requests/s does not keep {slo}, though one request at a time does")
        rate = rate * 2 if high == math.inf else rate / 2 if not low else math.sqrt(low * high)


def _trial_s(slo: Slo, tolerance: float) -> float:
    """A queue that grows by ``tolerance`` of a second each second is as long as the limit after ``limit / tolerance``."""
    longest_ms = max((limit for name, limit in slo.limits_ms.items() if name != "tpot"), default=0.0)
    return min(MAX_TRIAL_S, max(MIN_TRIAL_S, 4 * longest_ms / 1e3 / tolerance))


def _last_arrival_s(result: Result) -> float:
    """When the last session began, by plan."""
    return max((record.request.arrival_s or 0.0 for record in result.run.records), default=0.0)


def _judge(rate: float, result: Result, slo: Slo, tolerance: float, answer_s: float) -> Trial:
    metrics = result.metrics
    # Requests that we cancelled ourselves are not the server's to keep.
    judged = sum(metrics.outcomes.values()) - metrics.outcomes["cancelled"]
    share = (metrics.good_requests or 0) / judged if judged else 1.0
    last_sent_s = max((record.sent_s for record in result.run.records), default=0.0)
    keeps_up = metrics.duration_s - last_sent_s <= tolerance / 2 * last_sent_s + 2 * answer_s
    return Trial(rate, share, share >= slo.attainment and keeps_up, result)

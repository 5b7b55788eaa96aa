"""Several runs for one answer: a sweep over load levels, and the search for the highest rate that keeps an SLO."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Awaitable, Callable

from jaxserve.bench.metrics import Slo
from jaxserve.bench.session import Result
from jaxserve.bench.workload import Workload
from jaxserve.errors import BenchmarkError, ConfigError

MAX_DOUBLINGS = 20
MAX_HALVINGS = 6
MIN_TRIAL_S = 10.0
NUM_UNLOADED = 5
MAX_LATE_MS = 20.0
"""Of the client's own sending, 99th percentile: beyond it a trial says more about the client than about the server."""

RunWorkload = Callable[[Workload], Awaitable[Result]]

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Trial:
    """One rate that was tried.

    Args:
        rate: Requests per second.
        good_share: Of all requests sent, those within the SLO.
        sustained: Whether that is enough.
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
    """

    slo: Slo
    rate: float
    above: float | None
    trials: tuple[Trial, ...]
    unloaded: Result
    note: str


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


async def find_max_rate(
    workload: Workload, slo: Slo, run: RunWorkload, *, start_rate: float | None = None, tolerance: float = 0.05, stopped: Callable[[], bool] = lambda: False
) -> MaxRate:
    """Bisects for the highest rate at which ``slo.attainment`` of all requests are good.

    First one request at a time: it shows whether the SLO can be kept at all, and where to begin. Then doublings until a rate fails, then halves of the
    bracket (of its logarithm) until its ends are within ``tolerance / 2``. Where the workload has neither number nor duration, a trial is as long as an
    overload of ``tolerance / 2`` needs to show: a queue that grows by that share of a second a second passes the largest limit in half of the trial.

    Args:
        workload: Its arrivals; its own rate plays no part.
        slo: What to keep.
        run: Runs a workload.
        start_rate: Where to begin; ``None`` begins where one request at a time would keep the server busy.
        tolerance: Relative error wanted, in (0, 1).
        stopped: Whether to end with what is known.

    Raises:
        ConfigError: A trace, or a tolerance out of range.
        BenchmarkError: As ``run``.
    """
    if not 0 < tolerance < 1:
        raise ConfigError(f"tolerance is {tolerance}; must be in (0, 1)")
    trial_of = at_rate(workload, 1.0)
    if workload.num_requests is None and workload.duration_s is None:
        longest_s = max(limit for name, limit in slo.limits_ms.items() if name != "tpot") / 1e3 if set(slo.limits_ms) - {"tpot"} else 0.0
        trial_of = dataclasses.replace(trial_of, duration_s=max(MIN_TRIAL_S, 4 * longest_s / tolerance))
    unloaded = await run(dataclasses.replace(at_concurrency(workload, 1), num_requests=NUM_UNLOADED * workload.turns, duration_s=None))
    trials: list[Trial] = []
    low, high = 0.0, math.inf

    def answer(note: str) -> MaxRate:
        return MaxRate(slo, low, None if high == math.inf else high, tuple(trials), unloaded, note)

    if unloaded.metrics.good_requests == 0:
        return answer(f"impossible: not even one request at a time keeps {slo}")
    start = start_rate or 1e3 / unloaded.metrics.latencies["e2el"].median
    rate = start
    while not stopped():
        trial = await _try(at_rate(trial_of, rate), rate, slo, run)
        trials.append(trial)
        if stopped():
            return answer("stopped before the bracket was narrow enough")
        late = trial.result.metrics.late_ms
        if late is not None and late.p99 > MAX_LATE_MS:
            return answer(f"this client was {late.p99:.0f} ms late at {rate:.4g} requests/s: the server may sustain more than it can send")
        if trial.sustained:
            low = rate
        else:
            high = rate
        logger.info("%.4g requests/s: %.1f%% good, %s", rate, trial.good_share * 100, "sustained" if trial.sustained else "too much")
        if low and high <= low * (1 + tolerance / 2):
            return answer(f"between {low:.4g} (sustained) and {high:.4g} requests/s (not)")
        if high == math.inf and rate >= start * 2**MAX_DOUBLINGS:
            return answer("no rate tried was too much")
        if not low and rate <= start / 2**MAX_HALVINGS:
            return answer(f"even {rate:.4g} requests/s does not keep {slo}, though one request at a time does")
        rate = rate * 2 if high == math.inf else rate / 2 if not low else math.sqrt(low * high)
    return answer("stopped before the bracket was narrow enough")


async def _try(workload: Workload, rate: float, slo: Slo, run: RunWorkload) -> Trial:
    try:
        result = await run(workload)
    except BenchmarkError as error:
        raise BenchmarkError(f"at {rate:.4g} requests/s: {error}") from None
    # Requests that we cancelled ourselves are not the server's to keep.
    judged = sum(result.metrics.outcomes.values()) - result.metrics.outcomes["cancelled"]
    share = (result.metrics.good_requests or 0) / judged if judged else 0.0
    return Trial(rate, share, share >= slo.attainment, result)

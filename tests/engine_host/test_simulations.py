"""Whole workloads on simulated time: a step costs what a device's would, about, and the engine's clock shows it. Deterministic."""

from __future__ import annotations

import dataclasses
import random
import statistics

import pytest

from jaxserve.config import SchedulerConfig, TenantsConfig
from jaxserve.engine.engine import Engine
from jaxserve.engine.scheduling.schedule import Schedule
from jaxserve.errors import OverloadedError, QuotaExceededError
from jaxserve.request import RequestOptions, RequestOutput, SamplingParams
from tests.engine_host.fakes import FakeRunner, FakeStep, fake_engine, refusal_of

STEP_S, TOKEN_S = 0.010, 0.0002
"""A step, and each of its tokens: weights are read once, arithmetic grows."""


@dataclasses.dataclass
class Arrival:
    at_s: float
    prompt_len: int
    num_tokens: int
    options: RequestOptions = dataclasses.field(default_factory=RequestOptions)


@dataclasses.dataclass
class Ended:
    """What became of a request: times from its arrival; ``token_times_s`` is empty for one that was refused."""

    arrival: Arrival
    token_times_s: list[float] = dataclasses.field(default_factory=list[float])
    refusal: Exception | None = None

    @property
    def first_token_s(self) -> float:
        return self.token_times_s[0] - self.arrival.at_s

    @property
    def intervals_s(self) -> list[float]:
        return [after - before for before, after in zip(self.token_times_s, self.token_times_s[1:], strict=False)]


class TimedRunner(FakeRunner):
    now_s = 0.0

    def dispatch(self, schedule: Schedule) -> FakeStep:
        self.now_s += STEP_S + TOKEN_S * max(rank.num_tokens for rank in schedule.ranks)
        return super().dispatch(schedule)


def simulate(arrivals: list[Arrival], *, num_pages: int = 4000, tenants: TenantsConfig | None = None, **scheduler: object) -> tuple[list[Ended], Engine, float]:
    """Runs a workload to its end. Returns what became of each request, the engine, and how long it took."""
    config = SchedulerConfig(**({"max_num_seqs": 16, "max_tokens_per_step": 256} | scheduler))  # pyright: ignore[reportArgumentType]
    runner = TimedRunner(num_pages=num_pages, page_size=16, max_num_seqs=config.max_num_seqs, next_token=lambda token_ids, seed: 65)
    engine = fake_engine(runner, max_position=16_384, scheduler=config, tenants=tenants, clock=lambda: runner.now_s)
    ended = [Ended(arrival) for arrival in sorted(arrivals, key=lambda arrival: arrival.at_s)]
    position = 0

    def note(outputs: list[RequestOutput]) -> None:
        for output in outputs:
            result = ended[int(output.request_id)]
            result.token_times_s += [runner.now_s] * len(output.token_ids)
            result.refusal = refusal_of(output)

    while position < len(ended) or engine.has_work:
        if not engine.has_work:
            runner.now_s = max(runner.now_s, ended[position].arrival.at_s)
        while position < len(ended) and ended[position].arrival.at_s <= runner.now_s:
            arrival = ended[position].arrival
            prompt = [position % 250, position // 250, *range(arrival.prompt_len - 2)]
            prompt = [token_id % 250 for token_id in prompt]
            params = SamplingParams(max_tokens=arrival.num_tokens, ignore_eos=True)
            request = engine.make_request(prompt, params, str(position), arrival.options)
            try:
                note(engine.submit(dataclasses.replace(request, arrival_s=arrival.at_s)))
            except (OverloadedError, QuotaExceededError) as error:
                ended[position].refusal = error
            position += 1
        note(engine.step())
        if engine.idle_s:
            upcoming = ended[position].arrival.at_s if position < len(ended) else float("inf")
            runner.now_s = min(runner.now_s + engine.idle_s, max(upcoming, runner.now_s + 1e-6))
    engine.check_integrity()
    return ended, engine, runner.now_s


def poisson(rate: float, seconds: float, *, seed: int = 0) -> list[Arrival]:
    """A mix: most requests short, some ten times as long."""
    draw = random.Random(seed)
    arrivals: list[Arrival] = []
    at_s = 0.0
    while (at_s := at_s + draw.expovariate(rate)) < seconds:
        arrivals.append(Arrival(at_s, draw.choice([20, 40, 80, 300]), draw.choice([8, 16, 16, 32, 160])))
    return arrivals


def goodput(ended: list[Ended], seconds: float) -> float:
    """Requests a second that were served within their time: two seconds to the first token, 100 ms a token."""
    served = [e for e in ended if e.token_times_s and e.refusal is None]
    return sum(e.first_token_s <= 2.0 and statistics.mean(e.intervals_s) <= 0.1 for e in served) / seconds


@pytest.mark.parametrize("policy", ["static", "dynamic"])
def test_continuous_batching_serves_half_as_much_again(policy: str) -> None:
    arrivals = poisson(12.0, 40.0)
    results = {name: goodput(*(simulate(arrivals, policy=name, max_batch_delay_s=0.2, max_queued_requests=None)[::2])) for name in ("continuous", policy)}
    assert results["continuous"] >= 1.5 * results[policy], results


def test_a_long_prompt_among_streams() -> None:
    """With chunks the streams hardly notice it, and it is not much later; without, they stand still for it."""

    def run(budget: int) -> tuple[float, float, float]:
        streams = [Arrival(0.0, 10, 300) for _ in range(15)]
        ended, _, _ = simulate([*streams, Arrival(1.0, 4000, 4)], max_tokens_per_step=budget, chunk_by="tokens")  # the simulated device counts no context
        long = ended[-1]
        intervals = [(before, after - before) for e in ended[:-1] for before, after in zip(e.token_times_s, e.token_times_s[1:], strict=False)]
        undisturbed = statistics.median(interval for start, interval in intervals if start < 0.9)
        during = sorted(interval for start, interval in intervals if 1.0 <= start < long.token_times_s[0])
        return during[int(0.99 * len(during))] / undisturbed, long.first_token_s, undisturbed

    chunked, whole = run(96), run(4096)
    assert chunked[0] <= 2.5 < whole[0]
    assert chunked[1] <= 2 * whole[1]


def test_overload_is_refused_and_what_is_taken_is_served_in_time() -> None:
    """Four times what the engine can do: as much is served as at its best, and nobody waits longer than the queue's timeout."""
    limits = {"max_queued_requests": 16, "queue_timeout_s": 1.5}
    peak = max(goodput(*(simulate(poisson(rate, 20.0), **limits)[::2])) for rate in (8.0, 12.0, 16.0, 20.0))
    ended, engine, seconds = simulate(poisson(64.0, 20.0), **limits)
    assert goodput(ended, seconds) >= 0.8 * peak
    refused = [e for e in ended if e.refusal is not None]
    assert all(isinstance(e.refusal, OverloadedError) and e.refusal.retry_after_s >= 1 for e in refused)
    served = [e for e in ended if e.refusal is None]
    assert len(served) + len(refused) == len(ended) and all(len(e.token_times_s) == e.arrival.num_tokens for e in served)
    assert max(e.first_token_s for e in served) <= limits["queue_timeout_s"] + 1.0  # prefill beside others included
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_pages) == (0, 0, stats.num_pages)


def test_a_tenant_that_floods_does_not_slow_another() -> None:
    tenants = TenantsConfig(keys=("quiet=k1", "flood=k2"), limits=("flood.max_requests=12",))

    def p95(flood_rate: float) -> float:
        quiet = [dataclasses.replace(a, options=RequestOptions(tenant="quiet")) for a in poisson(2.0, 30.0, seed=1)]
        flood = [dataclasses.replace(a, options=RequestOptions(tenant="flood")) for a in poisson(flood_rate, 30.0, seed=2)]
        ended, _, _ = simulate([*quiet, *flood], tenants=tenants, order="fair")
        times = sorted(e.first_token_s for e in ended if e.arrival.options.tenant == "quiet")
        return times[int(0.95 * len(times))]

    assert p95(40.0) <= 1.5 * p95(10.0)

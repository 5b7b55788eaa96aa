"""Who is let in, who is turned away and with what words, on an engine whose clock stands still until it is told."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from typing import Any

import pytest

from jaxserve.config import CacheConfig, Config, SchedulerConfig, ServerConfig, TenantsConfig
from jaxserve.engine.engine import Engine
from jaxserve.engine.requests.expiry import Expiry
from jaxserve.engine.scheduling.sequence import Sequence, SequenceStatus
from jaxserve.errors import ConfigError, DeadlineExceededError, EngineDeadError, InvalidRequestError, OverloadedError, QuotaExceededError
from jaxserve.request import Request, RequestOptions, RequestOutput, SamplingParams
from jaxserve.tenants import TenantLimits, read_tenants
from tests.engine_host.fakes import FakeRunner, fake_engine, refusal_of


class Bench:
    """An engine of two slots, its clock, and what has come out of it."""

    def __init__(self, *, tenants: TenantsConfig | None = None, num_ranks: int = 1, **scheduler: Any) -> None:
        self.now_s = 100.0
        self.runner = FakeRunner(max_num_seqs=2, num_ranks=num_ranks)
        config = SchedulerConfig(**({"max_num_seqs": 2, "max_tokens_per_step": 16} | scheduler))
        self.engine = fake_engine(self.runner, scheduler=config, tenants=tenants or TenantsConfig(), clock=lambda: self.now_s)
        self.outputs: list[RequestOutput] = []
        self.num_submitted = 0

    def submit(self, name: str, *, prompt_len: int = 4, max_tokens: int = 4, **options: Any) -> None:
        self.num_submitted += 1
        prompt = [self.num_submitted % 251] * prompt_len  # not in the prefix cache
        request = self.engine.make_request(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), name, RequestOptions(**options))
        self.outputs += self.engine.submit(dataclasses.replace(request, arrival_s=self.now_s))

    def step(self, seconds: float = 1.0) -> list[RequestOutput]:
        outputs = self.engine.step()
        self.now_s += seconds
        self.engine.check_integrity()
        self.outputs += outputs
        return outputs

    def finish(self) -> None:
        for _ in range(500):
            if not self.engine.has_work:
                return
            self.step()
        pytest.fail("not done")

    def ended(self) -> dict[str, str]:
        return {output.request_id: output.finish_reason for output in self.outputs if output.finish_reason is not None}

    def refusal(self, name: str) -> Exception | None:
        return next(refusal_of(output) for output in self.outputs if output.request_id == name and output.finish_reason is not None)


class TestQueueBounds:
    def test_the_bound_counts_beyond_free_slots(self) -> None:
        bench = Bench(max_queued_requests=3)
        for i in range(5):  # two take the slots in the next step
            bench.submit(f"r{i}")
        with pytest.raises(OverloadedError, match=r"queue is full: 5 requests of 20 tokens wait \(scheduler.max_queued_requests is 3") as caught:
            bench.submit("late")
        assert caught.value.retry_after_s >= 1
        bench.step()
        with pytest.raises(OverloadedError):
            bench.submit("late")  # the slots are taken now
        bench.finish()
        assert Counter(bench.ended().values()) == {"length": 5}
        assert bench.engine.stats().refused["overload"] == 2

    def test_zero_admits_only_what_can_start_at_once(self) -> None:
        bench = Bench(max_queued_requests=0)
        bench.submit("a")
        bench.submit("b")
        with pytest.raises(OverloadedError):
            bench.submit("c")

    def test_slots_of_all_ranks_count(self) -> None:
        bench = Bench(max_queued_requests=0, num_ranks=3)
        for i in range(6):
            bench.submit(f"r{i}")
        with pytest.raises(OverloadedError):
            bench.submit("late")

    def test_the_bound_by_tokens(self) -> None:
        bench = Bench(max_queued_tokens=50, max_tokens_per_step=128)
        for i in range(2):
            bench.submit(f"run{i}", prompt_len=40)
        bench.step()
        bench.submit("fits", prompt_len=40)
        with pytest.raises(OverloadedError, match="max_queued_tokens 50"):
            bench.submit("large", prompt_len=20)
        bench.submit("small", prompt_len=8)

    def test_retry_after_follows_the_speed_of_the_queue(self) -> None:
        bench = Bench(max_queued_requests=50, max_tokens_per_step=4)
        for i in range(52):
            bench.submit(f"r{i}", max_tokens=1)
        for _ in range(10):
            bench.step(2.0)  # one prompt of four tokens in two seconds
        for i in range(10):
            bench.submit(f"more{i}", max_tokens=1)
        with pytest.raises(OverloadedError) as caught:
            bench.submit("late", max_tokens=1)
        assert 45 <= caught.value.retry_after_s <= 55  # half of 50 requests

    def test_retry_after_of_a_queue_that_is_stuck_grows_with_time_and_to_a_bound(self) -> None:
        bench = Bench(max_queued_requests=8, max_tokens_per_step=4, queue_timeout_s=None)
        for i in range(10):
            bench.submit(f"r{i}", max_tokens=100)

        def retry_after_s() -> float:
            with pytest.raises(OverloadedError) as caught:
                bench.submit("late")
            return caught.value.retry_after_s

        bench.step()
        bench.step()  # two prompts have begun in two seconds; the others wait for their slots
        bench.step()
        before = retry_after_s()
        for _ in range(40):
            bench.step()
        assert 20 * before <= retry_after_s() <= 24 * before
        assert bench.engine._admission.retry_after_s(10**9) == 120.0

    def test_time_without_requests_is_nobodys_wait(self) -> None:
        bench = Bench(max_queued_requests=8, max_tokens_per_step=4)
        for _ in range(10):
            bench.submit("a", max_tokens=2)
            bench.finish()
            bench.now_s += 600.0
        bench.submit("a", max_tokens=1)
        bench.step()
        bench.now_s += 600.0
        bench.submit("a", max_tokens=1)
        bench.engine.pause("a")
        bench.step(600.0)
        bench.engine.resume("a")
        bench.finish()
        assert bench.engine._admission.speed.time_for_s(4) <= 1.0

    def test_every_refusal_tells_when_the_queue_will_have_moved(self) -> None:
        bench = Bench(
            tenants=TenantsConfig(keys=("c=k",), limits=("c.max_requests=1",)),
            max_queued_requests=50,
            max_tokens_per_step=4,
            order="priority",
            queue_timeout_s=20,
        )
        for i in range(52):
            bench.submit(f"r{i}", max_tokens=1, priority=1, tenant="a")
        for _ in range(10):
            bench.step(2.0)  # two seconds a prompt
        for i in range(10):
            bench.submit(f"more{i}", max_tokens=1, priority=1, tenant="b")
        bench.submit("c0", max_tokens=1, priority=0, tenant="c")
        with pytest.raises(QuotaExceededError) as over_quota:
            bench.submit("c1", max_tokens=1, priority=0, tenant="c")
        with pytest.raises(OverloadedError) as late:
            bench.submit("late", max_tokens=1, priority=1)
        bench.step(0.0)
        for error in (bench.refusal("more9"), bench.refusal("r30"), over_quota.value, late.value):  # shed, timed out, over its quota, too many
            assert isinstance(error, OverloadedError | QuotaExceededError) and error.retry_after_s > 20

    def test_offline_use_is_not_bounded(self) -> None:
        bench = Bench(max_queued_requests=0, queue_timeout_s=2.0)
        for i in range(20):
            bench.engine.add(bench.engine.make_request([1], SamplingParams(max_tokens=1), f"r{i}"))
        bench.finish()
        assert list(bench.ended().values()) == ["length"] * 20


class TestShedding:
    def test_the_lowest_priority_makes_room_and_is_told(self) -> None:
        bench = Bench(max_queued_requests=2, order="priority")
        for name, priority in (("run0", 0), ("run1", 0), ("low", 5), ("lowest", 9)):
            bench.submit(name, priority=priority)
        bench.step()
        bench.submit("urgent", priority=-1)
        bench.step()
        assert bench.ended() == {"lowest": "error"}
        assert isinstance(bench.refusal("lowest"), OverloadedError)
        bench.submit("urgent2", priority=-1)
        with pytest.raises(OverloadedError):  # nobody below it waits any more
            bench.submit("late", priority=-1)
        bench.finish()
        assert bench.ended()["low"] == "error"
        assert bench.engine.stats().refused["shed"] == 2

    def test_a_running_request_is_never_shed(self) -> None:
        bench = Bench(max_queued_requests=0, order="priority")
        bench.submit("a", priority=9)
        bench.submit("b", priority=9)
        bench.step()
        with pytest.raises(OverloadedError):
            bench.submit("urgent", priority=-9)
        bench.finish()
        assert bench.ended() == {"a": "length", "b": "length"}

    def test_of_equals_the_last_that_came(self) -> None:
        bench = Bench(max_queued_requests=2, order="priority")
        for name in ("run0", "run1", "first", "last"):
            bench.submit(name, priority=3)
        bench.step()
        bench.submit("urgent", priority=0)
        bench.step()
        assert bench.ended() == {"last": "error"}

    @pytest.mark.parametrize("order", ["fcfs", "deadline", "fair"])
    def test_a_priority_takes_nobodys_place_in_other_orders(self, order: str) -> None:
        bench = Bench(max_queued_requests=0, order=order)
        for name in "ab":
            bench.submit(name, priority=9, tenant=name)
        with pytest.raises(OverloadedError):
            bench.submit("pushy", priority=-9, tenant="c")

    def test_a_flood_costs_whom_it_comes_from(self) -> None:
        bench = Bench(max_queued_requests=6, order="fair")
        for i in range(8):
            bench.submit(f"flood{i}", tenant="flood")
        bench.step()
        with pytest.raises(OverloadedError):
            bench.submit("more", tenant="flood")
        for i in range(5):
            with contextlib.suppress(OverloadedError):
                bench.submit(f"quiet{i}", tenant="quiet", priority=9)  # half of the queue, and no more
        assert bench.ended() == {f"flood{i}": "error" for i in (7, 6, 5)}
        assert all(isinstance(bench.refusal(name), OverloadedError) for name in bench.ended())
        bench.finish()
        assert Counter(bench.ended().values()) == {"error": 3, "length": 8}
        assert bench.engine.stats().refused["shed"] == 3

    def test_shares_of_the_queue_go_by_tokens_and_weight(self) -> None:
        tenants = TenantsConfig(keys=("gold=k1", "iron=k2"), limits=("gold.weight=3",))
        bench = Bench(max_queued_requests=None, max_queued_tokens=40, order="fair", tenants=tenants, max_tokens_per_step=64)
        for i in range(2):
            bench.submit(f"run{i}", max_tokens=50, tenant="other")
        bench.step()
        for i in range(4):
            bench.submit(f"gold{i}", prompt_len=6, tenant="gold")
        bench.submit("iron0", prompt_len=7, tenant="iron")
        bench.submit("iron1", prompt_len=7, tenant="iron")
        bench.submit("gold4", prompt_len=6, tenant="gold")  # 30 / 3 against 14
        assert bench.ended() == {"iron1": "error"}
        with pytest.raises(OverloadedError):
            bench.submit("iron2", prompt_len=8, tenant="iron")
        assert bench.ended() == {"iron1": "error"}


class TestTime:
    def test_queue_timeout(self) -> None:
        bench = Bench(queue_timeout_s=5.0)
        bench.submit("a", max_tokens=20)
        bench.submit("b", max_tokens=20)
        bench.submit("waits")
        bench.finish()
        assert bench.ended() == {"a": "length", "b": "length", "waits": "error"}
        error = bench.refusal("waits")
        assert isinstance(error, OverloadedError) and "has waited for 5.0 s and has not begun" in str(error)
        assert bench.engine.stats().refused["queue_timeout"] == 1

    def test_one_that_has_begun_is_not_timed_out(self) -> None:
        bench = Bench(queue_timeout_s=5.0)
        bench.submit("a", max_tokens=20)
        bench.finish()
        assert bench.ended() == {"a": "length"}

    @pytest.mark.parametrize("num_steps", [0, 1, 3])
    def test_a_deadline_ends_a_request_in_every_state(self, num_steps: int) -> None:
        bench = Bench(max_tokens_per_step=4)
        bench.submit("a", prompt_len=8, max_tokens=20, deadline_ms=10_000)
        for _ in range(num_steps):
            bench.step()
        bench.now_s = 110.0
        bench.step()
        assert bench.ended() == {"a": "error"}
        assert isinstance(bench.refusal("a"), DeadlineExceededError)
        stats = bench.engine.stats()
        assert (stats.refused["deadline"], stats.num_free_pages, stats.num_running) == (1, stats.num_pages, 0)

    def test_a_deadline_that_cannot_be_kept_is_refused_at_once(self) -> None:
        bench = Bench(max_tokens_per_step=4)
        for i in range(20):
            bench.submit(f"r{i}", max_tokens=1)
        for _ in range(5):
            bench.step()  # a second a prompt
        with pytest.raises(OverloadedError, match=r"would wait for about 1\d.\d s, longer than its deadline_ms of 5000"):
            bench.submit("hasty", deadline_ms=5_000)
        bench.submit("patient", deadline_ms=60_000)

    def test_a_deadline_is_not_judged_by_a_queue_that_the_request_passes(self) -> None:
        bench = Bench(max_tokens_per_step=4, order="priority")
        for i in range(20):
            bench.submit(f"r{i}", max_tokens=1)
        for _ in range(5):
            bench.step()
        bench.submit("urgent", deadline_ms=5_000, priority=-10, max_tokens=1)
        bench.finish()
        assert bench.ended()["urgent"] == "length"

    def test_an_engine_with_nothing_to_run_knows_when_to_look_again(self) -> None:
        bench = Bench(policy="dynamic", preferred_batch_size=2, max_batch_delay_s=3.0)
        bench.submit("a")
        assert bench.step(0.0) == [] and bench.engine.idle_s == 3.0
        bench.now_s += 1
        assert bench.engine.idle_s == 2.0
        bench.submit("b")
        assert bench.engine.idle_s == 0.0
        bench.finish()
        bench.submit("c", deadline_ms=500)
        bench.engine.pause("c")
        assert bench.step(0.0) == [] and bench.engine.idle_s == 0.5
        bench.engine.abort("c")
        bench.submit("d")
        bench.engine.pause("d")
        bench.step(0.0)
        assert bench.engine.idle_s == pytest.approx(120.0)  # the queue's timeout
        bench.engine.resume("d")
        bench.finish()
        assert bench.ended()["d"] == "length"

    def test_expiry_forgets_those_that_have_ended(self) -> None:
        expiry = Expiry()
        sequences = [Sequence.of(Request(request_id="r", prompt_token_ids=[1], sampling_params=SamplingParams()), seed=0, max_tokens=1) for _ in range(1000)]
        for i, sequence in enumerate(sequences):
            sequence.order = (0.0, i)
            expiry.add(sequence, 10.0 + i)
            if i >= 3:
                sequences[i - 3].status = SequenceStatus.FINISHED
        assert len(expiry._sequences._heap) <= 300
        assert expiry.take_due(2000.0) == sequences[-3:] and expiry.next_s == math.inf


class TestTenants:
    TENANTS = TenantsConfig(keys=("a=ka", "b=kb"), limits=("a.max_requests=2", "b.tokens_per_minute=60"))

    def test_requests_in_flight(self) -> None:
        bench = Bench(tenants=self.TENANTS)
        bench.submit("a0", tenant="a")
        bench.submit("a1", tenant="a")
        with pytest.raises(QuotaExceededError, match="tenant 'a': 2 requests are in flight; at most 2 are allowed") as caught:
            bench.submit("a2", tenant="a")
        assert caught.value.retry_after_s >= 1 and caught.value.code == "rate_limit_exceeded"
        bench.submit("b0", tenant="b")
        bench.finish()
        bench.submit("a2", tenant="a")
        assert bench.engine.stats().refused["quota"] == 1

    def test_tokens_a_minute(self) -> None:
        bench = Bench(tenants=self.TENANTS)
        for i in range(3):
            bench.submit(f"b{i}", prompt_len=8, max_tokens=10, tenant="b")
        with pytest.raises(QuotaExceededError, match="may take 18 tokens, 6 are left of 60 a minute") as caught:
            bench.submit("b3", prompt_len=8, max_tokens=10, tenant="b")
        assert caught.value.retry_after_s == pytest.approx(12.0)
        bench.now_s += 12.0
        bench.submit("b3", prompt_len=8, max_tokens=10, tenant="b")
        bench.submit("other", tenant="c")

    def test_what_was_not_used_is_given_back(self) -> None:
        bench = Bench(tenants=self.TENANTS)
        bench.submit("b0", prompt_len=8, max_tokens=50, tenant="b")
        with pytest.raises(QuotaExceededError):
            bench.submit("b1", prompt_len=4, max_tokens=4, tenant="b")
        bench.step(0.0)
        bench.engine.abort("b0")
        bench.submit("b1", prompt_len=8, max_tokens=40, tenant="b")

    def test_more_than_a_minutes_worth_waits_for_a_full_bucket(self) -> None:
        bench = Bench(tenants=self.TENANTS)
        bench.submit("b0", prompt_len=30, max_tokens=60, tenant="b")
        with pytest.raises(QuotaExceededError):
            bench.submit("b1", prompt_len=1, max_tokens=1, tenant="b")

    def test_a_flood_does_not_raise_anothers_wait(self) -> None:
        """With ``order=fair``, whether the neighbour floods or stays within its budget."""

        def mean_wait(num_flood: int) -> float:
            bench = Bench(order="fair", tenants=self.TENANTS, max_queued_requests=None, queue_timeout_s=None)
            for i in range(num_flood):
                bench.submit(f"flood{i}", tenant="x")
            waits: list[float] = []
            for i in range(10):
                name, arrival_s = f"quiet{i}", bench.now_s
                bench.submit(name, tenant="y")
                while not any(output.request_id == name for output in bench.step()):
                    pass
                waits.append(bench.now_s - arrival_s)
            return sum(waits) / len(waits)

        assert mean_wait(400) <= 1.5 * mean_wait(40)


class TestDegradation:
    def test_new_work_gets_fewer_tokens_while_the_queue_is_long(self) -> None:
        bench = Bench(max_queued_requests=4, degrade_at=0.5, degraded_max_tokens=2)
        for i in range(6):
            bench.submit(f"r{i}", max_tokens=5)
        bench.finish()
        last = {output.request_id: output for output in bench.outputs if output.finish_reason}
        assert [last[f"r{i}"].usage.completion_tokens for i in range(6)] == [5, 5, 5, 5, 2, 2]
        assert [last[f"r{i}"].degraded_max_tokens for i in range(6)] == [None] * 4 + [2, 2]

    def test_one_that_wants_fewer_anyway_is_not_touched(self) -> None:
        bench = Bench(max_queued_requests=4, degrade_at=0.0, degraded_max_tokens=2)
        for i in range(3):
            bench.submit(f"r{i}", max_tokens=1)
        bench.finish()
        assert {output.degraded_max_tokens for output in bench.outputs} == {None}


class TestFaults:
    def test_a_device_that_does_not_recover_is_dead(self) -> None:
        bench = Bench()
        bench.runner.errors = [RuntimeError("once"), None, RuntimeError("again"), RuntimeError("again"), RuntimeError("for good")]
        for i in range(2):
            bench.submit(f"r{i}")
            bench.step()
        for i in range(2, 4):
            bench.submit(f"r{i}")
            bench.step()
        bench.submit("last")
        with pytest.raises(EngineDeadError, match="3 steps in a row have failed, the last with RuntimeError: for good"):
            bench.step()


class TestReading:
    def test_keys_and_limits(self) -> None:
        tenants = read_tenants(["plain"], ["a=k=1", "a=k2", "b=k3"], ["a.weight=2.5", "a.max_requests=3"], TenantLimits(tokens_per_minute=9))
        assert tenants.by_key == {"plain": "", "k=1": "a", "k2": "a", "k3": "b"}
        assert tenants.of("a") == TenantLimits(max_requests=3, tokens_per_minute=9, weight=2.5)
        assert tenants.of("b") == tenants.of("") == TenantLimits(tokens_per_minute=9)

    @pytest.mark.parametrize(
        ("keys", "limits", "message"),
        [
            (["secret"], [], "tenants.keys is not NAME=KEY"),
            (["a b=secret"], [], "tenants.keys is not NAME=KEY"),
            (["a=secret", "b=secret"], [], "key of the tenant 'b' in tenants.keys is given twice"),
            (["a=k"], ["b.weight=1"], "'b' is no tenant of tenants.keys: a"),
            (["a=k"], ["a.wait=1"], "must be NAME.FIELD=VALUE with a FIELD of max_requests, tokens_per_minute, weight"),
            (["a=k"], ["a.weight=0"], "'0' must be a number above 0"),
            (["a=k"], ["a.max_requests=1.5"], "'1.5' must be a whole number above 0"),
        ],
    )
    def test_bad_texts_are_refused_without_showing_a_key(self, keys: list[str], limits: list[str], message: str) -> None:
        with pytest.raises(ConfigError, match=message) as caught:
            Config(tenants=TenantsConfig(keys=tuple(keys), limits=tuple(limits)))
        assert "secret" not in str(caught.value)

    def test_a_key_of_both_sections(self) -> None:
        with pytest.raises(ConfigError, match="given twice"):
            Config(server=ServerConfig(api_keys=("k",)), tenants=TenantsConfig(keys=("a=k",)))

    @pytest.mark.parametrize(
        ("scheduler", "tenants", "message"),
        [
            ({"preferred_batch_size": 4}, {}, "scheduler.preferred_batch_size is 4 and scheduler.policy is continuous"),
            ({"degraded_max_tokens": 4, "max_queued_requests": None}, {}, "scheduler.max_queued_requests is null"),
            ({}, {"keys": ("a=k",), "limits": ("a.weight=2",)}, "tenants.limits has a weight and scheduler.order is fcfs"),
        ],
    )
    def test_settings_that_contradict_each_other(self, scheduler: dict[str, Any], tenants: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            Config(scheduler=SchedulerConfig(**scheduler), tenants=TenantsConfig(**tenants))

    def test_a_batch_larger_than_the_slots(self) -> None:
        with pytest.raises(ConfigError, match="preferred_batch_size is 9; must be at most the number of sequence slots, 2"):
            Bench(policy="dynamic", preferred_batch_size=9)

    def test_swapping_to_nowhere(self) -> None:
        swap = SchedulerConfig(max_num_seqs=2, preemption="swap")
        with pytest.raises(ConfigError, match="scheduler.preemption is swap and cache.swap_gib is 0"):
            Config(scheduler=swap, cache=CacheConfig(swap_gib=0))
        with pytest.raises(ConfigError, match="no host memory to swap to"):
            fake_engine(FakeRunner(max_num_seqs=2), scheduler=swap)
        fake_engine(FakeRunner(max_num_seqs=2, num_host_pages=1), scheduler=swap)


@pytest.mark.parametrize(
    ("field", "value"),
    [("priority", 1001), ("priority", True), ("deadline_ms", 0), ("deadline_ms", 1.5), ("cache_salt", "x" * 257), ("session_id", ""), ("cache_salt", 3)],
)
def test_options_out_of_range(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=field) as caught:
        RequestOptions(**{field: value})
    assert caught.value.param == field


def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    bench = Bench(queue_timeout_s=1000.0, order="priority")
    for i in range(2000):
        bench.submit(f"r{i}", max_tokens=1, deadline_ms=1_000_000)
        bench.engine.step()
    engine = bench.engine
    kept = {
        "queued": engine._admission._shedding._sequences._heap,  # pyright: ignore[reportAttributeAccessIssue]
        "timeouts": engine._time_limits._queue_timeouts._sequences._heap,
        "deadlines": engine._time_limits._deadlines._sequences._heap,
    }
    assert all(len(entries) <= 257 for entries in kept.values()), {name: len(entries) for name, entries in kept.items()}
    assert not engine._generations and not engine.has_work


def test_accounts_come_back_to_zero() -> None:
    bench = Bench(tenants=TenantsConfig(max_requests=3, tokens_per_minute=10_000), max_queued_requests=4)
    for i in range(60):
        with contextlib.suppress(QuotaExceededError, OverloadedError):
            bench.submit(f"r{i}", prompt_len=1 + i % 9, max_tokens=1 + i % 5, tenant="ab"[i % 2], priority=i % 3)
        if i % 7 == 3:
            bench.engine.abort(f"r{i}")
        bench.step()
    bench.finish()
    engine: Engine = bench.engine
    assert {account.num_requests for account in engine._admission._accounts.values()} == {0}
    stats = engine.stats()
    assert stats.num_requests == sum(stats.finished.values()) and stats.num_queued_tokens == 0

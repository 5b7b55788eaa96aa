"""The overlapped loop: a step is launched while the one before it runs, and no one can tell from the outputs."""

from __future__ import annotations

import random
from typing import Any

import pytest

from jaxserve.config import SchedulerConfig, TenantsConfig
from jaxserve.engine.engine import Engine
from jaxserve.engine.scheduling.schedule import Schedule, SequenceResult
from jaxserve.engine.scheduling.sequence import Lag, Sequence
from jaxserve.errors import EngineDeadError
from jaxserve.request import RequestOptions, RequestOutput, SamplingParams
from tests.engine_host.fakes import EOS, FakeRunner, FakeStep, fake_engine, scripted


def add(engine: Engine, prompt: list[int], name: str | None = None, *, options: RequestOptions | None = None, **params: Any) -> str:
    request = engine.make_request(prompt, SamplingParams(**params), name, options)
    engine.submit(request)
    return request.request_id


def finish_all(engine: Engine) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.check_integrity()
    return outputs


class Ending(FakeRunner):
    """Its tokens depend on all before them, and every eighth or so ends a request: EOS, a stop id, or a character of a stop string."""

    def __init__(self, **options: Any) -> None:
        super().__init__(next_token=self._next, **options)

    @staticmethod
    def _next(token_ids: Any, seed: int) -> int:
        value = (seed + sum((position + 1) * token_id for position, token_id in enumerate(token_ids))) % 1009
        return EOS if value % 31 == 0 else 33 + value % 90


def history(seed: int, *, overlap: bool, num_requests: int = 25) -> dict[str, tuple[list[int], str, str | None, int]]:
    """Random requests on an engine that is short of everything: tokens, text, reason and usage of each that was not aborted; of the aborted ones nothing."""
    rng = random.Random(seed)
    runner = Ending(num_pages=rng.choice([12, 16, 30]), page_size=4, max_num_seqs=rng.choice([2, 4, 6]), num_ranks=rng.choice([1, 1, 2]), num_host_pages=20)
    config = SchedulerConfig(
        max_num_seqs=runner.max_num_seqs, max_tokens_per_step=rng.choice([6, 12, 32]), preemption=rng.choice(["swap", "recompute", "auto"]),
        order=rng.choice(["fcfs", "priority", "fair"]),
    )  # fmt: skip
    engine = fake_engine(runner, scheduler=config, overlap=overlap)
    texts: dict[str, str] = {}
    tokens: dict[str, list[int]] = {}
    ends: dict[str, RequestOutput] = {}

    def take(outputs: list[RequestOutput]) -> None:
        for output in outputs:
            assert output.request_id not in ends, "nothing comes after the end"
            texts[output.request_id] = texts.get(output.request_id, "") + output.text
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            assert output.usage.completion_tokens == len(tokens[output.request_id])
            if output.finish_reason is not None:
                ends[output.request_id] = output
        engine.check_integrity()

    actions = random.Random(seed + 1)  # by step, so they come at other tokens with overlap than without
    aborted: set[str] = set()
    paused: list[str] = []
    for number in range(num_requests):
        prompt = [rng.randrange(3)] * rng.randrange(1, 12) + [rng.randrange(200)]
        sampling = {"seed": rng.randrange(100), "max_tokens": rng.randrange(1, 30), "stop": rng.choice([(), ("A", "b"), ("zz",)]),
                    "stop_token_ids": rng.choice([(), (40, 41, 42)]), "ignore_eos": rng.random() < 0.2}  # fmt: skip
        add(engine, prompt, f"r{number}", options=RequestOptions(priority=rng.randrange(3), tenant=rng.choice("ab")), **sampling)
        for _ in range(actions.randrange(4)):
            take(engine.step())
        victim = f"r{actions.randrange(number + 1)}"
        if actions.random() < 0.2 and victim not in ends:
            aborted.add(victim)
            output = engine.abort(victim)
            assert output is not None
            take([output])
        elif actions.random() < 0.2:
            engine.pause(victim)
            paused.append(victim)
        if paused and actions.random() < 0.5:
            engine.resume(paused.pop())
    for victim in paused:
        engine.resume(victim)
    while engine.has_work:
        take(engine.step())
    stats = engine.stats()
    assert stats.num_free_pages == stats.num_pages and len(ends) == num_requests
    assert stats.num_generated_tokens == sum(map(len, tokens.values()))
    return {
        name: (tokens[name], texts[name], f"{end.finish_reason} {end.stop_reason}", end.usage.completion_tokens)
        for name, end in ends.items() if name not in aborted
    }  # fmt: skip


@pytest.mark.parametrize("part", range(4))
def test_random_histories_give_the_same_outputs(part: int) -> None:
    num_stopped = 0
    for seed in range(part * 1000, part * 1000 + 25):
        plain, overlapped = history(seed, overlap=False), history(seed, overlap=True)
        for name in plain.keys() & overlapped.keys():
            assert plain[name] == overlapped[name], (seed, name)
            num_stopped += plain[name][2].startswith("stop")
    assert num_stopped > 100


class TestStops:
    @pytest.mark.parametrize("length", range(1, 9))
    def test_nothing_behind_a_stop_is_seen_or_kept(self, length: int) -> None:
        """A stop at each place of a page. The step behind it runs for nothing; the prefix cache is left with what was generated."""
        tokens = [*range(65, 65 + length - 1), EOS, *range(97, 120)]
        runner = FakeRunner(next_token=scripted(tokens, prompt_len=3))
        engine = fake_engine(runner, overlap=True)
        request_id = add(engine, [0, 1, 2])
        outputs = finish_all(engine)[request_id]
        assert [token_id for output in outputs for token_id in output.token_ids] == tokens[:length]
        assert outputs[-1].usage.completion_tokens == engine.stats().num_generated_tokens == length
        assert runner.num_steps == length + 1, "one step too many, whose token nobody saw"
        cached = engine.stats().num_cached_pages
        assert cached * 4 <= 3 + length

    def test_max_tokens_is_known_and_costs_no_step(self) -> None:
        runner = FakeRunner()
        engine = fake_engine(runner, overlap=True)
        add(engine, [1, 2], max_tokens=5)
        finish_all(engine)
        assert runner.num_steps == 5

    def test_a_tenant_pays_for_what_it_got(self) -> None:
        def level(*, overlap: bool) -> float:
            runner = FakeRunner(next_token=scripted([65, 66, EOS, *range(97, 120)]))
            engine = fake_engine(runner, tenants=TenantsConfig(tokens_per_minute=1000), overlap=overlap, clock=lambda: 1.0)
            add(engine, [0], max_tokens=20)
            finish_all(engine)
            return engine._admission._account("", 1.0).level

        assert level(overlap=True) == level(overlap=False) == 1000 - 1 - 3


class TestOrder:
    def test_a_step_is_launched_before_the_one_before_it_is_fetched(self) -> None:
        events: list[str] = []

        class Runner(FakeRunner):
            def dispatch(self, schedule: Schedule) -> FakeStep:
                number = self.num_steps
                events.append(f"launch {number}")
                step = super().dispatch(schedule)
                fetch = step.fetch
                step.fetch = lambda: (events.append(f"fetch {number}"), fetch())[1]  # pyright: ignore[reportAttributeAccessIssue]
                return step

        engine = fake_engine(Runner(), overlap=True)
        add(engine, [1, 2], max_tokens=3)
        assert engine.step() == [] and events == ["launch 0"]
        assert len(engine.step()) == 1 and events[1:] == ["launch 1", "fetch 0"]
        assert len(engine.step()) == 1 and events[3:] == ["launch 2", "fetch 1"]
        assert engine.has_work and len(engine.step()) == 1 and events[5:] == ["fetch 2"]
        assert not engine.has_work

    @pytest.mark.parametrize(("lag", "at_once"), [(Lag.SITS_OUT, [2, 1, 2, 1]), (Lag.HOLDS_STEP, [2, 2, 2, 2])])
    def test_a_sequence_that_needs_its_token_known(self, monkeypatch: pytest.MonkeyPatch, lag: Lag, at_once: list[int]) -> None:
        """It sits out every other step, or every step waits for it."""
        make, sizes = Sequence.of, list[int]()

        def of(request: Any, **fields: Any) -> Sequence:
            sequence = make(request, **fields)
            sequence.lag = lag if request.request_id == "strict" else Lag.NONE
            return sequence

        class Runner(FakeRunner):
            def dispatch(self, schedule: Schedule) -> FakeStep:
                sizes.append(len(schedule.sequences))
                assert all(row.sequence.request.request_id != "strict" or row.start < len(row.sequence.token_ids) for row in schedule.sequences)
                return super().dispatch(schedule)

        monkeypatch.setattr(Sequence, "of", of)
        engine = fake_engine(Runner(), overlap=True)
        for name in ("strict", "other"):
            add(engine, [1, 2], name, max_tokens=8)
        outputs = finish_all(engine)
        assert sizes[:4] == at_once
        assert outputs["strict"][-1].usage.completion_tokens == outputs["other"][-1].usage.completion_tokens == 8


class TestEnds:
    def test_an_id_comes_again_while_its_last_step_is_under_way(self) -> None:
        engine = fake_engine(overlap=True)
        add(engine, [1, 2], "same", max_tokens=9)
        engine.step()
        engine.step()
        assert engine.abort("same") is not None and engine.has_work
        add(engine, [3, 4, 5], "same", max_tokens=4)
        outputs = finish_all(engine)["same"]
        alone = fake_engine()
        add(alone, [3, 4, 5], "same", max_tokens=4)
        assert outputs[-1].usage.completion_tokens == 4 and sum(len(output.token_ids) for output in outputs) == 4

    def test_a_deadline_with_steps_under_way(self) -> None:
        now_s = 0.0
        engine = fake_engine(overlap=True, clock=lambda: now_s)
        add(engine, [1, 2], "late", max_tokens=50, options=RequestOptions(deadline_ms=1000))
        other = add(engine, [3], max_tokens=6)
        for _ in range(3):
            engine.step()
        now_s = 2.0
        outputs = finish_all(engine)
        assert outputs["late"][-1].finish_reason == "error" and not outputs["late"][-1].token_ids
        assert outputs[other][-1].usage.completion_tokens == 6

    def test_the_last_step_is_collected_after_the_last_request(self) -> None:
        engine = fake_engine(FakeRunner(next_token=scripted([65, EOS, 66, 67])), overlap=True)
        add(engine, [0])
        while engine.stats().finished["stop"] == 0:
            engine.step()
        assert engine.has_work and engine.idle_s == 0.0
        assert engine.step() == [] and not engine.has_work
        engine.on_idle()


class TestPause:
    @pytest.mark.parametrize("before_first", [False, True])
    def test_a_token_in_flight_counts_and_the_time_behind_it_does_not(self, before_first: bool) -> None:
        """A request is paused while its second, or its first, token is on the device."""
        now_s = 100.0
        engine = fake_engine(overlap=True, clock=lambda: now_s)
        request_id = add(engine, [1], max_tokens=5)
        engine.step()
        if not before_first:
            now_s += 1.0
            engine.step()
        engine.pause(request_id)
        now_s += 1.0
        assert [len(output.token_ids) for output in engine.step()] == [1], "it comes, and nothing after it"
        now_s += 60.0
        engine.resume(request_id)
        outputs: list[RequestOutput] = []
        while engine.has_work:
            outputs += engine.step()
            now_s += 1.0
        measured, last = engine.measurements(), outputs[-1]
        assert measured.inter_token_s.total == measured.inter_token_s.num_values == 3 and last.usage.completion_tokens == 5
        assert last.times is not None and last.times.num_gaps == 1 and last.times.per_token_s(5) == 1.0


class Failing(FakeRunner):
    """Fails in the fetch of chosen steps; what was dispatched behind them cannot be had either."""

    def __init__(self, *failing: int) -> None:
        super().__init__()
        self.failing = failing
        self.num_lost = 0

    def dispatch(self, schedule: Schedule) -> FakeStep:
        number = self.num_steps
        step = super().dispatch(schedule)
        if number in self.failing:

            def fetch() -> list[SequenceResult]:
                self.lose_pools()
                raise RuntimeError(f"step {number} is lost")

            step.fetch = fetch  # pyright: ignore[reportAttributeAccessIssue]
        return step


class TestFailures:
    def test_a_fetch_fails_with_a_step_behind_it(self) -> None:
        """The requests of the failed step end; one that only the step behind it had is computed anew."""
        engine = fake_engine(Failing(1), overlap=True)
        first = add(engine, [1, 2], max_tokens=9)
        engine.step()
        engine.step()
        second = add(engine, [3, 4], max_tokens=5, seed=3)
        outputs = finish_all(engine)
        assert outputs[first][-1].finish_reason == "error" and "step 1 is lost" in str(outputs[first][-1].error)
        alone = fake_engine()
        plain = add(alone, [3, 4], max_tokens=5, seed=3)
        expected = [token_id for output in finish_all(alone)[plain] for token_id in output.token_ids]
        assert [token_id for output in outputs[second] for token_id in output.token_ids] == expected

    def test_a_dispatch_fails_with_a_step_under_way(self) -> None:
        """What the step under way gave is not lost."""
        runner = FakeRunner()
        engine = fake_engine(runner, overlap=True)
        request_id = add(engine, [1, 2], max_tokens=9)
        engine.step()
        runner.errors = [RuntimeError("no memory")]
        outputs = engine.step()
        assert [(output.finish_reason, len(output.token_ids)) for output in outputs] == [(None, 1), ("error", 0)]
        assert outputs[-1].request_id == request_id and outputs[-1].usage.completion_tokens == 1
        engine.check_integrity()
        assert not engine.has_work

    def test_three_in_a_row(self) -> None:
        engine = fake_engine(Failing(*range(20)), overlap=True)
        for i in range(40):
            add(engine, [i], max_tokens=5)
        with pytest.raises(EngineDeadError, match="3 steps in a row"):
            finish_all(engine)


class Timed(FakeRunner):
    """A device that takes its time, by a clock of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.step_s = 1.0
        self.busy_until_s = 0.0

    def dispatch(self, schedule: Schedule) -> FakeStep:
        self.now_s += 0.01
        end_s = self.busy_until_s = max(self.busy_until_s, self.now_s) + self.step_s
        step = super().dispatch(schedule)
        fetch = step.fetch

        def late_fetch() -> list[SequenceResult]:
            self.now_s = max(self.now_s, end_s)
            return fetch()

        step.fetch = late_fetch  # pyright: ignore[reportAttributeAccessIssue]
        return step


class TestSlack:
    def test_the_next_launch_is_put_off_but_not_too_long(self) -> None:
        runner = Timed()
        engine = fake_engine(runner, overlap=True, clock=lambda: runner.now_s)
        add(engine, [1, 2], max_tokens=30)
        assert engine.slack_s == 0.0, "nothing runs"
        for _ in range(3):
            engine.step()
        for _ in range(5):
            slack_s = engine.slack_s
            assert 0.7 < slack_s < 0.9
            runner.now_s += slack_s
            engine.note_sleep(slack_s)
            assert engine.slack_s == pytest.approx(0.0, abs=1e-9) and runner.now_s + 0.01 < runner.busy_until_s, "the device is never idle"
            engine.step()
        measured = engine.measurements()
        assert measured.step_s.total == pytest.approx(runner.now_s, rel=0.01), "steps that overlap share no time"
        assert measured.step_host_s.total < 0.05 * measured.step_s.total

    def test_without_overlap_there_is_none(self) -> None:
        runner = Timed()
        engine = fake_engine(runner, clock=lambda: runner.now_s)
        add(engine, [1, 2], max_tokens=30)
        for _ in range(4):
            engine.step()
            assert engine.slack_s == 0.0

    def test_a_request_that_comes_in_the_slack_is_part_of_the_next_step(self) -> None:
        runner = Timed()
        engine = fake_engine(runner, overlap=True, clock=lambda: runner.now_s)
        add(engine, [1, 2], max_tokens=30)
        for _ in range(3):
            engine.step()
        runner.now_s += engine.slack_s
        late = add(engine, [3], max_tokens=3)
        engine.step()
        outputs = engine.step()
        assert late in {output.request_id for output in outputs}

    def test_a_shorter_step_is_believed_at_once_and_a_longer_one_slowly(self) -> None:
        runner = Timed()
        engine = fake_engine(runner, overlap=True, clock=lambda: runner.now_s)
        add(engine, [1, 2], max_tokens=40)

        def slack_after(step_s: float, num_steps: int) -> float:
            runner.step_s = step_s
            for _ in range(num_steps):
                engine.step()
            return engine.slack_s

        assert slack_after(1.0, 4) == pytest.approx(0.85, abs=0.05)
        assert slack_after(0.5, 2) == pytest.approx(0.42, abs=0.05)
        assert 0.42 < slack_after(1.0, 3) < 0.55

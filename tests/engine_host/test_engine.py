"""The synchronous engine on the fake runner: the door, the ends, faults, and equality with the plain run."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from jaxserve.config import Config, EngineConfig, ModelConfig
from jaxserve.engine.engine import Engine, fold_seed
from jaxserve.engine.requests.sampling_params import resolve_sampling
from jaxserve.errors import ConfigError, ContextLengthError, EngineDeadError, InvalidRequestError, ModelError, ReaderTimeoutError
from jaxserve.request import RequestOutput, SamplingParams, Usage
from tests.engine_host.fakes import EOS, VOCAB_SIZE, FakeRunner, FakeTokenizer, fake_engine, fake_spec, plain_run, refusal_of, scripted


def finish_all(engine: Engine) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def text_of(outputs: list[RequestOutput]) -> str:
    return "".join(output.text for output in outputs)


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def add(engine: Engine, prompt: list[int], request_id: str | None = None, **fields: Any) -> str:
    request = engine.make_request(prompt, SamplingParams(**fields), request_id)
    engine.add(request)
    return request.request_id


class TestDoor:
    @pytest.mark.parametrize(
        ("prompt", "message"),
        [
            ([], "the prompt is empty"),
            ([1, VOCAB_SIZE], rf"token id {VOCAB_SIZE} in prompt is out of range; the vocabulary is \[0, {VOCAB_SIZE}\)"),
            ([1, -1], "token id -1"),
            ([1, 2.0], "must be integers"),
            (["a"], "must be integers"),
        ],
    )
    def test_bad_prompts_are_refused(self, prompt: list[Any], message: str) -> None:
        with pytest.raises(InvalidRequestError, match=message) as caught:
            fake_engine().make_request(prompt, SamplingParams())
        assert caught.value.param == "prompt"

    def test_stop_token_ids_are_of_the_vocabulary(self) -> None:
        with pytest.raises(InvalidRequestError, match=f"token id {VOCAB_SIZE} in stop_token_ids is out of range") as caught:
            fake_engine().make_request([1], SamplingParams(stop_token_ids=(VOCAB_SIZE - 1, VOCAB_SIZE)))
        assert caught.value.param == "stop_token_ids"

    def test_prompt_over_the_context_length(self) -> None:
        engine = fake_engine(max_position=20)
        engine.make_request([1] * 19, SamplingParams())
        with pytest.raises(ContextLengthError, match="This model's maximum context length is 20 tokens. However, your prompt has 20 tokens") as caught:
            engine.make_request([1] * 20, SamplingParams())
        assert caught.value.code == "context_length_exceeded"

    def test_prompt_and_max_tokens_over_the_context_length(self) -> None:
        engine = fake_engine(max_position=20)
        engine.make_request([1] * 12, SamplingParams(max_tokens=8))
        with pytest.raises(ContextLengthError, match=r"length is 20 tokens. However, you requested 21 tokens \(12 in the prompt, 9 for") as caught:
            engine.make_request([1] * 12, SamplingParams(max_tokens=9))
        assert caught.value.param == "max_tokens"

    def test_a_request_that_can_never_fit_the_pool_is_refused(self) -> None:
        engine = fake_engine(FakeRunner(num_pages=5, page_size=4))
        engine.make_request([1] * 12, SamplingParams(max_tokens=8))
        with pytest.raises(ContextLengthError, match=r"at most 20 tokens \(5 pages of 4\).*need 6 pages"):
            engine.make_request([1] * 12, SamplingParams(max_tokens=9))
        with pytest.raises(ContextLengthError, match="at least 1 for the completion"):
            engine.make_request([1] * 20, SamplingParams())

    def test_the_engine_serves_on_after_a_refusal(self) -> None:
        engine = fake_engine(max_position=20)
        with pytest.raises(ContextLengthError):
            engine.make_request([1] * 99, SamplingParams())
        request_id = add(engine, [1], max_tokens=3)
        assert finish_all(engine)[request_id][-1].finish_reason == "length"

    @pytest.mark.parametrize(("num_pages", "expected"), [(64, 15), (4, 11)])
    def test_without_max_tokens_all_that_fit_are_generated(self, num_pages: int, expected: int) -> None:
        engine = fake_engine(FakeRunner(num_pages=num_pages, page_size=4), max_position=20)
        request_id = add(engine, [1] * 5)
        outputs = finish_all(engine)[request_id]
        assert (outputs[-1].finish_reason, outputs[-1].usage) == ("length", Usage(prompt_tokens=5, completion_tokens=expected))

    def test_an_id_in_flight_is_refused(self) -> None:
        engine = fake_engine()
        add(engine, [1], "same")
        with pytest.raises(InvalidRequestError, match="'same' is in flight already"):
            add(engine, [1], "same")

    def test_impossible_settings(self) -> None:
        with pytest.raises(ConfigError, match=r"^model.max_model_len is 129; must be in \[2, 128\], the limit of model$"):
            Engine(FakeRunner(), FakeTokenizer(), fake_spec(128), Config(model=ModelConfig(max_model_len=129)))  # pyright: ignore[reportArgumentType]
        with pytest.raises(ModelError, match="sampling defaults of m cannot be used: top_p"):
            Engine(FakeRunner(max_num_seqs=32), FakeTokenizer(), fake_spec(), Config(), model_name="m", sampling_defaults={"top_p": 2.0})  # pyright: ignore[reportArgumentType]


class TestRun:
    def test_tokens_text_and_usage(self) -> None:
        engine = fake_engine()
        request_id = add(engine, [*b"prompt"], max_tokens=5, seed=3)
        outputs = finish_all(engine)[request_id]
        expected = plain_run(list(b"prompt"), 5, fold_seed(3))
        assert tokens_of(outputs) == expected
        assert text_of(outputs) == bytes(expected).decode()
        assert [output.finish_reason for output in outputs] == [None] * 4 + ["length"]
        assert outputs[-1].usage == Usage(prompt_tokens=6, completion_tokens=5)

    def test_every_way_to_end(self) -> None:
        script = [*b"abc", EOS, *b"defgh"]
        engine = fake_engine(FakeRunner(next_token=scripted(script)))
        expected: dict[str, tuple[str, str, object, int]] = {
            add(engine, [0]): ("abc", "stop", None, 4),
            add(engine, [0], max_tokens=2): ("ab", "length", None, 2),
            add(engine, [0], stop_token_ids=(ord("b"),)): ("a", "stop", ord("b"), 2),
            add(engine, [0], stop=("bc",)): ("a", "stop", "bc", 3),
            add(engine, [0], ignore_eos=True, stop=("g",)): ("abcdef", "stop", "g", 8),
            add(engine, [0], ignore_eos=True, stop=("cd",), include_stop_str_in_output=True): ("abcd", "stop", "cd", 5),
            add(engine, [0], ignore_eos=True, skip_special_tokens=False, max_tokens=5): ("abc<eos>d", "length", None, 5),
        }
        for request_id, outputs in finish_all(engine).items():
            last = outputs[-1]
            assert (text_of(outputs), last.finish_reason, last.stop_reason, last.usage.completion_tokens) == expected[request_id]
            assert len(tokens_of(outputs)) == last.usage.completion_tokens

    def test_a_stop_string_is_not_looked_for_in_the_prompt(self) -> None:
        engine = fake_engine(FakeRunner(next_token=lambda token_ids, seed: b"nd of it"[len(token_ids) - 3]))
        request_id = add(engine, [*b"an e"][1:], stop=("end", " e"), max_tokens=8)
        assert text_of(finish_all(engine)[request_id]) == "nd of it"

    def test_seeds(self) -> None:
        def run(seeds: list[int | None], engine_seed: int) -> list[list[int]]:
            engine = fake_engine(seed=engine_seed)
            ids = [add(engine, [5, 6], seed=seed, max_tokens=8) for seed in seeds]
            outputs = finish_all(engine)
            return [tokens_of(outputs[request_id]) for request_id in ids]

        first, second, given, same = run([None, None, 7, 7], engine_seed=1)
        assert first != second
        assert given == same == run([7], engine_seed=2)[0]
        assert [first, second] == run([None, None], engine_seed=1)
        assert first != run([None], engine_seed=2)[0]

    def test_all_bits_of_a_seed_count(self) -> None:
        seeds = [0, 1, -1, 2**31, 2**32, 2**32 + 1, 2**63 - 1, -(2**63)]
        folded = [fold_seed(seed) for seed in seeds]
        assert len(set(folded)) == len(seeds)
        assert all(0 <= seed < 2**32 for seed in folded)

    @settings(max_examples=40, deadline=None)
    @given(
        requests=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20), st.integers(0, 5)), min_size=2, max_size=7),
        page_size=st.sampled_from([1, 4, 16]),
        budget=st.integers(4, 64),
        pages_over=st.integers(0, 8),
    )
    def test_company_changes_nothing(self, requests: list[tuple[int, int, int]], page_size: int, budget: int, pages_over: int) -> None:
        """Pool of a single request and little more: the same outputs whatever runs beside, and however a prompt is chunked."""
        runner = FakeRunner(num_pages=-(-50 // page_size) + pages_over, page_size=page_size, max_num_seqs=4)
        engine = fake_engine(runner, max_tokens_per_step=budget)
        expected: dict[str, list[int]] = {}
        got: dict[str, list[int]] = {}
        for prompt_len, max_tokens, num_steps in requests:
            prompt = [(7 * i + prompt_len) % 256 for i in range(prompt_len)]
            request_id = add(engine, prompt, max_tokens=max_tokens, seed=max_tokens)
            expected[request_id] = plain_run(prompt, max_tokens, fold_seed(max_tokens))
            for _ in range(num_steps):
                for output in engine.step():
                    got.setdefault(output.request_id, []).extend(output.token_ids)
                engine.check_integrity()
        for request_id, outputs in finish_all(engine).items():
            got.setdefault(request_id, []).extend(tokens_of(outputs))
        assert got == expected


class TestAbort:
    @pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
    def test_in_every_state(self, num_steps: int) -> None:
        """Waiting, in mid-prompt, decoding; twice is as good as once."""
        engine = fake_engine(max_tokens_per_step=8)
        request_id = add(engine, [1] * 12, max_tokens=20, stop=("\x00never",))
        for _ in range(num_steps):
            engine.step()
        output = engine.abort(request_id)
        assert output is not None
        assert (output.finish_reason, output.usage.completion_tokens) == ("abort", max(0, num_steps - 1))
        assert engine.abort(request_id) is None
        assert not engine.has_work and engine.step() == []
        stats = engine.stats()
        assert (stats.num_free_pages, stats.num_running, stats.num_waiting, stats.finished["abort"]) == (64, 0, 0, 1)

    def test_held_text_comes_with_the_last_output(self) -> None:
        engine = fake_engine(FakeRunner(next_token=scripted([*b"abcd"])))
        request_id = add(engine, [0], stop=("bcd",))
        outputs = [*engine.step(), *engine.step()]
        assert text_of(outputs) == "a"
        last = engine.abort(request_id)
        assert last is not None and last.text == "b"

    def test_others_go_on(self) -> None:
        engine = fake_engine()
        aborted, other = add(engine, [1], max_tokens=9), add(engine, [2], max_tokens=9, seed=1)
        engine.step()
        engine.abort(aborted)
        engine.check_integrity()
        rest = finish_all(engine)[other]
        assert rest[-1].usage.completion_tokens == 9
        assert tokens_of(rest) == plain_run([2], 9, fold_seed(1))[1:]


class TestFaults:
    def test_a_failed_step_ends_its_requests_and_only_those(self) -> None:
        runner = FakeRunner(max_num_seqs=2)
        engine = fake_engine(runner)
        first, second, waiting = (add(engine, [i], max_tokens=4, seed=i) for i in range(3))
        engine.step()
        runner.errors = [RuntimeError("device on fire")]
        outputs = engine.step()
        assert {(output.request_id, output.finish_reason, str(refusal_of(output))) for output in outputs} == {
            (request_id, "error", "RuntimeError: device on fire") for request_id in (first, second)
        }
        engine.check_integrity()
        assert tokens_of(finish_all(engine)[waiting]) == plain_run([2], 4, fold_seed(2))
        assert engine.stats().finished["error"] == 2

    def test_those_that_sat_out_a_failed_step_are_computed_anew(self) -> None:
        """The failed step may have cost the pool its content: the fake runner's does."""
        runner = FakeRunner(num_pages=6, page_size=4)
        engine = fake_engine(runner, max_tokens_per_step=32)
        old = add(engine, [1] * 8, max_tokens=16)
        young = add(engine, [2] * 11, max_tokens=8, seed=2)
        got = [token_id for _ in range(2) for output in engine.step() if output.request_id == young for token_id in output.token_ids]
        runner.errors = [RuntimeError("lost")]
        assert [output.request_id for output in engine.step()] == [old]  # the younger one finds no page, waits in place, and loses what it has
        engine.check_integrity()
        got += tokens_of(finish_all(engine)[young])
        assert got == plain_run([2] * 11, 8, fold_seed(2))
        assert engine.stats().num_preemptions == 1

    def test_an_error_in_one_output_ends_that_request_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = fake_engine()
        healthy = add(engine, [2], max_tokens=3, seed=0)

        class Broken:
            def push(self, token_ids: object) -> str:
                raise ValueError("no such text")

        monkeypatch.setattr(engine.tokenizer, "detokenizer", lambda *_, **__: Broken(), raising=False)
        broken = add(engine, [1], max_tokens=3)
        outputs = finish_all(engine)
        assert (outputs[broken][-1].finish_reason, str(refusal_of(outputs[broken][-1]))) == ("error", "ValueError: no such text")
        assert outputs[healthy][-1].finish_reason == "length"

    def test_a_dead_runner_is_not_hidden(self) -> None:
        runner = FakeRunner()
        engine = fake_engine(runner)
        add(engine, [1])
        runner.errors = [EngineDeadError("gone")]
        with pytest.raises(EngineDeadError, match="gone"):
            engine.step()


class TestBooks:
    def test_they_are_checked_now_and_then_when_idle_and_opened_anew_if_wrong(self, caplog: pytest.LogCaptureFixture) -> None:
        now_s = 100.0
        engine = fake_engine(clock=lambda: now_s)
        engine.on_idle()
        add(engine, [1] * 9, max_tokens=3)
        engine._scheduler.ranks[0].pool._free.pop()
        assert finish_all(engine) and not caplog.records  # a step checks nothing: its outputs must go out first
        now_s += 5.0
        engine.on_idle()
        assert not caplog.records
        now_s += 5.0
        engine.on_idle()
        assert [record.levelname for record in caplog.records] == ["CRITICAL"]
        engine.check_integrity()
        stats = engine.stats()
        assert (stats.num_free_pages, stats.num_cached_pages, stats.num_requests, stats.finished["length"]) == (64, 0, 1, 1)

    def test_unless_they_are_not_to_be(self, caplog: pytest.LogCaptureFixture) -> None:
        engine = fake_engine(engine=EngineConfig(check_integrity=False))
        engine._scheduler.ranks[0].pool._free.pop()
        engine.on_idle()
        assert not caplog.records


class TestPause:
    def test_it_ends_after_its_time_and_a_resumed_one_does_not(self) -> None:
        now_s = 100.0
        engine = fake_engine(engine=EngineConfig(reader_timeout_s=10.0), clock=lambda: now_s)
        lost, late = add(engine, [1], max_tokens=9), add(engine, [2], max_tokens=9)
        engine.step()
        engine.pause(lost)
        now_s += 4.0
        engine.pause(late)
        engine.pause(lost)  # it is already
        assert engine.step() == [] and engine.idle_s == 6.0
        now_s += 5.9
        engine.resume(late)
        engine.pause(late)
        now_s += 0.1
        (output,) = engine.step()
        assert output.request_id == lost and isinstance(refusal_of(output), ReaderTimeoutError)
        assert engine.step() == [] and engine.idle_s == pytest.approx(9.9)
        engine.resume(late)
        assert finish_all(engine)[late][-1].finish_reason == "length"
        engine.check_integrity()
        assert engine.stats().refused["reader_timeout"] == 1 and engine._time_limits.next_s == math.inf

    def test_what_is_paused_for_ever_ends_only_if_it_must(self) -> None:
        engine = fake_engine(engine=EngineConfig(reader_timeout_s=None))
        request_id = add(engine, [1], max_tokens=9)
        engine.step()
        engine.pause(request_id)
        assert engine.step() == [] and engine.idle_s == math.inf
        engine.abort(request_id)
        assert engine._time_limits.next_s == math.inf

    def test_its_time_is_no_time_between_tokens(self) -> None:
        now_s = 100.0
        engine = fake_engine(clock=lambda: now_s)
        alone = add(engine, [1], max_tokens=5)
        engine.step()
        now_s += 1.0
        engine.step()
        now_s += 0.5
        engine.pause(alone)
        now_s += 60.0
        engine.resume(alone)
        engine.step()
        now_s += 1.0
        engine.step()
        now_s += 1.0
        (last,) = engine.step()
        measured = engine.measurements()
        assert (measured.inter_token_s.num_values, measured.inter_token_s.total) == (3, 3.0)
        assert (measured.decode_s.total, measured.per_token_s.total) == (3.0, 1.0)
        assert last.times is not None and (last.times.decode_s, last.times.per_token_s(5)) == (3.0, 1.0)

    def test_an_end_in_a_pause(self) -> None:
        now_s = 100.0
        engine = fake_engine(clock=lambda: now_s)
        request_id = add(engine, [1], max_tokens=5)
        engine.step()
        now_s += 1.0
        engine.step()
        engine.pause(request_id)
        now_s += 60.0
        last = engine.abort(request_id)
        assert last is not None and last.times is not None and last.times.last_token_s == 101.0
        assert engine.measurements().decode_s.total == engine.measurements().per_token_s.total == 1.0


def test_every_request_ends_in_exactly_one_outcome() -> None:
    runner = FakeRunner(num_pages=10, page_size=4, max_num_seqs=3)
    engine = fake_engine(runner)
    ids = [add(engine, [i] * (1 + i), max_tokens=1 + 3 * i) for i in range(8)]
    for step in range(100):
        if step % 5 == 1:
            engine.abort(ids[step // 5 % 8])
        if step == 12:
            runner.errors = [RuntimeError("once")]
        engine.step()
        stats = engine.stats()
        assert stats.num_requests == 8 == stats.num_running + stats.num_waiting + sum(stats.finished.values())
    stats = engine.stats()
    assert not engine.has_work
    assert (stats.num_free_pages, stats.num_prompt_tokens) == (10, sum(range(1, 9)))
    assert all(value >= 0 for value in dataclasses.asdict(stats)["finished"].values())


class TestParams:
    def test_omitted_fields_take_the_defaults(self) -> None:
        params = resolve_sampling({"top_p": 0.5, "top_k": None, "stop": "x", "stop_token_ids": [1]}, {"temperature": 0.2, "top_k": 20, "top_p": 0.8})
        assert params == SamplingParams(temperature=0.2, top_k=20, top_p=0.5, stop=("x",), stop_token_ids=(1,))

    @pytest.mark.parametrize(("field", "value"), [("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5), ("temperature", -1), ("stop", 3), ("best", 1)])
    def test_errors_name_the_field(self, field: str, value: object) -> None:
        with pytest.raises(InvalidRequestError, match=field) as caught:
            resolve_sampling({field: value}, {})
        assert caught.value.param == field

    @pytest.mark.parametrize(
        ("field", "value"), [("stop", "end"), ("ignore_eos", "false"), ("temperature", float("nan")), ("temperature", float("inf")), ("top_p", 10**400)]
    )
    def test_parameters_made_in_python_are_checked_too(self, field: str, value: Any) -> None:
        with pytest.raises(InvalidRequestError, match=field) as caught:
            SamplingParams(**{field: value})
        assert caught.value.param == field

"""The Python front end on a fake engine."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from jaxserve.config import Config
from jaxserve.engine.engine import fold_seed
from jaxserve.errors import ConfigError, ContextLengthError, InvalidRequestError
from jaxserve.llm import LLM
from jaxserve.request import SamplingParams
from tests.engine_host.fakes import fake_engine, plain_run


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> LLM:
    build = types.ModuleType("jaxserve.engine.build")
    build.build_engine = lambda config, *, progress: fake_engine()  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "jaxserve.engine.build", build)
    return LLM("fake", overrides={"model.dtype": "float32"})


def test_settings(llm: LLM) -> None:
    assert (llm.config.model.source, llm.config.model.dtype) == ("fake", "float32")
    assert LLM(config=llm.config).config == llm.config
    with pytest.raises(ConfigError, match="dtipe"):
        LLM(overrides={"model.dtipe": "float32"})
    assert LLM().config == Config()


def test_completions_come_in_the_order_of_prompts(llm: LLM) -> None:
    prompts = ["a long prompt, " * 5, "b", [99, 100], "d" * 20]
    params = [SamplingParams(max_tokens=20 - 5 * i, seed=i) for i in range(4)]
    completions = llm.generate(prompts, params)
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
        expected = plain_run(ids, 20 - 5 * i, fold_seed(i))
        assert (list(completion.prompt_token_ids), list(completion.token_ids), completion.text) == (ids, expected, bytes(expected).decode())
        assert completion.prompt == bytes(ids).decode()
        assert (completion.finish_reason, completion.usage.completion_tokens) == ("length", 20 - 5 * i)


@pytest.mark.parametrize("prompts", ["x", ["x"], [120], [[120]]])
def test_shapes_of_prompts(llm: LLM, prompts: Any) -> None:
    (completion,) = llm.generate(prompts, SamplingParams(max_tokens=2))
    assert (completion.prompt, list(completion.prompt_token_ids)) == ("x", [120])


def test_no_prompts_no_completions(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_chat(llm: LLM) -> None:
    (completion,) = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=3, seed=1))
    assert completion.prompt == "user: hi\n"
    assert list(completion.token_ids) == plain_run(b"user: hi\n", 3, fold_seed(1))
    assert len(llm.chat([[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]], SamplingParams(max_tokens=1))) == 2


def test_one_bad_prompt_runs_none(llm: LLM) -> None:
    with pytest.raises(ContextLengthError):
        llm.generate(["fine", "x" * 500])
    with pytest.raises(InvalidRequestError, match="out of range"):
        llm.generate([[1], [1, 99999]])
    with pytest.raises(InvalidRequestError, match="2 sampling parameters for 1 prompts"):
        llm.generate("x", [SamplingParams(), SamplingParams()])
    assert llm.engine.stats().num_requests == 0


def test_leaving_early_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step = llm.engine.step

    def interrupted() -> Any:
        if llm.engine.stats().num_steps == 3:
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b"], SamplingParams(max_tokens=50), progress=True)
    assert not llm.engine.has_work
    assert llm.engine.stats().finished["abort"] == 2
    assert len(llm.generate(["a", "b"], SamplingParams(max_tokens=5))) == 2

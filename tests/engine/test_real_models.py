"""The embedded models, greedily in float32, against what transformers generates from the same dequantised weights (scripts/make_token_fixtures.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxserve.config import CacheConfig, Config, EngineConfig, ModelConfig, SchedulerConfig
from jaxserve.llm import LLM
from jaxserve.request import SamplingParams
from tests.engine.prompts import PROMPTS
from tests.real_models import require_model

TIE = 1e-3
"""Logits closer than this may be ordered either way; the texts part there."""


@pytest.mark.parametrize("alias", ["smollm2-135m", pytest.param("gemma3-270m", marks=pytest.mark.slow)])
def test_greedy_tokens_are_those_of_transformers(alias: str) -> None:
    require_model(alias)
    config = Config(
        model=ModelConfig(source=alias, dtype="float32", max_model_len=1024),
        cache=CacheConfig(num_pages=256),
        scheduler=SchedulerConfig(max_num_seqs=8, max_tokens_per_step=256),
        engine=EngineConfig(token_buckets=(256,), sequence_buckets=(8,)),
    )
    completions = LLM(config=config).generate(list(PROMPTS), SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True))
    wanted = json.loads((Path(__file__).parent / f"fixtures/greedy_{alias}.json").read_text())
    assert [row["prompt"] for row in wanted] == list(PROMPTS)
    ties = []
    for completion, row in zip(completions, wanted, strict=True):
        assert list(completion.prompt_token_ids) == row["prompt_token_ids"]
        assert len(completion.token_ids) == 64
        for index, (got, want, gap) in enumerate(zip(completion.token_ids, row["token_ids"], row["gaps"], strict=True)):
            if got != want:
                assert gap < TIE, f"{completion.prompt[:30]!r}: token {index} is {got}, transformers has {want} by {gap}"
                ties.append((completion.prompt[:30], index, gap))
                break
    assert len(ties) <= 2, ties

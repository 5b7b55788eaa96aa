"""SmolLM2 on meshes of fake devices, through the whole engine: greedy and seeded tokens are those of one device."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from jaxserve.config import CacheConfig, Config, EngineConfig, MeshConfig, ModelConfig, SchedulerConfig
from jaxserve.llm import LLM
from jaxserve.mesh_shape import MeshShape
from jaxserve.request import SamplingParams
from tests.engine.prompts import PROMPTS
from tests.real_models import require_model

slow = pytest.mark.slow
NUM_PROMPTS, NUM_TOKENS = 6, 8
MESHES = [
    MeshShape(2, 3), pytest.param(MeshShape(1, 3), marks=slow), pytest.param(MeshShape(3, 1), marks=slow), pytest.param(MeshShape(2, 1), marks=slow),
    pytest.param(MeshShape(8, 1), marks=slow),
]  # fmt: skip


def tokens_on(mesh: MeshShape) -> list[tuple[int, ...]]:
    config = Config(
        model=ModelConfig(source="smollm2-135m", dtype="float32", max_model_len=256),
        mesh=MeshConfig(data=mesh.data, model=mesh.model),
        cache=CacheConfig(num_pages=32),
        scheduler=SchedulerConfig(max_num_seqs=2, max_tokens_per_step=64),
        engine=EngineConfig(layers="scan", token_buckets=(64,), sequence_buckets=(2,), compilation_cache=False),
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    params = [greedy if index % 2 else dataclasses.replace(greedy, temperature=1.0, seed=index, top_p=0.9) for index in range(NUM_PROMPTS)]
    return [completion.token_ids for completion in LLM(config=config).generate(list(PROMPTS[:NUM_PROMPTS]), params)]


@functools.cache
def tokens_on_one_device() -> list[tuple[int, ...]]:
    return tokens_on(MeshShape())


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_mesh_gives_the_tokens_of_one_device(mesh: MeshShape) -> None:
    require_model("smollm2-135m")
    got = tokens_on(mesh)
    assert all(len(tokens) == NUM_TOKENS for tokens in got)
    assert got == tokens_on_one_device()

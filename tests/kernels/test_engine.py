"""The engine on the kernels, in the fast interpreter: the tokens are those of ``xla``."""

import pytest

from jaxserve.config import CacheConfig, Config, EngineConfig, ModelConfig, SchedulerConfig
from jaxserve.llm import LLM
from jaxserve.request import SamplingParams
from tests.engine.tiny import run, tiny_engine
from tests.real_models import require_model

REQUESTS = [
    ([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)),
    (list(range(10, 40)), SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)),
    ([9], SamplingParams(temperature=1.0, seed=3, max_tokens=8, ignore_eos=True)),
]


def tokens(attention, **options):
    engine = tiny_engine(attention=attention, token_buckets=(16,), max_tokens_per_step=16, **options)
    return run(engine, REQUESTS, arrivals=[0, 1, 2])


@pytest.fixture(scope="module")
def expected():
    return tokens("xla")


@pytest.mark.parametrize("attention", ["pallas_tpu", "pallas_gpu"])
def test_tokens_are_those_of_xla(attention, expected):
    assert tokens(attention) == expected


def test_a_float8_pool_gives_the_same_tokens_everywhere(expected):
    by_xla = tokens("xla", cache_dtype="fp8")
    assert by_xla != expected  # three bits of mantissa show, even in a tiny model
    assert tokens("pallas_gpu", cache_dtype="fp8") == by_xla


@pytest.mark.slow
def test_greedy_tokens_of_a_real_model_are_those_of_xla():
    require_model("smollm2-135m")
    outputs = {}
    for attention in ("xla", "pallas_tpu", "pallas_gpu"):
        config = Config(
            model=ModelConfig(source="smollm2-135m", dtype="float32", max_model_len=128),
            cache=CacheConfig(num_pages=32),
            scheduler=SchedulerConfig(max_num_seqs=2, max_tokens_per_step=32),
            engine=EngineConfig(attention=attention, token_buckets=(32,), sequence_buckets=(2,)),
        )
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        completions = LLM(config=config).generate(["The capital of France is", "def fibonacci(n):", "Once upon a time"], params)
        outputs[attention] = [completion.token_ids for completion in completions]
    assert outputs["pallas_tpu"] == outputs["xla"]
    assert outputs["pallas_gpu"] == outputs["xla"]

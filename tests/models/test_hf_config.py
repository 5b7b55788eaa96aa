"""Configs are read strictly: what changes the maths and is not handled is named, never ignored; what is broken is an error, never a traceback."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from jaxserve.errors import UnsupportedModelError
from jaxserve.models.hf_config import spec_from_config
from tests.models.cases import CASES

CONFIGS = {case.name: case.config for case in CASES}
LLAMA, QWEN2, GEMMA = "llama2_mha", "qwen2_window", "gemma3"


def refused(base: str, **keys: Any) -> str:
    config = {key: value for key, value in (copy.deepcopy(CONFIGS[base]) | keys).items() if value is not ...}
    with pytest.raises(UnsupportedModelError) as caught:
        spec_from_config(config)
    return str(caught.value)


@pytest.mark.parametrize(
    ("base", "key", "value"),
    [
        (LLAMA, "hidden_act", "relu"),
        (LLAMA, "pretraining_tp", 2),
        (LLAMA, "quantization_config", {"quant_method": "gptq"}),
        (LLAMA, "partial_rotary_factor", 0.5),
        (LLAMA, "rope_interleaved", True),
        (LLAMA, "auto_map", {"AutoModel": "modeling.Model"}),
        (LLAMA, "is_encoder_decoder", True),
        (LLAMA, "some_new_scale", 12.0),
        (LLAMA, "sliding_window", 128),
        (LLAMA, "architectures", ["MambaForCausalLM"]),
        (LLAMA, "architectures", ["Gemma3ForConditionalGeneration"]),
        (LLAMA, "model_type", "qwen2"),
        ("mistral_window", "attention_bias", True),
        ("mistral_window", "layer_types", ["full_attention"] * 3),
        (QWEN2, "attention_bias", False),
        (QWEN2, "use_mrope", True),
        (GEMMA, "attn_logit_softcapping", 50.0),
        (GEMMA, "use_bidirectional_attention", True),
        (GEMMA, "layer_types", ["chunked_attention"] * 7),
        (GEMMA, "layer_types", ["full_attention"]),
        (GEMMA, "vision_config", {"hidden_size": 8}),
    ],
)
def test_attribute_that_is_not_handled_is_named_with_its_value(base: str, key: str, value: Any) -> None:
    message = refused(base, **{key: value})
    assert key in message or (key == "model_type" and "architectures" in message)
    assert repr(value)[:20] in message or key == "model_type"


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_scaling.rope_type"),
        ({"type": "longrope", "short_factor": [1.0]}, "rope_scaling.type"),
        ({"rope_type": "linear"}, "rope_scaling.factor is missing"),
        ({"rope_type": "linear", "factor": "two"}, "rope_scaling.factor"),
        ({"rope_type": "linear", "factor": 2.0, "low_freq_factor": 1.0}, "rope_scaling.low_freq_factor"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}, "rope_scaling.high_freq_factor"),
        ({"rope_type": "yarn", "factor": 1e6, "original_max_position_embeddings": 10**6}, "rope_scaling.factor"),
        ({"rope_type": "default", "partial_rotary_factor": 0.25}, "rope_scaling.partial_rotary_factor"),
        ([1, 2], "rope_scaling"),
    ],
)
def test_rope_rule_that_is_not_handled_is_named(rope: Any, named: str) -> None:
    assert named in refused(LLAMA, rope_scaling=rope)


def test_two_rope_rules_are_refused() -> None:
    assert "rope_scaling" in refused("llama3_v5", rope_scaling={"type": "linear", "factor": 2.0})


SIZES = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"]


@pytest.mark.parametrize("value", [0, -1, 2**40, "64", 64.5, True, [64], float("nan"), None, ...])
@pytest.mark.parametrize("key", SIZES)
def test_impossible_size_is_named(key: str, value: Any) -> None:
    assert key in refused(LLAMA, **{key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_key_value_heads", 3),
        ("num_attention_heads", 5),
        ("head_dim", 15),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", 0.0),
        ("rope_theta", float("inf")),
        ("rope_theta", 0),
        ("tie_word_embeddings", "yes"),
        ("eos_token_id", 97),
        ("eos_token_id", [1, "2"]),
        ("bos_token_id", -1),
        ("bos_token_id", [0, 1]),
        ("architectures", "LlamaForCausalLM"),
        ("architectures", [3]),
    ],
)
def test_broken_value_is_named(key: str, value: Any) -> None:
    assert key in refused(LLAMA, **{key: value})


def test_windows_without_a_size_are_refused() -> None:
    assert "layer_types" in refused("qwen2_layer_types", use_sliding_window=False)
    assert "sliding_window" in refused(GEMMA, sliding_window=None)


@pytest.mark.parametrize("config", [None, [], "llama", {}])
def test_what_is_no_config_is_refused(config: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="model config"):
        spec_from_config(config)


def test_unsupported_architecture_lists_what_is_supported() -> None:
    message = refused(LLAMA, architectures=["GPT2LMHeadModel"], model_type="gpt2")
    assert "GPT2LMHeadModel" in message and "LlamaForCausalLM" in message


def test_long_values_are_cut() -> None:
    assert len(refused(LLAMA, unknown_table=list(range(10_000)))) < 300


def test_bookkeeping_is_accepted_at_any_value() -> None:
    config = CONFIGS[LLAMA] | {"initializer_range": 0.5, "transformers_version": "9", "id2label": {"0": "A"}, "use_cache": False, "pad_token_id": -1}
    assert spec_from_config(config) == spec_from_config(CONFIGS[LLAMA])


@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_transformers_writes_for_a_config_means_the_same(case: Any) -> None:
    from transformers import CONFIG_MAPPING

    keys = copy.deepcopy(case.config)
    written = CONFIG_MAPPING[keys.pop("model_type")](**keys).to_dict()
    assert spec_from_config(written) == case.spec


def test_gemma_layers_follow_the_pattern() -> None:
    spec = spec_from_config(CONFIGS[GEMMA])
    assert [layer.window for layer in spec.layers] == [8, 8, None, 8, 8, None, 8]
    assert [layer.rope for layer in spec.layers] == [1, 1, 0, 1, 1, 0, 1]
    assert spec.embedding_scale == 8.0 and spec.attention.scale == 0.1 and spec.eos_token_ids == (2,)


def test_yarn_extends_the_context() -> None:
    assert spec_from_config(CONFIGS["qwen2_yarn_tied"]).max_position == 64


def test_default_frequencies_are_those_of_the_definition() -> None:
    (rope,) = spec_from_config(CONFIGS[LLAMA]).ropes
    np.testing.assert_allclose(rope.inv_freq, 10000.0 ** (-np.arange(8) / 8), rtol=1e-6)

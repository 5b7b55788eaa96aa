"""Tiny models of every family: the one list that stored outputs, live comparison and the tests of the model's own consistency share."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxserve.models.hf_config import spec_from_config
from jaxserve.models.spec import ModelSpec

SEQUENCE_LENGTH = 48
"""Longer than every window and than every original rope length below."""

_BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A config as its ``config.json`` would have it."""

    name: str
    config: dict[str, Any]

    @property
    def spec(self) -> ModelSpec:
        return spec_from_config(self.config)


def _case(name: str, architecture: str, model_type: str, **keys: Any) -> Case:
    config = {"architectures": [architecture], "model_type": model_type} | _BASE | keys
    return Case(name, {key: value for key, value in config.items() if value is not ...})


def _llama(name: str, **keys: Any) -> Case:
    return _case(name, "LlamaForCausalLM", "llama", **keys)


def _gemma(name: str, **keys: Any) -> Case:
    gemma = {"hidden_act": ..., "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "num_key_value_heads": 1, "sliding_window": 8}
    return _case(name, "Gemma3ForCausalLM", "gemma3_text", **(gemma | keys))


_LLAMA3_ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 16}

CASES: tuple[Case, ...] = (
    _llama("llama2_mha", pretraining_tp=1, torch_dtype="float16"),
    _llama("llama3_gqa_tied", num_key_value_heads=2, head_dim=64, tie_word_embeddings=True, rope_theta=500000.0,
           rope_scaling={"rope_type": "llama3", **_LLAMA3_ROPE}),
    _llama("llama3_v5", num_key_value_heads=2, rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **_LLAMA3_ROPE}, dtype="bfloat16"),
    _llama("llama_linear_biases", num_key_value_heads=2, attention_bias=True, mlp_bias=True, hidden_act="gelu_pytorch_tanh",
           rope_scaling={"type": "linear", "factor": 4.0}),
    _llama("llama_yarn", rope_scaling={"rope_type": "yarn", **_YARN, "beta_fast": 8.0, "attention_factor": 0.8, "truncate": False}),
    _llama("smollm2_mqa", hidden_size=192, num_attention_heads=3, num_key_value_heads=1, tie_word_embeddings=True, rope_theta=100000, rope_interleaved=False,
           is_llama_config=True, **{"transformers.js_config": {"dtype": "q4"}}),
    _case("mistral_window", "MistralForCausalLM", "mistral", num_key_value_heads=2, head_dim=128, sliding_window=8),
    _case("mistral_no_window", "MistralForCausalLM", "mistral", num_key_value_heads=1, sliding_window=None, rope_theta=1000000.0),
    _case("qwen2_window", "Qwen2ForCausalLM", "qwen2", num_key_value_heads=2, use_sliding_window=True, sliding_window=8, max_window_layers=1,
          rope_theta=1000000.0),
    _case("qwen2_yarn_tied", "Qwen2ForCausalLM", "qwen2", num_key_value_heads=2, use_sliding_window=False, sliding_window=32, max_window_layers=1,
          tie_word_embeddings=True, max_position_embeddings=16, rope_scaling={"type": "yarn", **_YARN}),
    _case("qwen2_layer_types", "Qwen2ForCausalLM", "qwen2", num_key_value_heads=4, use_sliding_window=True, sliding_window=5,
          layer_types=["sliding_attention", "full_attention", "sliding_attention"], rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
    _case("qwen3", "Qwen3ForCausalLM", "qwen3", num_key_value_heads=2, head_dim=128, tie_word_embeddings=True, rope_theta=1000000, attention_bias=False),
    _case("qwen3_bias_yarn", "Qwen3ForCausalLM", "qwen3", num_key_value_heads=1, head_dim=32, attention_bias=True,
          rope_scaling={"rope_type": "yarn", **_YARN, "mscale": 1.0, "mscale_all_dim": 0.5}),
    _gemma("gemma3", num_hidden_layers=7, head_dim=256, query_pre_attn_scalar=100, sliding_window_pattern=3, rope_theta=1000000,
           rope_local_base_freq=10000,
           rope_scaling={"rope_type": "linear", "factor": 8.0}, final_logit_softcapping=3.0,
           attn_logit_softcapping=None, cache_implementation="hybrid"),
    _gemma("gemma3_v5", num_hidden_layers=4, num_key_value_heads=2, head_dim=64, query_pre_attn_scalar=64, _sliding_window_pattern=6,
           use_bidirectional_attention=False,
           layer_types=["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
           rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
                            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100000.0}}),
    _gemma("gemma3_untied", head_dim=16, query_pre_attn_scalar=16, sliding_window_pattern=2, tie_word_embeddings=False),
)  # fmt: skip

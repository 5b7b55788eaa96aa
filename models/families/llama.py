"""Llama 2 and 3.x, and the models of other names that are Llamas (SmolLM2)."""

from __future__ import annotations

from jaxserve.models.config_reader import ConfigReader
from jaxserve.models.families.common import read_decoder
from jaxserve.models.spec import ModelSpec


def llama(config: ConfigReader) -> ModelSpec:
    """The spec of a ``LlamaForCausalLM``."""
    config.neutral("pretraining_tp", [1])  # Splits products in slices: other sums.
    config.neutral("rope_interleaved", [False])
    config.ignore(["is_llama_config"])
    attention_bias = config.flag("attention_bias", default=False)
    mlp_bias = config.flag("mlp_bias", default=False)
    return read_decoder(config, "llama", attention={"qkv_bias": attention_bias, "o_bias": attention_bias}, mlp={"bias": mlp_bias})

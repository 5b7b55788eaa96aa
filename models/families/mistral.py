"""Mistral: a Llama whose layers all have one sliding window, or none."""

from __future__ import annotations

from jaxserve.models.config_reader import ConfigReader
from jaxserve.models.families.common import read_decoder, read_sizes, read_window
from jaxserve.models.spec import LayerSpec, ModelSpec


def mistral(config: ConfigReader) -> ModelSpec:
    """The spec of a ``MistralForCausalLM``."""
    config.neutral("attention_bias", [False])
    config.neutral("mlp_bias", [False])
    return read_decoder(config, "mistral", layers=(LayerSpec(window=read_window(config, default=4096)),) * read_sizes(config).num_layers)

"""Qwen 2, 2.5 (biases on queries, keys and values) and 3 (norms on queries and keys). Layers from ``max_window_layers`` on may have a window."""

from __future__ import annotations

from jaxserve.models.config_reader import ConfigReader
from jaxserve.models.families.common import MAX_LAYERS, read_decoder, read_layer_types, read_sizes, read_window
from jaxserve.models.spec import LayerSpec, ModelSpec


def qwen2(config: ConfigReader) -> ModelSpec:
    """The spec of a ``Qwen2ForCausalLM``."""
    config.neutral("attention_bias", [True])
    config.neutral("mlp_bias", [False])
    config.neutral("use_mrope", [False])
    return read_decoder(config, "qwen2", layers=_layers(config), attention={"qkv_bias": True})


def qwen3(config: ConfigReader) -> ModelSpec:
    """The spec of a ``Qwen3ForCausalLM``."""
    bias = config.flag("attention_bias", default=False)
    config.neutral("mlp_bias", [False])
    if not config.has("head_dim"):
        raise config.error("head_dim", "is missing")
    return read_decoder(config, "qwen3", layers=_layers(config), attention={"qkv_bias": bias, "o_bias": bias, "qk_norm": True})


def _layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    num_layers = read_sizes(config).num_layers
    window = read_window(config, default=4096)
    if not config.flag("use_sliding_window", default=False):
        window = None
    first = config.integer("max_window_layers", low=0, high=MAX_LAYERS, default=28)
    local = read_layer_types(config, num_layers, [window is not None and layer >= first for layer in range(num_layers)])
    if any(local) and window is None:
        raise config.error("layer_types", "has sliding_attention layers, but use_sliding_window and sliding_window give them no window")
    return tuple(LayerSpec(window=window if is_local else None) for is_local in local)

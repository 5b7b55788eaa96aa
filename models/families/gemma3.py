"""Gemma 3, text only: local and global layers with a rotary embedding each, norms around every block, scaled embeddings."""

from __future__ import annotations

from jaxserve.models.config_reader import ConfigReader
from jaxserve.models.families.common import MAX_LAYERS, Sizes, read_decoder, read_layer_types, read_sizes, read_window
from jaxserve.models.rope import read_theta, rope_section, rope_spec
from jaxserve.models.spec import LayerSpec, ModelSpec, RopeSpec

_GLOBAL, _LOCAL = 0, 1


def gemma3(config: ConfigReader) -> ModelSpec:
    """The spec of a ``Gemma3ForCausalLM``."""
    config.neutral("attention_bias", [False])
    config.neutral("use_bidirectional_attention", [False])
    config.neutral("attn_logit_softcapping", [])  # Gemma 2's; transformers reads and drops it here, so there is nothing to agree with.
    if not config.has("head_dim"):
        raise config.error("head_dim", "is missing")
    sizes = read_sizes(config)
    return read_decoder(
        config,
        "gemma3",
        activation_key="hidden_activation",
        tied=True,
        layers=_layers(config, sizes),
        ropes=_ropes(config, sizes),
        attention={"scale": config.number("query_pre_attn_scalar", low=1e-3, high=1e6) ** -0.5, "qk_norm": True},
        post_norms=True,
        norm_offset=1.0,
        embedding_scale=config.integer("hidden_size", low=1, high=2**17) ** 0.5,
        final_soft_cap=config.number("final_logit_softcapping", low=1e-3, high=1e6, default=None),
    )


def _layers(config: ConfigReader, sizes: Sizes) -> tuple[LayerSpec, ...]:
    """Every pattern-th layer is global. The pattern has had two names; ``layer_types`` overrides it."""
    pattern = config.integer("_sliding_window_pattern", low=1, high=MAX_LAYERS, default=6)
    pattern = config.integer("sliding_window_pattern", low=1, high=MAX_LAYERS, default=pattern)
    local = read_layer_types(config, sizes.num_layers, [(layer + 1) % pattern != 0 for layer in range(sizes.num_layers)])
    window = read_window(config, default=4096)
    if any(local) and window is None:
        raise config.error("sliding_window", "gives no window to the sliding_attention layers")
    return tuple(LayerSpec(window=window, rope=_LOCAL) if is_local else LayerSpec(rope=_GLOBAL) for is_local in local)


def _ropes(config: ConfigReader, sizes: Sizes) -> tuple[RopeSpec, RopeSpec]:
    """Before transformers 5, ``rope_scaling`` is the global layers' alone; since then ``rope_parameters`` has a section for each kind."""
    global_section, local_section = rope_section(config), None
    if config.has("rope_parameters") and (both := global_section) is not None:
        global_section, local_section = both.section("full_attention"), both.section("sliding_attention")
        both.finish()
    global_theta = read_theta(config, default=1_000_000.0)
    local_theta = read_theta(config, default=10_000.0, key="rope_local_base_freq")
    global_rope, _ = rope_spec(config, global_section, theta=global_theta, head_dim=sizes.head_dim, max_position=sizes.max_position)
    local_rope, _ = rope_spec(config, local_section, theta=local_theta, head_dim=sizes.head_dim, max_position=sizes.max_position)
    return global_rope, local_rope

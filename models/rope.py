"""The frequencies of rotary embeddings from a Hugging Face config: base and scaling rules, in the old and the new spelling."""

from __future__ import annotations

import math

import numpy as np

from jaxserve.models.config_reader import ConfigReader
from jaxserve.models.spec import RopeSpec

MAX_POSITION = 2**28
"""Largest context length that a config may state, in tokens."""


def flat_rope(config: ConfigReader, *, head_dim: int, max_position: int) -> tuple[RopeSpec, int]:
    """The rotary embedding of a model whose layers all share it, and the context length that it allows.

    Configs of transformers 5 have ``rope_parameters``; older ones have ``rope_theta`` and, if frequencies are scaled, ``rope_scaling``.
    """
    return rope_spec(config, rope_section(config), theta=read_theta(config, default=10_000.0), head_dim=head_dim, max_position=max_position)


def read_theta(config: ConfigReader, *, default: float, key: str = "rope_theta") -> float:
    """The base of the frequencies."""
    return config.number(key, low=1.001, high=1e15, default=default)


def rope_section(config: ConfigReader) -> ConfigReader | None:
    """The section ``rope_parameters`` or ``rope_scaling``, whichever the config has; ``None`` if it has neither. Both together are an error."""
    if config.has("rope_parameters") and config.has("rope_scaling"):
        raise config.error("rope_scaling", "is given beside rope_parameters; one of them is allowed")
    return config.section("rope_parameters") or config.section("rope_scaling")


def rope_spec(config: ConfigReader, rope: ConfigReader | None, *, theta: float, head_dim: int, max_position: int) -> tuple[RopeSpec, int]:
    """The rotary embedding of one kind of layer, and the context length that it allows.

    Args:
        config: The whole config, whose ``partial_rotary_factor`` must be neutral.
        rope: The section with the scaling rule; ``None`` if there is no rule.
        theta: The base of the frequencies, if the section gives none.
        head_dim: H, which is even.
        max_position: The config's context length.

    Returns:
        The embedding and the context length, which is the config's, or with YaRN's rule at least ``original_max_position_embeddings`` times its factor.
    """
    config.neutral("partial_rotary_factor", [1])
    if rope is None:
        return RopeSpec(inv_freq=_to_tuple(_inv_freq(theta, head_dim))), max_position
    rope.neutral("partial_rotary_factor", [1])
    theta = read_theta(rope, default=theta)
    inv_freq = _inv_freq(theta, head_dim)
    attention_factor = 1.0
    match _rope_type(rope):
        case "linear":
            inv_freq = inv_freq / np.float32(_factor(rope, "factor"))
        case "llama3":
            inv_freq = _llama3(rope, inv_freq, max_position)
        case "yarn":
            inv_freq, attention_factor, max_position = _yarn(rope, theta, head_dim, max_position)
        case _:
            pass
    rope.finish()
    return RopeSpec(inv_freq=_to_tuple(inv_freq), attention_factor=attention_factor), max_position


def _factor(rope: ConfigReader, key: str, **default: float | None) -> float:
    return rope.number(key, low=1e-6, high=1e6, **default)


def _rope_type(rope: ConfigReader) -> str:
    types = {name: name for name in ("default", "linear", "llama3", "yarn")}
    key = "rope_type" if rope.has("rope_type") else "type"
    rope.ignore(["rope_type", "type"])  # Some configs give both, for old readers.
    return rope.choice(key, types, default="default")


def _inv_freq(theta: float, head_dim: int) -> np.ndarray:
    """The inverse frequencies ``theta ** (-2i / H)``, with float32 exponents and results as in training, because at long positions the last bit matters."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return np.float32(1.0) / np.power(theta, exponents.astype(np.float64)).astype(np.float32)


def _llama3(rope: ConfigReader, inv_freq: np.ndarray, max_position: int) -> np.ndarray:
    """The inverse frequencies by Llama 3.1's rule (model card): long wavelengths are slowed by the factor, short ones kept, those between blended."""
    factor = _factor(rope, "factor")
    low, high = _factor(rope, "low_freq_factor"), _factor(rope, "high_freq_factor")
    original = rope.integer("original_max_position_embeddings", low=1, high=MAX_POSITION, default=max_position)
    if not low < high:
        raise rope.error("high_freq_factor", f"must be larger than low_freq_factor = {low:g}")
    rotations = original * inv_freq.astype(np.float64) / (2 * math.pi)  # Over the original context.
    kept = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    return (inv_freq * ((1 - kept) / factor + kept)).astype(np.float32)


def _yarn(rope: ConfigReader, theta: float, head_dim: int, max_position: int) -> tuple[np.ndarray, float, int]:
    """The inverse frequencies, attention factor and context length by YaRN's rule (arXiv:2309.00071).

    Dimensions that turn often over the original context are kept, those that turn seldom are interpolated.
    """
    factor = _factor(rope, "factor")
    original = rope.integer("original_max_position_embeddings", low=1, high=MAX_POSITION, default=max_position)
    fast, slow = _factor(rope, "beta_fast", default=32.0), _factor(rope, "beta_slow", default=1.0)
    scale, scale_all = _factor(rope, "mscale", default=None), _factor(rope, "mscale_all_dim", default=None)
    truncate = rope.flag("truncate", default=True)

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    default = magnitude(scale) / magnitude(scale_all) if scale and scale_all else magnitude(1.0)
    attention_factor = _factor(rope, "attention_factor", default=default)

    def dimension(rotations: float) -> float:
        """The dimension that turns this many times over the original context."""
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(fast), dimension(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    extended = max(max_position, int(original * factor))
    if extended > MAX_POSITION:
        raise rope.error("factor", f"makes a context of {extended} tokens; at most {MAX_POSITION} are allowed")
    ramp = np.clip((np.arange(head_dim // 2) - low) / (high - low if high != low else 0.001), 0.0, 1.0)
    inv_freq = _inv_freq(theta, head_dim)
    return (inv_freq * (1 - ramp) + inv_freq / factor * ramp).astype(np.float32), attention_factor, extended


def _to_tuple(inv_freq: np.ndarray) -> tuple[float, ...]:
    return tuple(inv_freq.tolist())

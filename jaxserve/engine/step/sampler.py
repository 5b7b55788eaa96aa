"""Choosing the next token from logits, on the device, each row by its own parameters. Pure functions of arrays; no sort of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, UInt32

from jaxserve.dims import round_up

CHUNK = 256
"""Vocabulary entries of one chunk of the two-level searches. On CPU an argmax over V = 49,152 in one level took 3.5 ms for 32 rows, in two 0.13."""

_ONE_BITS = 0x3F800000
"""float32 1.0 as an integer: the bits of floats in [0, 1] are ordered as the floats are."""


class SamplingArrays(NamedTuple):
    """Sampling parameters of a step's rows. A greedy row has temperature 0; ``top_k`` is V or more where it is off."""

    temperature_B: Float[Array, "B"]
    top_k_B: Int32[Array, "B"]
    top_p_B: Float[Array, "B"]
    min_p_B: Float[Array, "B"]
    seed_B: UInt32[Array, "B"]
    position_B: Int32[Array, "B"]
    """Position that the new token will have in its sequence."""


def sample(logits_BV: Float[Array, "B V"], params: SamplingArrays) -> Int32[Array, "B"]:
    """One token id a row.

    Temperature, then top-k, then top-p on what top-k left, then min-p relative to the most likely token. Tokens of equal probability at a
    threshold stay together. The random number of a row is ``uniform(fold_in(key(seed), position))``: no batch mate, slot, chunk or mesh enters.
    Rows with temperature 0 take the lowest id among the largest logits; when all are such, nothing else is computed.
    """
    chunked = split_into_chunks(logits_BV)
    greedy_B = argmax(chunked)

    def draw() -> Array:
        weights = weigh(chunked, chunked.max((1, 2)), params)
        weights = keep(weights, threshold(weights, params, logits_BV.shape[1]))
        running = jnp.cumsum(weights.sum(-1), axis=-1)
        # Logits that are NaN draw nothing in particular, but an id of the vocabulary.
        drawn_B = jnp.minimum(find(weights, running, uniform(params) * running[:, -1]), logits_BV.shape[1] - 1)
        return jnp.where(params.temperature_B > 0, drawn_B, greedy_B)

    return lax.cond(jnp.any(params.temperature_B > 0), draw, lambda: greedy_B)


def split_into_chunks(logits_BV: Float[Array, "B V"]) -> Float[Array, "B C chunk"]:
    """The logits in chunks of ``CHUNK``, the last one filled up with minus infinity."""
    num_rows, vocab_size = logits_BV.shape
    padding = round_up(vocab_size, CHUNK) - vocab_size
    if padding:
        logits_BV = jnp.pad(logits_BV, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    return logits_BV.reshape(num_rows, -1, CHUNK)


def argmax(chunked: Float[Array, "B C chunk"]) -> Int32[Array, "B"]:
    """The lowest id among the largest logits."""
    chunk_B = jnp.argmax(chunked.max(-1), axis=-1)
    within_B = jnp.argmax(jnp.take_along_axis(chunked, chunk_B[:, None, None], axis=1)[:, 0], axis=-1)
    return (chunk_B * CHUNK + within_B).astype(jnp.int32)


def weigh(logits: Float[Array, "B *some"], largest_B: Float[Array, "B"], params: SamplingArrays) -> Float[Array, "B *some"]:
    """Probabilities relative to the most likely token's, in [0, 1]. ``largest_B`` is the row's largest logit; it is subtracted first: a tiny
    temperature then gives exp(-inf) = 0 and never inf - inf.
    """
    shape = (-1, *(1,) * (logits.ndim - 1))
    temperature_B = jnp.where(params.temperature_B > 0, params.temperature_B, 1.0)
    return jnp.exp((logits - largest_B.reshape(shape)) / temperature_B.reshape(shape))


def keep(weights: Float[Array, "B C chunk"], threshold_B: Float[Array, "B"]) -> Float[Array, "B C chunk"]:
    """The weights of a threshold and more; 0 for the others."""
    return jnp.where(weights >= threshold_B[:, None, None], weights, 0.0)


def threshold(
    weights: Float[Array, "B C chunk"], params: SamplingArrays, vocab_size: int, total: Callable[[Array], Array] = lambda part_B: part_B
) -> Float[Array, "B"]:
    """The weight from which on a row's tokens stay, after top-k, top-p and min-p.

    Args:
        weights: From :func:`weigh`, of the whole vocabulary or of a part.
        params: Of each row.
        vocab_size: V, of the whole.
        total: Adds up a row's number over all parts.
    """

    def top_k() -> Array:
        # Counted in float32, exact below 2**24: a sum of booleans took four times as long on CPU.
        count = params.top_k_B.astype(jnp.float32)
        found_B = _largest_threshold(weights, lambda kept: total(jnp.where(kept, 1.0, 0.0).sum((1, 2))), count)
        return jnp.where(params.top_k_B < vocab_size, found_B, 0.0)

    threshold_B = lax.cond(jnp.any(params.top_k_B < vocab_size), top_k, lambda: jnp.zeros_like(params.top_p_B))
    weights = keep(weights, threshold_B)

    def top_p() -> Array:
        target = params.top_p_B * total(weights.sum((1, 2)))
        found_B = _largest_threshold(weights, lambda kept: total(jnp.where(kept, weights, 0.0).sum((1, 2))), target)
        return jnp.where(params.top_p_B < 1.0, found_B, 0.0)

    threshold_B = jnp.maximum(threshold_B, lax.cond(jnp.any(params.top_p_B < 1.0), top_p, lambda: jnp.zeros_like(params.top_p_B)))
    return jnp.maximum(threshold_B, params.min_p_B)


def _largest_threshold(weights: Array, measure: Callable[[Array], Array], target_B: Array) -> Array:
    """The largest float t in [0, 1] with ``measure(weights >= t) >= target``, for each row: exact, by bisection on the float's bits (30 rounds)."""

    def narrow(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # measure(low) meets the target, measure(high) does not.
        middle = low + (high - low) // 2
        value = lax.bitcast_convert_type(middle, jnp.float32)
        meets = measure(weights >= value[:, None, None]) >= target_B
        return jnp.where(meets, middle, low), jnp.where(meets, high, middle)

    low = jnp.zeros(target_B.shape, jnp.int32)
    high = jnp.full(target_B.shape, _ONE_BITS + 1, jnp.int32)
    low, _ = lax.fori_loop(0, 31, narrow, (low, high))
    return lax.bitcast_convert_type(low, jnp.float32)


def uniform(params: SamplingArrays) -> Float[Array, "B"]:
    """The row's random number in [0, 1)."""

    def one(seed: Array, position: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position))

    return jax.vmap(one)(params.seed_B, params.position_B)


def find(weights: Float[Array, "B C chunk"], running_BC: Float[Array, "B C"], target_B: Float[Array, "B"]) -> Int32[Array, "B"]:
    """The token at which the running sum of weights first exceeds the target, by chunk and then within it. ``running_BC`` is that sum after each chunk."""
    chunk_sums = weights.sum(-1)
    chunk_B = _first((running_BC > target_B[:, None]) & (chunk_sums > 0), chunk_sums > 0)
    before_B = jnp.take_along_axis(running_BC - chunk_sums, chunk_B[:, None], axis=1)[:, 0]
    within = jnp.take_along_axis(weights, chunk_B[:, None, None], axis=1)[:, 0]
    token_B = _first((before_B[:, None] + jnp.cumsum(within, axis=-1) > target_B[:, None]) & (within > 0), within > 0)
    return (chunk_B * CHUNK + token_B).astype(jnp.int32)


def _first(hit: Array, allowed: Array) -> Array:
    """Index of the first hit; where rounding leaves none, of the last that is allowed."""
    last = allowed.shape[-1] - 1 - jnp.argmax(allowed[:, ::-1], axis=-1)
    return jnp.where(hit.any(-1), jnp.argmax(hit, axis=-1), last)

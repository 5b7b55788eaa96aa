"""The sampler: chooses the next token of each row from its logits, on the device, by the row's own parameters. Pure functions; the vocabulary is not sorted.

Logits become tokens in stages, which are the same whether the vocabulary lies on one device or is split (``step.split_sampler``): changes of the logits
(``LOGITS_STAGES``), temperature, filters (``FILTERS``), and the draw. A stage that no row needs is skipped; see :func:`when`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jaxserve.dims import round_up
from jaxserve.engine.step.buckets import SAMPLING_STAGES, Sampling
from jaxserve.engine.step.rows import OFF, ROW_FIELDS

CHUNK = 256
"""Number of token ids in one chunk of the two-level searches. On CPU an argmax over V = 49,152 took 3.5 ms for 32 rows in one level, 0.13 in two."""

_ONE_BITS = 0x3F800000
"""float32 1.0 as an integer: the bits of floats in [0, 1] are ordered as the floats are."""

_FIELDS = {field.name: field for field in ROW_FIELDS}


class SamplingArrays(NamedTuple):
    """The sampling parameters of all rows, named like the fields of the row schema (``step.rows``). A greedy row has temperature 0 and no filters."""

    temperature_B: Float[Array, "B"]
    top_k_B: Int32[Array, "B"]
    """Number of likeliest tokens to keep; V or more if the filter is off."""
    top_p_B: Float[Array, "B"]
    min_p_B: Float[Array, "B"]
    seed_B: UInt32[Array, "B"]
    position_B: Int32[Array, "B"]
    """Position of the new token in its sequence."""

    def need(self, name: str) -> Bool[Array, ""]:
        """Whether the field ``name`` of any row differs from the schema's default."""
        return jnp.any(getattr(self, f"{name}_B") != _FIELDS[name].default)


@dataclasses.dataclass(frozen=True)
class LogitsStage:
    """A change of the logits before all other stages, such as a bias, a penalty or a mask.

    Args:
        name: Field of the row schema; a row needs the stage if its value is not the default.
        apply: Function ``apply(logits_BV, rows)`` that returns the changed logits. It works elementwise in V, because it may get a part of the vocabulary.
    """

    name: str
    apply: Callable[[Array, SamplingArrays], Array]


@dataclasses.dataclass(frozen=True)
class Filter:
    """A filter that keeps a row's tokens whose weight is at least a threshold, which has to be searched for.

    Args:
        name: Field of the row schema; a row needs the filter if its value is not the default.
        search: Function ``search(weights, rows, total)`` that returns each row's threshold, 0 for a row whose filter is off. ``weights`` are those left by
            the earlier filters; ``total`` adds up a number of each row over all parts of the vocabulary.
    """

    name: str
    search: Callable[[Array, SamplingArrays, Callable[[Array], Array]], Array]


def when(name: str, rows: SamplingArrays, sampling: Sampling, needed: Callable[[], Array], otherwise: Callable[[], Array]) -> Array:
    """The result of ``needed()`` if any row has a field that is not the default, else of ``otherwise()``. Only one of them is computed.

    Args:
        name: Field of the row schema that has a stage.
        rows: Sampling parameters of each row.
        sampling: Kind of program. ``any`` decides on the device. The others have a fixed set of stages, and the host calls one that has all the stages needed.
        needed: Computes the result with the stage.
        otherwise: Computes the result without the stage.
    """
    if sampling == "any":
        return lax.cond(rows.need(name), needed, otherwise)
    return needed() if _FIELDS[name].stage in SAMPLING_STAGES[sampling] else otherwise()


LOGITS_STAGES: tuple[LogitsStage, ...] = ()
"""The changes of the logits, in order. There are none so far; bias and penalties come first, then masks."""


def sample(
    logits_BV: Float[Array, "B V"], rows: SamplingArrays, *, sampling: Sampling = "any", stages: Sequence[LogitsStage] = LOGITS_STAGES
) -> Int32[Array, "B"]:
    """One token id for each row of logits.

    Temperature is applied first, then top-k, then top-p on what top-k left, then min-p relative to the most likely token. Tokens of equal probability at a
    threshold are all kept. The random number of a row is ``uniform(fold_in(key(seed), position))``, so it does not depend on the other rows, the slot, the
    chunks or the mesh. Rows with temperature 0 take the lowest id among the largest logits; if all rows are such, nothing else is computed.

    Args:
        logits_BV: Logits of the whole vocabulary.
        rows: Sampling parameters of each row.
        sampling: Kind of program, whose stages must include all that the rows need.
        stages: Changes of the logits, which come first.
    """
    vocab_size = logits_BV.shape[1]

    def drawn(logits_BV: Array, rows: SamplingArrays) -> Array:
        chunked = split_into_chunks(logits_BV)
        weights = weigh(chunked, chunked.max((1, 2)), rows)
        weights = keep(weights, threshold(weights, rows, sampling))
        running = jnp.cumsum(weights.sum(-1), axis=-1)
        # Logits that are NaN draw nothing in particular, but an id of the vocabulary.
        drawn_B = jnp.minimum(find(weights, running, uniform(rows) * running[:, -1]), vocab_size - 1)
        return jnp.where(rows.temperature_B > 0, drawn_B, argmax(chunked))

    return choose(logits_BV, rows, sampling, stages, vocab_size, drawn, lambda logits_BV: argmax(split_into_chunks(logits_BV)))


def choose(
    logits_BV: Float[Array, "B V"],
    rows: SamplingArrays,
    sampling: Sampling,
    stages: Sequence[LogitsStage],
    vocab_size: int,
    drawn: Callable[[Array, SamplingArrays], Array],
    greedy: Callable[[Array], Array],
) -> Int32[Array, "B"]:
    """One token id for each row, by the stages that :func:`sample` and ``split_sampler.sample_split`` share around ``drawn`` and ``greedy``, which differ.

    Args:
        logits_BV: Logits of the vocabulary, or of this device's part.
        rows: Sampling parameters of each row.
        sampling: See :func:`sample`.
        stages: See :func:`sample`.
        vocab_size: V, the size of the whole vocabulary.
        drawn: Chooses the tokens from the changed logits by the parameters of each row.
        greedy: Chooses the tokens if all rows are greedy.
    """
    rows = rows._replace(top_k_B=jnp.where(rows.top_k_B < vocab_size, rows.top_k_B, OFF))
    for stage in stages:
        logits_BV = _changed(stage, logits_BV, rows, sampling)
    return when("temperature", rows, sampling, lambda: drawn(logits_BV, rows), lambda: greedy(logits_BV))


def _changed(stage: LogitsStage, logits_BV: Array, rows: SamplingArrays, sampling: Sampling) -> Array:
    return when(stage.name, rows, sampling, lambda: stage.apply(logits_BV, rows), lambda: logits_BV)


def split_into_chunks(logits_BV: Float[Array, "B V"]) -> Float[Array, "B C chunk"]:
    """The logits in chunks of ``CHUNK``, the last one padded with minus infinity."""
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


def weigh(logits: Float[Array, "B *some"], largest_B: Float[Array, "B"], rows: SamplingArrays) -> Float[Array, "B *some"]:
    """The weights of tokens: their probabilities relative to the most likely token's, in [0, 1].

    ``largest_B`` is each row's largest logit. It is subtracted first, so that a tiny temperature gives exp(-inf) = 0 and never inf - inf.
    """
    shape = (-1, *(1,) * (logits.ndim - 1))
    temperature_B = jnp.where(rows.temperature_B > 0, rows.temperature_B, 1.0)
    return jnp.exp((logits - largest_B.reshape(shape)) / temperature_B.reshape(shape))


def keep(weights: Float[Array, "B C chunk"], threshold_B: Float[Array, "B"]) -> Float[Array, "B C chunk"]:
    """The weights that are at least their row's threshold; 0 in place of the others."""
    return jnp.where(weights >= threshold_B[:, None, None], weights, 0.0)


def threshold(
    weights: Float[Array, "B C chunk"], rows: SamplingArrays, sampling: Sampling, total: Callable[[Array], Array] = lambda part_B: part_B
) -> Float[Array, "B"]:
    """The smallest weight that each row's tokens must have to pass all filters.

    Args:
        weights: Weights from :func:`weigh`, of the whole vocabulary or of a part.
        rows: Sampling parameters of each row.
        sampling: See :func:`sample`.
        total: Adds up a number of each row over all parts of the vocabulary.
    """
    threshold_B = jnp.zeros_like(rows.top_p_B)
    for each in FILTERS:
        found_B = search(each, weights, rows, sampling, total)
        weights = keep(weights, found_B)
        threshold_B = jnp.maximum(threshold_B, found_B)
    return jnp.maximum(threshold_B, rows.min_p_B)  # min-p's own value is a weight: there is nothing to search for


def search(
    which: Filter, weights: Float[Array, "B C chunk"], rows: SamplingArrays, sampling: Sampling, total: Callable[[Array], Array] = lambda part_B: part_B
) -> Float[Array, "B"]:
    """The smallest weight that each row's tokens must have to pass one filter; for the arguments see :func:`threshold`."""
    return when(which.name, rows, sampling, lambda: which.search(weights, rows, total), lambda: jnp.zeros_like(rows.top_p_B))


def _search_top_k(weights: Array, rows: SamplingArrays, total: Callable[[Array], Array]) -> Array:
    # Counted in float32, exact below 2**24: a sum of booleans took four times as long on CPU.
    count_B = rows.top_k_B.astype(jnp.float32)
    found_B = _largest_threshold(weights, lambda kept: total(jnp.where(kept, 1.0, 0.0).sum((1, 2))), count_B)
    return jnp.where(rows.top_k_B < OFF, found_B, 0.0)


def _search_top_p(weights: Array, rows: SamplingArrays, total: Callable[[Array], Array]) -> Array:
    target_B = rows.top_p_B * total(weights.sum((1, 2)))
    found_B = _largest_threshold(weights, lambda kept: total(jnp.where(kept, weights, 0.0).sum((1, 2))), target_B)
    return jnp.where(rows.top_p_B < 1.0, found_B, 0.0)


TOP_K, TOP_P = Filter("top_k", _search_top_k), Filter("top_p", _search_top_p)
FILTERS = (TOP_K, TOP_P)
"""The filters, in order. Min-p comes after them and needs no search."""


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


def uniform(rows: SamplingArrays) -> Float[Array, "B"]:
    """A random number in [0, 1) for each row, from its seed and position."""

    def one(seed: Array, position: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position))

    return jax.vmap(one)(rows.seed_B, rows.position_B)


def find(weights: Float[Array, "B C chunk"], running_BC: Float[Array, "B C"], target_B: Float[Array, "B"]) -> Int32[Array, "B"]:
    """The token of each row at which the running sum of weights first exceeds ``target_B``. ``running_BC`` is that sum after each chunk."""
    chunk_sums = weights.sum(-1)
    chunk_B = _first((running_BC > target_B[:, None]) & (chunk_sums > 0), chunk_sums > 0)
    before_B = jnp.take_along_axis(running_BC - chunk_sums, chunk_B[:, None], axis=1)[:, 0]
    within = jnp.take_along_axis(weights, chunk_B[:, None, None], axis=1)[:, 0]
    token_B = _first((before_B[:, None] + jnp.cumsum(within, axis=-1) > target_B[:, None]) & (within > 0), within > 0)
    return (chunk_B * CHUNK + token_B).astype(jnp.int32)


def _first(hit: Array, allowed: Array) -> Array:
    """Index of the first hit in each row; if rounding leaves none, of the last element that is allowed."""
    last = allowed.shape[-1] - 1 - jnp.argmax(allowed[:, ::-1], axis=-1)
    return jnp.where(hit.any(-1), jnp.argmax(hit, axis=-1), last)

"""The sampler for a vocabulary that is split over a mesh axis: devices exchange a few candidates in one small gather, never the logits."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxserve.engine.step.buckets import Sampling
from jaxserve.engine.step.rows import OFF
from jaxserve.engine.step.sampler import (
    FILTERS,
    LOGITS_STAGES,
    TOP_K,
    TOP_P,
    LogitsStage,
    SamplingArrays,
    argmax,
    choose,
    find,
    keep,
    search,
    split_into_chunks,
    threshold,
    uniform,
    weigh,
)
from jaxserve.kernels_pallas.target import current_target

NUM_CANDIDATES = 64
"""Number of likeliest tokens that each part sends. It covers every top-k up to this number, and nearly always all that top-p keeps."""


def sample_split(
    logits_BV: Float[Array, "B V"], rows: SamplingArrays, axis: str, *, sampling: Sampling = "any", stages: Sequence[LogitsStage] = LOGITS_STAGES
) -> Int32[Array, "B"]:
    """One token id for each row of logits: the same on every device of the axis, and the same as ``sampler.sample`` gives for the whole vocabulary.

    Each part sends its candidates, which are its likeliest tokens, and the sum of its weights. If a row's filters keep nothing but candidates, which the
    smallest candidate's weight tells, the row's token is drawn from them. If a row keeps more (no top-k and no top-p, or a very flat distribution), the running
    sums of the parts decide which part holds the token; for such rows with top-k or top-p, the thresholds are searched with one reduction in each round. A
    program without filters sends only the largest candidate. A program that may not decide on the device always does the search.

    Args:
        logits_BV: Logits of this device's part of the vocabulary. The parts are equal and in order.
        rows: Sampling parameters of each row, equal on all devices of the axis.
        axis: Mesh axis that the vocabulary is split over; the function must be called inside ``shard_map``.
        sampling: Kind of program, whose stages must include all that the rows need.
        stages: Changes of the logits, which come first.
    """
    part_size = logits_BV.shape[1]
    first_id = lax.axis_index(axis) * part_size
    sends_all = part_size <= NUM_CANDIDATES  # Then every row is drawn from the candidates, by any program.

    def largest(logits_BV: Array) -> tuple[Array, Array]:
        """Each part's largest logit and its id ``[B, parts, 1]``."""
        token_B = argmax(split_into_chunks(logits_BV))
        value_B = jnp.take_along_axis(logits_BV, token_B[:, None], axis=1)[:, 0]
        return _gather(value_B[:, None], token_B[:, None] + first_id, axis)

    def drawn_plain(logits_BV: Array, rows: SamplingArrays) -> Array:
        values_BP1, ids_BP1 = largest(logits_BV)
        token_B = _draw_from_all(logits_BV, values_BP1[..., 0].max(-1), rows, sampling, axis)
        return jnp.where(rows.temperature_B > 0, token_B, _best(values_BP1, ids_BP1))

    def drawn(logits_BV: Array, rows: SamplingArrays) -> Array:
        candidates = lax.top_k(logits_BV, min(NUM_CANDIDATES, part_size))
        if current_target().platform == "tpu":
            # Where a slice of the result is in sight, XLA:TPU sorts the whole part instead (8 s of compiling, and it runs longer). JAX 0.10's XLA:CPU
            # crashes on such a barrier.
            candidates = lax.optimization_barrier(candidates)
        values_BC, ids_BC = candidates
        least = jnp.finfo(jnp.float32).min  # A part whose logits are all masked weighs nothing.
        sums_B = weigh(logits_BV, jnp.maximum(values_BC[:, 0], least), rows).sum(-1)
        ids_BC = ids_BC.astype(jnp.int32) + first_id
        values_BPC, ids_BPC = _gather(jnp.concatenate([values_BC, sums_B[:, None]], axis=1), ids_BC, axis)
        values_BPC, sums_BP = values_BPC[..., :-1], values_BPC[..., -1]
        largest_B = values_BPC[..., 0].max(-1)
        weights_BPC = weigh(values_BPC, largest_B, rows)
        total_B = (sums_BP * weights_BPC[..., 0]).sum(-1)
        # A token that a part did not send weighs at most as much as the least that it did.
        unsent_B = jnp.full_like(total_B, -1.0) if sends_all else weights_BPC[..., -1].max(-1)
        kept_BX, covers_B = _filter(weights_BPC.reshape(len(total_B), -1), total_B, unsent_B, rows, sampling)
        token_B = _draw(kept_BX, ids_BPC.reshape(kept_BX.shape), uniform(rows))
        covers_B |= rows.temperature_B <= 0
        # Rows that are drawn already must not make the others search for their thresholds.
        rest = rows._replace(
            top_k_B=jnp.where(covers_B, OFF, rows.top_k_B),
            top_p_B=jnp.where(covers_B, 1.0, rows.top_p_B),
            min_p_B=jnp.where(covers_B, 0.0, rows.min_p_B),
        )

        def drawn_rest() -> Array:
            return jnp.where(covers_B, token_B, _draw_from_all(logits_BV, largest_B, rest, sampling, axis))

        token_B = lax.cond(jnp.all(covers_B), lambda: token_B, drawn_rest) if sampling == "any" else drawn_rest()
        return jnp.where(rows.temperature_B > 0, token_B, _best(values_BPC[..., :1], ids_BPC[..., :1]))

    by_rows = drawn_plain if sampling == "plain" and not sends_all else drawn
    return choose(logits_BV, rows, sampling, stages, part_size * lax.axis_size(axis), by_rows, lambda logits_BV: _best(*largest(logits_BV)))


def _gather(values_BC: Array, ids_BI: Array, axis: str) -> tuple[Array, Array]:
    """The values and ids of all parts ``[B, parts, …]``, exchanged in one message."""
    packed = jnp.concatenate([lax.bitcast_convert_type(values_BC, jnp.int32), ids_BI], axis=1)
    packed = lax.all_gather(packed, axis, axis=1)
    split = values_BC.shape[1]
    return lax.bitcast_convert_type(packed[..., :split], jnp.float32), packed[..., split:]


def _best(values_BP1: Array, ids_BP1: Array) -> Array:
    """The id of the largest value; of equal ones that of the first part, whose ids are lower."""
    part_B = jnp.argmax(values_BP1[..., 0], axis=1)
    return jnp.take_along_axis(ids_BP1[..., 0], part_B[:, None], axis=1)[:, 0]


def _filter(weights_BX: Array, total_B: Array, unsent_B: Array, rows: SamplingArrays, sampling: Sampling) -> tuple[Array, Array]:
    """The filters applied to candidates: the weights that stay, and whether the filters would keep no token that is not a candidate.

    Args:
        weights_BX: Weights of the candidates.
        total_B: Sum of the weights of all tokens.
        unsent_B: Largest weight that a token which is no candidate can have.
        rows: Sampling parameters of each row.
        sampling: See ``sampler.sample``.
    """
    assert FILTERS == (TOP_K, TOP_P), "each filter has its own way to tell from candidates what the whole vocabulary would keep"
    one_chunk = weights_BX[:, None]
    is_top_k_B = rows.top_k_B < OFF
    top_k_B = search(TOP_K, one_chunk, rows, sampling)
    kept = keep(one_chunk, top_k_B)
    # The share of all weights is a share of the candidates' that is larger by as much as these are fewer.
    share_B = rows.top_p_B * jnp.where(is_top_k_B, 1.0, total_B / kept.sum((1, 2)))
    top_p_B = search(TOP_P, kept, rows._replace(top_p_B=jnp.where(rows.top_p_B < 1.0, jnp.minimum(share_B, 1.0), 1.0)), sampling)
    threshold_B = jnp.maximum(jnp.maximum(top_k_B, top_p_B), rows.min_p_B)
    covers_top_k_B = is_top_k_B & (rows.top_k_B <= weights_BX.shape[1]) & (top_k_B > unsent_B)
    return keep(one_chunk, threshold_B)[:, 0], covers_top_k_B | (~is_top_k_B & (threshold_B > unsent_B))


def _draw(weights_BX: Array, ids_BX: Array, uniform_B: Array) -> Array:
    """A token by its share of the weights, in the order of the ids: the order in which the whole vocabulary is drawn from.

    The running sums come from comparing all pairs: a sort of the candidates takes XLA:TPU seconds to compile. Their largest is the total: any other sum of
    the weights is rounded otherwise, and may be above all of them. Weights that are NaN draw the last candidate.
    """
    running_BX = jnp.where(ids_BX[:, None, :] <= ids_BX[:, :, None], weights_BX[:, None, :], 0.0).sum(-1)
    hit_BX = (running_BX > (uniform_B * running_BX.max(1))[:, None]) & (weights_BX > 0)
    return jnp.where(hit_BX, ids_BX, ids_BX.max(1, keepdims=True)).min(1)


def _draw_from_all(logits_BV: Array, largest_B: Array, rows: SamplingArrays, sampling: Sampling, axis: str) -> Array:
    """The draw of ``sampler.sample`` from the whole vocabulary. Each part computes its share, and one or two numbers for each row are exchanged."""
    part_size = logits_BV.shape[1]
    weights = weigh(split_into_chunks(logits_BV), largest_B, rows)
    weights = keep(weights, threshold(weights, rows, sampling, lambda part_B: lax.psum(part_B, axis)))
    running_BC = jnp.cumsum(weights.sum(-1), axis=-1)
    sums_PB = lax.all_gather(running_BC[:, -1], axis)
    running_PB = jnp.cumsum(sums_PB, axis=0)
    target_B = uniform(rows) * running_PB[-1]
    hit_PB = (running_PB > target_B) & (sums_PB > 0)
    owner_B = jnp.argmax(hit_PB, axis=0)
    before_B = jnp.take_along_axis(running_PB - sums_PB, owner_B[None], axis=0)[0]
    part = lax.axis_index(axis)
    token_B = jnp.minimum(find(weights, running_BC, target_B - before_B), part_size - 1) + part * part_size
    return lax.psum(jnp.where(owner_B == part, token_B, 0), axis)

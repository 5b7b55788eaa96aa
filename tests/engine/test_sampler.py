"""The sampler against a numpy oracle that sorts."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine.step.buckets import SAMPLING_STAGES
from jaxserve.engine.step.sampler import LogitsStage, SamplingArrays, sample

OFF = np.iinfo(np.int32).max


def arrays(num_rows: int, *, temperature: float = 1.0, top_k: int = OFF, top_p: float = 1.0, min_p: float = 0.0, seeds=None, position: int = 5):
    def full(value: float, dtype: jnp.dtype) -> jax.Array:
        return jnp.full((num_rows,), value, dtype)

    seed_B = jnp.arange(num_rows, dtype=jnp.uint32) if seeds is None else jnp.asarray(seeds, jnp.uint32)
    probabilities = (full(top_p, jnp.float32), full(min_p, jnp.float32))
    return SamplingArrays(full(temperature, jnp.float32), full(top_k, jnp.int32), *probabilities, seed_B, full(position, jnp.int32))


def oracle(logits_V: np.ndarray, *, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The distribution that the documented order of operations leaves, in float64."""
    weights = np.exp((logits_V.astype(np.float64) - logits_V.max()) / temperature)
    order = np.argsort(-weights, kind="stable")
    kept = np.zeros(len(weights), bool)
    kept[order[:top_k]] = True
    weights = np.where(kept, weights, 0)
    running = np.cumsum(weights[order])
    kept = np.zeros(len(weights), bool)
    kept[order[: np.searchsorted(running, top_p * running[-1] - 1e-9) + 1]] = True
    weights = np.where(kept & (weights >= min_p), weights, 0)
    return weights / weights.sum()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(2.0, OFF, 0.6, 0.0), (1.0, 50, 1.0, 0.0), (0.7, 20, 0.9, 0.05), (1.5, OFF, 1.0, 0.1), (1.0, 1, 1.0, 0.0), (1.0, OFF, 1e-4, 0.0), (0.05, OFF, 0.3, 0.0)],
)
@pytest.mark.parametrize("vocab_size", [256, 1000])
def test_draws_follow_the_oracle(temperature: float, top_k: int, top_p: float, min_p: float, vocab_size: int) -> None:
    num_draws = 4096
    logits_V = np.random.default_rng(vocab_size).normal(size=vocab_size).astype(np.float32) * 2
    want = oracle(logits_V, temperature=temperature, top_k=min(top_k, vocab_size), top_p=top_p, min_p=min_p)
    params = arrays(num_draws, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    drawn = np.asarray(jax.jit(sample)(jnp.broadcast_to(logits_V, (num_draws, vocab_size)), params))
    share = np.bincount(drawn, minlength=vocab_size) / num_draws
    assert not share[want == 0].any(), "a token outside the support was drawn"
    # Five standard deviations of a binomial share.
    assert np.all(np.abs(share - want) <= 5 * np.sqrt(want * (1 - want) / num_draws) + 1e-12)


def test_greedy_takes_the_lowest_id_of_the_largest_logits() -> None:
    logits = np.zeros((3, 700), np.float32)
    logits[0, [600, 40, 41]] = 1
    logits[1, [699]] = 1
    logits[2] = -np.inf
    logits[2, 256] = -5
    assert np.asarray(sample(jnp.asarray(logits), arrays(3, temperature=0.0))).tolist() == [40, 699, 256]


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    logits = np.random.default_rng(1).normal(size=(4, 500)).astype(np.float32)
    params = arrays(4)._replace(temperature_B=jnp.asarray([0.0, 1.0, 0.0, 1.0]))
    tokens = np.asarray(sample(jnp.asarray(logits), params))
    assert tokens[[0, 2]].tolist() == logits[[0, 2]].argmax(-1).tolist()
    alone = np.asarray(sample(jnp.asarray(logits[[1, 1]]), arrays(2, seeds=[1, 1])))
    assert tokens[1] == alone[0] == alone[1], "a row's draw depends on its seed and position alone"


def test_the_draw_changes_with_seed_and_with_position() -> None:
    logits = jnp.zeros((64, 4096))
    first = np.asarray(sample(logits, arrays(64)))
    assert len(set(first.tolist())) > 50
    assert (first != np.asarray(sample(logits, arrays(64, position=6)))).mean() > 0.9


@pytest.mark.parametrize("temperature", [1e-6, 1e-3, 1e4])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(8, 300)) * 50, jnp.float32)
    tokens = np.asarray(sample(logits, arrays(8, temperature=temperature, top_p=0.9)))
    assert ((tokens >= 0) & (tokens < 300)).all()
    if temperature < 1:
        assert tokens.tolist() == np.asarray(logits).argmax(-1).tolist()


def test_ties_at_a_threshold_stay_together() -> None:
    logits = jnp.broadcast_to(jnp.asarray([1.0, 1.0, 1.0, 0.0] + [-20.0] * 252), (512, 256))
    tokens = np.asarray(sample(logits, arrays(512, top_k=2)))
    assert set(tokens.tolist()) == {0, 1, 2}


FORCED, LEAST = 7, -9.0
FORCE_MIN_P_ROWS = LogitsStage("min_p", lambda logits, params: jnp.where((params.min_p_B > 0)[:, None] & (logits == LEAST), 1e9, logits))
"""Makes the least likely token of a row with min-p the likeliest, greedy or not: stands for a bias or a mask, for no field calls for one so far."""


def logits_whose_least_is(token_id: int, num_rows: int, vocab_size: int) -> np.ndarray:
    logits = np.random.default_rng(3).normal(size=(num_rows, vocab_size)).astype(np.float32)
    logits[:, token_id] = LEAST
    return logits


def test_a_stage_changes_the_logits_of_all_rows_that_need_it() -> None:
    logits = logits_whose_least_is(FORCED, 4, 500)
    params = arrays(4)._replace(temperature_B=jnp.asarray([0.0, 1.0, 0.0, 1.0]), min_p_B=jnp.asarray([0.1, 0.1, 0.0, 0.0]))
    forced = np.asarray(jax.jit(functools.partial(sample, stages=(FORCE_MIN_P_ROWS,)))(logits, params))
    assert forced[:2].tolist() == [FORCED] * 2
    assert forced[2:].tolist() == np.asarray(jax.jit(sample)(logits, params))[2:].tolist()


@pytest.mark.parametrize("sampling", ["any", "plain"])
def test_a_stage_that_no_row_needs_does_not_run(sampling) -> None:
    ran: list[int] = []

    def spy(logits, params):
        jax.debug.callback(lambda: ran.append(1))
        return logits

    choose = jax.jit(functools.partial(sample, sampling=sampling, stages=(LogitsStage("min_p", spy),)))
    for min_p in (0.0, 0.1):
        ran.clear()
        jax.block_until_ready(choose(jnp.zeros((2, 300)), arrays(2, min_p=min_p)))
        jax.effects_barrier()
        assert bool(ran) == (sampling == "any" and min_p > 0)


SERVED = {"greedy": ["greedy"], "plain": ["greedy", "plain"], "filtered": ["greedy", "plain", "filtered"]}
"""Program -> the rows that may meet in it."""
ROWS = {"greedy": {"temperature": 0.0}, "plain": {"temperature": 1.3}, "filtered": {"temperature": 0.9, "top_k": 30, "top_p": 0.8, "min_p": 0.02}}


def rows_of(kinds: list[str], num_rows: int) -> SamplingArrays:
    """Rows of some kinds in turn."""
    each = [arrays(1, seeds=[row], **ROWS[kinds[row % len(kinds)]]) for row in range(num_rows)]
    return SamplingArrays(*(jnp.concatenate(columns) for columns in zip(*each, strict=True)))


@pytest.mark.parametrize("sampling", SAMPLING_STAGES)
def test_every_program_gives_the_same_tokens_to_the_rows_that_it_serves(sampling) -> None:
    logits = jnp.asarray(np.random.default_rng(4).normal(size=(64, 700)).astype(np.float32) * 2)
    params = rows_of(SERVED[sampling], 64)
    got = jax.jit(functools.partial(sample, sampling=sampling))(logits, params)
    assert np.asarray(got).tolist() == np.asarray(jax.jit(sample)(logits, params)).tolist()

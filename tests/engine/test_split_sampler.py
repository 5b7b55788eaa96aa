"""Sampling from a vocabulary that is split over devices, against sampling from the whole."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxserve.config import ShardingConfig
from jaxserve.engine.step import split_sampler
from jaxserve.engine.step.sampler import SamplingArrays, sample
from jaxserve.engine.step.split_sampler import NUM_CANDIDATES, sample_split
from jaxserve.mesh import REPLICATED, make_layout
from jaxserve.mesh_axes import MODEL
from jaxserve.mesh_shape import MeshShape
from tests.engine.test_sampler import FORCE_MIN_P_ROWS, FORCED, SERVED, arrays, logits_whose_least_is, rows_of

CASES = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 20},
    "top_k_of_all_candidates": {"top_k": NUM_CANDIDATES},
    "top_k_beyond_a_part's_candidates": {"top_k": 3 * NUM_CANDIDATES},
    "top_k_beyond_all_candidates": {"top_k": 10 * NUM_CANDIDATES, "temperature": 5.0},
    "top_p": {"top_p": 0.7},
    "top_p_that_is_wide": {"top_p": 0.99, "temperature": 4.0},
    "min_p": {"min_p": 0.05},
    "all": {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "temperature": 0.8},
    "all_wide": {"top_k": 700, "top_p": 0.95, "min_p": 1e-5, "temperature": 3.0},
}


def split_sample(parts: int, **options):
    layout = make_layout(MeshShape(1, parts), ShardingConfig())

    def sample_part(logits, params):
        return sample_split(logits, params, MODEL, **options)

    return jax.jit(layout.map_devices(sample_part, (PartitionSpec(None, MODEL), REPLICATED), REPLICATED))


@pytest.mark.parametrize("parts", [pytest.param(2, marks=pytest.mark.slow), 4, pytest.param(8, marks=pytest.mark.slow)])
def test_a_split_vocabulary_gives_the_tokens_of_the_whole(parts: int) -> None:
    vocab_size, num_rows = 1600, 256
    whole, split = jax.jit(sample), split_sample(parts)
    logits = np.random.default_rng(parts).normal(size=(num_rows, vocab_size)).astype(np.float32) * 2
    for name, settings in CASES.items():
        params = arrays(num_rows, **settings)
        want, got = np.asarray(whole(logits, params)), np.asarray(split(logits, params))
        # Sums in another order move a boundary between two tokens by 1e-7 of the total.
        assert (want != got).mean() <= 0.004, name
        if name == "greedy":
            assert (want == got).all()


def test_rows_of_every_kind_share_a_batch() -> None:
    logits = np.random.default_rng(0).normal(size=(len(CASES), 1600)).astype(np.float32) * 2
    each = [arrays(1, seeds=[index], **settings) for index, settings in enumerate(CASES.values())]
    together = SamplingArrays(*(jnp.concatenate(columns) for columns in zip(*each, strict=True)))
    assert np.asarray(split_sample(4)(logits, together)).tolist() == np.asarray(jax.jit(sample)(logits, together)).tolist()


def test_ties_go_to_the_lowest_id_and_stay_together() -> None:
    logits = np.zeros((64, 800), np.float32)
    assert np.asarray(split_sample(8)(logits, arrays(64, temperature=0.0))).tolist() == [0] * 64
    logits[:, 300:] = -np.inf  # whole parts have no weight
    logits[:, 5:300:10] = 1.0  # 30 equal ones stay with top-k of 3
    drawn = np.asarray(split_sample(8)(logits, arrays(64, top_k=3)))
    assert (drawn % 10 == 5).all() and (drawn < 300).all() and len(set(drawn.tolist())) > 10


def test_logits_that_are_nan_draw_an_id_of_the_vocabulary() -> None:
    drawn = np.asarray(split_sample(4)(np.full((8, 400), np.nan, np.float32), arrays(8)))
    assert ((drawn >= 0) & (drawn < 400)).all()


def test_the_largest_random_number_draws_a_candidate() -> None:
    """The weights are numpy's, whose sums are rounded otherwise than XLA's: as two sums of one program may be."""
    rng = np.random.default_rng(0)
    weights = rng.random((256, 128), dtype=np.float32) ** 4
    ids = np.argsort(rng.random(weights.shape), axis=1).astype(np.int32)
    drawn = np.asarray(split_sampler._draw(weights, ids, np.full(256, 1 - 2**-23, np.float32)))
    assert (drawn < 128).all()


def test_a_row_that_its_candidates_decide_makes_no_other_row_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second row, flat and without filters, is drawn from the whole: that takes no threshold."""
    searched: list[tuple[list[int], list[float], list[float]]] = []
    whole = split_sampler._draw_from_all

    def spy(logits, largest, params, *rest):
        jax.debug.callback(lambda *columns: searched.append(tuple(column.tolist() for column in columns)), *params[1:4])
        return whole(logits, largest, params, *rest)

    monkeypatch.setattr(split_sampler, "_draw_from_all", spy)
    filtered, flat, greedy = arrays(1, top_k=5, top_p=0.9, min_p=0.01), arrays(1, temperature=9.0), arrays(1, temperature=0.0, top_k=7)
    params = SamplingArrays(*(jnp.concatenate(columns) for columns in zip(filtered, flat, greedy, strict=True)))
    logits = np.random.default_rng(1).normal(size=(3, 1600)).astype(np.float32)
    jax.block_until_ready(split_sample(4)(logits, params))
    jax.effects_barrier()
    off = np.iinfo(np.int32).max
    assert searched and all(seen == ([off] * 3, [1.0] * 3, [0.0] * 3) for seen in searched)


def test_a_stage_changes_the_logits_of_all_rows_that_need_it() -> None:
    logits = logits_whose_least_is(1600 - FORCED, 4, 1600)
    params = arrays(4)._replace(temperature_B=jnp.asarray([0.0, 1.0, 0.0, 1.0]), min_p_B=jnp.asarray([0.1, 0.1, 0.0, 0.0]))
    stages = (FORCE_MIN_P_ROWS,)
    forced = np.asarray(split_sample(2, stages=stages)(logits, params))
    assert forced[:2].tolist() == [1600 - FORCED] * 2
    assert forced.tolist() == np.asarray(jax.jit(functools.partial(sample, stages=stages))(logits, params)).tolist()


@pytest.mark.parametrize(("sampling", "vocab_size"), [("greedy", 1600), ("plain", 1600), ("filtered", 1600), ("plain", 80)])
def test_every_program_gives_the_same_tokens_to_the_rows_that_it_serves(sampling, vocab_size: int) -> None:
    """A part of 40 is smaller than the candidates that it may send."""
    logits = jnp.asarray(np.random.default_rng(4).normal(size=(64, vocab_size)).astype(np.float32) * 2)
    params = rows_of(SERVED[sampling], 64)
    assert np.asarray(split_sample(2, sampling=sampling)(logits, params)).tolist() == np.asarray(split_sample(2)(logits, params)).tolist()

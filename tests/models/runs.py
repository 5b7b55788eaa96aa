"""Runs a model over one sequence, with the plain attention of these tests."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.kernels_pallas.ragged_paged_attention.api import KVPool
from jaxserve.models.model import Model
from jaxserve.models.params import Params
from tests.models.dense_attention import dense_attend, empty_cache


@functools.partial(jax.jit, static_argnums=0)
def step(model: Model, params: Params, token_ids: jax.Array, positions: jax.Array, cache: KVPool) -> tuple[jax.Array, KVPool]:
    """Logits of every token, and the cache that holds them too."""
    x_TD, cache = model.forward(params, token_ids, positions, cache, dense_attend(model.spec, positions))
    return model.logits(params, x_TD), cache


def full_forward(model: Model, params: Params, token_ids: np.ndarray) -> np.ndarray:
    """``[S, V]`` logits of a whole sequence in one step."""
    length = len(token_ids)
    logits, _ = step(model, params, jnp.asarray(token_ids), jnp.arange(length, dtype=jnp.int32), empty_cache(model.spec, length, model.dtype))
    return np.asarray(logits)

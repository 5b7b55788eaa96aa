"""Attention over a plain cache, for tests of the model alone: one sequence, no pages, the whole score matrix."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxserve.kernels_pallas.ragged_paged_attention.api import KVPool
from jaxserve.models.layers import Attend
from jaxserve.models.spec import ModelSpec


def empty_cache(spec: ModelSpec, length: int, dtype: jnp.dtype) -> KVPool:
    """Keys and values ``[L, S, K, H]`` of one sequence of at most ``length`` tokens."""
    shape = (spec.num_layers, length, spec.attention.num_kv_heads, spec.attention.head_dim)
    return KVPool(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype))


def dense_attend(spec: ModelSpec, positions_T: Int32[Array, "T"]) -> Attend:
    """Attention of tokens at ``positions_T`` to all tokens of the cache that are not after them, within the window."""

    kind = spec.attention

    def attend(q_TNH, k_TKH, v_TKH, pool, layer, window):
        pool = KVPool(k=pool.k.at[layer, positions_T].set(k_TKH), v=pool.v.at[layer, positions_T].set(v_TKH))
        k_SKH, v_SKH = pool.k[layer], pool.v[layer]
        q_TKGH = q_TNH.reshape(-1, kind.num_kv_heads, kind.group_size, kind.head_dim)
        scores_KGTS = jnp.einsum("TKGH,SKH->KGTS", q_TKGH, k_SKH, preferred_element_type=jnp.float32) * kind.scale
        if kind.soft_cap is not None:
            scores_KGTS = kind.soft_cap * jnp.tanh(scores_KGTS / kind.soft_cap)
        distance_TS = positions_T[:, None] - jnp.arange(k_SKH.shape[0])
        seen_TS = (distance_TS >= 0) & (distance_TS < window)
        scores_KGTS = jnp.where(seen_TS, scores_KGTS, -jnp.inf)
        weights_KGTS = jnp.exp(scores_KGTS - scores_KGTS.max(axis=-1, keepdims=True))
        weights_KGTS /= weights_KGTS.sum(axis=-1, keepdims=True)
        o_TKGH = jnp.einsum("KGTS,SKH->TKGH", weights_KGTS.astype(v_SKH.dtype), v_SKH, preferred_element_type=jnp.float32)
        return o_TKGH.reshape(q_TNH.shape).astype(q_TNH.dtype), pool

    return attend

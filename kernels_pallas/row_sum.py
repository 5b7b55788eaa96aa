"""Sums over the last axis whose bits do not depend on how many rows there are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def row_sum(x: Float[Array, "*rows X"]) -> Float[Array, "*rows 1"]:
    """``x.sum(-1, keepdims=True)``; on CPU the result of a row is the same whatever rows are beside it.

    XLA:CPU orders the terms of a reduction by the whole shape, so a token's norm or softmax would depend on its batch mates (1e-6 after three layers).
    Sums of halves are plain additions, which it does not reorder, and cost about the same.
    """
    return jax.lax.platform_dependent(x, cpu=_sum_of_halves, default=lambda x: jnp.sum(x, axis=-1, keepdims=True))


def _sum_of_halves(x: Array) -> Array:
    odd = jnp.zeros_like(x[..., :1])
    while (width := x.shape[-1]) > 1:
        if width % 2:
            odd = odd + x[..., -1:]
        x = x[..., : width // 2] + x[..., width // 2 : width // 2 * 2]
    return x + odd

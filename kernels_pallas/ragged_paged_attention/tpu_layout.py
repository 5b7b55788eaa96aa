"""The pool's layout on TPU: keys and values of a head side by side in the lanes of one row, a page of one head in consecutive rows."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array

from jaxserve.dims import round_up
from jaxserve.kernels_pallas.ragged_paged_attention.contract import KVPool, PoolShape, abstract_array

LANES = 128
WRITE_ROWS = 8
"""Rows of one tile in HBM, for every dtype: the smallest piece of a page that a copy can address."""


def half_width(head_dim: int) -> int:
    """Lanes of a key in a row, and of a value: 64 where both fit into one register's 128 lanes, else a whole number of registers.

    A separate array of head dim 64 would be padded to 128 lanes by Mosaic but not by XLA, which then copied the whole pool on every call.
    """
    return LANES // 2 if head_dim <= LANES // 2 else round_up(head_dim, LANES)


def product_width(head_dim: int) -> int:
    """Lanes of the operands of both products. With 64-lane halves it is the whole row: queries are zero over the value half."""
    return max(half_width(head_dim), LANES)


def init_pool(shape: PoolShape) -> KVPool:
    """``[L*P, K, Z, 2 * half_width]``."""
    rows = (shape.num_layers * shape.num_pages, shape.num_kv_heads, shape.page_size, 2 * half_width(shape.head_dim))
    return KVPool(abstract_array(rows, shape.dtype), None)


def fuse(k: Array, v: Array) -> Array:
    """Keys and values ``[..., H]`` side by side, each padded with zeros to its half."""
    missing = half_width(k.shape[-1]) - k.shape[-1]
    padding = [(0, 0)] * (k.ndim - 1) + [(0, missing)]
    return jnp.concatenate([jnp.pad(k, padding), jnp.pad(v, padding)], axis=-1)


def pack(k_PZKH: Array, v_PZKH: Array, shape: PoolShape) -> KVPool:
    """Logical keys and values to the layout."""
    del shape
    return KVPool(fuse(k_PZKH, v_PZKH).transpose(0, 2, 1, 3), None)


def unpack(pool: KVPool, shape: PoolShape) -> tuple[Array, Array]:
    """The layout to logical keys and values."""
    rows_PZKW, half = pool.k.transpose(0, 2, 1, 3), half_width(shape.head_dim)
    return rows_PZKW[..., : shape.head_dim], rows_PZKW[..., half : half + shape.head_dim]

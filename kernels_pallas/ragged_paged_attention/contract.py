"""What all implementations of ragged paged attention share: the batch, the pool, the static shape, and what an implementation must offer. No kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.kernels_pallas.ragged_paged_attention.pool_shape import PoolShape
from jaxserve.kernels_pallas.target import Target

NO_WINDOW = 2**30
"""Window of a layer that sees the whole context: larger than any context length."""

MASKED = -1e30
"""Logit of a key that is not seen. Finite: what a row that sees nothing yet adds up, the first key that it sees multiplies by exp(-inf) = 0."""

KERNEL_PAGE_SIZES = (8, 16, 32, 64, 128)
"""Page sizes that the Pallas kernels take: whole tiles of 8 rows."""


class RaggedBatch(NamedTuple):
    """Which tokens belong to which sequence and where their keys and values live. All arrays are int32, of the bucket's fixed shape.

    Sequences are rows ``0 .. num_seqs-1``; the first ``num_decodes`` rows have exactly one token, so row b's token is token b.
    Rows from ``num_seqs`` on are empty: query length 0, context length 0.

    Attributes:
        context_lens_B: Tokens of the row in the pool *after* this step, its new ones included; 0 for an empty row.
        query_starts_B1: ``[B+1]`` Packed index of each row's first new token; row b owns ``query_starts[b]:query_starts[b+1]``.
        page_table_BM: Page ids (of one layer, in ``[0, P)``) of each row in order of position. Entries past the context may hold anything in range.
        entries_T: Where each token's key and value go, as the number of an entry of one layer: ``page_id * Z + offset``, or ``>= P * Z`` for padding,
            which is dropped. An entry is the room in a page for one token.
        positions_T: Position of each token in its sequence; 0 for padding.
        counts_2: ``[num_decodes, num_seqs]``.
    """

    context_lens_B: Int32[Array, "B"]
    query_starts_B1: Int32[Array, "B1"]
    page_table_BM: Int32[Array, "B M"]
    entries_T: Int32[Array, "T"]
    positions_T: Int32[Array, "T"]
    counts_2: Int32[Array, "2"]


class KVPool(NamedTuple):
    """Keys and values of all layers, in the layout of one implementation. A pytree: carried through the layer scan and donated to the step.

    An implementation that keeps keys and values in one array has it as ``k``, and ``v`` is ``None``.
    """

    k: Array
    v: Array | None


class KVScales(NamedTuple):
    """Scales of a quantised pool (int8, float8_e4m3fn): a key ``x`` of head ``h`` is stored as ``round(x / k_K[h])``, saturated. Positive, finite."""

    k_K: Float32[Array, "K"]
    v_K: Float32[Array, "K"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """Everything about a call that is known when tracing: tile sizes, costs and refusals are pure functions of it.

    Args:
        num_tokens: T, the bucket's packed tokens.
        num_rows: B, the bucket's sequences.
        table_width: M, pages of the longest context.
        num_heads: N.
        pool: The pool's logical shape.
        q_dtype: Of queries, new keys and values, and the output.
        decode_only: No row has more than one new token, so no code for prefill is needed.
        target: The device it is compiled for.
    """

    num_tokens: int
    num_rows: int
    table_width: int
    num_heads: int
    pool: PoolShape
    q_dtype: Any
    decode_only: bool
    target: Target

    @property
    def group_size(self) -> int:
        """G, query heads per key/value head."""
        return self.num_heads // self.pool.num_kv_heads

    @property
    def max_context(self) -> int:
        """The longest context that the page table can hold."""
        return self.table_width * self.pool.page_size


class Attend(Protocol):
    """The core of an implementation: writes the new keys and values to the pool, then attends. Arguments are already checked."""

    def __call__(
        self, q_TNH: Float[Array, "T N H"], k_TKH: Float[Array, "T K H"], v_TKH: Float[Array, "T K H"], pool: KVPool, batch: RaggedBatch, work: Any,
        *, problem: Problem, layer: int | Int32[Array, ""], window: int | Int32[Array, ""], scale: float, soft_cap: float | None,
        sinks_N: Float[Array, "N"] | None, kv_scales: KVScales | None,
    ) -> tuple[Float[Array, "T N H"], KVPool]: ...  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to compute the op, with the pool's layout that goes with it.

    Args:
        name: As users write it.
        init_pool: The pool as abstract arrays, in this implementation's layout. Zeros are valid contents at the start; of kernels any are.
        prepare: What every layer of a step needs of the batch, computed once a step: a pytree of small arrays, traced.
        attend: The computation.
        refusal: Why a problem cannot be served here, or ``None`` if it can.
        pack: Logical keys and values ``[L*P, Z, K, H]`` to a pool.
        unpack: The inverse, given the logical shape.
    """

    name: str
    init_pool: Callable[[PoolShape], KVPool]
    prepare: Callable[[RaggedBatch, Problem], Any]
    attend: Attend
    refusal: Callable[[Problem], str | None]
    pack: Callable[[Array, Array, PoolShape], KVPool]
    unpack: Callable[[KVPool, PoolShape], tuple[Array, Array]]


def abstract_array(shape: tuple[int, ...], dtype: Any) -> Any:
    """An array's shape and dtype, where a tuple of arrays wants an array."""
    return jax.ShapeDtypeStruct(shape, dtype)


def pack_apart(init_pool: Callable[[PoolShape], KVPool], k_PZKH: Array, v_PZKH: Array, shape: PoolShape) -> KVPool:
    """Logical keys and values to a layout that keeps them in arrays of their own, in the logical order."""
    want = init_pool(shape).k
    return KVPool(*(lax.bitcast_convert_type(array, want.dtype).reshape(want.shape) for array in (k_PZKH, v_PZKH)))


def unpack_apart(pool: KVPool, shape: PoolShape) -> tuple[Array, Array]:
    """The inverse of :func:`pack_apart`."""
    assert pool.v is not None
    logical = (-1, shape.page_size, shape.num_kv_heads, shape.head_dim)
    return lax.bitcast_convert_type(pool.k, shape.dtype).reshape(logical), lax.bitcast_convert_type(pool.v, shape.dtype).reshape(logical)


def is_quantised(dtype: Any) -> bool:
    """Whether a pool of this dtype has a scale for each key head."""
    return jnp.dtype(dtype) in (jnp.int8, jnp.float8_e4m3fn)


def byte_dtype(dtype: Any) -> Any:
    """The dtype of a pool's array: uint8 for float8_e4m3fn, which jax 0.10 and older chips cannot load or scatter; any other is itself."""
    return jnp.uint8 if jnp.dtype(dtype) == jnp.float8_e4m3fn else jnp.dtype(dtype)


def quantise(x_TKH: Float[Array, "T K H"], scale_K: Float32[Array, "K"] | None, dtype: Any) -> Array:
    """Values as the pool stores them: divided by their head's scale, rounded to nearest even and saturated for int8 and float8, a plain cast otherwise."""
    if not is_quantised(dtype):
        return x_TKH.astype(dtype)
    x = x_TKH.astype(jnp.float32)
    if scale_K is not None:
        x = x / scale_K[:, None]
    if dtype == jnp.int8:
        return jnp.clip(jnp.round(x), -127, 127).astype(jnp.int8)
    largest = float(jnp.finfo(jnp.float8_e4m3fn).max)
    return jnp.clip(x, -largest, largest).astype(jnp.float8_e4m3fn)

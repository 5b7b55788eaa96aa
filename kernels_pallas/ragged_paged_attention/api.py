"""Ragged paged attention: the public op, its validation, and the choice of implementation. Implementations live in the files beside this one."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int32

from jaxserve.kernels_pallas.ragged_paged_attention import pallas_gpu, pallas_tpu, reference, xla_implementation
from jaxserve.kernels_pallas.ragged_paged_attention.contract import (
    KERNEL_PAGE_SIZES,
    NO_WINDOW,
    Implementation,
    KVPool,
    KVScales,
    PoolShape,
    Problem,
    RaggedBatch,
    is_quantised,
)  # fmt: skip
from jaxserve.kernels_pallas.target import Target, current_target

__all__ = [
    "IMPLEMENTATIONS", "NO_WINDOW", "Implementation", "KVPool", "KVScales", "PoolShape", "Problem", "RaggedBatch",
    "choose_implementation", "make_problem", "ragged_paged_attention",
]  # fmt: skip

logger = logging.getLogger(__name__)

IMPLEMENTATIONS: dict[str, Implementation] = {
    implementation.name: implementation
    for implementation in (reference.IMPLEMENTATION, xla_implementation.IMPLEMENTATION, pallas_tpu.make_implementation(), pallas_gpu.make_implementation())
}
"""Every implementation by its name."""

_POOL_DTYPES = ("bfloat16", "float32", "float8_e4m3fn", "int8")
_Q_DTYPES = ("bfloat16", "float32")


def ragged_paged_attention(
    q_TNH: Float[Array, "T N H"],
    k_TKH: Float[Array, "T K H"],
    v_TKH: Float[Array, "T K H"],
    pool: KVPool,
    batch: RaggedBatch,
    work: Any = None,
    *,
    shape: PoolShape,
    layer: int | Int32[Array, ""],
    window: int | Int32[Array, ""] = NO_WINDOW,
    scale: float,
    soft_cap: float | None = None,
    sinks_N: Float[Array, "N"] | None = None,
    kv_scales: KVScales | None = None,
    decode_only: bool = False,
    implementation: str | Implementation = "auto",
) -> tuple[Float[Array, "T N H"], KVPool]:
    """Writes the new keys and values of all tokens into the paged pool, then attends causally to each token's own context.

    For token t of row b at position p, and key head ``k = n // G``, with the row's first ``p + 1`` keys and values gathered from its pages::

        s = soft_cap * tanh(scale * q[t, n] @ keys[:p+1, k].T / soft_cap)      # without soft_cap: scale * q @ k
        s[:p+1-window] = -inf
        o[t, n] = softmax(concatenate([s, sinks[n]]))[:-1] @ values[:p+1, k]   # without sinks: softmax(s) @ v

    All arithmetic but the products' operands is float32. Any mix of decodes and prefill chunks; empty rows and padding tokens are inert:
    they write nothing, and padding tokens get zeros. Equivalent plain JAX is ``reference.attend``. Sources: PagedAttention (arXiv:2309.06180),
    FlashAttention-2 (arXiv:2307.08691); a sink is a key without a value (arXiv:2309.17453, with a learned logit).

    Args:
        q_TNH: Queries, rotated, not scaled; bfloat16 or float32. N is a whole multiple of K.
        k_TKH: New keys, rotated, in the dtype of the queries.
        v_TKH: New values.
        pool: Keys and values of all layers in the implementation's layout (``Implementation.init_pool``). Updated in place inside a ``jit`` to which the
            caller donates it; a call outside of one copies all of it.
        batch: Which tokens belong to which sequence. Checked when its arrays are concrete; inside ``jit`` the caller answers for the values.
        work: ``implementation.prepare(batch, make_problem(...))``, so that a step computes it once and not in each layer; ``None`` computes it here.
        shape: The pool's logical shape.
        layer: In ``[0, L)``; may be traced.
        window: A token sees itself and the ``window - 1`` tokens before it, ``>= 1``; ``NO_WINDOW`` sees all. May be traced.
        scale: Multiplies the products.
        soft_cap: Positive, or ``None``.
        sinks_N: One learned logit a head, or ``None``.
        kv_scales: For an int8 or float8 pool; ``None`` means 1. Refused for other pools.
        decode_only: Promises that no row has more than one new token; skips the code for prefill.
        implementation: A name in ``IMPLEMENTATIONS``, ``auto``, or one made with other options.

    Returns:
        The output in the dtype of the queries, zero for padding tokens, and the updated pool.

    Raises:
        ValueError: A shape, dtype or value breaks the contract.
        NotImplementedError: The named implementation cannot serve this problem; the message says why.
    """
    problem = make_problem(
        num_tokens=q_TNH.shape[0], num_rows=batch.page_table_BM.shape[0], table_width=batch.page_table_BM.shape[1], num_heads=q_TNH.shape[1],
        shape=shape, q_dtype=q_TNH.dtype, decode_only=decode_only,
    )  # fmt: skip
    chosen = choose_implementation(implementation, problem)
    _check_arrays(q_TNH, k_TKH, v_TKH, pool, batch, chosen, problem, sinks_N, kv_scales)
    _check_scalars(layer, window, soft_cap, shape)
    _check_batch_values(batch, problem)
    if work is None:
        work = chosen.prepare(batch, problem)
    return _jitted(chosen)(
        q_TNH, k_TKH, v_TKH, pool, batch, work, problem=problem, layer=jnp.asarray(layer, jnp.int32), window=jnp.asarray(window, jnp.int32),
        scale=scale, soft_cap=soft_cap, sinks_N=sinks_N, kv_scales=kv_scales,
    )  # fmt: skip


@functools.cache
def _jitted(implementation: Implementation) -> Callable[..., Any]:
    """The computation under ``jit``: unrolled layers then trace and lower it once, not once each (80 layers on a GPU: minutes against seconds)."""
    return jax.jit(implementation.attend, static_argnames=("problem", "scale", "soft_cap"))


def make_problem(
    *, num_tokens: int, num_rows: int, table_width: int, num_heads: int, shape: PoolShape, q_dtype: Any, decode_only: bool = False, target: Target | None = None
) -> Problem:
    """The static description of a call, checked.

    Args:
        num_tokens: T.
        num_rows: B.
        table_width: M.
        num_heads: N.
        shape: The pool's logical shape.
        q_dtype: Of queries.
        decode_only: No row has more than one new token.
        target: ``None`` takes the device that the surrounding code is traced for.

    Raises:
        ValueError: A number is out of range or a head ratio is not whole.
    """
    for name, value in (("num_tokens", num_tokens), ("num_rows", num_rows), ("table_width", table_width), ("num_heads", num_heads)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    for name in ("num_layers", "num_pages", "num_kv_heads", "head_dim"):
        if getattr(shape, name) < 1:
            raise ValueError(f"the pool's {name} is {getattr(shape, name)}; it must be at least 1")
    if shape.page_size < 1 or shape.page_size & (shape.page_size - 1) or shape.page_size > 256:
        raise ValueError(f"page_size is {shape.page_size}; allowed are powers of two up to 256 (kernels take {KERNEL_PAGE_SIZES})")
    if num_heads % shape.num_kv_heads:
        raise ValueError(f"{num_heads} query heads are not a whole multiple of {shape.num_kv_heads} key/value heads")
    if shape.head_dim % 8 or shape.head_dim > 256:
        raise ValueError(f"head_dim is {shape.head_dim}; allowed are multiples of 8 up to 256")
    if jnp.dtype(shape.dtype).name not in _POOL_DTYPES:
        raise ValueError(f"the pool's dtype is {jnp.dtype(shape.dtype).name}; allowed are {', '.join(_POOL_DTYPES)}")
    if jnp.dtype(q_dtype).name not in _Q_DTYPES:
        raise ValueError(f"the queries' dtype is {jnp.dtype(q_dtype).name}; allowed are {', '.join(_Q_DTYPES)}")
    if num_rows > num_tokens and decode_only:
        raise ValueError(f"decode_only with {num_rows} rows and {num_tokens} tokens; every row has one token, so num_tokens must be at least num_rows")
    return Problem(
        num_tokens=num_tokens, num_rows=num_rows, table_width=table_width, num_heads=num_heads, pool=shape, q_dtype=jnp.dtype(q_dtype),
        decode_only=decode_only, target=target or current_target(),
    )  # fmt: skip


def choose_implementation(implementation: str | Implementation, *problems: Problem) -> Implementation:
    """The implementation to use: one for all problems, since the pool's layout belongs to it.

    Args:
        implementation: A name, an implementation, or ``auto``: the platform's kernel where it serves all problems, else ``xla``, with a logged warning.
        problems: What it has to serve, for instance each bucket of an engine; at least one.

    Raises:
        ValueError: The name is unknown.
        NotImplementedError: It cannot serve one of the problems.
    """
    if implementation == "auto":
        kernel = {"tpu": "pallas_tpu", "gpu": "pallas_gpu", "cpu": "xla"}[problems[0].target.platform]
        candidates = [IMPLEMENTATIONS[name] for name in dict.fromkeys((kernel, "xla"))]
    elif isinstance(implementation, Implementation):
        candidates = [implementation]
    elif implementation in IMPLEMENTATIONS:
        candidates = [IMPLEMENTATIONS[implementation]]
    else:
        raise ValueError(f"attention implementation {implementation!r} is unknown; allowed are auto, {', '.join(IMPLEMENTATIONS)}")
    reasons: list[str] = []
    for candidate in candidates:
        reason = next((reason for reason in map(candidate.refusal, problems) if reason is not None), None)
        if reason is None:
            if reasons:
                logger.warning("attention by %s, which is slower: %s", candidate.name, "; ".join(reasons))
            return candidate
        reasons.append(f"{candidate.name}: {reason}")
    raise NotImplementedError(f"no attention implementation serves this: {'; '.join(reasons)}")


def _check_arrays(
    q_TNH: Array, k_TKH: Array, v_TKH: Array, pool: KVPool, batch: RaggedBatch, chosen: Implementation, problem: Problem,
    sinks_N: Array | None, kv_scales: KVScales | None,
) -> None:  # fmt: skip
    shape, T, B, N = problem.pool, problem.num_tokens, problem.num_rows, problem.num_heads
    K, H = shape.num_kv_heads, shape.head_dim
    arrays: dict[str, tuple[Any, tuple[int, ...], Any]] = {
        "q_TNH": (q_TNH, (T, N, H), problem.q_dtype),
        "k_TKH": (k_TKH, (T, K, H), problem.q_dtype),
        "v_TKH": (v_TKH, (T, K, H), problem.q_dtype),
        "context_lens_B": (batch.context_lens_B, (B,), jnp.int32),
        "query_starts_B1": (batch.query_starts_B1, (B + 1,), jnp.int32),
        "page_table_BM": (batch.page_table_BM, (B, problem.table_width), jnp.int32),
        "entries_T": (batch.entries_T, (T,), jnp.int32),
        "positions_T": (batch.positions_T, (T,), jnp.int32),
        "counts_2": (batch.counts_2, (2,), jnp.int32),
    }
    if sinks_N is not None:
        arrays["sinks_N"] = (sinks_N, (N,), sinks_N.dtype)
    if kv_scales is not None:
        if not is_quantised(shape.dtype):
            raise ValueError(f"kv_scales are for pools of int8 or float8_e4m3fn; this pool is {jnp.dtype(shape.dtype).name}")
        arrays["kv_scales.k_K"] = (kv_scales.k_K, (K,), jnp.float32)
        arrays["kv_scales.v_K"] = (kv_scales.v_K, (K,), jnp.float32)
    expected = chosen.init_pool(shape)
    for name, array, want in (("pool.k", pool.k, expected.k), ("pool.v", pool.v, expected.v)):
        if (array is None) != (want is None):
            raise ValueError(f"{name} is {'missing' if array is None else 'given'}; make the pool with the init_pool of {chosen.name}")
        if want is not None:
            arrays[name] = (array, want.shape, want.dtype)
    for name, (array, want_shape, want_dtype) in arrays.items():
        if tuple(array.shape) != tuple(want_shape) or array.dtype != want_dtype:
            raise ValueError(f"{name} is {array.dtype}{list(array.shape)}; expected {jnp.dtype(want_dtype)}{list(want_shape)}")


def _check_scalars(layer: Any, window: Any, soft_cap: float | None, shape: PoolShape) -> None:
    if isinstance(layer, int) and not 0 <= layer < shape.num_layers:
        raise ValueError(f"layer is {layer}; allowed are 0 to {shape.num_layers - 1}")
    if isinstance(window, int) and window < 1:
        raise ValueError(f"window is {window}; it must be at least 1 (NO_WINDOW sees all)")
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"soft_cap is {soft_cap}; it must be positive, or None")


def _check_batch_values(batch: RaggedBatch, problem: Problem) -> None:
    """Faults that only values show, where the arrays are concrete."""
    if any(isinstance(array, Tracer) for array in batch):
        return
    context_lens, starts, table, entries, positions, (num_decodes, num_rows) = (np.asarray(array) for array in batch)
    if not 0 <= num_decodes <= num_rows <= problem.num_rows:
        raise ValueError(f"counts_2 is [{num_decodes}, {num_rows}]; allowed are 0 <= num_decodes <= num_seqs <= {problem.num_rows}")
    query_lens = np.diff(starts)
    if starts[0] != 0 or (query_lens < 0).any() or starts[-1] > problem.num_tokens:
        raise ValueError(f"query_starts_B1 is {starts.tolist()}; it must rise from 0 to at most {problem.num_tokens}")
    for row in range(num_rows):
        length, new = int(context_lens[row]), int(query_lens[row])
        if not 1 <= new <= length:
            raise ValueError(f"row {row} has {new} new tokens and context length {length}; allowed are 1 <= new tokens <= context length")
        if length > problem.max_context:
            raise ValueError(f"row {row} has context length {length}; the page table holds at most {problem.max_context}")
        if new > 1 and (row < num_decodes or problem.decode_only):
            raise ValueError(f"row {row} is a decode and has {new} new tokens; a decode has exactly 1")
        pages = table[row, : -(-length // problem.pool.page_size)]
        outside = pages[(pages < 0) | (pages >= problem.pool.num_pages)]
        if outside.size:
            raise ValueError(f"row {row} names page {outside[0]}; allowed are 0 to {problem.pool.num_pages - 1}")
        position = np.arange(length - new, length)
        own = slice(starts[row], starts[row + 1])
        page_size = problem.pool.page_size
        for name, given, implied in (
            ("positions_T", positions[own], position),
            ("entries_T", entries[own], pages[position // page_size] * page_size + position % page_size),
        ):
            if (given != implied).any():
                token = int(np.argmax(given != implied))
                raise ValueError(f"{name} is {given[token]} for new token {token} of row {row}; its context length and page table imply {implied[token]}")
    padding, limit = entries[starts[num_rows] :], problem.pool.num_pages * problem.pool.page_size
    if (padding < limit).any():
        raise ValueError(f"entries_T is {padding.min()} for a token that no row has; allowed are {limit} and up, which are dropped")

"""The XLA code of ``xla.py`` under the interface that all implementations share."""

from __future__ import annotations

import functools
from typing import Any

from jaxtyping import Array

from jaxserve.kernels_pallas.ragged_paged_attention import xla
from jaxserve.kernels_pallas.ragged_paged_attention.contract import Implementation, KVPool, KVScales, Problem, RaggedBatch, pack_apart, unpack_apart


def _prepare(batch: RaggedBatch, problem: Problem) -> xla.Work:
    return xla.prepare(batch, problem.num_tokens, decode_only=problem.decode_only)


def _attend(
    q_TNH: Array, k_TKH: Array, v_TKH: Array, pool: KVPool, batch: RaggedBatch, work: xla.Work, *, problem: Problem, layer: Any, window: Any,
    scale: float, soft_cap: float | None, sinks_N: Array | None, kv_scales: KVScales | None,
) -> tuple[Array, KVPool]:  # fmt: skip
    return xla.attend(
        q_TNH, k_TKH, v_TKH, pool, batch, work, layer=layer, window=window, num_pages=problem.pool.num_pages, page_size=problem.pool.page_size,
        scale=scale, soft_cap=soft_cap, sinks_N=sinks_N, kv_scales=kv_scales,
    )  # fmt: skip


def _refusal(problem: Problem) -> None:
    """It serves everything."""
    del problem


IMPLEMENTATION = Implementation(
    name="xla", init_pool=xla.init_pool, prepare=_prepare, attend=_attend, refusal=_refusal, pack=functools.partial(pack_apart, xla.init_pool),
    unpack=unpack_apart,
)  # fmt: skip

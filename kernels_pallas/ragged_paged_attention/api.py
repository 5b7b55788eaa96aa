"""Ragged paged attention: the public op, its contract and validation. Implementations live in the files beside this one; which of them runs is chosen here."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int32

NO_WINDOW = 2**30
"""Window of a layer that sees the whole context: larger than any context length."""


class RaggedBatch(NamedTuple):
    """Which tokens belong to which sequence and where their keys and values live. All arrays are int32, of the bucket's fixed shape.

    Sequences are rows ``0 .. num_seqs-1``; the first ``num_decodes`` rows have exactly one token, so row b's token is token b.
    Rows from ``num_seqs`` on are empty: query length 0, context length 0.

    Attributes:
        context_lens_B: Tokens of the row in the pool *after* this step, its new ones included; 0 for an empty row.
        query_starts_B1: ``[B+1]`` Packed index of each row's first new token; row b owns ``query_starts[b]:query_starts[b+1]``.
        page_table_BM: Page ids (of one layer, in ``[0, P)``) of each row in order of position. Entries past the context may hold anything in range.
        slots_T: Where each token's key and value go: ``page_id * Z + offset`` in one layer, or ``>= P * Z`` for padding, which is dropped.
        positions_T: Position of each token in its sequence; 0 for padding.
        counts_2: ``[num_decodes, num_seqs]``.
    """

    context_lens_B: Int32[Array, "B"]
    query_starts_B1: Int32[Array, "B1"]
    page_table_BM: Int32[Array, "B M"]
    slots_T: Int32[Array, "T"]
    positions_T: Int32[Array, "T"]
    counts_2: Int32[Array, "2"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolShape:
    """The logical shape of a KV pool; each implementation lays it out as suits it.

    Args:
        num_layers: L. The pool is flat over layers: layer l's page p is page ``l * P + p`` of the whole.
        num_pages: P, of one layer.
        page_size: Z.
        num_kv_heads: K.
        head_dim: H.
        dtype: Of keys and values.
    """

    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: Any


class KVPool(NamedTuple):
    """Keys and values of all layers, in the layout of one implementation. A pytree: carried through the layer scan and donated to the step."""

    k: Array
    v: Array

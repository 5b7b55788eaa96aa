"""The logical shape of a KV pool. Apart from the contract, whose arrays need jax: who counts pages and bytes does not."""

from __future__ import annotations

import dataclasses
from typing import Any


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

    def page_rows(self, num_rows: int) -> int:
        """Rows of one layer's page in an array of the pool that has ``num_rows``: a page is a run of whole rows."""
        rows, rest = divmod(num_rows, self.num_layers * self.num_pages)
        assert not rest, "a page is a run of whole rows"
        return rows

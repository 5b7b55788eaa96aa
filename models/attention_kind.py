"""The kinds of attention, as plain numbers: what a layer of a kind has for parameters, what it keeps of a token in the KV pool, and what it costs.

The engine, the scheduler and ``plan`` ask the kind. How it is computed is in ``models/layers.py``. No arrays here.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from jaxserve.kernels_pallas.ragged_paged_attention.pool_shape import PoolShape
from jaxserve.models.param_spec import FULL, Init, ParamSpec, Piece, vector, whole

_NAME = "model.layers.{layer}.self_attn."


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedQueryAttention:
    """Heads of queries in groups that share one head of keys and values.

    Args:
        num_heads: N.
        num_kv_heads: K; divides N. Repeated heads are counted as often as they stand.
        head_dim: H.
        scale: Multiplies query-key products.
        qkv_bias: Whether the query, key and value projections have biases.
        o_bias: Whether the output projection has a bias.
        qk_norm: RMSNorm over H on queries and keys before the rotary embedding.
        soft_cap: ``c * tanh(x / c)`` on attention logits.
        kv_repeat: How often each KV head of the checkpoint stands, side by side, so that every model rank has one (``models.sharding.fit_kv_heads``).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    soft_cap: float | None = None
    kv_repeat: int = 1

    head_axis: ClassVar[str] = "kv_heads"
    """The logical axis along which model ranks share the heads of queries."""
    pool_axis: ClassVar[str] = "kv_heads"
    """The logical axis along which model ranks share the pool."""

    @property
    def group_size(self) -> int:
        """G, query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def flops_per_seen_token(self) -> float:
        """FLOPs of a layer for each pair of a token and one that it sees: the product of query and key, and that of weight and value."""
        return 4.0 * self.num_heads * self.head_dim

    def token_values(self, num_parts: int = 1) -> int:
        """Values that a device keeps of a token for each layer: keys and values, without what a pool's layout adds to fill its tiles."""
        return 2 * self._kv_heads(num_parts) * self.head_dim

    def token_formula(self, num_layers: int, num_parts: int = 1) -> str:
        """How a token's values over all layers come about, in words."""
        return f"2 x {num_layers} layers x {self._kv_heads(num_parts)} KV heads x {self.head_dim}"

    def pool_shape(self, *, num_layers: int, num_pages: int, page_size: int, dtype: Any, num_parts: int = 1) -> PoolShape:
        """The shape of a device's part of a pool.

        Args:
            num_layers: Of this kind.
            num_pages: Of a data rank.
            page_size: Tokens of a page.
            dtype: Of keys and values.
            num_parts: How many model ranks share the pool along :attr:`pool_axis`.
        """
        return PoolShape(
            num_layers=num_layers, num_pages=num_pages, page_size=page_size, num_kv_heads=self._kv_heads(num_parts), head_dim=self.head_dim, dtype=dtype
        )

    def params(self, width: int, norm_init: Init) -> dict[str, ParamSpec]:
        """The parameters of a layer, by name.

        Queries, keys and values are one array grouped by KV head, ``[K, G+2, H, D]``: sharded on K it needs no permute, which a plain concatenation does.

        Args:
            width: D.
            norm_init: Where norms are neutral.
        """
        D, N, K, G, H = width, self.num_heads, self.num_kv_heads, self.group_size, self.head_dim
        kv_rows, repeat = K // self.kv_repeat, self.kv_repeat
        places = {"q": (slice(0, G), N, 1), "k": (slice(G, G + 1), kv_rows, repeat), "v": (slice(G + 1, G + 2), kv_rows, repeat)}

        def qkv(kind: str, *inner: int) -> tuple[Piece, ...]:
            return tuple(
                Piece(name=f"{_NAME}{x}_proj.{kind}", shape=(rows * H, *inner), into=(FULL, index, *[FULL] * (1 + len(inner))), repeat=repeat)
                for x, (index, rows, repeat) in places.items()
            )

        axes = ("kv_heads", None, None)
        params = {"qkv": ParamSpec(shape=(K, G + 2, H, D), axes=(*axes, "width"), init="normal", pieces=qkv("weight", D), num_in_axes=1)}
        if self.qkv_bias:
            params["qkv_bias"] = ParamSpec(shape=(K, G + 2, H), axes=axes, init="zeros", pieces=qkv("bias"))
        if self.qk_norm:
            params |= {f"{x}_norm": vector(f"{_NAME}{x}_norm.weight", H, norm_init) for x in "qk"}
        pieces = whole(_NAME + "o_proj.weight", (D, K, G, H), (D, N * H))
        params["o"] = ParamSpec(shape=(D, K, G, H), axes=("width", *axes), init="normal", pieces=pieces, num_in_axes=3)
        if self.o_bias:
            params["o_bias"] = vector(_NAME + "o_proj.bias", D, "zeros")
        return params

    def _kv_heads(self, num_parts: int) -> int:
        return self.num_kv_heads // num_parts


AttentionKind = GroupedQueryAttention
"""Every kind there is: a second one joins with ``|``, and with a row in ``models.layers.ATTENTION_BLOCKS``."""

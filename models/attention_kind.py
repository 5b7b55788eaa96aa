"""The kinds of attention, described by plain numbers: the parameters of a layer, what it keeps of a token in the KV pool, and what it costs.

The engine, the scheduler and ``plan`` get these facts from here. The computation is in ``models/layers.py``. No arrays here.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from jaxserve.kernels_pallas.ragged_paged_attention.pool_shape import PoolShape
from jaxserve.models.param_spec import FULL, Init, ParamSpec, Piece, vector, whole

_NAME = "model.layers.{layer}.self_attn."


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedQueryAttention:
    """Grouped-query attention: the query heads form groups, each of which shares one head of keys and values.

    Args:
        num_heads: N, the number of query heads.
        num_kv_heads: K, the number of KV heads, which divides N. Repeated heads count each time.
        head_dim: H, the size of a head.
        scale: Factor of the query-key products.
        qkv_bias: Whether the query, key and value projections have biases.
        o_bias: Whether the output projection has a bias.
        qk_norm: Whether queries and keys get an RMSNorm over H before the rotary embedding.
        soft_cap: The c in ``c * tanh(x / c)``, which is applied to attention logits; ``None`` for none.
        kv_repeat: How often each KV head of the checkpoint is repeated, side by side, so that every model rank has one (``models.sharding.fit_kv_heads``).
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
    """The logical axis along which the query heads are split over model ranks."""
    pool_axis: ClassVar[str] = "kv_heads"
    """The logical axis along which the pool is split over model ranks."""

    @property
    def group_size(self) -> int:
        """G, the number of query heads for each KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def flops_per_seen_token(self) -> float:
        """FLOPs of a layer for each pair of a token and a token that it sees: the product of query and key, and that of attention weight and value."""
        return 4.0 * self.num_heads * self.head_dim

    def token_values(self, num_parts: int = 1) -> int:
        """Number of values that a device keeps of a token for each layer: its keys and values, without the padding that a pool's layout adds."""
        return 2 * self._kv_heads(num_parts) * self.head_dim

    def token_formula(self, num_layers: int, num_parts: int = 1) -> str:
        """The number of a token's values over all layers as a product in words, such as "2 x 30 layers x 3 KV heads x 64"."""
        return f"2 x {num_layers} layers x {self._kv_heads(num_parts)} KV heads x {self.head_dim}"

    def pool_shape(self, *, num_layers: int, num_pages: int, page_size: int, dtype: Any, num_parts: int = 1) -> PoolShape:
        """The shape of a device's part of a pool.

        Args:
            num_layers: Number of layers of this kind.
            num_pages: Number of pages of a data rank.
            page_size: Tokens that one page holds.
            dtype: Dtype of keys and values.
            num_parts: Number of model ranks over which the pool is split along :attr:`pool_axis`.
        """
        return PoolShape(
            num_layers=num_layers, num_pages=num_pages, page_size=page_size, num_kv_heads=self._kv_heads(num_parts), head_dim=self.head_dim, dtype=dtype
        )

    def params(self, width: int, norm_init: Init) -> dict[str, ParamSpec]:
        """The parameters of a layer, by name.

        The projections of queries, keys and values are one array grouped by KV head, ``[K, G+2, H, D]``. Split on K it needs no permutation, which a plain
        concatenation would.

        Args:
            width: D, the width of the residual stream.
            norm_init: Initial value at which norms change nothing.
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
"""Every kind of attention. A new kind is added here with ``|``, and in ``models.layers.ATTENTION_BLOCKS``."""

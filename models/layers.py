"""The decoder as Flax NNX modules: a layer with its two blocks, and the embedding, final norm and head around the layers. Attention is a given function.

Products take operands in the model dtype and give float32; what follows a product (bias, norm, rotary embedding, activation) stays in float32
and is rounded once. On CPU that is also the fast path: a bfloat16 result would convert whole weights (design notes, CPU facts).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.kernels_pallas.ragged_paged_attention.api import KVPool
from jaxserve.kernels_pallas.row_sum import row_sum
from jaxserve.models.attention_kind import GroupedQueryAttention
from jaxserve.models.mlp_kind import GatedMlp
from jaxserve.models.params import head_path, layer_params, param_specs
from jaxserve.models.spec import LayerKind, ModelSpec
from jaxserve.models.weight import Weight, bind


class Attend(Protocol):
    """The interface of the function that writes a layer's new keys and values into the pool and computes attention over the pool. It knows the step's batch."""

    def __call__(
        self,
        q_TNH: Float[Array, "T N H"],
        k_TKH: Float[Array, "T K H"],
        v_TKH: Float[Array, "T K H"],
        pool: KVPool,
        layer: Int32[Array, ""] | int,
        window: Int32[Array, ""] | int,
    ) -> tuple[Float[Array, "T N H"], KVPool]:
        """Attention of one layer.

        Args:
            q_TNH: Rotated queries in the model dtype, not scaled; head ``n`` reads key head ``n // G``.
            k_TKH: Rotated new keys.
            v_TKH: New values.
            pool: Keys and values of all layers.
            layer: Index of the layer.
            window: Number of tokens that a token sees, itself included; ``NO_WINDOW`` for all.

        Returns:
            The attention output and the pool with the new keys and values in it.
        """
        ...


def rms_norm(x: Float[Array, "*batch D"], weight_D: Float[Array, "D"], *, eps: float, offset: float) -> Float32[Array, "*batch D"]:
    """The root mean square norm ``x / sqrt(mean(x**2) + eps) * (offset + weight)`` over the last axis, in float32 throughout.

    Llama's reference rounds before the multiplication and Gemma's after it. That is the same in float32, and rounding once loses less in bfloat16.
    """
    x = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(row_sum(jnp.square(x)) / x.shape[-1] + eps)
    return x * scale * (offset + weight_D.astype(jnp.float32))


def rotate(x_TXH: Float32[Array, "T *heads H"], cos_TR: Float32[Array, "T R"], sin_TR: Float32[Array, "T R"]) -> Float32[Array, "T *heads H"]:
    """The rotary embedding of heads, in the rotate-half convention: dimension ``i`` is paired with ``i + H / 2``. R is ``H / 2``."""
    shape = (cos_TR.shape[0], *(1,) * (x_TXH.ndim - 2), cos_TR.shape[1])
    cos, sin = cos_TR.reshape(shape), sin_TR.reshape(shape)
    first, second = jnp.split(x_TXH, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def soft_cap(x: Float32[Array, "*shape"], cap: float | None) -> Float32[Array, "*shape"]:
    """The soft cap ``cap * tanh(x / cap)``; ``x`` itself if ``cap`` is ``None``."""
    return x if cap is None else cap * jnp.tanh(x / cap)


class GroupedQueryBlock(nnx.Module):
    """The computation of :class:`GroupedQueryAttention` in a layer.

    Args:
        spec: The model's specification.
        kind: The layer's kind of attention.
        params: The layer's parameters by name, from ``weight.bind``; the block takes its own.
        sum_dtype: Dtype in which the devices' parts of the output are summed.
    """

    def __init__(self, spec: ModelSpec, kind: GroupedQueryAttention, params: Mapping[str, Any], *, sum_dtype: Any) -> None:
        self.spec = spec
        self.kind = kind
        self.sum_dtype = sum_dtype
        self.qkv: Weight = params["qkv"]
        self.o: Weight = params["o"]
        self.qkv_bias, self.o_bias = params.get("qkv_bias"), params.get("o_bias")
        if kind.qk_norm:
            self.q_norm: nnx.Param[Array] = params["q_norm"]
            self.k_norm: nnx.Param[Array] = params["k_norm"]

    def __call__(
        self,
        x_TD: Float[Array, "T D"],
        cos_TR: Float32[Array, "T R"],
        sin_TR: Float32[Array, "T R"],
        pool: KVPool,
        attend: Attend,
        layer: Int32[Array, ""] | int,
        window: Int32[Array, ""] | int,
    ) -> tuple[Float32[Array, "T D"], KVPool]:
        """The attention output of normed rows, and the pool with their keys and values in it."""
        q_TNH, k_TKH, v_TKH = self._queries_keys_values(x_TD, cos_TR, sin_TR)
        o_TNH, pool = attend(q_TNH, k_TKH, v_TKH, pool, layer, window)
        return self.o.apply(o_TNH.astype(x_TD.dtype).reshape(x_TD.shape[0], -1), self.o_bias, dtype=self.sum_dtype), pool

    def _queries_keys_values(self, x_TD: Array, cos_TR: Array, sin_TR: Array) -> tuple[Array, Array, Array]:
        kind = self.kind
        qkv_TKXH = self.qkv.apply(x_TD, self.qkv_bias).reshape(-1, kind.num_kv_heads, kind.group_size + 2, kind.head_dim)
        q_TKGH, k_TKH, v_TKH = qkv_TKXH[:, :, :-2], qkv_TKXH[:, :, -2], qkv_TKXH[:, :, -1]
        if kind.qk_norm:
            q_TKGH, k_TKH = _norm(self.spec, q_TKGH, self.q_norm), _norm(self.spec, k_TKH, self.k_norm)
        q_TKGH, k_TKH = rotate(q_TKGH, cos_TR, sin_TR), rotate(k_TKH, cos_TR, sin_TR)
        q_TNH = q_TKGH.reshape(-1, kind.num_heads, kind.head_dim)
        return q_TNH.astype(x_TD.dtype), k_TKH.astype(x_TD.dtype), v_TKH.astype(x_TD.dtype)


class GatedMlpBlock(nnx.Module):
    """The computation of :class:`GatedMlp` in a layer.

    Args:
        kind: The layer's kind of MLP.
        params: The layer's parameters by name, from ``weight.bind``; the block takes its own.
        sum_dtype: Dtype in which the devices' parts of the output are summed.
    """

    def __init__(self, kind: GatedMlp, params: Mapping[str, Any], *, sum_dtype: Any) -> None:
        self.kind = kind
        self.sum_dtype = sum_dtype
        self.gate_up: Weight = params["gate_up"]
        self.down: Weight = params["down"]
        self.gate_up_bias, self.down_bias = params.get("gate_up_bias"), params.get("down_bias")

    def __call__(self, x_TD: Float[Array, "T D"]) -> Float32[Array, "T D"]:
        """The MLP output of normed rows."""
        halves = jnp.split(self.gate_up.apply(x_TD, self.gate_up_bias), 2, axis=1)
        gate_TF, up_TF = (half.reshape(x_TD.shape[0], -1) for half in halves)
        gate_TF = jax.nn.silu(gate_TF) if self.kind.activation == "silu" else jax.nn.gelu(gate_TF, approximate=True)
        return self.down.apply((gate_TF * up_TF).astype(x_TD.dtype), self.down_bias, dtype=self.sum_dtype)


ATTENTION_BLOCKS = {GroupedQueryAttention: GroupedQueryBlock}
"""The block that computes each kind of attention."""
MLP_BLOCKS = {GatedMlp: GatedMlpBlock}
"""The block that computes each kind of MLP."""


class DecoderLayer(nnx.Module):
    """One layer: ``x + attention(norm(x))``, then ``x + mlp(norm(x))``; Gemma norms each block's output too.

    Args:
        spec: The model's specification.
        kind: The layer's kind.
        values: The layer's parameters by name, from ``build_params``.
        dtype: The model's dtype.
        is_split: Whether the parameters are split over several devices.
    """

    input_norm: nnx.Param[Array]
    mlp_norm: nnx.Param[Array]
    post_attention_norm: nnx.Param[Array]  # These two only where the spec asks for them.
    post_mlp_norm: nnx.Param[Array]

    def __init__(self, spec: ModelSpec, kind: LayerKind, values: Mapping[str, Any], *, dtype: Any, is_split: bool) -> None:
        self.spec = spec
        params = bind(values, layer_params(spec, kind), is_split=is_split)
        # Of products that devices sum up: the model's own dtype, half the bytes of float32 on the links.
        sum_dtype = dtype if is_split else jnp.float32
        self.attention = ATTENTION_BLOCKS[type(kind.attention)](spec, kind.attention, params, sum_dtype=sum_dtype)
        self.mlp = MLP_BLOCKS[type(kind.mlp)](kind.mlp, params, sum_dtype=sum_dtype)
        for name in ("input_norm", "mlp_norm", *(("post_attention_norm", "post_mlp_norm") if spec.post_norms else ())):
            setattr(self, name, params[name])

    def __call__(
        self,
        x_TD: Float[Array, "T D"],
        cos_TR: Float32[Array, "T R"],
        sin_TR: Float32[Array, "T R"],
        pool: KVPool,
        attend: Attend,
        layer: Int32[Array, ""] | int,
        window: Int32[Array, ""] | int,
    ) -> tuple[Float[Array, "T D"], KVPool]:
        """The residual stream after this layer, in the dtype of ``x_TD``, and the pool with the layer's new keys and values."""
        spec, dtype = self.spec, x_TD.dtype
        o_TD, pool = self.attention(_norm(spec, x_TD, self.input_norm).astype(dtype), cos_TR, sin_TR, pool, attend, layer, window)
        if spec.post_norms:
            o_TD = _norm(spec, o_TD, self.post_attention_norm)
        x_TD = (x_TD + o_TD).astype(dtype)
        y_TD = self.mlp(_norm(spec, x_TD, self.mlp_norm).astype(dtype))
        if spec.post_norms:
            y_TD = _norm(spec, y_TD, self.post_mlp_norm)
        return (x_TD + y_TD).astype(dtype), pool


class Stem(nnx.Module):
    """The modules around the layers: embedding, final norm and output head.

    Args:
        spec: The model's specification.
        values: The parameters that belong to no layer, from ``build_params``.
        is_split: Whether the parameters are split over several devices.
    """

    embed: Weight
    final_norm: nnx.Param[Array]
    head: Weight  # Only where the head is not the embedding.

    def __init__(self, spec: ModelSpec, values: Mapping[str, Any], *, is_split: bool) -> None:
        self.spec = spec
        for name, param in bind(values, param_specs(spec), is_split=is_split).items():
            setattr(self, name, param)

    def embeddings(self, token_ids_T: Int32[Array, "T"]) -> Float[Array, "T D"]:
        """The scaled embeddings in the model's dtype. Ids out of range are clipped; the engine accepts none."""
        x_TD = self.embed.rows(token_ids_T)
        if self.spec.embedding_scale == 1.0:
            return x_TD
        scale = jnp.asarray(self.spec.embedding_scale, x_TD.dtype)
        return x_TD * scale

    def final(self, x_TD: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """The residual stream after the final norm, which the head reads."""
        return _norm(self.spec, x_TD, self.final_norm).astype(x_TD.dtype)

    def logits(self, x_BD: Float[Array, "B D"]) -> Float32[Array, "B V"]:
        """The output logits, with a soft cap if the model has one."""
        head: Weight = getattr(self, head_path(self.spec))
        return soft_cap(head.apply(x_BD), self.spec.final_soft_cap)


def _norm(spec: ModelSpec, x: Array, weight: nnx.Param[Array]) -> Float32[Array, "*shape"]:
    return rms_norm(x, weight[...], eps=spec.norm_eps, offset=spec.norm_offset)


def rope_tables(spec: ModelSpec, positions_T: Int32[Array, "T"]) -> tuple[Float32[Array, "C T R"], Float32[Array, "C T R"]]:
    """The cosines and sines of every kind of rotary embedding (C kinds) at the given positions, for all layers."""
    inv_freq_CR = jnp.asarray([rope.inv_freq for rope in spec.ropes], jnp.float32)
    factor_C11 = jnp.asarray([rope.attention_factor for rope in spec.ropes], jnp.float32)[:, None, None]
    angles_CTR = positions_T.astype(jnp.float32)[None, :, None] * inv_freq_CR[:, None, :]
    return jnp.cos(angles_CTR) * factor_C11, jnp.sin(angles_CTR) * factor_C11

"""The decoder as two Flax NNX modules: one layer, and what stands around the layers. Attention itself is the caller's.

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
from jaxserve.models.spec import ModelSpec


class Attend(Protocol):
    """Writes a layer's new keys and values into the pool and attends to what it then holds. Closes over the step's batch."""

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
            window: How many tokens a token sees, itself included; ``NO_WINDOW`` sees all.

        Returns:
            The attention output and the pool with the new keys and values in it.
        """
        ...


def rms_norm(x: Float[Array, "*batch D"], weight_D: Float[Array, "D"], *, eps: float, offset: float) -> Float32[Array, "*batch D"]:
    """``x / sqrt(mean(x**2) + eps) * (offset + weight)`` over the last axis, in float32 throughout.

    Llama's reference rounds before it multiplies and Gemma's after: the same in float32, and rounding once loses less in bfloat16.
    """
    x = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(row_sum(jnp.square(x)) / x.shape[-1] + eps)
    return x * scale * (offset + weight_D.astype(jnp.float32))


def rotate(x_TXH: Float32[Array, "T *heads H"], cos_TR: Float32[Array, "T R"], sin_TR: Float32[Array, "T R"]) -> Float32[Array, "T *heads H"]:
    """Rotary embedding in the rotate-half convention: dimension ``i`` pairs with ``i + H / 2``. R is ``H / 2``."""
    shape = (cos_TR.shape[0], *(1,) * (x_TXH.ndim - 2), cos_TR.shape[1])
    cos, sin = cos_TR.reshape(shape), sin_TR.reshape(shape)
    first, second = jnp.split(x_TXH, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def soft_cap(x: Float32[Array, "*shape"], cap: float | None) -> Float32[Array, "*shape"]:
    """``cap * tanh(x / cap)``, or ``x`` where there is no cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def _product(x_TI: Array, weight: nnx.Param[Array], bias: nnx.Param[Array] | None = None, *, dtype: Any = jnp.float32) -> Float32[Array, "T O"]:
    """``x @ weight.T + bias`` in float32, for a weight ``[out…, in…]`` and a bias ``[out…]``.

    Their axes are flattened, which costs nothing; for a product that keeps them XLA:CPU would transpose the whole weight.

    Args:
        dtype: In which the product is rounded before the bias. Where its inputs are split over devices the parts are summed in this dtype.
    """
    weight_OI = weight[...].reshape(-1, x_TI.shape[1])
    y_TO = jax.lax.dot_general(x_TI, weight_OI, (((1,), (1,)), ((), ())), preferred_element_type=dtype).astype(jnp.float32)
    return y_TO if bias is None else y_TO + bias[...].reshape(-1).astype(jnp.float32)


class DecoderLayer(nnx.Module):
    """One layer: ``x + attention(norm(x))``, then ``x + mlp(norm(x))``; Gemma norms each block's output too.

    Args:
        spec: The model.
        values: The layer's parameters, or their shapes, by the last part of their paths in ``param_specs``.
        is_split: Whether the parameters are split over several devices.
    """

    input_norm: nnx.Param[Array]
    qkv: nnx.Param[Array]
    o: nnx.Param[Array]
    mlp_norm: nnx.Param[Array]
    gate_up: nnx.Param[Array]
    down: nnx.Param[Array]
    q_norm: nnx.Param[Array]  # The rest only where the spec asks for it.
    k_norm: nnx.Param[Array]
    post_attention_norm: nnx.Param[Array]
    post_mlp_norm: nnx.Param[Array]
    qkv_bias: nnx.Param[Array] | None = None
    o_bias: nnx.Param[Array] | None = None
    gate_up_bias: nnx.Param[Array] | None = None
    down_bias: nnx.Param[Array] | None = None

    def __init__(self, spec: ModelSpec, values: Mapping[str, Any], *, is_split: bool) -> None:
        self.spec = spec
        self.is_split = is_split
        for name, value in values.items():
            setattr(self, name, nnx.Param(value))

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
        """The residual stream after this layer, in the dtype it came in, and the pool."""
        spec, dtype = self.spec, x_TD.dtype
        q_TNH, k_TKH, v_TKH = self._queries_keys_values(self._norm(x_TD, self.input_norm).astype(dtype), cos_TR, sin_TR)
        o_TNH, pool = attend(q_TNH, k_TKH, v_TKH, pool, layer, window)
        o_TD = _product(o_TNH.astype(dtype).reshape(x_TD.shape[0], -1), self.o, self.o_bias, dtype=self._sum_dtype(dtype))
        if spec.post_norms:
            o_TD = self._norm(o_TD, self.post_attention_norm)
        x_TD = (x_TD + o_TD).astype(dtype)
        y_TD = self._mlp(self._norm(x_TD, self.mlp_norm).astype(dtype))
        if spec.post_norms:
            y_TD = self._norm(y_TD, self.post_mlp_norm)
        return (x_TD + y_TD).astype(dtype), pool

    def _norm(self, x: Array, weight: nnx.Param[Array]) -> Array:
        return rms_norm(x, weight[...], eps=self.spec.norm_eps, offset=self.spec.norm_offset)

    def _queries_keys_values(self, x_TD: Array, cos_TR: Array, sin_TR: Array) -> tuple[Array, Array, Array]:
        spec = self.spec
        qkv_TKXH = _product(x_TD, self.qkv, self.qkv_bias).reshape(-1, spec.num_kv_heads, spec.group_size + 2, spec.head_dim)
        q_TKGH, k_TKH, v_TKH = qkv_TKXH[:, :, :-2], qkv_TKXH[:, :, -2], qkv_TKXH[:, :, -1]
        if spec.qk_norm:
            q_TKGH, k_TKH = self._norm(q_TKGH, self.q_norm), self._norm(k_TKH, self.k_norm)
        q_TKGH, k_TKH = rotate(q_TKGH, cos_TR, sin_TR), rotate(k_TKH, cos_TR, sin_TR)
        q_TNH = q_TKGH.reshape(-1, spec.num_heads, spec.head_dim)
        return q_TNH.astype(x_TD.dtype), k_TKH.astype(x_TD.dtype), v_TKH.astype(x_TD.dtype)

    def _mlp(self, x_TD: Array) -> Array:
        gate_TF, up_TF = self._gate_up(x_TD)
        gate_TF = jax.nn.silu(gate_TF) if self.spec.activation == "silu" else jax.nn.gelu(gate_TF, approximate=True)
        return _product((gate_TF * up_TF).astype(x_TD.dtype), self.down, self.down_bias, dtype=self._sum_dtype(x_TD.dtype))

    def _gate_up(self, x_TD: Array) -> tuple[Array, Array]:
        if not self.is_split:
            gate_TF, up_TF = jnp.split(_product(x_TD, self.gate_up, self.gate_up_bias), 2, axis=1)
            return gate_TF, up_TF
        # F is split over devices, and flattening would mix it with the axis of two in front of it.
        y_T2F = jax.lax.dot_general(x_TD, self.gate_up[...], (((1,), (2,)), ((), ())), preferred_element_type=jnp.float32)
        if self.gate_up_bias is not None:
            y_T2F = y_T2F + self.gate_up_bias[...].astype(jnp.float32)
        return y_T2F[:, 0], y_T2F[:, 1]

    def _sum_dtype(self, dtype: Any) -> Any:
        """Of products that devices sum up: the model's own, half the bytes of float32 on the links."""
        return dtype if self.is_split else jnp.float32


class Stem(nnx.Module):
    """What stands around the layers: embedding, final norm, output head.

    Args:
        spec: The model.
        values: The parameters that are not a layer's, or their shapes, by their paths in ``param_specs``.
    """

    embed: nnx.Param[Array]
    final_norm: nnx.Param[Array]
    head: nnx.Param[Array]  # Only where the head is not the embedding.

    def __init__(self, spec: ModelSpec, values: Mapping[str, Any]) -> None:
        self.spec = spec
        for name, value in values.items():
            setattr(self, name, nnx.Param(value))

    def embeddings(self, token_ids_T: Int32[Array, "T"]) -> Float[Array, "T D"]:
        """Scaled embeddings in the model dtype. Ids out of range are clipped; the engine lets none in."""
        x_TD = jnp.take(self.embed[...], token_ids_T, axis=0, mode="clip")
        if self.spec.embedding_scale == 1.0:
            return x_TD
        scale = jnp.asarray(self.spec.embedding_scale, x_TD.dtype)
        return x_TD * scale

    def final(self, x_TD: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """The normed residual stream that the head reads."""
        return rms_norm(x_TD, self.final_norm[...], eps=self.spec.norm_eps, offset=self.spec.norm_offset).astype(x_TD.dtype)

    def logits(self, x_BD: Float[Array, "B D"]) -> Float32[Array, "B V"]:
        """Output logits, soft-capped where the model does."""
        return soft_cap(_product(x_BD, self.embed if self.spec.tied else self.head), self.spec.final_soft_cap)


def rope_tables(spec: ModelSpec, positions_T: Int32[Array, "T"]) -> tuple[Float32[Array, "C T R"], Float32[Array, "C T R"]]:
    """Cosines and sines of every kind of rotary embedding (C kinds) at the given positions, for all layers of a forward."""
    inv_freq_CR = jnp.asarray([rope.inv_freq for rope in spec.ropes], jnp.float32)
    factor_C11 = jnp.asarray([rope.attention_factor for rope in spec.ropes], jnp.float32)[:, None, None]
    angles_CTR = positions_T.astype(jnp.float32)[None, :, None] * inv_freq_CR[:, None, :]
    return jnp.cos(angles_CTR) * factor_C11, jnp.sin(angles_CTR) * factor_C11

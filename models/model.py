"""The model: a decoder as pure functions over a plain tree of parameters. NNX modules exist only while tracing; jit never gets one."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.kernels_pallas.ragged_paged_attention.api import NO_WINDOW, KVPool
from jaxserve.mesh import Layout
from jaxserve.models.layers import Attend, DecoderLayer, Stem, rope_tables
from jaxserve.models.param_spec import ParamSpec
from jaxserve.models.params import LayersForm, Params, build_params, param_specs, unrepeated
from jaxserve.models.sharding import param_sharding
from jaxserve.models.spec import LayerKind, ModelSpec, Stack

_Slice = tuple[Mapping[str, Any], Array, Array, Array]
"""One layer's slice in a scan: its parameters, index, window and kind of rotary embedding."""

_SPREAD = 0.1
"""Standard deviation of random norm weights (about their neutral value) and biases."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder without its parameters, which is hashable and holds no arrays. Made by :func:`build_model`.

    Args:
        spec: The decoder's specification.
        dtype: Dtype of the parameters and of the residual stream.
        layers: Form of the layers: ``scan`` runs one compiled body for each group of layers over stacked parameters, ``unroll`` runs each layer with its own.
        is_split: Whether the parameters are split over several devices, which sum up their parts of each block in ``dtype``.
    """

    spec: ModelSpec
    dtype: jnp.dtype
    layers: LayersForm
    is_split: bool

    def abstract_params(self) -> Params:
        """The parameters' shapes and dtypes, as ``jax.ShapeDtypeStruct``."""

        def make(_path: str, param: ParamSpec, layer: int | None) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(param.array_shape(layer), self.dtype)

        return build_params(self.spec, self.layers, make)

    def random_params(self, seed: int, layout: Layout | None = None, *, randomize_all: bool = False) -> Params:
        """Random parameters. Their values are the same for both forms of the layers, on any layout, and with or without repeated KV heads.

        Args:
            seed: Seed, any integer ``>= 0``.
            layout: Layout by which they are split over devices; ``None`` puts them on jax's default device. The host holds one whole parameter at a time.
            randomize_all: Whether norms and biases are random too; otherwise they have their neutral values.
        """
        once = param_specs(unrepeated(self.spec))

        def one(path: str, param: ParamSpec, layer: int) -> np.ndarray:
            # Drawn by numpy: a compile for each shape takes longer than drawing the models that tests use. By the name and the layer's index alone, so that
            # it does not matter how layers are grouped.
            name = f"layers.{path.rpartition('.')[2]}" if param.per_layer else path
            rng = np.random.default_rng([seed, zlib.crc32(name.encode()), layer])
            values = _random(rng, once[path], randomize_all).astype(self.dtype)
            return values if once[path] == param else _repeat_heads(values, once[path], param)

        def make(path: str, param: ParamSpec, layer: int | None) -> Array:
            if param.per_layer and layer is None:
                values = np.stack([one(path, param, index) for index in param.indices])
            else:
                values = one(path, param, layer or 0)
            if layout is None:
                return jnp.asarray(values)
            return jax.make_array_from_callback(values.shape, param_sharding(param, layer, layout), lambda part: values[part])

        return build_params(self.spec, self.layers, make)

    def forward(
        self, params: Params, token_ids_T: Int32[Array, "T"], positions_T: Int32[Array, "T"], pool: KVPool, attend: Attend
    ) -> tuple[Float[Array, "T D"], KVPool]:
        """The residual stream after all layers and the final norm, for packed tokens. A pure function to be called under jit.

        Args:
            params: The parameters, in the form of :meth:`abstract_params`.
            token_ids_T: Tokens of all sequences on one axis; padding may hold any id in range. T should be 2 or more, because one row takes a slow path on CPU.
            positions_T: Position of each token in its sequence.
            pool: Keys and values of all layers, which ``attend`` reads and updates layer by layer.
            attend: Computes attention over the step's batch.

        Returns:
            The residual stream after the final norm, in the model's dtype, for :meth:`logits`; and the pool.
        """
        stem = self._stem(params)
        x_TD = stem.embeddings(token_ids_T)
        cos_CTR, sin_CTR = rope_tables(self.spec, positions_T)

        def run(kind: LayerKind, values: Mapping[str, Any], x_TD: Array, pool: KVPool, layer: Any, window: Any, rope: Any) -> tuple[Array, KVPool]:
            module = DecoderLayer(self.spec, kind, values, dtype=self.dtype, is_split=self.is_split)
            return module(x_TD, cos_CTR[rope], sin_CTR[rope], pool, attend, layer, window)

        if self.layers == "unroll":
            # Traced once a kind, called for each layer; XLA inlines the calls. Tracing 30 layers apart took 2 s a bucket, more than reading it from disk.
            run_traced = jax.jit(run, static_argnums=0)
            kinds = {layer: stack.kind for stacks in self.spec.stacks for stack in stacks for layer in stack.layers}
            for layer, values in enumerate(params["layers"]):
                x_TD, pool = run_traced(kinds[layer], values, x_TD, pool, *(jnp.int32(number) for number in (layer, *self._numbers(layer))))
            return stem.final(x_TD), pool
        arrays = iter(params["layers"])
        for stacks in self.spec.stacks:
            # The pool is carried: as scan input and output XLA keeps a second whole pool. Window and rope kind are data, so layers that differ share a body.
            def body(carry: tuple[Array, KVPool], unit: Sequence[_Slice], stacks: tuple[Stack, ...] = stacks) -> tuple[tuple[Array, KVPool], None]:
                for stack, (values, layer, window, rope) in zip(stacks, unit, strict=True):
                    carry = run(stack.kind, values, *carry, layer, window, rope if len(self.spec.ropes) > 1 else 0)
                return carry, None

            unit = [(next(arrays), *self._stacked_numbers(stack.layers)) for stack in stacks]
            (x_TD, pool), _ = jax.lax.scan(body, (x_TD, pool), unit)
        return stem.final(x_TD), pool

    def logits(self, params: Params, x_BD: Float[Array, "B D"]) -> Float32[Array, "B V"]:
        """The output logits of rows of :meth:`forward`'s result, in float32, after the final soft cap if the model has one."""
        return self._stem(params).logits(x_BD)

    def _numbers(self, layer: int) -> tuple[int, int]:
        """The window and the kind of rotary embedding of a layer."""
        numbers = self.spec.layers[layer]
        return NO_WINDOW if numbers.window is None else numbers.window, numbers.rope

    def _stacked_numbers(self, layers: range) -> tuple[Array, Array, Array]:
        """The index, window and kind of rotary embedding of each layer of a stack."""
        rows = [(layer, *self._numbers(layer)) for layer in layers]
        indices, windows, ropes = (jnp.asarray(column, jnp.int32) for column in zip(*rows, strict=True))
        return indices, windows, ropes

    def _stem(self, params: Params) -> Stem:
        return Stem(self.spec, {name: value for name, value in params.items() if name != "layers"}, is_split=self.is_split)


def build_model(spec: ModelSpec, *, dtype: Any, layers: LayersForm, is_split: bool = False) -> Model:
    """The model of a specification.

    Args:
        spec: The decoder's specification.
        dtype: Dtype of the parameters and the residual stream, in any form that numpy accepts, such as ``"bfloat16"``.
        layers: Form of the layers and of their parameters.
        is_split: Whether the parameters will be split over several devices, which then sum up their parts of each block in ``dtype``.
    """
    return Model(spec=spec, dtype=jnp.dtype(dtype), layers=layers, is_split=is_split)


def _random(rng: np.random.Generator, param: ParamSpec, randomize_all: bool) -> np.ndarray:
    if param.init == "normal":
        return rng.standard_normal(param.shape, np.float32) * np.float32(param.fan_in**-0.5)
    neutral = np.full(param.shape, 1.0 if param.init == "ones" else 0.0, np.float32)
    return neutral + _SPREAD * rng.standard_normal(param.shape, np.float32) if randomize_all else neutral


def _repeat_heads(values: np.ndarray, param: ParamSpec, repeated: ParamSpec) -> np.ndarray:
    """One layer's parameter for the model with repeated KV heads, from that of the :func:`unrepeated` model.

    Args:
        values: The values in the unrepeated model.
        param: Declaration of the parameter in the unrepeated model.
        repeated: Declaration of the parameter in the model with repeated KV heads.
    """
    result = np.empty(repeated.shape, values.dtype)
    for piece, place in zip(param.pieces, repeated.pieces, strict=True):
        target = result[place.into]
        heads = values[piece.into].reshape(target.shape[0] // place.repeat, -1)
        target[...] = np.repeat(heads, place.repeat, axis=0).reshape(target.shape)
    return result

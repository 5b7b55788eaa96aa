"""A decoder as pure functions over a plain tree of parameters. NNX modules are put together here while tracing; jit never sees one."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.kernels_pallas.ragged_paged_attention.api import NO_WINDOW, KVPool
from jaxserve.mesh import Layout
from jaxserve.models.layers import Attend, DecoderLayer, Stem, rope_tables
from jaxserve.models.params import LayersForm, Params, ParamSpec, build_params, param_specs, repeat_heads, unrepeated
from jaxserve.models.sharding import param_sharding
from jaxserve.models.spec import ModelSpec

_SPREAD = 0.1
"""Standard deviation of random norm weights (about their neutral value) and biases."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder without its parameters: cheap, hashable, no arrays. Made by :func:`build_model`.

    Args:
        spec: What the decoder is.
        dtype: Of parameters and of the residual stream.
        layers: ``scan`` runs one compiled layer over stacked parameters, ``unroll`` compiles each with its own.
        layer_graph: Static part of one layer.
        stem_graph: Static part of what stands around the layers.
    """

    spec: ModelSpec
    dtype: jnp.dtype
    layers: LayersForm
    layer_graph: nnx.GraphDef[DecoderLayer]
    stem_graph: nnx.GraphDef[Stem]

    def abstract_params(self) -> Params:
        """The parameters' shapes and dtypes, as ``jax.ShapeDtypeStruct``."""

        def make(_path: str, param: ParamSpec, layer: int | None) -> jax.ShapeDtypeStruct:
            stacked = param.per_layer and layer is None
            return jax.ShapeDtypeStruct((self.spec.num_layers, *param.shape) if stacked else param.shape, self.dtype)

        return build_params(self.spec, self.layers, make)

    def random_params(self, seed: int, layout: Layout | None = None, *, randomize_all: bool = False) -> Params:
        """Random parameters: the same values for both forms of the layers, on any layout, and with KV heads repeated or not.

        Args:
            seed: Any integer ``>= 0``.
            layout: How they are split over devices; ``None`` puts them on jax's default device. The host holds one whole parameter at a time.
            randomize_all: Also norms and biases, which are otherwise at their neutral values.
        """
        once = param_specs(unrepeated(self.spec))

        def one(path: str, param: ParamSpec, layer: int) -> np.ndarray:
            # Drawn by numpy: a compile for each shape takes longer than drawing the models that tests use.
            rng = np.random.default_rng([seed, zlib.crc32(path.encode()), layer])
            values = _random(rng, once[path], randomize_all).astype(self.dtype)
            return values if once[path] == param else repeat_heads(values, once[path], param)

        def make(path: str, param: ParamSpec, layer: int | None) -> Array:
            if param.per_layer and layer is None:
                values = np.stack([one(path, param, index) for index in range(self.spec.num_layers)])
            else:
                values = one(path, param, layer or 0)
            if layout is None:
                return jnp.asarray(values)
            return jax.make_array_from_callback(values.shape, param_sharding(param, layer, layout), lambda part: values[part])

        return build_params(self.spec, self.layers, make)

    def forward(
        self, params: Params, token_ids_T: Int32[Array, "T"], positions_T: Int32[Array, "T"], pool: KVPool, attend: Attend
    ) -> tuple[Float[Array, "T D"], KVPool]:
        """Runs the layers over packed tokens. Pure; call it under jit.

        Args:
            params: As :meth:`abstract_params` lays them out.
            token_ids_T: Tokens of all sequences on one axis; padding may hold any id in range. Use two rows or more: one takes another path on CPU.
            positions_T: Position of each token in its sequence.
            pool: Keys and values of all layers; handed to ``attend`` layer by layer.
            attend: Attention over the step's batch.

        Returns:
            The final-normed residual stream in the model dtype, for :meth:`logits`, and the pool.
        """
        stem = self._stem(params)
        x_TD = stem.embeddings(token_ids_T)
        cos_CTR, sin_CTR = rope_tables(self.spec, positions_T)
        windows = [NO_WINDOW if layer.window is None else layer.window for layer in self.spec.layers]
        ropes = [layer.rope for layer in self.spec.layers]

        def run(layer_params: Mapping[str, Array], x_TD: Array, pool: KVPool, layer: Any, window: Any, rope: Any) -> tuple[Array, KVPool]:
            module = nnx.merge(self.layer_graph, layer_params)
            return module(x_TD, cos_CTR[rope], sin_CTR[rope], pool, attend, layer, window)

        if self.layers == "unroll":
            # Traced once, called for each layer; XLA inlines the calls. Tracing 30 layers apart took 2 s a bucket, more than reading the program from disk.
            run_traced = jax.jit(run)
            for layer, layer_params in enumerate(params["layers"]):
                numbers = (jnp.int32(layer), jnp.int32(windows[layer]), jnp.int32(ropes[layer]))
                x_TD, pool = run_traced(layer_params, x_TD, pool, *numbers)
        else:
            # The pool is carried: as scan input and output XLA keeps a second whole pool. Window and rope kind are data, so layers that differ share a body.
            def body(carry: tuple[Array, KVPool], xs: tuple[Mapping[str, Array], Array, Array, Array]) -> tuple[tuple[Array, KVPool], None]:
                layer_params, layer, window, rope = xs
                return run(layer_params, *carry, layer, window, rope if len(self.spec.ropes) > 1 else 0), None

            numbers = (jnp.arange(self.spec.num_layers, dtype=jnp.int32), jnp.asarray(windows, jnp.int32), jnp.asarray(ropes, jnp.int32))
            (x_TD, pool), _ = jax.lax.scan(body, (x_TD, pool), (params["layers"], *numbers))
        return stem.final(x_TD), pool

    def logits(self, params: Params, x_BD: Float[Array, "B D"]) -> Float32[Array, "B V"]:
        """Output logits of rows of :meth:`forward`'s result, in float32, the final soft cap applied."""
        return self._stem(params).logits(x_BD)

    def _stem(self, params: Params) -> Stem:
        return nnx.merge(self.stem_graph, {name: value for name, value in params.items() if name != "layers"})


def build_model(spec: ModelSpec, *, dtype: Any, layers: LayersForm, is_split: bool = False) -> Model:
    """The model of a spec.

    Args:
        spec: What the decoder is.
        dtype: Of parameters and residual stream: anything that numpy takes for a dtype, such as ``"bfloat16"``.
        layers: Form of the layers and of their parameters.
        is_split: Whether the parameters will be split over several devices, which then sum up their parts of each block in ``dtype``.
    """
    dtype = jnp.dtype(dtype)
    layer: dict[str, jax.ShapeDtypeStruct] = {}
    stem: dict[str, jax.ShapeDtypeStruct] = {}
    for path, param in param_specs(spec).items():
        values = layer if param.per_layer else stem
        values[path.removeprefix("layers.")] = jax.ShapeDtypeStruct(param.shape, dtype)
    layer_graph, _ = nnx.split(DecoderLayer(spec, layer, is_split=is_split))
    stem_graph, _ = nnx.split(Stem(spec, stem))
    return Model(spec=spec, dtype=dtype, layers=layers, layer_graph=layer_graph, stem_graph=stem_graph)


def _random(rng: np.random.Generator, param: ParamSpec, randomize_all: bool) -> np.ndarray:
    if param.init == "normal":
        return rng.standard_normal(param.shape, np.float32) * np.float32(param.fan_in**-0.5)
    neutral = np.full(param.shape, 1.0 if param.init == "ones" else 0.0, np.float32)
    return neutral + _SPREAD * rng.standard_normal(param.shape, np.float32) if randomize_all else neutral

"""Checkpoint tensors that follow from a seed and their name alone, so that stored outputs need no stored weights; and parameters filled from them."""

from __future__ import annotations

import hashlib
import zlib

import jax.numpy as jnp
import numpy as np

from jaxserve.models.model import Model
from jaxserve.models.param_spec import ParamSpec
from jaxserve.models.params import Params, build_params, param_specs
from jaxserve.models.spec import ModelSpec

SEED = 20261129


def tensor(name: str, shape: tuple[int, ...], *, norm_neutral: float = 1.0) -> np.ndarray:
    """A float32 checkpoint tensor. All are random, norms (about their neutral value) and biases too."""
    normal = np.random.default_rng([SEED, zlib.crc32(name.encode())]).standard_normal(shape)
    if len(shape) > 1:
        values = normal * shape[-1] ** -0.5
    elif name.endswith("bias"):
        values = 0.3 * normal
    else:
        values = norm_neutral + 0.3 * normal
    return values.astype(np.float32)


def checkpoint(spec: ModelSpec) -> dict[str, np.ndarray]:
    """Every tensor of a model, by its Hugging Face name."""
    neutral = 1.0 - spec.norm_offset
    tensors: dict[str, np.ndarray] = {}
    for param in param_specs(spec).values():
        for piece in param.pieces:
            for layer in param.indices:
                name = piece.name.format(layer=layer)
                tensors[name] = tensor(name, piece.shape, norm_neutral=neutral)
    return tensors


def checkpoint_digest(spec: ModelSpec) -> str:
    """Tells whether stored outputs belong to these tensors: a library's random numbers may change."""
    digest = hashlib.sha256()
    for name, values in sorted(checkpoint(spec).items()):
        digest.update(name.encode() + values.tobytes())
    return digest.hexdigest()


def token_ids(spec: ModelSpec, length: int) -> np.ndarray:
    """A prompt."""
    return np.random.default_rng(SEED).integers(0, spec.vocab_size, length).astype(np.int32)


def params_from(model: Model, tensors: dict[str, np.ndarray]) -> Params:
    """The model's parameters, put together from a checkpoint as ``param_specs`` says."""

    def one(param: ParamSpec, layer: int) -> np.ndarray:
        values = np.full(param.shape, np.nan, np.float32)
        for piece in param.pieces:
            source = tensors[piece.name.format(layer=layer)]
            assert source.shape == piece.shape
            values[piece.into] = source.reshape(values[piece.into].shape)
        return values

    def make(path: str, param: ParamSpec, layer: int | None) -> jnp.ndarray:
        if param.per_layer and layer is None:
            return jnp.asarray(np.stack([one(param, index) for index in param.indices]), model.dtype)
        return jnp.asarray(one(param, layer or 0), model.dtype)

    return build_params(model.spec, model.layers, make)

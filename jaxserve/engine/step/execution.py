"""The choices that depend on the platform, made from measurements: the form of the layers, the dtype of keys and values, and the buckets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.config import Config
from jaxserve.engine.step.buckets import SAMPLING_STAGES, Sampling
from jaxserve.models.params import LayersForm

_TOKEN_COUNTS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
"""Each is 1.33 to 2 times the one before. A step takes as long as its bucket does, so padding wastes a sixth on average; with powers of two, a quarter."""
_ROW_COUNTS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
_FEW_TOKEN_COUNTS = (32, 128, 512, 2048, 8192)
_FEW_ROW_COUNTS = (2, 8, 32, 128, 512)
_COMPILER_OPTIONS: Mapping[str, Mapping[str, str]] = {
    # XLA takes 16-bit weights in tiles of 8 rows and, on this chip, computes on tiles of 16: each step began with a copy of all weights.
    "TPU7x": {"xla_tpu_control_large_2nd_minor_layout_for_x16": "false"},
}
"""Options of the XLA compiler by device kind."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """How steps are run on a platform.

    Args:
        platform: jax's name of the platform: ``cpu``, ``gpu`` or ``tpu``.
        layers: Form of the layers and their parameters: scanned or unrolled.
        kv_dtype: Dtype of keys and values in the pool.
        token_buckets: Token counts of mixed steps.
        sequence_buckets: Sequence counts of steps.
        sampling: The kinds of programs of each bucket's shapes; see ``buckets``.
    """

    platform: str
    layers: LayersForm
    kv_dtype: Any
    token_buckets: tuple[int, ...]
    sequence_buckets: tuple[int, ...]
    sampling: tuple[Sampling, ...]


def compiler_options(device_kind: str) -> dict[str, str]:
    """The options with which XLA compiles a step for a kind of device, by jax's name of it."""
    return dict(_COMPILER_OPTIONS.get(device_kind, {}))


def choose_execution(config: Config, platform: str) -> Execution:
    """The execution for a configuration on a platform. Choices that the configuration leaves open follow from measurements.

    Scanned layers compile in 1 to 3 s for each bucket, whatever the depth. Layers are unrolled where the loop costs too much: XLA:GPU copies each layer's
    weights out of the stack in every iteration, and JAX 0.10 on CPU converts whole bfloat16 layers to float32. Unrolled layers take 10 s or more to compile,
    so there are fewer buckets. JAX 0.10 on CPU also promotes a bfloat16 pool to float32 for each write, so keys and values are float32 from the start.
    On GPU a conditional makes the host wait for the device, so each set of sampling stages has a program of its own.
    """
    dtype = jnp.dtype(config.model.dtype)
    slow_bf16 = platform == "cpu" and jax.__version_info__ < (0, 11) and dtype == jnp.bfloat16
    layers = config.engine.layers
    if layers == "auto":
        layers = "unroll" if platform == "gpu" or slow_bf16 else "scan"
    kv_dtype = config.cache.dtype
    if kv_dtype == "auto":
        kv_dtype = "float32" if slow_bf16 else dtype
    elif kv_dtype == "fp8":
        kv_dtype = jnp.float8_e4m3fn
    unrolled = layers == "unroll"
    return Execution(
        platform=platform,
        layers=layers,
        kv_dtype=jnp.dtype(kv_dtype),
        token_buckets=config.engine.token_buckets or (_FEW_TOKEN_COUNTS if unrolled else _TOKEN_COUNTS),
        sequence_buckets=config.engine.sequence_buckets or (_FEW_ROW_COUNTS if unrolled else _ROW_COUNTS),
        sampling=tuple(SAMPLING_STAGES) if platform == "gpu" else ("any",),
    )

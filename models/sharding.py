"""How a model's parameters lie on a mesh, and whether they can: every rule is checked against every parameter before anything is allocated."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.config import ShardingConfig
from jaxserve.errors import ConfigError
from jaxserve.mesh import Layout
from jaxserve.mesh_shape import MODEL, MeshShape
from jaxserve.models.params import LayersForm, Params, ParamSpec, build_params, param_specs
from jaxserve.models.spec import ModelSpec

_AXIS_NAMES = {"vocab": "vocabulary", "kv_heads": "KV heads", "mlp": "MLP width", "width": "width"}


def param_shardings(spec: ModelSpec, layers: LayersForm, layout: Layout) -> Params:
    """The sharding of every parameter, laid out as ``Model.abstract_params``."""
    return build_params(spec, layers, lambda _path, param, layer: param_sharding(param, layer, layout))


def param_sharding(param: ParamSpec, layer: int | None, layout: Layout) -> NamedSharding:
    """The sharding of one parameter; ``layer`` as ``build_params`` gives it. Layers are never split."""
    partition = layout.spec(param.axes)
    stacked = param.per_layer and layer is None
    return layout.sharding(PartitionSpec(None, *partition) if stacked else partition)


def fit_kv_heads(spec: ModelSpec, mesh: MeshShape, rules: ShardingConfig, *, replicate: bool) -> ModelSpec:
    """The model with as many KV heads as the model ranks need: each one repeated where there are fewer than ranks and the configuration allows it.

    Raises:
        ConfigError: There are fewer, and repeating them is not allowed or does not come out even.
    """
    K, ranks = spec.num_kv_heads, mesh.model
    if MODEL not in (rules.kv_heads or ()) or ranks <= K:
        return spec
    repeat, rest = divmod(ranks, K)
    if rest or spec.num_heads % ranks:
        raise ConfigError(
            f"mesh {mesh}: {spec.num_heads} heads on {K} KV heads (sharding.kv_heads) cannot be split over {ranks} model ranks, not even with KV heads "
            f"repeated; {_nearest(spec, ranks)}"
        )
    if not replicate:
        raise ConfigError(
            f"mesh {mesh}: {K} KV heads (sharding.kv_heads) are fewer than {ranks} model ranks; mesh.replicate_kv_heads=true holds each on {repeat} ranks, "
            f"at {repeat} times the memory of keys and values, or use model={K} or less"
        )
    return dataclasses.replace(spec, num_kv_heads=ranks, kv_repeat=repeat)


def check_layout(spec: ModelSpec, mesh: MeshShape, rules: ShardingConfig) -> None:
    """Checks that every parameter can be split as the rules say.

    Args:
        spec: The model, its KV heads fitted already.
        mesh: Shape of the mesh.
        rules: Sharding rules.

    Raises:
        ConfigError: A parameter would be split twice over one mesh axis, or a dimension does not divide.
    """
    sizes = mesh._asdict()
    for path, param in param_specs(spec).items():
        split_by: dict[str, str] = {}
        for dimension, logical in zip(param.shape, param.axes, strict=True):
            mesh_axes: Sequence[str] = (getattr(rules, logical) or ()) if logical else ()
            for axis in mesh_axes:
                if axis in split_by:
                    raise ConfigError(
                        f"sharding.{split_by[axis]} and sharding.{logical} both split {path} {list(param.shape)} over the mesh axis {axis!r}; "
                        f"an array can be split once over an axis"
                    )
                split_by[axis] = str(logical)
            parts = math.prod(sizes[axis] for axis in mesh_axes)
            if dimension % parts:
                over = " x ".join(f"{axis}={sizes[axis]}" for axis in mesh_axes)
                hint = _nearest(spec, mesh.model) if mesh_axes == (MODEL,) else f"use a number of parts that divides {dimension}"
                raise ConfigError(f"mesh {mesh}: {_AXIS_NAMES[str(logical)]} {dimension} of {path} (sharding.{logical}) does not divide over {over}; {hint}")


def _nearest(spec: ModelSpec, ranks: int) -> str:
    """The numbers of model ranks next to ``ranks`` that suit heads, MLP and vocabulary alike."""
    common = math.gcd(spec.num_heads, spec.mlp_width, spec.vocab_size)
    fitting = [n for n in range(1, common + 1) if common % n == 0 and (spec.num_kv_heads % n == 0 or n % spec.num_kv_heads == 0)]
    below, above = max(n for n in fitting if n <= max(1, ranks)), min((n for n in fitting if n > ranks), default=None)
    return f"the nearest that fit: model={below}" + (f" or model={above}" if above else "")

"""How a model's parameters lie on a mesh, and whether they can: every rule is checked against every parameter before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.config import MeshAxis, ShardingConfig
from jaxserve.errors import ConfigError
from jaxserve.mesh import Layout
from jaxserve.mesh_shape import DATA, MODEL, MeshShape
from jaxserve.models.param_spec import ParamSpec
from jaxserve.models.params import LayersForm, Params, build_params, param_specs, unrepeated
from jaxserve.models.spec import ModelSpec

_AXIS_NAMES = {"vocab": "vocabulary", "kv_heads": "number of KV heads", "mlp": "MLP width", "width": "width"}


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
    K, ranks = spec.attention.num_kv_heads, mesh.model
    fitted = _with_repeats(spec, ranks, rules)
    if fitted is None:
        raise ConfigError(
            f"mesh {mesh}: {spec.attention.num_heads} heads on {K} KV heads cannot be split over {ranks} model ranks (sharding.kv_heads), not even with KV "
            f"heads repeated; {_nearest(spec, mesh, rules, MODEL)}"
        )
    if fitted.attention.kv_repeat > spec.attention.kv_repeat and not replicate:
        check_layout(fitted, mesh, rules)  # what repeating would not mend comes first
        repeat = fitted.attention.kv_repeat
        raise ConfigError(
            f"mesh {mesh}: {K} KV heads are fewer than {ranks} model ranks (sharding.kv_heads); mesh.replicate_kv_heads=true holds each on {repeat} ranks, "
            f"at {repeat} times the memory of keys and values, or use model={K}"
        )
    return fitted


def check_layout(spec: ModelSpec, mesh: MeshShape, rules: ShardingConfig) -> None:
    """Checks that every parameter can be split as the rules say.

    Args:
        spec: The model, its KV heads fitted already.
        mesh: Shape of the mesh.
        rules: Sharding rules.

    Raises:
        ConfigError: A parameter would be split twice over one mesh axis, or a dimension does not divide.
    """
    for path, param in param_specs(spec).items():
        split_by: dict[str, str] = {}
        for logical in filter(None, param.axes):
            for axis in _mesh_axes(rules, logical):
                if axis in split_by:
                    raise ConfigError(
                        f"sharding.{split_by[axis]} and sharding.{logical} both split {path} {list(param.shape)} over the mesh axis {axis!r}; "
                        f"an array can be split once over an axis: leave {axis!r} out of one of them"
                    )
                split_by[axis] = logical
    if (misfit := _first_misfit(spec, mesh, rules)) is not None:
        axes = _mesh_axes(rules, misfit.logical)
        over = " x ".join(f"{axis}={mesh._asdict()[axis]}" for axis in axes)
        raise ConfigError(
            f"mesh {mesh}: the {_AXIS_NAMES[misfit.logical]} is {misfit.size} and does not divide over {over} "
            f"(sharding.{misfit.logical} splits {misfit.path}); {_nearest(spec, mesh, rules, MODEL if MODEL in axes else DATA)}"
        )


class _Misfit(NamedTuple):
    """A dimension that does not divide."""

    path: str
    size: int
    logical: str


def _first_misfit(spec: ModelSpec, mesh: MeshShape, rules: ShardingConfig) -> _Misfit | None:
    sizes = mesh._asdict()
    for path, param in param_specs(spec).items():
        for size, logical in zip(param.shape, param.axes, strict=True):
            if logical is not None and size % math.prod(sizes[axis] for axis in _mesh_axes(rules, logical)):
                return _Misfit(path, size, logical)
    return None


def _mesh_axes(rules: ShardingConfig, logical: str) -> Sequence[MeshAxis]:
    return getattr(rules, logical) or ()


def _with_repeats(spec: ModelSpec, ranks: int, rules: ShardingConfig) -> ModelSpec | None:
    """The model with KV heads repeated as often as the model ranks need; ``None`` where that does not come out even."""
    K = spec.attention.num_kv_heads
    if MODEL not in _mesh_axes(rules, "kv_heads") or ranks <= K:
        return spec
    if ranks % K or spec.attention.num_heads % ranks:
        return None
    return spec.with_attention(num_kv_heads=ranks, kv_repeat=spec.attention.kv_repeat * (ranks // K))


def _nearest(spec: ModelSpec, mesh: MeshShape, rules: ShardingConfig, axis: MeshAxis) -> str:
    """The sizes of one mesh axis, next to the one that does not fit, at which everything does."""
    checkpoint = unrepeated(spec)

    def option(size: int) -> str | None:
        shape = mesh._replace(**{axis: size})
        fitted = _with_repeats(checkpoint, shape.model, rules)
        if fitted is None or _first_misfit(fitted, shape, rules) is not None:
            return None
        return f"{axis}={size}" + (" with mesh.replicate_kv_heads=true" if fitted.attention.kv_repeat > 1 else "")

    now = getattr(mesh, axis)
    below, above = range(now - 1, 0, -1), range(now + 1, 2 * max(now, spec.attention.num_heads) + 1)
    options = [next(filter(None, map(option, sizes)), None) for sizes in (below, above)]
    if not any(options):
        return f"no number of {axis} ranks fits; change the rule or the other axis"
    return f"the nearest that fit: {' or '.join(filter(None, options))}"

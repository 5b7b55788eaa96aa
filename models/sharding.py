"""The shardings of a model's parameters on a mesh. Every rule is checked against every parameter before anything is allocated."""

from __future__ import annotations

import dataclasses

from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.errors import ConfigError
from jaxserve.mesh import Layout
from jaxserve.mesh_axes import MODEL
from jaxserve.models.param_spec import ParamSpec
from jaxserve.models.params import LayersForm, Params, build_params, param_specs, unrepeated
from jaxserve.models.spec import ModelSpec
from jaxserve.sharding_rules import Misfit, ShardingRules

_AXIS_NAMES = {"vocab": "vocabulary", "kv_heads": "number of KV heads", "mlp": "MLP width", "width": "width"}


def param_shardings(spec: ModelSpec, layers: LayersForm, layout: Layout) -> Params:
    """The sharding of every parameter, in a tree like that of ``Model.abstract_params``."""
    return build_params(spec, layers, lambda _path, param, layer: param_sharding(param, layer, layout))


def param_sharding(param: ParamSpec, layer: int | None, layout: Layout) -> NamedSharding:
    """The sharding of one parameter. ``layer`` is the index that ``build_params`` gives. The axis of stacked layers is never split."""
    partition = layout.spec(param.axes)
    stacked = param.per_layer and layer is None
    return layout.sharding(PartitionSpec(None, *partition) if stacked else partition)


def fit_kv_heads(spec: ModelSpec, rules: ShardingRules, *, replicate: bool) -> ModelSpec:
    """The specification with at least as many KV heads as model ranks that split them. If there are fewer heads than ranks, each head is repeated.

    Args:
        spec: The model's specification.
        rules: The sharding rules on the mesh.
        replicate: Whether heads may be repeated.

    Raises:
        ConfigError: There are fewer heads than ranks, and repeating them is not allowed or does not come out even.
    """
    K, mesh, ranks = spec.attention.num_kv_heads, rules.mesh, rules.mesh.model
    fitted = _with_repeats(spec, rules)
    if fitted is None:
        raise ConfigError(
            f"mesh {mesh}: {spec.attention.num_heads} heads on {K} KV heads cannot be split over {ranks} model ranks (sharding.kv_heads), not even with KV "
            f"heads repeated; {_nearest(spec, rules, MODEL)}"
        )
    if fitted.attention.kv_repeat > spec.attention.kv_repeat and not replicate:
        check_layout(fitted, rules)  # what repeating would not mend comes first
        repeat = fitted.attention.kv_repeat
        raise ConfigError(
            f"mesh {mesh}: {K} KV heads are fewer than {ranks} model ranks (sharding.kv_heads); mesh.replicate_kv_heads=true holds each on {repeat} ranks, "
            f"at {repeat} times the memory of keys and values, or use model={K}"
        )
    return fitted


def check_layout(spec: ModelSpec, rules: ShardingRules) -> None:
    """Checks that every parameter can be split as the rules say.

    Args:
        spec: The model's specification, after :func:`fit_kv_heads`.
        rules: The sharding rules on the mesh.

    Raises:
        ConfigError: A parameter would be split twice over one mesh axis, or a dimension does not divide into its parts.
    """
    for path, param in param_specs(spec).items():
        if (collision := rules.collision(param.axes)) is not None:
            raise ConfigError(
                f"sharding.{collision.first} and sharding.{collision.second} both split {path} {list(param.shape)} over the mesh axis "
                f"{collision.mesh_axis!r}; an array can be split once over an axis: leave {collision.mesh_axis!r} out of one of them"
            )
    if (found := _first_misfit(spec, rules)) is not None:
        path, misfit = found
        axes = rules.mesh_axes(misfit.logical)
        over = " x ".join(f"{axis}={rules.mesh[axis]}" for axis in axes)
        raise ConfigError(
            f"mesh {rules.mesh}: the {_AXIS_NAMES[misfit.logical]} is {misfit.size} and does not divide over {over} "
            f"(sharding.{misfit.logical} splits {path}); {_nearest(spec, rules, MODEL if MODEL in axes else axes[0])}"
        )


def _first_misfit(spec: ModelSpec, rules: ShardingRules) -> tuple[str, Misfit] | None:
    """The path of the first parameter with a dimension that does not divide into its parts, and that dimension; ``None`` if there is none."""
    for path, param in param_specs(spec).items():
        if (misfit := rules.misfit(param.shape, param.axes)) is not None:
            return path, misfit
    return None


def _with_repeats(spec: ModelSpec, rules: ShardingRules) -> ModelSpec | None:
    """The specification with KV heads repeated as often as the model ranks need; ``None`` if that does not come out even."""
    K, ranks = spec.attention.num_kv_heads, rules.parts_over("kv_heads", MODEL)
    if ranks <= K:
        return spec
    if ranks % K or spec.attention.num_heads % ranks:
        return None
    return spec.with_attention(num_kv_heads=ranks, kv_repeat=spec.attention.kv_repeat * (ranks // K))


def _nearest(spec: ModelSpec, rules: ShardingRules, axis: str) -> str:
    """The end of a message: the nearest sizes of a mesh axis, below and above the one that does not fit, with which everything fits."""
    checkpoint = unrepeated(spec)

    def option(size: int) -> str | None:
        resized = dataclasses.replace(rules, mesh=rules.mesh.resized(axis, size))
        fitted = _with_repeats(checkpoint, resized)
        if fitted is None or _first_misfit(fitted, resized) is not None:
            return None
        return f"{axis}={size}" + (" with mesh.replicate_kv_heads=true" if fitted.attention.kv_repeat > 1 else "")

    now = rules.mesh[axis]
    below, above = range(now - 1, 0, -1), range(now + 1, 2 * max(now, spec.attention.num_heads) + 1)
    options = [next(filter(None, map(option, sizes)), None) for sizes in (below, above)]
    if not any(options):
        return f"no number of {axis} ranks fits; change the rule or the other axis"
    return f"the nearest that fit: {' or '.join(filter(None, options))}"

"""How a model's parameters lie on a mesh, and whether they can: every rule is checked against every parameter before anything is allocated."""

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
    """The sharding of every parameter, laid out as ``Model.abstract_params``."""
    return build_params(spec, layers, lambda _path, param, layer: param_sharding(param, layer, layout))


def param_sharding(param: ParamSpec, layer: int | None, layout: Layout) -> NamedSharding:
    """The sharding of one parameter; ``layer`` as ``build_params`` gives it. Layers are never split."""
    partition = layout.spec(param.axes)
    stacked = param.per_layer and layer is None
    return layout.sharding(PartitionSpec(None, *partition) if stacked else partition)


def fit_kv_heads(spec: ModelSpec, rules: ShardingRules, *, replicate: bool) -> ModelSpec:
    """The model with as many KV heads as the model ranks need: each one repeated where there are fewer than ranks and the configuration allows it.

    Raises:
        ConfigError: There are fewer, and repeating them is not allowed or does not come out even.
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
        spec: The model, its KV heads fitted already.
        rules: What is split over which axes of the mesh.

    Raises:
        ConfigError: A parameter would be split twice over one mesh axis, or a dimension does not divide.
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
    """The first parameter with a dimension that does not divide, by its path."""
    for path, param in param_specs(spec).items():
        if (misfit := rules.misfit(param.shape, param.axes)) is not None:
            return path, misfit
    return None


def _with_repeats(spec: ModelSpec, rules: ShardingRules) -> ModelSpec | None:
    """The model with KV heads repeated as often as the model ranks need; ``None`` where that does not come out even."""
    K, ranks = spec.attention.num_kv_heads, rules.parts_over("kv_heads", MODEL)
    if ranks <= K:
        return spec
    if ranks % K or spec.attention.num_heads % ranks:
        return None
    return spec.with_attention(num_kv_heads=ranks, kv_repeat=spec.attention.kv_repeat * (ranks // K))


def _nearest(spec: ModelSpec, rules: ShardingRules, axis: str) -> str:
    """The sizes of one mesh axis, next to the one that does not fit, at which everything does."""
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

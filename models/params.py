"""The parameters of a whole model, by their paths: those of its layers, as their kinds declare them, and what stands around the layers.

Modules, abstract shapes, shardings, random weights and all loaders derive from :func:`param_specs`. No arrays here.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from jaxserve.models.param_spec import Init, ParamSpec, Parts, vector, whole
from jaxserve.models.spec import LayerKind, ModelSpec

Params = dict[str, Any]
"""A plain nested dict of arrays. A weight is a dict of its own, ``{"values": array}``; a vector is an array.

``"layers"`` is a list of dicts by the parameters' names: of stacked arrays, one dict a stack of the spec, or of arrays of one layer, one dict a layer.
"""

LayersForm = Literal["scan", "unroll"]
"""``scan``: each per-layer parameter is one stacked array. ``unroll``: each layer has its own arrays."""


def param_specs(spec: ModelSpec) -> dict[str, ParamSpec]:
    """Every parameter of the model by its path, ``embed``, ``layers.qkv``, …, in a fixed order.

    Where layers are of several stacks, their number is part of the path: ``layers.1.qkv``.
    """
    V, D = spec.vocab_size, spec.width
    table = ParamSpec(shape=(V, D), axes=("vocab", "width"), init="normal", pieces=whole("model.embed_tokens.weight", (V, D)), num_in_axes=1)
    specs = {"embed": table}
    for stack in _declared_stacks(spec):
        specs |= {f"{stack.prefix}.{name}": param for name, param in stack.params.items()}
    specs["final_norm"] = vector("model.norm.weight", D, _norm_init(spec))
    if not spec.tied:
        specs["head"] = dataclasses.replace(table, pieces=whole("lm_head.weight", (V, D)))
    return specs


def layer_params(spec: ModelSpec, kind: LayerKind) -> dict[str, ParamSpec]:
    """The parameters of a layer of one kind by their names, which are the last part of their paths."""
    D, init = spec.width, _norm_init(spec)
    layer = "model.layers.{layer}."
    params = {"input_norm": vector(layer + "input_layernorm.weight", D, init)} | kind.attention.params(D, init)
    if spec.post_norms:
        params["post_attention_norm"] = vector(layer + "post_attention_layernorm.weight", D, init)
        params["mlp_norm"] = vector(layer + "pre_feedforward_layernorm.weight", D, init)
        params["post_mlp_norm"] = vector(layer + "post_feedforward_layernorm.weight", D, init)
    else:
        params["mlp_norm"] = vector(layer + "post_attention_layernorm.weight", D, init)
    return params | kind.mlp.params(D)


def build_params(spec: ModelSpec, layers: LayersForm, make: Callable[[str, ParamSpec, int | None], Any]) -> Params:
    """A tree of the model's parameters, each leaf from ``make``.

    Args:
        spec: The model.
        layers: Form of the per-layer parameters.
        make: Called with path, declaration and layer index; the index is ``None`` for a stacked parameter and for one that is not a layer's.
    """

    def leaf(path: str, param: ParamSpec, layer: int | None = None) -> Any:
        values = make(path, param, layer)
        return {"values": values} if param.is_weight else values

    def one(stack: _DeclaredStack, layer: int | None) -> dict[str, Any]:
        return {name: leaf(f"{stack.prefix}.{name}", param, layer) for name, param in stack.params.items()}

    params: Params = {path: leaf(path, param) for path, param in param_specs(spec).items() if not param.per_layer}
    stacks = _declared_stacks(spec)
    if layers == "scan":
        params["layers"] = [one(stack, None) for stack in stacks]
    else:
        stack_of = {layer: stack for stack in stacks for layer in stack.layers}
        params["layers"] = [one(stack_of[layer], layer) for layer in range(spec.num_layers)]
    return params


def product_flops(spec: ModelSpec, parts: Parts | None = None) -> tuple[float, float]:
    """FLOPs of products with weights on a device: for each token, and for each row whose logits are wanted.

    Args:
        spec: The model.
        parts: Into how many parts the work along a logical axis is split; without it one device does all.
    """
    specs = param_specs(spec)
    return sum(param.flops(parts) for param in specs.values() if param.per_layer), specs[head_path(spec)].flops(parts)


def head_path(spec: ModelSpec) -> str:
    """The path of the weight that gives logits."""
    return "embed" if spec.tied else "head"


def unrepeated(spec: ModelSpec) -> ModelSpec:
    """The model with the KV heads of its checkpoint, each one once."""
    return spec.with_attention(num_kv_heads=spec.attention.num_kv_heads // spec.attention.kv_repeat, kv_repeat=1)


class _DeclaredStack(NamedTuple):
    """A stack's parameters by name, and the part of their paths before the name."""

    prefix: str
    layers: range
    params: dict[str, ParamSpec]


def _declared_stacks(spec: ModelSpec) -> list[_DeclaredStack]:
    stacks = list(itertools.chain.from_iterable(spec.stacks))
    declared: list[_DeclaredStack] = []
    for index, stack in enumerate(stacks):
        # The only stack of a model has no number: so paths were before a model could have several, in checkpoints too.
        prefix = "layers" if len(stacks) == 1 else f"layers.{index}"
        params = {name: dataclasses.replace(param, layers=stack.layers) for name, param in layer_params(spec, stack.kind).items()}
        declared.append(_DeclaredStack(prefix, stack.layers, params))
    return declared


def _norm_init(spec: ModelSpec) -> Init:
    return "zeros" if spec.norm_offset else "ones"

"""The parameters of a whole model by their paths: those of its layers, which their kinds declare, and those around the layers.

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
"""The parameters of a model as a nested dict of arrays. A weight is a dict of its own, ``{"values": array}``; a vector is an array.

``"layers"`` is a list of dicts by the parameters' names. In the form ``scan`` there is one dict of stacked arrays for each stack of the specification, in
the form ``unroll`` one dict of arrays for each layer.
"""

LayersForm = Literal["scan", "unroll"]
"""The form of the layers' parameters. ``scan``: the layers of a stack share stacked arrays. ``unroll``: each layer has its own arrays."""


def param_specs(spec: ModelSpec) -> dict[str, ParamSpec]:
    """The declarations of all parameters of a model by path (``embed``, ``layers.qkv``, …), in a fixed order.

    If the model has several stacks of layers, the stack's number is part of the path, as in ``layers.1.qkv``.
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
    """The declarations of the parameters of a layer of one kind, by their names, which are the last part of their paths."""
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
    """A tree of a model's parameters whose leaves come from ``make``.

    Args:
        spec: The model's specification.
        layers: Form of the layers' parameters.
        make: Makes a leaf from a parameter's path, declaration and layer index. The index is ``None`` for a stacked parameter and for one of no layer.
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
    """The FLOPs of products with weights on a device: for each token, and for each row whose logits are computed.

    Args:
        spec: The model's specification.
        parts: Gives the number of parts into which the work along a logical axis is split; ``None`` if one device does all.
    """
    specs = param_specs(spec)
    return sum(param.flops(parts) for param in specs.values() if param.per_layer), specs[head_path(spec)].flops(parts)


def head_path(spec: ModelSpec) -> str:
    """The path of the weight that gives the logits."""
    return "embed" if spec.tied else "head"


def unrepeated(spec: ModelSpec) -> ModelSpec:
    """The specification of the model with the KV heads of its checkpoint, each of them once."""
    return spec.with_attention(num_kv_heads=spec.attention.num_kv_heads // spec.attention.kv_repeat, kv_repeat=1)


class _DeclaredStack(NamedTuple):
    """A stack's declared parameters by name, and the part of their paths before the name."""

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

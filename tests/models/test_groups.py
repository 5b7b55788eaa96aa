"""Layers in groups: several loops one after the other, units of several kinds, both forms, on a mesh. No family has such layers yet; the spec is the test's."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxserve.config import ShardingConfig
from jaxserve.mesh import make_layout
from jaxserve.mesh_shape import MeshShape
from jaxserve.models.attention_kind import GroupedQueryAttention
from jaxserve.models.mlp_kind import GatedMlp
from jaxserve.models.model import build_model
from jaxserve.models.params import LayersForm, param_specs, product_flops
from jaxserve.models.sharding import param_shardings
from jaxserve.models.spec import LayerGroup, LayerKind, LayerSpec, ModelSpec, RopeSpec
from tests.models.runs import full_forward
from tests.models.seeded import checkpoint, params_from, token_ids

V, D, N, K, H = 96, 64, 4, 2, 16
EPS = 1e-5
ATTENTION = GroupedQueryAttention(num_heads=N, num_kv_heads=K, head_dim=H, scale=H**-0.5)
NARROW, WIDE = (LayerKind(attention=ATTENTION, mlp=GatedMlp(width=width, activation="silu")) for width in (48, 80))
INV_FREQ = tuple(100.0 ** (-2 * i / H) for i in range(H // 2))
ANY, LOCAL = LayerSpec(), LayerSpec(window=5)


def make_spec(*groups: tuple[tuple[LayerKind, ...], tuple[LayerSpec, ...]]) -> ModelSpec:
    return ModelSpec(
        family="test", vocab_size=V, width=D, groups=tuple(LayerGroup(unit=unit, layers=layers) for unit, layers in groups), max_position=64,
        norm_eps=EPS, ropes=(RopeSpec(inv_freq=INV_FREQ),),
    )  # fmt: skip


SPECS = {
    "two groups": make_spec(((NARROW,), (ANY, LOCAL)), ((WIDE,), (LOCAL, ANY, ANY))),
    "a unit of two kinds": make_spec(((NARROW, WIDE), (LOCAL, ANY, ANY, LOCAL))),
    "one and then a unit": make_spec(((WIDE,), (ANY,)), ((WIDE, NARROW, WIDE), (ANY, LOCAL, ANY) * 2)),
}


def reference(spec: ModelSpec, tensors: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """``[S, V]`` logits by numpy in float64, from the checkpoint's own tensors, layer by layer."""

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * tensors[name]

    def rotated(x_SXH: np.ndarray) -> np.ndarray:
        angles = np.arange(len(ids))[:, None, None] * np.asarray(INV_FREQ)
        first, second = np.split(x_SXH, 2, axis=-1)
        return np.concatenate([first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)], axis=-1)

    distance = np.arange(len(ids))[:, None] - np.arange(len(ids))
    x_SD = tensors["model.embed_tokens.weight"][ids].astype(np.float64)
    for index, layer in enumerate(spec.layers):
        name = f"model.layers.{index}."
        y_SD = norm(x_SD, name + "input_layernorm.weight")
        q, k, v = ((y_SD @ tensors[f"{name}self_attn.{x}_proj.weight"].T).reshape(len(ids), -1, H) for x in "qkv")
        q, k, v = rotated(q), np.repeat(rotated(k), N // K, axis=1), np.repeat(v, N // K, axis=1)
        scores = np.einsum("TNH,SNH->NTS", q, k) * H**-0.5
        scores = np.where((distance >= 0) & (distance < (layer.window or 2**30)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        o_SNH = np.einsum("NTS,SNH->TNH", weights / weights.sum(-1, keepdims=True), v)
        x_SD = x_SD + o_SNH.reshape(len(ids), -1) @ tensors[name + "self_attn.o_proj.weight"].T
        y_SD = norm(x_SD, name + "post_attention_layernorm.weight")
        gate, up = (y_SD @ tensors[f"{name}mlp.{x}_proj.weight"].T for x in ("gate", "up"))
        x_SD = x_SD + (gate / (1 + np.exp(-gate)) * up) @ tensors[name + "mlp.down_proj.weight"].T
    return norm(x_SD, "model.norm.weight") @ tensors["lm_head.weight"].T


@pytest.mark.parametrize("mesh", [MeshShape(), MeshShape(2, 2)], ids=str)
@pytest.mark.parametrize("form", ["scan", "unroll"])
@pytest.mark.parametrize("name", SPECS)
def test_grouped_layers_compute_what_a_plain_loop_does(name: str, form: LayersForm, mesh: MeshShape) -> None:
    spec, layout = SPECS[name], make_layout(mesh, ShardingConfig())
    model = build_model(spec, dtype="float32", layers=form, is_split=layout.rules.splits_anything)
    tensors = checkpoint(spec)
    params = jax.device_put(params_from(model, tensors), param_shardings(spec, form, layout))
    ids = token_ids(spec, 20)
    np.testing.assert_allclose(full_forward(model, params, ids), reference(spec, tensors, ids), atol=2e-5, rtol=0)


def test_parameters_of_a_seed_do_not_depend_on_the_grouping() -> None:
    """Nor do logits: the same layers, in one loop, in two, and as a unit of two."""
    layers = (ANY, LOCAL, LOCAL, ANY)
    specs = [make_spec(((WIDE,), layers)), make_spec(((WIDE,), layers[:1]), ((WIDE,), layers[1:])), make_spec(((WIDE, WIDE), layers))]
    unrolled = [build_model(spec, dtype="float32", layers="unroll").random_params(3, randomize_all=True) for spec in specs]
    for other in unrolled[1:]:
        jax.tree.map(np.testing.assert_array_equal, unrolled[0], other)
    models = [build_model(spec, dtype="float32", layers="scan") for spec in specs]
    logits = [full_forward(model, model.random_params(3, randomize_all=True), token_ids(model.spec, 20)) for model in models]
    for other in logits[1:]:
        np.testing.assert_allclose(other, logits[0], atol=1e-6, rtol=0)


def test_each_stack_is_one_array_and_has_a_path_of_its_own() -> None:
    spec = SPECS["one and then a unit"]
    specs = param_specs(spec)
    assert {path.rpartition(".")[0]: param.layers for path, param in specs.items() if param.per_layer} == {
        "layers.0": range(1), "layers.1": range(1, 7, 3), "layers.2": range(2, 7, 3), "layers.3": range(3, 7, 3),
    }  # fmt: skip
    names = [piece.name.format(layer=layer) for param in specs.values() for piece in param.pieces for layer in param.indices]
    assert len(names) == len(set(names)) == 3 + 9 * spec.num_layers
    stacked = build_model(spec, dtype="bfloat16", layers="scan").abstract_params()["layers"]
    assert [stack["gate_up"]["values"].shape for stack in stacked] == [(1, 2, 80, D), (2, 2, 80, D), (2, 2, 48, D), (2, 2, 80, D)]
    unrolled = build_model(spec, dtype="bfloat16", layers="unroll").abstract_params()["layers"]
    assert [layer["gate_up"]["values"].shape[1] for layer in unrolled] == [80, 80, 48, 80, 80, 48, 80]


def test_flops_are_those_of_every_layer() -> None:
    attention = (2 * N + 2 * K) * H * D
    assert product_flops(SPECS["two groups"]) == (2 * (5 * attention + (2 * 48 + 3 * 80) * 3 * D), 2 * V * D)
    halves = product_flops(SPECS["two groups"], lambda axis: 1 if axis == "width" else 2)
    assert halves == tuple(flops / 2 for flops in product_flops(SPECS["two groups"]))


def test_layers_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(AssertionError, match="3 layers are no whole number of units of 2"):
        make_spec(((NARROW, WIDE), (ANY, ANY, ANY)))
    other = LayerKind(attention=GroupedQueryAttention(num_heads=N, num_kv_heads=1, head_dim=H, scale=1.0), mlp=NARROW.mlp)
    with pytest.raises(AssertionError, match="one kind of attention"):
        make_spec(((NARROW, other), (ANY, ANY)))

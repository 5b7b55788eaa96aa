"""The model agrees with itself: both forms of the layers, any split into steps, any number of rows, and a size that does not grow with depth."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.mlp_kind import GatedMlp
from jaxserve.models.model import Model, build_model
from jaxserve.models.params import param_specs
from jaxserve.models.spec import LayerGroup, LayerSpec
from tests.models.cases import CASES, SEQUENCE_LENGTH
from tests.models.dense_attention import dense_attend, empty_cache
from tests.models.runs import full_forward, step
from tests.models.seeded import token_ids

SPECS = {case.name: case.spec for case in CASES}
VARIED = ["llama_linear_biases", "qwen2_window", "qwen3_bias_yarn", "gemma3_v5"]


@pytest.mark.parametrize("name", VARIED)
def test_scan_equals_unroll(name: str) -> None:
    spec = SPECS[name]
    logits = []
    for layers in ("scan", "unroll"):
        model = build_model(spec, dtype="float32", layers=layers)
        params = model.random_params(7, randomize_all=True)
        assert jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params) == model.abstract_params()
        logits.append(full_forward(model, params, token_ids(spec, SEQUENCE_LENGTH)))
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("name", "layers"), [*((name, "scan") for name in VARIED), ("gemma3_v5", "unroll")])
def test_prefill_then_decode_equals_one_full_forward(name: str, layers: str) -> None:
    spec = SPECS[name]
    model = build_model(spec, dtype="float32", layers=layers)
    params = model.random_params(3, randomize_all=True)
    ids = token_ids(spec, SEQUENCE_LENGTH)
    cache = empty_cache(spec, SEQUENCE_LENGTH, jnp.dtype(jnp.float32))
    parts = []
    for start, end in [(0, 17), (17, 34), *((position, position + 1) for position in range(34, SEQUENCE_LENGTH))]:
        logits, cache = step(model, params, jnp.asarray(ids[start:end]), jnp.arange(start, end, dtype=jnp.int32), cache)
        parts.append(np.asarray(logits))
    np.testing.assert_allclose(np.concatenate(parts), full_forward(model, params, ids), atol=2e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["smollm2_mqa", "gemma3"])
def test_rows_do_not_depend_on_the_number_of_rows(name: str, dtype: str) -> None:
    spec = SPECS[name]
    model = build_model(spec, dtype=dtype, layers="scan")
    params = model.random_params(5, randomize_all=True)
    rng = np.random.default_rng(0)
    ids, positions = (jnp.asarray(rng.integers(0, spec.vocab_size, 128), jnp.int32) for _ in range(2))

    @jax.jit
    def run(params, token_ids, positions):
        def attend(q_TNH, k_TKH, v_TKH, pool, layer, window):  # Not attention, but it keeps rows apart.
            G = spec.attention.group_size
            return (q_TNH * jnp.repeat(k_TKH, G, axis=1) + jnp.repeat(v_TKH, G, axis=1)).astype(q_TNH.dtype), pool

        x_TD, _ = model.forward(params, token_ids, positions, (), attend)
        return model.logits(params, x_TD)

    full = np.asarray(run(params, ids, positions))
    for rows in (2, 3, 32):
        assert np.array_equal(run(params, ids[:rows], positions[:rows]), full[:rows]), rows


def _lowered(model: Model, rows: int = 8) -> jax.stages.Lowered:
    vector = jax.ShapeDtypeStruct((rows,), jnp.int32)
    cache = jax.eval_shape(lambda: empty_cache(model.spec, rows, model.dtype))
    return step.lower(model, model.abstract_params(), vector, vector, cache)


def test_program_does_not_grow_with_layers_under_scan() -> None:
    spec = SPECS["llama2_mha"]
    (group,) = spec.groups
    deep = {
        num_layers: dataclasses.replace(spec, groups=(dataclasses.replace(group, layers=(LayerSpec(),) * num_layers),)) for num_layers in (4, 32, 80)
    }  # fmt: skip
    programs = {n: _lowered(build_model(spec, dtype="float32", layers="scan")).compile().as_text() for n, spec in deep.items()}
    num_lines = [text.count("\n") for text in programs.values()]
    assert max(num_lines) <= 1.1 * min(num_lines), num_lines


@pytest.mark.parametrize("layers", ["scan", "unroll"])
def test_no_weight_is_converted_or_transposed(layers: str) -> None:
    """XLA:CPU may read the layer's slice of a stack into place, but no weight may change its type or its order: that costs more than the product."""
    if layers == "scan" and jax.__version_info__ < (0, 12):
        pytest.skip("before JAX 0.12 XLA:CPU converts scanned bfloat16 stacks to float32; the runner unrolls there")
    F = 256
    (group,) = SPECS["qwen2_window"].groups
    wide = LayerGroup.uniform(group.unit[0].attention, GatedMlp(width=F, activation="silu"), group.layers)
    spec = dataclasses.replace(SPECS["qwen2_window"], groups=(wide,), vocab_size=384)
    model = build_model(spec, dtype="bfloat16", layers=layers)

    def run(params, token_ids, positions):
        x_TD, _ = model.forward(params, token_ids, positions, (), lambda q_TNH, k, v, pool, layer, window: (q_TNH, pool))
        return model.logits(params, x_TD)

    vector = jax.ShapeDtypeStruct((8,), jnp.int32)
    compiled = jax.jit(run).lower(model.abstract_params(), vector, vector).compile()
    memory = compiled.memory_analysis()
    layer_bytes = 2 * sum(param.num_values() // spec.num_layers for param in param_specs(spec).values() if param.per_layer)
    rows_bytes = 8 * 4 * (spec.vocab_size + 2 * F + 8 * spec.width)
    assert memory is not None
    assert memory.temp_size_in_bytes <= (layer_bytes if layers == "scan" else 0) + rows_bytes
    weights = {f"[{spec.width},{2 * F}]", f"[{2 * F},{spec.width}]"}
    for line in compiled.as_text().splitlines():
        produced, _, operation = line.partition(" = ")[2].partition(" ")
        if operation.startswith(("transpose(", "convert(", "copy(")):
            assert not any(shape in produced for shape in weights), line


def test_params_handed_to_jit_are_plain_and_few() -> None:
    spec = SPECS["gemma3"]
    params = build_model(spec, dtype="bfloat16", layers="scan").abstract_params()
    assert type(params) is dict and [type(layers) for layers in params["layers"]] == [dict]
    leaves = jax.tree.leaves(params)
    assert all(type(leaf) is jax.ShapeDtypeStruct for leaf in leaves)
    assert len(leaves) == len(param_specs(spec)) <= 13


def test_random_params_follow_the_seed() -> None:
    model = build_model(SPECS["llama_linear_biases"], dtype="float32", layers="scan")
    one, same, other = model.random_params(1), model.random_params(1), model.random_params(2)
    assert all(map(np.array_equal, jax.tree.leaves(one), jax.tree.leaves(same)))
    (layers,) = one["layers"]
    assert not np.array_equal(layers["qkv"]["values"], other["layers"][0]["qkv"]["values"])
    assert np.all(np.asarray(one["final_norm"]) == 1.0) and np.all(np.asarray(layers["qkv_bias"]) == 0.0)
    assert np.asarray(model.random_params(1, randomize_all=True)["layers"][0]["qkv_bias"]).std() > 0.05


def test_model_is_a_static_argument() -> None:
    spec = SPECS["qwen3"]
    one, same = (build_model(spec, dtype="float32", layers="scan") for _ in range(2))
    assert one == same and hash(one) == hash(same)
    assert one != build_model(spec, dtype="bfloat16", layers="scan")


def test_dense_attention_of_these_tests_sees_no_later_token() -> None:
    spec = SPECS["mistral_window"]
    positions = jnp.arange(6, dtype=jnp.int32)
    heads = spec.attention
    q_TNH = jnp.ones((6, heads.num_heads, heads.head_dim))
    v_TKH = jnp.broadcast_to(jnp.arange(6.0)[:, None, None], (6, heads.num_kv_heads, heads.head_dim))
    o_TNH, _ = dense_attend(spec, positions)(q_TNH, jnp.zeros_like(v_TKH), v_TKH, empty_cache(spec, 6, jnp.dtype(jnp.float32)), 0, 3)
    np.testing.assert_allclose(o_TNH[:, 0, 0], [0.0, 0.5, 1.0, 2.0, 3.0, 4.0], rtol=1e-6)

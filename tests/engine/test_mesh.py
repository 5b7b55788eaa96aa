"""The engine on meshes of fake devices: the same tokens as on one, from programs that move no more than they must."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import ShardingConfig
from jaxserve.engine.programs.plan import lower_bucket, pool_of_size
from jaxserve.engine.step.buckets import Bucket
from jaxserve.engine.step.function import abstract_params
from jaxserve.mesh import make_layout
from jaxserve.mesh_shape import MeshShape
from jaxserve.models.model import build_model
from jaxserve.models.spec import ModelSpec
from jaxserve.plan.traffic import Traffic, measure_traffic
from jaxserve.request import SamplingParams
from tests.engine.tiny import tiny_engine, tiny_spec

MESHES = [MeshShape(1, 2), MeshShape(1, 4), MeshShape(1, 8), MeshShape(2, 1), MeshShape(2, 4), MeshShape(4, 2), MeshShape(8, 1)]
SPECS = {
    "8 KV heads": tiny_spec(num_heads=8, num_kv_heads=8, width=64, vocab_size=320),
    "2 KV heads": tiny_spec(num_heads=8, num_kv_heads=2, width=64, vocab_size=320, tied=False, qk_norm=True, qkv_bias=True, mlp_bias=True, o_bias=True),
}
ALWAYS = {
    "8 KV heads": {MeshShape(1, 8), MeshShape(2, 4), MeshShape(8, 1)},
    "2 KV heads": {MeshShape(1, 2), MeshShape(2, 4), MeshShape(4, 2)},
}
"""Meshes of each kind: one axis, the other, both, heads whole and repeated. Each compiles its own programs, so the others are slow."""
NUM_PAGES = 8192
KINDS = [{"temperature": 0.0}, {"seed": 1}, {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 2}, {"temperature": 2.0, "min_p": 0.1, "seed": 3}]


def tokens_on(mesh: MeshShape, spec: ModelSpec) -> dict[int, list[int]]:
    """What 11 requests of unlike length generate that arrive while others run; two are aborted on their way."""
    engine = tiny_engine(spec=spec, mesh=mesh, max_num_seqs=4, token_buckets=(32,))
    rng = np.random.default_rng(0)
    lengths = [3, 40, 1, 17, 25, 8, 60, 2, 33, 5, 12]
    arrivals = [0, 0, 0, 1, 1, 3, 3, 3, 6, 9, 9]
    prompts = [rng.integers(0, spec.vocab_size, length).tolist() for length in lengths]
    tokens: dict[int, list[int]] = {index: [] for index in range(len(prompts))}
    step = 0
    while step < 10 or engine.has_work:
        for index, prompt in enumerate(prompts):
            if arrivals[index] == step:
                engine.add(engine.make_request(prompt, SamplingParams(max_tokens=10, **KINDS[index % len(KINDS)]), str(index)))
        for index in (1, 5):
            if step == arrivals[index] + 4:
                engine.abort(str(index))
        for output in engine.step():
            assert output.error is None, output.error
            tokens[int(output.request_id)] += output.token_ids
        engine.check_integrity()
        step += 1
    assert engine.stats().num_free_pages == engine.stats().num_pages
    return {index: generated for index, generated in tokens.items() if index not in (1, 5)}


@functools.cache
def tokens_on_one_device(name: str) -> dict[int, list[int]]:
    return tokens_on(MeshShape(), SPECS[name])


@pytest.mark.parametrize(
    ("name", "mesh"), [pytest.param(name, mesh, marks=() if mesh in ALWAYS[name] else pytest.mark.slow) for name in SPECS for mesh in MESHES], ids=str
)
def test_every_mesh_gives_the_tokens_of_one_device(name: str, mesh: MeshShape) -> None:
    got = tokens_on(mesh, SPECS[name])
    assert got == tokens_on_one_device(name)
    assert all(len(generated) == 10 for generated in got.values())


def test_an_axis_more_in_the_table_changes_nothing_for_data_and_model() -> None:
    """The table is read when modules are imported, so the engine with a third axis, of two ranks, is a process of its own."""
    done = subprocess.run([sys.executable, "-m", "tests.engine.third_axis"], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["axes"], found["parts"], found["model_axis"]) == (["data", "model", "expert"], [8, 2, 8], "model")
    assert {int(index): tokens for index, tokens in found["tokens"].items()} == tokens_on_one_device("8 KV heads")


def compiled_decode(mesh: MeshShape, rules: ShardingConfig, *, dtype: str = "float32") -> tuple[jax.stages.Lowered, ModelSpec]:
    spec = SPECS["8 KV heads"]
    layout = make_layout(mesh, rules)
    model = build_model(spec, dtype=dtype, layers="scan", is_split=True)
    bucket = Bucket(4, 4, 12, True)
    plan = pool_of_size(model, layout, [bucket], num_pages=NUM_PAGES, page_size=8, kv_dtype=jnp.dtype(dtype), attention="xla")
    return lower_bucket(model, abstract_params(model, layout), plan, bucket, max_num_seqs=4), spec


def traffic_of(compiled: jax.stages.Compiled, mesh: MeshShape) -> Traffic:
    text = compiled.as_text()
    assert text is not None
    return measure_traffic(text, mesh)


@pytest.mark.parametrize("mesh", [MeshShape(1, 8), MeshShape(2, 4), MeshShape(8, 1)], ids=str)
def test_a_decode_step_reduces_twice_a_layer_and_gathers_no_weights(mesh: MeshShape) -> None:
    lowered, spec = compiled_decode(mesh, ShardingConfig())
    compiled = lowered.compile()
    traffic = traffic_of(compiled, mesh)
    reductions = [each for each in traffic.collectives if each.kind == "all-reduce"]
    assert sum(each.count for each in reductions) == (2 * spec.num_layers + 1 if mesh.model > 1 else 0)
    assert all(each.axis == "model" for each in reductions)
    # What is gathered is what sampling exchanges: 64 candidates of each part, 4 rows, values and ids.
    others = [each for each in (*traffic.collectives, *traffic.sometimes) if each.kind != "all-reduce"]
    assert all(each.axis == "model" and each.bytes <= each.count * 4 * mesh.model * (2 * 64 + 1) * 4 for each in others), others
    memory = compiled.memory_analysis()
    pool_bytes = 2 * spec.num_layers * NUM_PAGES * 8 * (spec.attention.num_kv_heads // mesh.model) * spec.attention.head_dim * 4
    assert memory is not None
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < 0.1 * pool_bytes


def test_a_rule_that_splits_weights_over_data_shows_its_gathers() -> None:
    mesh = MeshShape(4, 1)
    right, wrong = (traffic_of(compiled_decode(mesh, rules)[0].compile(), mesh) for rules in (ShardingConfig(), ShardingConfig(mlp=("data",))))
    assert not any(each.axis == "data" for each in right.collectives)
    gathers = [each for each in wrong.collectives if each.axis == "data"]
    assert gathers and sum(each.bytes for each in gathers) > 0


def test_reductions_are_in_the_models_dtype() -> None:
    """Seen before XLA:CPU, which has no bfloat16 reductions, widens them."""
    lowered, _ = compiled_decode(MeshShape(1, 8), ShardingConfig(), dtype="bfloat16")
    products = re.findall(r"stablehlo.dot_general.*?->\s*tensor<4x64x(\w+)>", lowered.as_text())
    assert products and set(products) == {"bf16"}  # o and down: the two whose inputs are split


def test_each_device_holds_its_part_of_every_split_parameter() -> None:
    mesh = MeshShape(2, 4)
    layout = make_layout(mesh, ShardingConfig())
    model = build_model(SPECS["8 KV heads"], dtype="float32", layers="scan", is_split=True)
    params = model.random_params(0, layout)
    replicated = 0
    for leaf, abstract in zip(jax.tree.leaves(params), jax.tree.leaves(abstract_params(model, layout)), strict=True):
        assert leaf.sharding == abstract.sharding
        parts = {shard.data.nbytes for shard in leaf.addressable_shards}
        is_split = any(leaf.sharding.spec)
        replicated += 0 if is_split else leaf.nbytes
        assert parts == {leaf.nbytes // (mesh.model if is_split else 1)}
    assert replicated <= 0.01 * sum(leaf.nbytes for leaf in jax.tree.leaves(params))

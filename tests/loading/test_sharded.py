"""Parameters on a mesh: each device holds its part and nothing more was read for it, whatever the format."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest

from jaxserve.config import ModelConfig, ShardingConfig
from jaxserve.mesh import Layout, make_layout
from jaxserve.mesh_shape import MeshShape
from jaxserve.models.hf_config import spec_from_config
from jaxserve.models.loading import assemble as assemble_module
from jaxserve.models.loading import parts
from jaxserve.models.loading.assemble import assemble
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.convert import convert
from jaxserve.models.loading.specs import open_spec
from jaxserve.models.model import Model, build_model
from jaxserve.models.params import LayersForm, Params, param_specs
from jaxserve.models.sharding import check_layout, fit_kv_heads, param_shardings
from jaxserve.models.spec import ModelSpec
from tests.loading.builders import MemorySource, random_tensors, tiny_config, write_folder, write_gguf

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")

MESHES = [MeshShape(1, 1), MeshShape(1, 2), MeshShape(1, 4), MeshShape(2, 4), MeshShape(8, 1), MeshShape(1, 8)]
RULES = ShardingConfig()
# Of llama the GGUF converter permutes rows; qwen2 has biases.
CONFIGS = {
    "llama": tiny_config("llama", num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen2": tiny_config("qwen2", num_attention_heads=8, num_key_value_heads=8, hidden_size=256, intermediate_size=768),
}
SPECS = {name: spec_from_config(config) for name, config in CONFIGS.items()}


def model_on(spec: ModelSpec, layout: Layout, layers: LayersForm = "scan", dtype: str = "float32") -> Model:
    fitted = fit_kv_heads(spec, layout.rules, replicate=True)
    check_layout(fitted, layout.rules)
    return build_model(fitted, dtype=dtype, layers=layers)


def expected_params(model: Model, tensors: Mapping[str, np.ndarray]) -> Params:
    """The whole parameters by numpy alone."""
    spec = model.spec
    heads_of, D = spec.attention, spec.width
    K, G, H, r = heads_of.num_kv_heads, heads_of.group_size, heads_of.head_dim, heads_of.kv_repeat

    def layer(index: int) -> dict[str, Any]:
        def get(name: str) -> np.ndarray:
            return tensors[f"model.layers.{index}.{name}"]

        def heads(kind: str, *inner: int) -> np.ndarray:
            q, k, v = (get(f"self_attn.{x}_proj.{kind}") for x in "qkv")
            k, v = (np.repeat(x.reshape(K // r, 1, H, *inner), r, axis=0) for x in (k, v))
            return np.concatenate([q.reshape(K, G, H, *inner), k, v], axis=1)

        return stored({
            "input_norm": get("input_layernorm.weight"),
            "qkv": heads("weight", D),
            "o": get("self_attn.o_proj.weight").reshape(D, K, G, H),
            "mlp_norm": get("post_attention_layernorm.weight"),
            "gate_up": np.stack([get("mlp.gate_proj.weight"), get("mlp.up_proj.weight")]),
            "down": get("mlp.down_proj.weight"),
        } | ({"qkv_bias": heads("bias")} if spec.attention.qkv_bias else {}))  # fmt: skip

    layers: Any = [layer(index) for index in range(spec.num_layers)]
    if model.layers == "scan":
        layers = [jax.tree.map(lambda *each: np.stack(each), *layers)]
    stem = {"embed": tensors["model.embed_tokens.weight"], "final_norm": tensors["model.norm.weight"]}
    return stored(stem if spec.tied else stem | {"head": tensors["lm_head.weight"]}) | {"layers": layers}


def stored(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Arrays by name as parameters are stored: a weight is a dict of its own."""
    return {name: {"values": array} if name in ("embed", "head", "qkv", "o", "gate_up", "down") else array for name, array in arrays.items()}


def assert_params(params: Params, model: Model, expected: Params, layout: Layout) -> None:
    """Values, shardings, and what each device holds."""
    ranks = layout.shape.model

    def one(path: Any, array: jax.Array, values: np.ndarray, sharding: jax.sharding.Sharding) -> None:
        assert array.sharding == sharding and array.dtype == model.dtype, path
        assert len(array.addressable_shards) == layout.mesh.size
        is_split = values.ndim > 1 and "norm" not in jax.tree_util.keystr(path)
        for shard in array.addressable_shards:
            assert shard.data.size * (ranks if is_split else 1) == values.size, path
            np.testing.assert_array_equal(np.asarray(shard.data), values[shard.index].astype(model.dtype), err_msg=str(path))

    jax.tree_util.tree_map_with_path(one, params, expected, param_shardings(model.spec, model.layers, layout))


@pytest.mark.parametrize("layers", ["scan", "unroll"])
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_each_device_has_its_part_and_each_value_is_read_once(monkeypatch: pytest.MonkeyPatch, mesh: MeshShape, family: str, layers: LayersForm) -> None:
    monkeypatch.setattr(assemble_module, "BLOCK_VALUES", 5000)
    tensors = random_tensors(CONFIGS[family])
    source, layout = MemorySource(tensors), make_layout(mesh, RULES)
    model = model_on(SPECS[family], layout, layers)
    calls: list[tuple[str, int, int]] = []
    params = assemble(source, model, layout=layout, progress=lambda *call: calls.append(call))
    assert_params(params, model, expected_params(model, tensors), layout)
    for name, times in source.times_read.items():
        ranks_that_share = model.spec.attention.kv_repeat if name.split(".")[-2] in ("k_proj", "v_proj") else 1
        assert (times == ranks_that_share).all(), name
    assert calls[-1][1] == calls[-1][2] == sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model.abstract_params()))
    # A block, or one entry: the rows of a KV head, or the columns of one.
    assert source.largest_read <= max(5000, SPECS[family].attention.group_size * 32 * SPECS[family].width)


def safetensors(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    return write_folder(folder / "folder", config, tensors, num_shards=2)


def gguf_file(kind: gguf.GGMLQuantizationType) -> Callable[..., Path]:
    return lambda folder, config, tensors: write_gguf(folder / "model.gguf", config, tensors, quantization=kind)


def orbax(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    return convert(ModelConfig(source=str(safetensors(folder, config, tensors)), dtype="float32"), folder / "orbax")


FORMATS: dict[str, Callable[..., Path]] = {
    "safetensors": safetensors,
    "gguf_f32": gguf_file(gguf.GGMLQuantizationType.F32),
    "gguf_q8_0": gguf_file(gguf.GGMLQuantizationType.Q8_0),
    "orbax": orbax,
}


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("kind", FORMATS)
def test_every_format(tmp_path: Path, kind: str, family: str) -> None:
    """On every mesh the same as on none, and as numpy has it where nothing is quantised."""
    tensors = random_tensors(CONFIGS[family])
    checkpoint = open_checkpoint(ModelConfig(source=str(FORMATS[kind](tmp_path, CONFIGS[family], tensors))))
    if "q8" in kind:
        source = checkpoint.open_source()
        tensors = {name: source.read(name, slice(0, source.shape(name)[0])) for name in source.keys()}  # noqa: SIM118  not a mapping
    layers: tuple[LayersForm, ...] = ("scan", "unroll")
    for index, mesh in enumerate((MeshShape(1, 1), MeshShape(2, 4), MeshShape(1, 8))):
        layout = make_layout(mesh, RULES)
        model = model_on(checkpoint.spec, layout, layers[index % 2], "bfloat16")
        assert_params(checkpoint.load_params(model, layout=layout), model, expected_params(model, tensors), layout)
    model = model_on(checkpoint.spec, make_layout(MeshShape(1, 8), RULES), "scan")
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), b), checkpoint.load_params(model), expected_params(model, tensors))


@pytest.mark.parametrize(
    "rules",
    [
        ShardingConfig(vocab=None, kv_heads=None, mlp=None, width=("model",)),
        ShardingConfig(vocab=("data",), kv_heads=("model",), mlp=("data", "model"), width=None),
        ShardingConfig(vocab=None, kv_heads=None, mlp=("model",), width=("data",)),
    ],
    ids=["width", "over data too", "both axes"],
)
def test_any_rule(rules: ShardingConfig) -> None:
    tensors = random_tensors(CONFIGS["qwen2"])
    source, layout = MemorySource(tensors), make_layout(MeshShape(2, 4), rules)
    model = model_on(SPECS["qwen2"], layout)
    params = assemble(source, model, layout=layout)
    shardings = param_shardings(model.spec, model.layers, layout)
    jax.tree.map(lambda array, sharding: assert_equal(array.sharding, sharding), params, shardings)
    jax.tree.map(lambda array, values: np.testing.assert_array_equal(np.asarray(array), values), params, expected_params(model, tensors))
    assert all((times == 1).all() for times in source.times_read.values())


def assert_equal(a: object, b: object) -> None:
    assert a == b


def test_the_host_holds_one_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    original = parts._aligned_buffer

    def noting(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        sizes.append(math.prod(shape))
        return original(shape, dtype)

    monkeypatch.setattr(parts, "_aligned_buffer", noting)
    layout = make_layout(MeshShape(2, 4), RULES)
    model = model_on(SPECS["qwen2"], layout)
    params = assemble(MemorySource(random_tensors(CONFIGS["qwen2"])), model, layout=layout)
    leaves = jax.tree.leaves(params)
    assert max(sizes) == max(leaf.addressable_shards[0].data.size for leaf in leaves)
    assert sum(sizes) == sum(leaf.size for leaf in leaves)  # replicas share one
    for leaf in leaves:
        held = {(str(shard.index), shard.data.unsafe_buffer_pointer()) for shard in leaf.addressable_shards}
        assert len(held) == len({index for index, _ in held})


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gemma3-27b"])
def test_hardly_anything_is_replicated(name: str) -> None:
    _, spec = open_spec(name)
    layout = make_layout(MeshShape(1, 8), RULES)
    shapes = build_model(spec, dtype="bfloat16", layers="scan").abstract_params()
    pairs = list(zip(jax.tree.leaves(shapes), jax.tree.leaves(param_shardings(spec, "scan", layout)), strict=True))
    replicated = sum(leaf.size for leaf, sharding in pairs if sharding.is_fully_replicated)
    assert 0 < replicated <= 0.01 * sum(leaf.size for leaf, _ in pairs)
    for leaf, sharding in pairs:
        part = math.prod(sharding.shard_shape(leaf.shape))
        assert part == leaf.size if sharding.is_fully_replicated else part * 8 == leaf.size


@pytest.mark.parametrize("family", CONFIGS)
def test_random_params_do_not_depend_on_the_layout(family: str) -> None:
    single = build_model(SPECS[family], dtype="bfloat16", layers="scan").random_params(3, randomize_all=True)
    tensors = checkpoint_tensors(SPECS[family], single)
    for mesh, layers in ((MeshShape(2, 4), "unroll"), (MeshShape(1, 8), "scan")):
        layout = make_layout(mesh, RULES)
        model = model_on(SPECS[family], layout, layers, "bfloat16")
        assert_params(model.random_params(3, layout, randomize_all=True), model, expected_params(model, tensors), layout)


def checkpoint_tensors(spec: ModelSpec, params: Params) -> dict[str, np.ndarray]:
    """The checkpoint that stacked parameters would come from."""
    tensors: dict[str, np.ndarray] = {}
    for path, param in param_specs(spec).items():
        array = params["layers"][0][path.removeprefix("layers.")] if param.per_layer else params[path]
        values = np.asarray(array["values"] if param.is_weight else array)
        for layer in param.indices:
            for piece in param.pieces:
                tensors[piece.name.format(layer=layer)] = (values[layer] if param.per_layer else values)[piece.into].reshape(piece.shape)
    return tensors

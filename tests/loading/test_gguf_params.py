"""GGUF and safetensors of one model give the same parameters and the same spec."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest

from jaxserve.config import ModelConfig
from jaxserve.errors import CheckpointError, UnsupportedModelError
from jaxserve.models.hf_config import spec_from_config
from jaxserve.models.loading.checkpoint import Checkpoint, open_checkpoint
from jaxserve.models.model import build_model
from jaxserve.models.params import Params
from tests.loading.builders import FAMILIES, random_tensors, tiny_config, write_folder, write_gguf

CONFIGS = {family: tiny_config(family) for family in FAMILIES} | {
    "llama, biases": tiny_config("llama", attention_bias=True, mlp_bias=True),
    "llama, tied, one kv head": tiny_config("llama", tie_word_embeddings=True, num_key_value_heads=1),
}


def opened(path: Path) -> Checkpoint:
    return open_checkpoint(ModelConfig(source=str(path)))


def load(checkpoint: Checkpoint, dtype: str = "float32", layers: str = "scan") -> Params:
    return checkpoint.load_params(build_model(checkpoint.spec, dtype=dtype, layers=layers))


def assert_same(a: Params, b: Params) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


@pytest.mark.parametrize("name", CONFIGS)
def test_same_parameters_and_spec(tmp_path: Path, name: str) -> None:
    config = CONFIGS[name]
    tensors = random_tensors(config)
    from_folder = opened(write_folder(tmp_path / "folder", config, tensors))
    from_gguf = opened(write_gguf(tmp_path / "model.gguf", config, tensors))
    assert from_gguf.spec == from_folder.spec
    assert from_gguf.format == "gguf"
    for dtype, layers in (("float32", "scan"), ("bfloat16", "unroll")):
        a, b = load(from_folder, dtype, layers), load(from_gguf, dtype, layers)
        assert_same(a, b)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(b)} == {dtype}


def test_values_reach_their_places(tmp_path: Path) -> None:
    config = tiny_config("llama")
    tensors = random_tensors(config)
    params = load(opened(write_folder(tmp_path, config, tensors)))
    group, head_dim, width = 2, config["head_dim"], config["hidden_size"]
    (layers,) = params["layers"]
    qkv = np.asarray(layers["qkv"]["values"])
    q = tensors["model.layers.1.self_attn.q_proj.weight"].reshape(2, group, head_dim, width)
    np.testing.assert_array_equal(qkv[1, :, :group], q)
    np.testing.assert_array_equal(qkv[1, :, group], tensors["model.layers.1.self_attn.k_proj.weight"].reshape(2, head_dim, width))
    np.testing.assert_array_equal(qkv[1, :, group + 1], tensors["model.layers.1.self_attn.v_proj.weight"].reshape(2, head_dim, width))
    np.testing.assert_array_equal(np.asarray(layers["gate_up"]["values"])[0, 1], tensors["model.layers.0.mlp.up_proj.weight"])


def _dequantizable() -> list[gguf.GGMLQuantizationType]:
    kinds = []
    for kind, (_, block_bytes) in gguf.GGML_QUANT_SIZES.items():
        try:
            gguf.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
        except NotImplementedError:
            continue
        kinds.append(kind)
    return kinds


@pytest.mark.parametrize("kind", _dequantizable(), ids=lambda kind: kind.name)
def test_every_quantization(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Any bytes are a valid tensor of most types: what is read is what the gguf package makes of them, whatever the rows asked for."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    config = tiny_config("qwen3", hidden_size=256, num_attention_heads=8)
    raw = rng.integers(0, 256, (48, 256 // block_size * block_bytes), dtype=np.uint8)
    tensors = random_tensors(config)
    del tensors["model.embed_tokens.weight"]
    path = tmp_path / "model.gguf"
    writer_extra = {"token_embd.weight": raw}
    write_with_raw(path, config, tensors, writer_extra, kind)
    source = opened(path).open_source()
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(raw, kind).astype(np.float32)
        read = [source.read("model.embed_tokens.weight", rows).astype(np.float32) for rows in (slice(0, 5), slice(5, 48))]
    np.testing.assert_array_equal(np.concatenate(read), expected)


def write_with_raw(path: Path, config: dict, tensors: dict, raw: dict[str, np.ndarray], kind: gguf.GGMLQuantizationType) -> None:
    original = gguf.GGUFWriter.add_tensor

    def add_tensor(self: gguf.GGUFWriter, name: str, tensor: np.ndarray, **options: object) -> None:
        original(self, name, tensor, **({"raw_dtype": kind} if name in raw else options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_tensor", add_tensor)
        write_gguf(path, config, tensors, extra=raw)


def test_quantized_rows_are_permuted_back(tmp_path: Path) -> None:
    config = tiny_config("llama")
    tensors = random_tensors(config)
    params = load(opened(write_gguf(tmp_path / "model.gguf", config, tensors, quantization=gguf.GGMLQuantizationType.Q8_0)))
    q = np.asarray(params["layers"][0]["qkv"]["values"])[0, :, :2].reshape(128, 64)
    np.testing.assert_allclose(q, tensors["model.layers.0.self_attn.q_proj.weight"], atol=0.02)


def test_llama3_rope_factors(tmp_path: Path) -> None:
    """llama.cpp's converter divides the scaling into one factor a frequency; the spec must be that of the Hugging Face config."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    config = tiny_config("llama")
    plain, scaled = spec_from_config(config), spec_from_config(config | {"rope_scaling": scaling})
    factors = (np.asarray(plain.ropes[0].inv_freq) / np.asarray(scaled.ropes[0].inv_freq)).astype(np.float32)
    file = write_gguf(tmp_path / "model.gguf", config, random_tensors(config), extra={"rope_freqs.weight": factors})
    spec = opened(file).spec
    np.testing.assert_allclose(spec.ropes[0].inv_freq, scaled.ropes[0].inv_freq, rtol=3e-7)
    assert dataclasses.replace(spec, ropes=scaled.ropes) == scaled


@pytest.mark.parametrize("factors", [np.zeros(16, np.float32), np.ones(8, np.float32), np.full(16, np.nan, np.float32)])
def test_impossible_rope_factors(tmp_path: Path, factors: np.ndarray) -> None:
    config = tiny_config("llama")
    file = write_gguf(tmp_path / "model.gguf", config, random_tensors(config), extra={"rope_freqs.weight": factors})
    with pytest.raises(CheckpointError, match="rope factors"):
        opened(file)


@pytest.mark.parametrize(
    ("metadata", "error", "words"),
    [
        ({"llama.attention.new_trick": 1}, UnsupportedModelError, "llama.attention.new_trick"),
        ({"split.count": 2}, UnsupportedModelError, "split.count is 2"),
        ({"llama.expert_count": 8}, UnsupportedModelError, "expert_count is 8"),
        ({"llama.attention.head_count_kv": [2, 1]}, UnsupportedModelError, "differs from layer to layer"),
        ({"llama.attention.value_length": 16}, UnsupportedModelError, "value_length is 16"),
        ({"llama.rope.scaling.type": "longrope"}, UnsupportedModelError, "longrope"),
        ({"llama.block_count": None}, CheckpointError, "'llama.block_count' is missing"),
        ({"llama.block_count": 2**30}, CheckpointError, "block_count is 1073741824"),
        ({"llama.attention.head_count": 0}, CheckpointError, "0 attention heads"),
        ({"llama.rope.freq_base": "big"}, CheckpointError, "rope.freq_base"),
        ({"tokenizer.ggml.eos_token_id": 48}, CheckpointError, r"eos_token_id is 48.*\[0, 48\)"),
    ],
)
def test_metadata_that_cannot_be_served(tmp_path: Path, metadata: dict, error: type[Exception], words: str) -> None:
    config = tiny_config("llama")
    file = write_gguf(tmp_path / "model.gguf", config, random_tensors(config), metadata=metadata)
    with pytest.raises(error, match=words):
        opened(file)


def test_unknown_architecture(tmp_path: Path) -> None:
    config = tiny_config("llama")
    file = write_gguf(tmp_path / "model.gguf", config | {"model_type": "qwen2"}, {})
    file.write_bytes(file.read_bytes().replace(b"qwen2", b"grok7"))
    with pytest.raises(UnsupportedModelError, match="'grok7' is not supported; supported are llama"):
        opened(file)


def test_end_ids_and_scaling_from_metadata(tmp_path: Path) -> None:
    tokens = [f"t{index}" for index in range(46)] + ["<|eot_id|>", "<end_of_turn>"]
    metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 46 + [3, 1],
        "tokenizer.ggml.eos_token_id": 5,
        "tokenizer.ggml.eom_token_id": 7,
        "tokenizer.ggml.bos_token_id": 1,
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 128,
    }
    config = tiny_config("qwen2")
    checkpoint = opened(write_gguf(tmp_path / "model.gguf", config, random_tensors(config), metadata=metadata))
    assert checkpoint.spec.eos_token_ids == (5, 7, 46)  # <end_of_turn> is no control token here
    assert checkpoint.spec.bos_token_id == 1
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert checkpoint.spec.ropes == spec_from_config(config | {"rope_scaling": scaling}).ropes

"""The real models' files, where they are in the cache already."""

from __future__ import annotations

import gguf
import jax
import numpy as np

from jaxserve.config import ModelConfig
from jaxserve.models.loading.checkpoint import Checkpoint, open_checkpoint
from jaxserve.models.model import build_model
from tests.real_models import require_model


def real(alias: str) -> Checkpoint:
    require_model(alias)
    return open_checkpoint(ModelConfig(source=alias))


def raw(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """A tensor by the gguf package's own dequantiser, all rows at once."""
    assert checkpoint.gguf is not None
    tensor = checkpoint.gguf.tensors[name]
    return gguf.dequantize(np.asarray(checkpoint.gguf.rows(name)), tensor.type).reshape(tensor.shape)


def test_smollm2() -> None:
    checkpoint = real("smollm2-135m")
    spec = checkpoint.spec
    heads = spec.attention
    assert (spec.family, spec.num_layers, heads.num_heads, heads.num_kv_heads, heads.head_dim, spec.vocab_size) == ("llama", 30, 9, 3, 64, 49152)
    assert spec.tied
    assert (spec.norm_eps, spec.max_position, spec.eos_token_ids) == (1e-5, 8192, (2, 0))
    params = checkpoint.load_params(build_model(spec, dtype="float32", layers="scan"))
    np.testing.assert_array_equal(np.asarray(params["embed"]["values"]), raw(checkpoint, "token_embd.weight"))
    np.testing.assert_array_equal(np.asarray(params["layers"][0]["down"]["values"])[7], raw(checkpoint, "blk.7.ffn_down.weight"))
    interleaved = raw(checkpoint, "blk.3.attn_k.weight").reshape(3, 32, 2, 576)
    np.testing.assert_array_equal(np.asarray(params["layers"][0]["qkv"]["values"])[3, :, 3], interleaved.swapaxes(1, 2).reshape(3, 64, 576))
    assert all(bool(np.isfinite(np.asarray(leaf)).all()) for leaf in jax.tree.leaves(params))


def test_gemma3() -> None:
    checkpoint = real("gemma3-270m")
    spec = checkpoint.spec
    heads = spec.attention
    assert (spec.family, spec.num_layers, heads.num_heads, heads.num_kv_heads, heads.head_dim, spec.vocab_size) == ("gemma3", 18, 4, 1, 256, 262144)
    assert [layer.window for layer in spec.layers] == [None if (index + 1) % 6 == 0 else 512 for index in range(18)]
    assert (spec.norm_eps, spec.norm_offset, heads.scale, spec.eos_token_ids) == (1e-6, 1.0, 1 / 16, (1, 106))
    source = checkpoint.open_source()
    np.testing.assert_array_equal(source.read("model.norm.weight", slice(0, 640)), raw(checkpoint, "output_norm.weight") - 1)
    rows = slice(1000, 1100)
    np.testing.assert_array_equal(source.read("model.layers.2.mlp.down_proj.weight", slice(0, 640)), raw(checkpoint, "blk.2.ffn_down.weight"))
    np.testing.assert_array_equal(source.read("model.embed_tokens.weight", rows), raw(checkpoint, "token_embd.weight")[rows])

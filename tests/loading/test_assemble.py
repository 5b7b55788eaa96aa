"""Assembling parameters: every key accounted for, blocks, no copies, bounded memory."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.config import ModelConfig
from jaxserve.errors import CheckpointError
from jaxserve.models.hf_config import spec_from_config
from jaxserve.models.loading import assemble as assemble_module
from jaxserve.models.loading import parts
from jaxserve.models.loading.assemble import assemble
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.model import Model, build_model
from jaxserve.models.params import param_specs
from tests.loading.builders import MemorySource, random_tensors, tiny_config, write_folder

ROOT = Path(__file__).parents[2]


def model_of(config: Mapping[str, Any], **options: Any) -> Model:
    return build_model(spec_from_config(config), **({"dtype": "float32", "layers": "scan"} | options))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_blocks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch, kv_heads: int) -> None:
    config = tiny_config("llama", num_key_value_heads=kv_heads)
    tensors = random_tensors(config)
    whole = assemble(MemorySource(tensors), model_of(config))
    monkeypatch.setattr(assemble_module, "BLOCK_VALUES", 1000)
    source = MemorySource(tensors)
    blocks = assemble(source, model_of(config))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), whole, blocks)
    # Never less than one KV head's rows of a projection.
    assert source.largest_read <= max(1000, 4 // kv_heads * 32 * 64)


def test_forms_and_dtypes_agree() -> None:
    config = tiny_config("gemma3")
    source = MemorySource(random_tensors(config))
    scan, unroll = assemble(source, model_of(config)), assemble(source, model_of(config, layers="unroll"))
    (stack,) = scan["layers"]
    for layer in range(2):
        jax.tree.map(lambda a, b, layer=layer: np.testing.assert_array_equal(np.asarray(a[layer]), np.asarray(b)), stack, unroll["layers"][layer])
    half = assemble(source, model_of(config, dtype="bfloat16"))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(half)} == {"bfloat16"}
    abstract = model_of(config).abstract_params()
    assert jax.tree.structure(abstract) == jax.tree.structure(scan)
    assert all(a.shape == b.shape for a, b in zip(jax.tree.leaves(abstract), jax.tree.leaves(scan), strict=True))


def test_cpu_takes_over_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses: set[int] = set()
    original = parts._aligned_buffer

    def noting(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        buffer = original(shape, dtype)
        addresses.add(buffer.ctypes.data)
        return buffer

    monkeypatch.setattr(parts, "_aligned_buffer", noting)
    config = tiny_config("llama")
    params = assemble(MemorySource(random_tensors(config)), model_of(config, dtype="bfloat16"))
    assert {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)} == addresses


def test_progress_reaches_the_end() -> None:
    config = tiny_config("qwen2")
    calls: list[tuple[str, int, int]] = []
    assemble(MemorySource(random_tensors(config)), model_of(config), progress=lambda *call: calls.append(call))
    assert [call[1] for call in calls] == sorted(call[1] for call in calls)
    total = sum(value.size for value in random_tensors(config).values())
    assert calls[-1] == ("loading weights", total, total)


def test_all_problems_in_one_error() -> None:
    config = tiny_config("llama")
    tensors = random_tensors(config)
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((5, 64), np.float32)
    tensors |= {f"visual.{index}": np.zeros(1, np.float32) for index in range(30)}
    with pytest.raises(CheckpointError) as caught:
        assemble(MemorySource(tensors), model_of(config))
    message = str(caught.value)
    assert "1 missing: model.norm.weight" in message
    assert "30 not part of the model: visual.0, visual.1, visual.10," in message
    assert message.count("visual.") == 20
    assert "and 10 more" in message
    assert "1 of another shape: model.layers.0.mlp.up_proj.weight is [5, 64], expected [96, 64]" in message


def test_tolerated_extras() -> None:
    config = tiny_config("llama", tie_word_embeddings=True)
    tensors = random_tensors(config)
    extras = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(16, np.float32), "lm_head.weight": tensors["model.embed_tokens.weight"]}
    assemble(MemorySource(tensors | extras), model_of(config))
    extras["lm_head.weight"] = extras["lm_head.weight"] + 1
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        assemble(MemorySource(tensors | extras), model_of(config))


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
def test_folder_dtypes_and_shards(tmp_path: Path, dtype: Any) -> None:
    config = tiny_config("qwen3")
    tensors = random_tensors(config)
    expected = assemble(MemorySource(tensors), model_of(config))
    folder = write_folder(tmp_path, config, {name: value.astype(dtype) for name, value in tensors.items()}, num_shards=3)
    loaded = open_checkpoint(ModelConfig(source=str(folder))).load_params(model_of(config))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), expected, loaded)


def test_opening_imports_no_jax(tmp_path: Path) -> None:
    write_folder(tmp_path, tiny_config("llama"), random_tensors(tiny_config("llama")))
    code = (
        "import sys\nfrom jaxserve.config import ModelConfig\nfrom jaxserve.models.loading.checkpoint import open_checkpoint\n"
        f"open_checkpoint(ModelConfig(source={str(tmp_path)!r})).open_source()\nsys.exit('jax' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def sparse_checkpoint(folder: Path, config: Mapping[str, Any]) -> None:
    """A bfloat16 checkpoint of zeros that takes no space on the disk."""
    spec = spec_from_config(config)
    shapes = {piece.name.format(layer=layer): piece.shape for param in param_specs(spec).values() for piece in param.pieces for layer in param.indices}
    entries, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + 2 * int(np.prod(shape))
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    head = json.dumps(entries).encode()
    (folder / "config.json").write_text(json.dumps(dict(config)))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.truncate(8 + len(head) + offset)


def measured(folder: Path, layers: str, mesh: str = "data=1,model=1") -> dict[str, int]:
    script = Path(__file__).with_name("peak_memory.py")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), str(folder), "--layers", layers, "--mesh", mesh]
    result = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(result.stdout)


LINUX = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
WIDE = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 1, "head_dim": 64, "intermediate_size": 4096}


@LINUX
@pytest.mark.parametrize(("layers", "mesh"), [("scan", "data=1,model=1"), ("unroll", "data=1,model=1"), ("scan", "data=2,model=4")])
def test_peak_memory(tmp_path: Path, layers: str, mesh: str) -> None:
    """256 MB, half of it one tensor. The two data ranks share the host's buffers."""
    sparse_checkpoint(tmp_path, tiny_config("llama", **WIDE, num_hidden_layers=4, vocab_size=65536, tie_word_embeddings=True))
    result = measured(tmp_path, layers, mesh)
    assert result["params"] > 220e6
    assert result["peak"] <= 1.3 * result["params"]


@LINUX
@pytest.mark.slow
@pytest.mark.parametrize("layers", ["scan", "unroll"])
def test_peak_memory_of_4_gib(tmp_path: Path, layers: str) -> None:
    sizes = {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192}
    sparse_checkpoint(tmp_path, tiny_config("llama", **sizes, num_hidden_layers=28, vocab_size=131072))
    result = measured(tmp_path, layers)
    assert result["params"] >= 4 * 2**30
    assert result["peak"] <= 1.3 * result["params"]


def test_empty_tensor_is_misshapen(tmp_path: Path) -> None:
    config = tiny_config("llama")
    tensors = random_tensors(config) | {"model.norm.weight": np.zeros(0, np.float32)}
    write_folder(tmp_path, config, random_tensors(config))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is \[0\], expected \[64\]"):
        open_checkpoint(ModelConfig(source=str(tmp_path))).load_params(model_of(config))

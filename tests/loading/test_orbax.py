"""Conversion to a self-contained Orbax folder, and loading it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.config import ModelConfig
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.models.loading import orbax_source
from jaxserve.models.loading.assemble import assemble
from jaxserve.models.loading.checkpoint import Checkpoint, open_checkpoint
from jaxserve.models.loading.convert import convert
from jaxserve.models.loading.orbax_format import write_orbax
from jaxserve.models.model import build_model
from jaxserve.models.params import Params
from jaxserve.models.spec import LayerGroup
from jaxserve.tokenizer import load_tokenizer
from tests.loading.builders import random_tensors, tiny_config, write_folder, write_gguf

BYTES = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
ALPHABET = [chr(byte) for byte in BYTES] + [chr(0x100 + index) for index in range(256 - len(BYTES))]
TOKENS = ["<|end|>", "<|start|>", *ALPHABET, "he", "ll", "hell"]
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3] + [1] * (len(TOKENS) - 2),
    "tokenizer.ggml.merges": ["h e", "l l", "he ll"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.chat_template": "{% for m in messages %}<|start|>{{ m.content }}<|end|>{% endfor %}",
}


def opened(path: Path) -> Checkpoint:
    return open_checkpoint(ModelConfig(source=str(path)))


def load(checkpoint: Checkpoint, **options: Any) -> Params:
    return checkpoint.load_params(build_model(checkpoint.spec, **({"dtype": "bfloat16", "layers": "scan"} | options)))


def assert_same(a: Params, b: Params) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


def test_gguf_to_orbax(tmp_path: Path) -> None:
    config = tiny_config("llama", vocab_size=len(TOKENS))
    factors = np.linspace(1, 8, 16, dtype=np.float32)
    original = opened(write_gguf(tmp_path / "m.gguf", config, random_tensors(config), metadata=TOKENIZER, extra={"rope_freqs.weight": factors}))
    folder = convert(ModelConfig(source=str(original.path)), tmp_path / "new" / "converted")
    original.path.unlink()  # the folder stands by itself
    converted = opened(folder)
    assert converted.format == "orbax"
    assert converted.spec == original.spec
    assert sorted(path.name for path in folder.parent.iterdir()) == ["converted"]
    tokenizer = load_tokenizer(converted)
    text = "hello 123 <|start|>é😀"
    assert tokenizer.encode(text)[:2] == [TOKENS.index("hell"), TOKENS.index("o")]
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert tokenizer.encode_chat([{"role": "user", "content": "o"}]) == [1, TOKENS.index("o"), 0]
    assert tokenizer.eos_token_ids == (0,)


def test_folder_to_orbax_in_every_form(tmp_path: Path) -> None:
    config = tiny_config("gemma3")
    original = opened(write_folder(tmp_path / "folder", config, random_tensors(config)))
    (original.path / "generation_config.json").write_text('{"temperature": 0.5, "eos_token_id": [3, 4]}')
    converted = opened(convert(ModelConfig(source=str(original.path)), tmp_path / "converted"))
    assert converted.generation_defaults == {"temperature": 0.5}
    assert converted.spec == dataclasses.replace(original.spec, eos_token_ids=(3, 4))
    for layers in ("scan", "unroll"):
        for dtype in ("bfloat16", "float32"):
            assert_same(load(converted, layers=layers, dtype=dtype), load(original, layers=layers, dtype=dtype))
    calls: list[tuple[str, int, int]] = []
    converted.load_params(build_model(converted.spec, dtype="bfloat16", layers="scan"), progress=lambda *call: calls.append(call))
    assert calls[-1][1] == calls[-1][2] > 0


def test_each_stack_of_layers_is_kept_under_its_own_number(tmp_path: Path) -> None:
    spec = opened(write_folder(tmp_path / "folder", tiny_config("llama"), {})).spec
    (group,) = spec.groups
    unit = (*group.unit, dataclasses.replace(group.unit[0], mlp=dataclasses.replace(group.unit[0].mlp, width=40)))
    spec = dataclasses.replace(spec, groups=(group, LayerGroup(unit=unit, layers=group.layers * 2)))
    model = build_model(spec, dtype="float32", layers="scan")
    params = model.random_params(1, randomize_all=True)
    write_orbax(params, model, tmp_path)
    source = orbax_source.OrbaxSource(tmp_path, spec)
    assert source.read("model.layers.5.mlp.down_proj.weight", slice(0, 64)).tolist() == np.asarray(params["layers"][2]["down"]["values"])[1].tolist()
    assert_same(assemble(source, model), params)
    unrolled = build_model(spec, dtype="float32", layers="unroll")
    assert_same(assemble(source, unrolled), unrolled.random_params(1, randomize_all=True))


def test_keys_are_accounted_for(tmp_path: Path) -> None:
    config = tiny_config("llama")
    write_folder(tmp_path / "folder", config, random_tensors(config))
    convert(ModelConfig(source=str(tmp_path / "folder")), tmp_path / "converted")
    (tmp_path / "converted" / "config.json").write_text(json.dumps(tiny_config("qwen3", tie_word_embeddings=True, vocab_size=50)))
    with pytest.raises(CheckpointError) as caught:
        load(opened(tmp_path / "converted"))
    for words in ("2 missing: layers.k_norm, layers.q_norm", "1 not part of the model: head", "1 of another shape: embed is [48, 64], expected [50, 64]"):
        assert words in str(caught.value)


def test_broken_weights(tmp_path: Path) -> None:
    config = tiny_config("llama")
    write_folder(tmp_path / "folder", config, random_tensors(config))
    folder = convert(ModelConfig(source=str(tmp_path / "folder")), tmp_path / "converted")
    shutil.rmtree(folder / "orbax")
    (folder / "orbax").mkdir()
    with pytest.raises(CheckpointError, match="orbax"):
        load(opened(folder))


def test_destination_exists(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exists already"):
        convert(ModelConfig(source=str(tmp_path)), tmp_path)


def test_chunks_are_small_enough_to_be_read_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    config = tiny_config("llama", num_hidden_layers=3)
    folder = write_folder(tmp_path / "folder", config, random_tensors(config))
    checkpoint = opened(convert(ModelConfig(source=str(folder)), tmp_path / "converted"))
    largest = 2 * (2 + 2) * 32 * 64 * 2  # queries, keys and values of one layer
    monkeypatch.setattr(orbax_source, "CHUNK_BYTES", largest)
    checkpoint.open_source()
    assert not caplog.records
    monkeypatch.setattr(orbax_source, "CHUNK_BYTES", largest - 1)
    checkpoint.open_source()
    assert "packed in chunks of up to" in caplog.text

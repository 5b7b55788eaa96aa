"""Tokenizers of Hugging Face folders: tokenizer.json decides, whatever config.json's model type is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxserve.config import ModelConfig
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.gguf_tokenizer import GGUFTokenizer
from jaxserve.tokenizer import Tokenizer, load_tokenizer
from tests.loading.builders import FAMILIES, tiny_config
from tests.tokenizer.vocabularies import CORPUS, byte_level, sentencepiece

KINDS = {"smollm": lambda: byte_level("smollm"), "llama3": lambda: byte_level("llama-bpe"), "sentencepiece": sentencepiece}


def folder_tokenizer(folder: Path, family: str, parts: GGUFTokenizer) -> Tokenizer:
    (folder / "config.json").write_text(json.dumps(tiny_config(family, vocab_size=400)))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **parts.special_tokens}))
    return load_tokenizer(open_checkpoint(ModelConfig(source=str(folder))))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_tokenizer_json(tmp_path: Path, family: str, kind: str) -> None:
    parts = KINDS[kind]()
    parts.backend.enable_truncation(3)
    parts.backend.enable_padding(pad_token=parts.special_tokens["eos_token"])
    parts.backend.save(str(tmp_path / "tokenizer.json"))
    parts.backend.no_truncation()
    parts.backend.no_padding()
    loaded = folder_tokenizer(tmp_path, family, parts)
    for text in CORPUS:
        for special in (True, False):
            assert loaded.encode(text, add_special_tokens=special) == parts.backend.encode(text, add_special_tokens=special).ids
    assert loaded.bos_token_id == parts.bos_token_id
    assert loaded.vocab_size == parts.backend.get_vocab_size()


def test_without_tokenizer_json(tmp_path: Path) -> None:
    """Old Qwen folders hold vocab.json and merges.txt only."""
    parts = byte_level("qwen2")
    parts.backend.model.save(str(tmp_path))
    loaded = folder_tokenizer(tmp_path, "qwen2", parts)
    for text in CORPUS:
        assert loaded.encode(text) == parts.backend.encode(text).ids
        assert loaded.decode(loaded.encode(text)) == parts.backend.decode(parts.backend.encode(text).ids)

"""Tiny vocabularies of the two kinds of tokenizer, as GGUF metadata."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.models.loading.gguf_file import GGUFFile, GGUFTensor
from jaxserve.models.loading.gguf_tokenizer import GGUFTokenizer, gguf_tokenizer
from jaxserve.tokenizer import Tokenizer

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_ALPHABET = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(0x100 + index) for index, byte in enumerate(_OTHERS)}
"""GPT-2's characters for bytes."""

CORPUS = (
    "",
    " ",
    "Hello, world! 12345 it's 3.14",
    "  leading and trailing  ",
    "tabs\tand\n\nnewlines\r\n",
    "日本語のテキスト、中文文本。",
    "한국어 텍스트",
    "Привет, мир! Ελληνικά",
    "العربية עברית हिन्दी ไทย",
    "emoji 😀👩‍👩‍👧‍👦🇩🇪 ¡ñandú!",
    "e\u0301 combining, \u00e9 composed",
    "def f(x):\n    return x**2  # <0x41> ▁",
    "x" * 50,
)


def _file(metadata: dict[str, Any], vocab_size: int) -> GGUFFile:
    embedding = GGUFTensor(name="token_embd.weight", shape=(vocab_size, 1), type=0, offset=0, num_bytes=0)  # type: ignore[arg-type]  # only its shape is read
    return GGUFFile(path=Path("test.gguf"), metadata={f"tokenizer.{key}": value for key, value in metadata.items()}, tensors={"token_embd.weight": embedding})


def byte_level(pre: str = "gpt-2", **changes: Any) -> GGUFTokenizer:
    """Byte-level BPE: four special tokens, the bytes, a few merges."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2", "12 3", "Ġ Ġ", "e Ì", "ð Ł", "ðŁ ĺ"]
    tokens = ["<|end|>", "<|start|>", "<tool>", "<｜odd▁one｜>", *BYTE_ALPHABET.values(), *(merge.replace(" ", "") for merge in merges)]
    metadata = {
        "ggml.model": "gpt2",
        "ggml.pre": pre,
        "ggml.tokens": tokens,
        "ggml.token_type": np.array([3, 3, 4, 3] + [1] * (len(tokens) - 4), np.int32),
        "ggml.merges": merges,
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 0,
    } | {f"ggml.{key}" if key != "chat_template" else key: value for key, value in changes.items()}
    return gguf_tokenizer(_file(metadata, len(tokens)))


def sentencepiece(**changes: Any) -> GGUFTokenizer:
    """SentencePiece BPE with byte fallback; runs of spaces and newlines are user-defined, as in Gemma."""
    pieces = [*"▁helowrd日本éab", "▁w", "ll", "he", "hell", "hello", "▁hello", "▁wo", "日本", "ab", "aba", "ba", "."]
    special = ["<unk>", "<s>", "</s>", "\n", "\n\n", "  ", "   "]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    metadata = {
        "ggml.model": "llama",
        "ggml.tokens": tokens,
        "ggml.token_type": np.array([2, 3, 3, 4, 4, 4, 4] + [6] * 256 + [1] * len(pieces), np.int32),
        "ggml.scores": np.array([0.0] * (7 + 256) + [-float(index) for index in range(len(pieces))], np.float32),
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
    } | {f"ggml.{key}": value for key, value in changes.items()}
    return gguf_tokenizer(_file(metadata, len(tokens)))


def wrap(parts: GGUFTokenizer, **changes: Any) -> Tokenizer:
    """The tokenizer that a loaded file would give."""
    fields = {field.name: getattr(parts, field.name) for field in dataclasses.fields(parts) if field.name != "backend"}
    return Tokenizer(parts.backend, **(fields | {"eos_token_ids": (parts.backend.token_to_id(parts.special_tokens["eos_token"]),)} | changes))

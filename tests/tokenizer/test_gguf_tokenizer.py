"""Tokenizers from GGUF metadata: the splitters, SentencePiece's rules, BOS and EOS."""

from __future__ import annotations

import logging

import pytest
from tokenizers import Regex, pre_tokenizers

from jaxserve.errors import InvalidRequestError
from jaxserve.models.loading.gguf_tokenizer import SPLITTERS
from tests.tokenizer.vocabularies import CORPUS, byte_level, sentencepiece, wrap

EXAMPLE = "I'LL pay $1234.50, ok?\n\n  It's   été\t٣٤"


def words(pre: str, text: str) -> list[str]:
    """What the splitter makes of a text, as text."""
    backend = byte_level(pre).backend
    return [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]


EXPECTED = {
    "gpt-2": ["I", "'", "LL", " pay", " $", "1234", ".", "50", ",", " ok", "?", "\n\n ", " It", "'s", "  ", " été", "\t", "٣٤"],
    "smollm": ["I", "'", "LL", " pay", " $", "1", "2", "3", "4", ".", "5", "0", ",", " ok", "?", "\n\n ", " It", "'s", "  ", " été", "\t", "٣", "٤"],
    "llama-bpe": ["I", "'LL", " pay", " $", "123", "4", ".", "50", ",", " ok", "?\n\n", " ", " It", "'s", "  ", " été", "\t", "٣٤"],
    "qwen2": ["I", "'LL", " pay", " $", "1", "2", "3", "4", ".", "5", "0", ",", " ok", "?\n\n", " ", " It", "'s", "  ", " été", "\t", "٣", "٤"],
}


@pytest.mark.parametrize("pre", EXPECTED)
def test_splitters(pre: str) -> None:
    assert words(pre, EXAMPLE) == EXPECTED[pre]


def test_smollm_is_the_original_pipeline() -> None:
    """SmolLM2's tokenizer.json: digits one by one, then GPT-2's own splitting."""
    original = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    ours = byte_level("smollm").backend.pre_tokenizer
    for text in (*CORPUS, EXAMPLE):
        assert ours.pre_tokenize_str(text) == original.pre_tokenize_str(text)


def test_tekken_splits_by_case() -> None:
    assert words("tekken", "HelloWorld fooBAR 123") == ["Hello", "World", " foo", "BAR", " ", "1", "2", "3"]


@pytest.mark.parametrize("pre", SPLITTERS)
def test_every_splitter_loses_nothing(pre: str) -> None:
    tokenizer = wrap(byte_level(pre))
    for text in CORPUS:
        if not SPLITTERS[pre].compose or "\u0301" not in text:
            assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    for pattern in SPLITTERS[pre].patterns:
        Regex(pattern)


def test_digits_one_by_one() -> None:
    """The vocabulary has 12 and 123; GPT-2 uses them, SmolLM2 must not."""
    assert len(byte_level("gpt-2").backend.encode("123").ids) == 1
    assert len(byte_level("smollm").backend.encode("123").ids) == 3


def test_qwen_composes_unicode() -> None:
    assert wrap(byte_level("qwen2")).encode("e\u0301") == wrap(byte_level("qwen2")).encode("\u00e9")
    assert wrap(byte_level("gpt-2")).encode("e\u0301") != wrap(byte_level("gpt-2")).encode("\u00e9")


def test_bos_and_eos() -> None:
    assert wrap(byte_level()).encode("he")[:1] != [1]  # BPE adds none unless told
    assert wrap(byte_level("llama-bpe")).encode("he")[0] == 1  # Llama 3 does
    assert wrap(byte_level("llama-bpe", add_bos_token=False)).encode("he")[0] != 1
    both = wrap(byte_level(add_bos_token=True, add_eos_token=True))
    assert both.encode("he")[:1] + both.encode("he")[-1:] == [1, 0]
    assert both.encode("he", add_special_tokens=False) == both.encode("he")[1:-1]
    assert wrap(sentencepiece()).encode("he")[0] == 1  # SentencePiece does unless told


def test_bos_once(caplog: pytest.LogCaptureFixture) -> None:
    """vllm#27515."""
    tokenizer = wrap(sentencepiece(add_space_prefix=False))
    with caplog.at_level(logging.WARNING):
        assert tokenizer.encode("<s>hello") == tokenizer.encode("hello")
    assert "'<s>' itself" in caplog.text
    smol = wrap(byte_level("smollm"))  # adds none: what a user writes twice stays twice
    assert smol.encode("<|start|><|start|>") == [1, 1]


def pieces_of(text: str, **options: object) -> list[str]:
    return sentencepiece(add_bos_token=False, **options).backend.encode(text).tokens


def test_sentencepiece() -> None:
    assert pieces_of("hello world", add_space_prefix=False) == ["hello", "▁wo", "r", "l", "d"]
    assert pieces_of("hello world") == ["▁hello", "▁wo", "r", "l", "d"]
    # User-defined runs of spaces and newlines come first, longest first.
    assert pieces_of("a    b\n\n\nh", add_space_prefix=False) == ["a", "   ", "▁", "b", "\n\n", "\n", "h"]
    # No piece: bytes. A byte token's name in text is no byte.
    assert pieces_of("日本語", add_space_prefix=False) == ["日本", "<0xE8>", "<0xAA>", "<0x9E>"]
    assert "<0x41>" not in pieces_of("<0x41>")
    # The better score wins: "ab" (score -21) before "ba" (-23), then "aba" (-22).
    assert pieces_of("aba", add_space_prefix=False) == ["aba"]
    assert pieces_of("bab", add_space_prefix=False) == ["b", "ab"]
    assert pieces_of("hello<s>hello", add_space_prefix=False) == ["hello", "<s>", "hello"]
    assert pieces_of("") == []


def test_lone_surrogate() -> None:
    with pytest.raises(InvalidRequestError, match="not valid Unicode: a lone surrogate at character 1") as caught:
        wrap(byte_level()).encode("a\ud800")
    assert caught.value.param == "prompt"

"""Incremental decoding: whatever comes in whatever chunks, the joined stream is the text of all ids (user reports: streaming/detokenization)."""

from __future__ import annotations

import random

import msgspec
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models

from jaxserve.detokenizer import TokenBytes
from jaxserve.errors import UnsupportedModelError
from jaxserve.tokenizer import Tokenizer
from tests.tokenizer.vocabularies import CORPUS, byte_level, sentencepiece, wrap


def metaspace() -> Tokenizer:
    """A word-piece model with visible spaces, as T5's or XLM's: no byte fallback."""
    vocab = {token: index for index, token in enumerate(["<unk>", "▁", "▁Hello", "▁world", "lo", ",", "é", "▁é"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    return Tokenizer(backend)


KINDS = {
    "byte-level": lambda: wrap(byte_level()),
    "sentencepiece": lambda: wrap(sentencepiece(add_space_prefix=False)),
    "sentencepiece with a space in front": lambda: wrap(sentencepiece()),
    "metaspace": metaspace,
}


def stream(tokenizer: Tokenizer, ids: list[int], rng: random.Random, **options: bool) -> str:
    detokenizer = tokenizer.detokenizer([], **options)
    text, start = "", 0
    while start < len(ids):
        size = rng.randint(1, 4)
        text += detokenizer.push(ids[start : start + size])
        start += size
    return text + detokenizer.finish()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
def test_stream_equals_decode_for_any_ids(kind: str, skip: bool) -> None:
    """Random ids are mostly broken UTF-8, with special tokens in between and ids beyond the vocabulary."""
    tokenizer = KINDS[kind]()
    rng = random.Random(0)
    for _ in range(300):
        ids = [rng.randrange(tokenizer.vocab_size + 5) for _ in range(rng.randrange(30))]
        assert stream(tokenizer, ids, rng, skip_special_tokens=skip) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_that_was_sent_to_another_process_streams_the_same(kind: str) -> None:
    """vllm#984, where a front end in a process of its own makes the text."""
    tokenizer = KINDS[kind]()
    data = tokenizer.to_data()
    sent = Tokenizer.of(msgspec.msgpack.decode(msgspec.msgpack.encode(data), type=type(data)))
    rng = random.Random(4)
    for _ in range(100):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(30))]
        for skip in (True, False):
            assert stream(sent, ids, rng, skip_special_tokens=skip) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece", "sentencepiece with a space in front"])
def test_round_trip(kind: str) -> None:
    tokenizer = KINDS[kind]()
    rng = random.Random(1)
    for text in CORPUS:
        if "space in front" in kind and ("  " in text or "\n" in text):
            continue  # text after a user-defined token gets a space of its own, as in llama.cpp
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == stream(tokenizer, ids, rng) == text.replace("▁", " " if "sentencepiece" in kind else "▁")


@pytest.mark.parametrize("kind", KINDS)
def test_same_as_the_backend_on_whole_characters(kind: str) -> None:
    tokenizer = KINDS[kind]()
    rng = random.Random(2)
    pieces = TokenBytes(tokenizer._backend)
    whole = [index for index in range(tokenizer.vocab_size) if _is_text(pieces.of(index))]
    for _ in range(200):
        ids = [rng.choice(whole) for _ in range(rng.randrange(1, 20))]
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == tokenizer._backend.decode(ids, skip_special_tokens=skip)


def test_same_as_the_backend_on_any_bytes() -> None:
    """Byte-level decoders replace broken bytes as Python does."""
    tokenizer = KINDS["byte-level"]()
    rng = random.Random(3)
    for _ in range(500):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(1, 20))]
        assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer._backend.decode(ids, skip_special_tokens=False)


def _is_text(data: bytes) -> bool:
    try:
        return bool(data.decode())
    except UnicodeDecodeError:
        return False


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_characters_come_whole(kind: str) -> None:
    """vllm#8627: one byte a token, no replacement character until it is certain."""
    tokenizer = KINDS[kind]()
    for text in ("日本", "😀é👩‍👩‍👧"):
        ids = byte_ids(tokenizer, text.encode())
        detokenizer = tokenizer.detokenizer([])
        deltas = [detokenizer.push([index]) for index in ids]
        assert "".join(deltas) == text
        assert detokenizer.finish() == ""
        assert all("\ufffd" not in delta for delta in deltas)
        assert sum(map(bool, deltas)) == len(text)


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_half_a_character_at_the_end_is_one_replacement(kind: str) -> None:
    tokenizer = KINDS[kind]()
    ids = byte_ids(tokenizer, b"ok" + "😀".encode()[:3])
    detokenizer = tokenizer.detokenizer([])
    assert detokenizer.push(ids) == "ok"
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""
    assert tokenizer.decode(ids) == "ok\ufffd"


def test_prompt_is_never_emitted() -> None:
    """vllm#48853: a prompt that ends inside a character."""
    tokenizer = KINDS["byte-level"]()
    emoji = byte_ids(tokenizer, "😀".encode())
    prompt = [*tokenizer.encode("a long prompt 日本"), *emoji[:2]]

    completed = tokenizer.detokenizer(prompt)
    assert [completed.push([index]) for index in emoji[2:]] == ["", "😀"]
    assert completed.push(tokenizer.encode("!")) == "!"
    assert completed.finish() == ""

    abandoned = tokenizer.detokenizer(prompt)
    assert abandoned.push(tokenizer.encode("hi")) == "hi"

    half = tokenizer.detokenizer(prompt)
    assert half.push(emoji[2:3]) == ""
    assert half.finish() == "\ufffd"  # what was generated, and not the prompt's bytes

    broken = tokenizer.detokenizer(prompt)
    assert broken.push([emoji[2], *tokenizer.encode("x")]) == "\ufffdx"

    silent = tokenizer.detokenizer(prompt)
    assert silent.finish() == ""


def test_leading_space_belongs_to_the_middle_of_a_text() -> None:
    """vllm#984: a first piece's space is dropped at the beginning of a text only."""
    tokenizer = KINDS["sentencepiece with a space in front"]()
    hello = tokenizer._backend.token_to_id("▁hello")
    assert tokenizer.decode([hello, hello]) == "hello hello"
    after_bos, after_text = tokenizer.detokenizer([tokenizer.bos_token_id]), tokenizer.detokenizer([tokenizer.bos_token_id, hello])
    assert after_bos.push([hello]) == "hello"
    assert after_text.push([hello]) == " hello"


def test_special_tokens() -> None:
    tokenizer = KINDS["byte-level"]()
    ids = tokenizer.encode("a<|start|>b<tool>c<｜odd▁one｜>", add_special_tokens=False)
    assert tokenizer.decode(ids) == "ab<tool>c"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|start|>b<tool>c<｜odd▁one｜>"


def test_special_token_inside_a_character_does_not_break_it() -> None:
    tokenizer = KINDS["byte-level"]()
    first, *rest = byte_ids(tokenizer, "é".encode())
    assert tokenizer.decode([first, 1, *rest]) == "é"
    assert tokenizer.decode([first, 1, *rest], skip_special_tokens=False) == "\ufffd<|start|>\ufffd"


def test_work_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = KINDS["sentencepiece"]()
    looked_up: list[int] = []
    original = TokenBytes.of
    monkeypatch.setattr(TokenBytes, "of", lambda self, index: looked_up.append(index) or original(self, index))
    detokenizer = tokenizer.detokenizer([270] * 100_000)
    assert len(looked_up) <= 4
    for _ in range(5000):
        detokenizer.push([271])
    assert len(looked_up) <= 5004
    assert len(detokenizer._pending) <= 3


def test_unknown_decoder() -> None:
    backend = tokenizers.Tokenizer(models.WordPiece(vocab={"a": 0}, unk_token="a"))
    with pytest.raises(UnsupportedModelError, match="no decoder"):
        Tokenizer(backend)
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModelError, match="WordPiece"):
        Tokenizer(backend)


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One id a byte."""
    pieces = TokenBytes(tokenizer._backend)
    ids = {pieces.of(index): index for index in reversed(range(tokenizer.vocab_size))}
    return [ids[bytes([byte])] for byte in data]

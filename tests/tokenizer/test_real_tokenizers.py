"""The tokenizers of the real models, where their files are in the cache already."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from jaxserve.config import ModelConfig
from jaxserve.errors import InvalidRequestError
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.tokenizer import Tokenizer, load_tokenizer
from tests.real_models import require_model
from tests.tokenizer.vocabularies import CORPUS


def real(alias: str) -> Tokenizer:
    require_model(alias)
    return load_tokenizer(open_checkpoint(ModelConfig(source=alias)))


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    return real("smollm2-135m")


@pytest.fixture(scope="module")
def gemma() -> Tokenizer:
    return real("gemma3-270m")


def tokens(tokenizer: Tokenizer, text: str) -> list[str]:
    return tokenizer._backend.encode(text, add_special_tokens=False).tokens


def assert_round_trips(tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    for text in (*CORPUS, " ".join(CORPUS)):
        ids = tokenizer.encode(text, add_special_tokens=False)
        expected = text.replace("▁", " ") if "▁" not in tokenizer.decode(ids) else text
        assert tokenizer.decode(ids) == expected
        cut = rng.randrange(len(ids) + 1)
        detokenizer = tokenizer.detokenizer([])
        assert "".join([*map(detokenizer.push, (ids[:cut], ids[cut:])), detokenizer.finish()]) == expected


class TestSmolLM2:
    def test_ids(self, smollm: Tokenizer) -> None:
        assert smollm.vocab_size == 49152
        assert smollm.encode("Hello world 12345") == [19556, 905, 216, 33, 34, 35, 36, 37]
        assert tokens(smollm, "It's 2026!") == ["It", "'s", "Ġ", "2", "0", "2", "6", "!"]
        assert smollm.encode("<|im_start|>user\nhi<|im_end|>") == [1, 4093, 198, 6004, 2]
        assert smollm.eos_token_ids == (2, 0)

    def test_same_as_the_original_pipeline(self, smollm: Tokenizer) -> None:
        """The original tokenizer.json: digits one by one, then GPT-2's own regular expression; the same vocabulary and merges."""
        checkpoint = open_checkpoint(ModelConfig(source="smollm2-135m"))
        assert checkpoint.gguf is not None
        vocab = {token: index for index, token in enumerate(checkpoint.gguf.metadata["tokenizer.ggml.tokens"])}
        merges = [tuple(merge.split(" ")) for merge in checkpoint.gguf.metadata["tokenizer.ggml.merges"]]
        original = Backend(models.BPE(vocab=vocab, merges=merges))
        original.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
        for text in (*CORPUS, " ".join(CORPUS)):
            assert smollm.encode(text) == original.encode(text).ids

    def test_round_trips(self, smollm: Tokenizer) -> None:
        assert_round_trips(smollm)

    def test_chat(self, smollm: Tokenizer) -> None:
        text = smollm.render_chat([{"role": "user", "content": "What is the capital of France?"}])
        assert text == (
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
            "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
        )
        ids = smollm.encode_chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}])
        assert ids.count(1) == 3
        assert smollm.decode(ids, skip_special_tokens=False).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>")
        assert smollm.template_source == "GGUF metadata"


class TestGemma3:
    def test_ids(self, gemma: Tokenizer) -> None:
        assert gemma.vocab_size == 262144
        assert gemma.encode("Hello world 12") == [2, 9259, 1902, 236743, 236770, 236778]
        assert tokens(gemma, "a    b\n\nc") == ["a", "    ", "b", "\n\n", "c"]
        assert gemma.encode("<start_of_turn>user", add_special_tokens=False) == [105, 2364]
        assert gemma.encode("<bos>Hello") == gemma.encode("Hello")
        assert gemma.eos_token_ids == (1, 106)

    def test_bytes(self, gemma: Tokenizer) -> None:
        rare = "\U00012345"
        ids = gemma.encode(rare, add_special_tokens=False)
        assert [gemma._backend.id_to_token(index) for index in ids] == [f"<0x{byte:02X}>" for byte in rare.encode()]
        assert gemma.decode(ids) == rare

    def test_round_trips(self, gemma: Tokenizer) -> None:
        assert_round_trips(gemma)

    def test_no_chat(self, gemma: Tokenizer) -> None:
        with pytest.raises(InvalidRequestError, match="no chat template"):
            gemma.encode_chat([{"role": "user", "content": "hi"}])

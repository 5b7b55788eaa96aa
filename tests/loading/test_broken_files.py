"""No file can make the readers crash, hang or allocate without bound: what is wrong with it is one CheckpointError that says so."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jaxserve.config import ModelConfig
from jaxserve.errors import CheckpointError, ModelError
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.gguf_file import open_gguf
from jaxserve.models.loading.gguf_tokenizer import gguf_tokenizer
from jaxserve.models.loading.safetensors_source import SafetensorsSource
from tests.loading.builders import random_tensors, tiny_config, write_folder, write_gguf

CONFIG = tiny_config("llama", num_hidden_layers=1)
TOKENS = ["<unk>", "<s>", "</s>", "a", "b", "ab", "c", "abc"] + [f"x{index}" for index in range(40)]
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [2, 3, 3] + [1] * 45,
    "tokenizer.ggml.merges": ["a b", "ab c"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def header(num_tensors: int, num_keys: int, body: bytes, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + body


def tensor(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def key(name: str, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


PADDING = bytes(256)
CRAFTED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cannot be read as GGUF"),
    "no magic": (b"GGML" + PADDING, "not a GGUF file"),
    "only magic": (b"GGUF", "truncated: the version"),
    "old version": (header(0, 0, b"", version=1), "version 1; supported are 2, 3"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "tensor count": (header(2**62, 0, PADDING), f"tensor count is {2**62}"),
    "metadata count": (header(0, 2**62, PADDING), f"metadata count is {2**62}"),
    "key length": (header(0, 1, struct.pack("<Q", 2**63) + PADDING), f"length of the key of metadata entry 0 is {2**63}"),
    "empty key": (header(0, 1, key("", 4, PADDING)), "has 0 characters"),
    "key not UTF-8": (header(0, 1, struct.pack("<Q", 2) + b"\xff\xfe" + PADDING), "not valid UTF-8"),
    "value type": (header(0, 1, key("k", 99, PADDING)), "'k' has the unknown type 99"),
    "string length": (header(0, 1, key("k", 8, struct.pack("<Q", 10**9))), "length of the value of 'k' is 1000000000"),
    "array length": (header(0, 1, key("k", 9, struct.pack("<IQ", 5, 2**61)) + PADDING), "length of 'k'"),
    "array bytes": (header(0, 1, key("k", 9, struct.pack("<IQ", 11, 200)) + PADDING), "needs 1600 bytes"),
    "array of strings": (header(0, 1, key("k", 9, struct.pack("<IQ", 8, 10**6)) + PADDING), "length of 'k' is 1000000"),
    "array element type": (header(0, 1, key("k", 9, struct.pack("<IQ", 77, 1)) + PADDING), "unknown type 77"),
    "array of arrays": (header(0, 1, key("k", 9, struct.pack("<IQ", 9, 1)) + PADDING), "array of arrays"),
    "key twice": (header(0, 2, key("k", 4, bytes(4)) * 2 + PADDING), "'k' appears twice"),
    "alignment": (header(0, 1, key("general.alignment", 4, struct.pack("<I", 0)) + PADDING), "general.alignment is 0"),
    "alignment type": (header(0, 1, key("general.alignment", 8, string("x")) + PADDING), "general.alignment is 'x'"),
    "tensor type": (header(1, 0, tensor("t", (32,), 999, 0) + PADDING), "'t' has the unknown type 999"),
    "tensor rank": (header(1, 0, string("t") + struct.pack("<I", 2**31) + PADDING), "dimensions"),
    "tensor size": (header(1, 0, tensor("t", (2**40, 2**20), 0, 0) + PADDING), "truncated, or a false offset"),
    "tensor size wraps": (header(1, 0, tensor("t", (2**32, 2**32, 2**2), 0, 0) + PADDING), "truncated, or a false offset"),
    "tensor offset": (header(1, 0, tensor("t", (8,), 0, 2**40) + PADDING), "truncated, or a false offset"),
    "tensor offset unaligned": (header(1, 0, tensor("t", (8,), 0, 4) + PADDING), "not a multiple of the alignment"),
    "tensor empty": (header(1, 0, tensor("t", (8, 0), 0, 0) + PADDING), "empty shape"),
    "block size": (header(1, 0, tensor("t", (33,), 2, 0) + PADDING), "not a multiple of the 32"),
    "tensor twice": (header(2, 0, tensor("t", (8,), 0, 0) + tensor("t", (8,), 0, 32) + PADDING), "'t' appears twice"),
    "overlap": (header(2, 0, tensor("t", (16,), 0, 0) + tensor("u", (8,), 0, 32) + PADDING), "'t' and 'u' overlap"),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_gguf(tmp_path: Path, name: str) -> None:
    data, words = CRAFTED[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        open_gguf(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.fixture(scope="module")
def good_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return write_gguf(path, CONFIG, random_tensors(CONFIG), metadata=TOKENIZER).read_bytes()


@pytest.fixture(scope="module")
def good_safetensors(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = write_folder(tmp_path_factory.mktemp("folder"), CONFIG, random_tensors(CONFIG))
    return (folder / "model.safetensors").read_bytes()


def damaged(data: bytes, header_size: int, rng: np.random.Generator) -> bytes:
    """One random damage: a cut, flipped bytes, a wild number, or a deleted or doubled stretch; all in the header, where the structure is."""
    where = int(rng.integers(0, header_size))
    match rng.integers(0, 5):
        case 0:
            return data[: int(rng.integers(0, len(data)))]
        case 1:
            changed = bytearray(data)
            for index in rng.integers(0, header_size, int(rng.integers(1, 9))):
                changed[index] ^= 1 << int(rng.integers(0, 8))
            return bytes(changed)
        case 2:
            value = [0, 1, 255, 2**31, 2**63, 2**64 - 1][int(rng.integers(0, 6))]
            return data[:where] + struct.pack("<Q", value) + data[where + 8 :]
        case 3:
            return data[:where] + data[where + int(rng.integers(1, 64)) :]
        case _:
            return data[:where] + data[where : where + int(rng.integers(1, 64))] + data[where:]


def read_gguf_fully(path: Path) -> None:
    checkpoint = open_checkpoint(ModelConfig(source=str(path)))
    assert checkpoint.gguf is not None
    gguf_tokenizer(checkpoint.gguf)
    source = checkpoint.open_source()
    for name in source.keys():  # noqa: SIM118
        source.read(name, slice(0, source.shape(name)[0]))


def read_safetensors_fully(path: Path) -> None:
    source = SafetensorsSource(path.parent)
    for name in source.keys():  # noqa: SIM118
        if source.shape(name) and source.shape(name)[0]:
            source.read(name, slice(0, source.shape(name)[0]))


def assert_only_model_errors(read: Callable[[Path], None], path: Path, data: bytes, header_size: int, rounds: int) -> None:
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(rounds):
        path.write_bytes(damaged(data, header_size, rng))
        tracemalloc.start()
        try:
            read(path)  # harmless damage, such as another name in a description, may well be read
        except ModelError:
            refused += 1
        finally:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert peak < 16 * len(data) + (8 << 20)
    assert refused > rounds // 3


def test_fuzzed_gguf(tmp_path: Path, good_gguf: bytes) -> None:
    header_size = len(good_gguf) - sum(value.nbytes for value in random_tensors(CONFIG).values())
    with np.errstate(all="ignore"):
        assert_only_model_errors(read_gguf_fully, tmp_path / "model.gguf", good_gguf, header_size, rounds=400)


def test_fuzzed_safetensors(tmp_path: Path, good_safetensors: bytes) -> None:
    header_size = 8 + struct.unpack("<Q", good_safetensors[:8])[0]
    assert_only_model_errors(read_safetensors_fully, tmp_path / "model.safetensors", good_safetensors, header_size, rounds=400)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges is missing"),
        ({"tokenizer.ggml.merges": ["a q"]}, "merges holds 'a q'"),
        ({"tokenizer.ggml.merges": ["ab"]}, "merges holds 'ab'"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "holds 'a' twice, as 0 and 1"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "expected are 48 numbers"),
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model is missing"),
        ({"tokenizer.ggml.model": "bert"}, "'bert'; supported are 'gpt2'"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.scores is missing"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [float("nan")] * 48}, "not finite"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre is missing"),
        ({"tokenizer.ggml.pre": "newfangled"}, "'newfangled'; supported are default, gpt-2, smollm"),
        ({"tokenizer.ggml.add_bos_token": 1}, "add_bos_token is 1; it must be a boolean"),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None}, "bos_token_id is missing"),
        ({"tokenizer.chat_template": 3}, "chat_template is no string"),
    ],
)
def test_broken_tokenizer_metadata(tmp_path: Path, change: dict, words: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", CONFIG, {"model.norm.weight": np.ones(64, np.float32)} | random_tensors(CONFIG), metadata=TOKENIZER | change)
    with pytest.raises(ModelError) as caught:
        gguf_tokenizer(open_gguf(path))
    assert words in str(caught.value)


def test_type_that_gguf_cannot_dequantise(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", CONFIG, random_tensors(CONFIG), extra={"odd": np.zeros(8, np.int32)})
    checkpoint = open_checkpoint(ModelConfig(source=str(path)))
    with pytest.raises(CheckpointError, match="'odd' has type I32, which the gguf package cannot dequantise"):
        checkpoint.open_source()


class TestSafetensors:
    def folder(self, tmp_path: Path, **options: int) -> Path:
        return write_folder(tmp_path / "model", CONFIG, random_tensors(CONFIG), **options)

    def refuse(self, folder: Path, words: str) -> None:
        with pytest.raises(CheckpointError) as caught:
            SafetensorsSource(folder)
        assert words in str(caught.value)

    def test_truncated(self, tmp_path: Path, good_safetensors: bytes) -> None:
        folder = self.folder(tmp_path)
        for size in (0, 4, 100, len(good_safetensors) - 1):
            (folder / "model.safetensors").write_bytes(good_safetensors[:size])
            self.refuse(folder, "model.safetensors: cannot be read as safetensors")

    def test_false_offsets(self, tmp_path: Path) -> None:
        folder = self.folder(tmp_path)
        meta = json.dumps({"t": {"dtype": "F32", "shape": [4], "data_offsets": [0, 2**40]}}).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(meta)) + meta + bytes(16))
        self.refuse(folder, "cannot be read as safetensors")

    def test_integer_tensor(self, tmp_path: Path) -> None:
        folder = self.folder(tmp_path)
        meta = json.dumps({"t": {"dtype": "I32", "shape": [4], "data_offsets": [0, 16]}}).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(meta)) + meta + bytes(16))
        self.refuse(folder, "'t' has type I32; supported are F64, F32, F16, BF16")

    def test_only_pickles(self, tmp_path: Path) -> None:
        (tmp_path / "pytorch_model.bin").write_bytes(b"")
        self.refuse(tmp_path, "is a pickle")

    def test_missing_shard(self, tmp_path: Path) -> None:
        folder = self.folder(tmp_path, num_shards=2)
        (folder / "model-00002-of-00002.safetensors").unlink()
        self.refuse(folder, "model-00002-of-00002.safetensors: missing")

    @pytest.mark.parametrize("bad", ["../elsewhere.safetensors", "/tmp/x.safetensors", "weights.bin", 7])
    def test_index_may_not_point_elsewhere(self, tmp_path: Path, bad: object) -> None:
        folder = self.folder(tmp_path, num_shards=2)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"t": bad}}))
        self.refuse(folder, "which is no name of a .safetensors file in the folder")

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', "[" * 100_000])
    def test_unreadable_index(self, tmp_path: Path, text: str) -> None:
        folder = self.folder(tmp_path, num_shards=2)
        (folder / "model.safetensors.index.json").write_text(text)
        self.refuse(folder, "weight_map")

    def test_index_and_shards_disagree(self, tmp_path: Path) -> None:
        folder = self.folder(tmp_path, num_shards=2)
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        path.write_text(json.dumps({"weight_map": index["weight_map"] | {"ghost": "model-00001-of-00002.safetensors"}}))
        self.refuse(folder, "lists 1 tensors that the shards do not hold: ghost")
        del index["weight_map"]["model.norm.weight"]
        path.write_text(json.dumps(index))
        self.refuse(folder, "which model.safetensors.index.json places in None")


@pytest.mark.parametrize("text", ["", "[]", "{", "\x00", "[" * 100_000])
def test_broken_config(tmp_path: Path, text: str) -> None:
    write_folder(tmp_path, CONFIG, random_tensors(CONFIG))
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(ModelConfig(source=str(tmp_path)))


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        open_checkpoint(ModelConfig(source=str(tmp_path)))


def test_cut_inside_the_data(tmp_path: Path, good_gguf: bytes) -> None:
    """A file that is cut inside its data is refused when it is opened, not when the missing rows are reached."""
    path = tmp_path / "model.gguf"
    path.write_bytes(good_gguf[:-4])
    with pytest.raises(CheckpointError, match="truncated, or a false offset"):
        open_gguf(path)

"""Builds a model's tokenizer from GGUF metadata: byte-level BPE ("gpt2") and SentencePiece BPE ("llama").

``tokenizer.ggml.pre`` decides how text is split before BPE. The patterns are those of the original tokenizers (llama.cpp's, where it has
the same ones); a splitter that is not listed here is an error, because a wrong one gives wrong ids without any sign of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jaxserve.errors import CheckpointError, UnsupportedModelError
from jaxserve.models.loading.gguf_config import token_id
from jaxserve.models.loading.gguf_file import GGUFFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "\u2581"
"""SentencePiece's visible space."""

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS_AND_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Splitter:
    """How text is cut before BPE, and what else hangs on ``tokenizer.ggml.pre``.

    Args:
        patterns: Applied one after the other, each to the parts that the one before left; matches and gaps both become parts.
        whole_words_first: A part that is a token is taken as it is, whatever the merges say.
        add_bos: Where the file does not say.
        compose: Unicode is composed (NFC) first.
    """

    patterns: tuple[str, ...]
    whole_words_first: bool = False
    add_bos: bool = False
    compose: bool = False


_LLAMA3 = Splitter(patterns=(rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_WORDS_AND_REST}",), whole_words_first=True, add_bos=True)
_QWEN2 = Splitter(patterns=(rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_WORDS_AND_REST}",), compose=True)
_SINGLE_DIGITS = Splitter(patterns=(r"\p{N}", _GPT2))

SPLITTERS: dict[str, Splitter] = {
    "default": Splitter(patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": Splitter(patterns=(_GPT2,)),
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "command-r": _SINGLE_DIGITS,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": Splitter(patterns=(rf"{_CASED_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",), whole_words_first=True, add_bos=True),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GGUFTokenizer:
    """What the metadata says about text.

    Args:
        backend: Text to ids and back; puts BOS and EOS where the file asks for them.
        bos_token_id: Beginning of text, ``None`` where there is none.
        special_tokens: Texts of the special tokens by role, as templates use them: ``bos_token``, ``eos_token``, ….
        chat_template: Jinja source, ``None`` where the file has none.
    """

    backend: Tokenizer
    bos_token_id: int | None
    special_tokens: Mapping[str, str]
    chat_template: str | None


def gguf_tokenizer(file: GGUFFile) -> GGUFTokenizer:
    """Builds the tokenizer of a GGUF file.

    Raises:
        CheckpointError: Metadata is missing, misshapen or contradicts itself; the message names the key.
        UnsupportedModelError: A tokenizer model or splitter that jaxserve does not have.
    """
    vocabulary = _Vocabulary(file)
    kind = vocabulary.text("model", None)
    if kind == "gpt2":
        backend, add_bos = _byte_level(vocabulary)
    elif kind == "llama":
        backend, add_bos = _sentencepiece(vocabulary)
    else:
        raise UnsupportedModelError(f"{file.path}: tokenizer.ggml.model is {kind!r}; supported are 'gpt2' (byte-level BPE) and 'llama' (SentencePiece)")
    backend.add_tokens(vocabulary.added_tokens())
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {role: token_id(file, name) for role, name in roles.items()}
    _add_ends(backend, vocabulary, ids, add_bos=add_bos)
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{file.path}: tokenizer.chat_template is no string")
    return GGUFTokenizer(
        backend=backend,
        bos_token_id=ids["bos_token"],
        special_tokens={role: vocabulary.tokens[value] for role, value in ids.items() if value is not None},
        chat_template=template,
    )


class _Vocabulary:
    """The token arrays, checked against each other."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.tokens: list[str] = self._list("tokens")
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            index = next(index for index, token in enumerate(self.tokens) if self.ids[token] != index)
            raise CheckpointError(f"{file.path}: tokenizer.ggml.tokens holds {self.tokens[index]!r} twice, as {index} and {self.ids[self.tokens[index]]}")
        types = self._array("token_type", "iu", required=False)
        self.types = np.full(len(self.tokens), NORMAL) if types is None else types

    def text(self, name: str, default: str | None) -> str:
        value = self.file.metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, str):
            raise CheckpointError(f"{self.file.path}: tokenizer.ggml.{name} is {'missing' if value is None else 'no string'}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.file.metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.file.path}: tokenizer.ggml.{name} is {value!r}; it must be a boolean")
        return value

    def scores(self) -> np.ndarray:
        scores = self._array("scores", "f", required=True)
        assert scores is not None
        if not np.isfinite(scores).all():
            raise CheckpointError(f"{self.file.path}: tokenizer.ggml.scores holds values that are not finite")
        return scores

    def merges(self) -> list[tuple[str, str]]:
        """The merges, each a pair of tokens whose concatenation is a token."""
        pairs: list[tuple[str, str]] = []
        for text in self._list("merges"):
            cut = text.find(" ", 1)  # a merge's first half may itself begin with a space, never be empty
            left, right = text[:cut], text[cut + 1 :]
            if cut < 0 or left not in self.ids or right not in self.ids or left + right not in self.ids:
                raise CheckpointError(f"{self.file.path}: tokenizer.ggml.merges holds {text!r:.80}, which does not join two tokens into a third")
            pairs.append((left, right))
        return pairs

    def added_tokens(self) -> list[AddedToken]:
        """Tokens that are recognised in text before anything else: control and unknown tokens (special), and user-defined ones."""
        special = np.isin(self.types, (CONTROL, UNKNOWN))
        return [
            AddedToken(self.tokens[index], special=bool(special[index]), normalized=False)
            for index in np.flatnonzero(special | (self.types == USER_DEFINED)).tolist()
            if self.tokens[index]
        ]

    def _list(self, name: str) -> list[str]:
        value = self.file.metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(value, list) or not value:
            raise CheckpointError(f"{self.file.path}: tokenizer.ggml.{name} is {'missing' if value is None else 'no list of strings'}")
        return value

    def _array(self, name: str, kinds: str, *, required: bool) -> np.ndarray | None:
        value = self.file.metadata.get(f"tokenizer.ggml.{name}")
        if value is None and not required:
            return None
        if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds or len(value) != len(self.tokens):
            found = "missing" if value is None else f"{value!r:.60}"
            raise CheckpointError(f"{self.file.path}: tokenizer.ggml.{name} is {found}; expected are {len(self.tokens)} numbers, one a token")
        return value


def _byte_level(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    path, pre = vocabulary.file.path, vocabulary.text("pre", None)
    if pre not in SPLITTERS:
        raise UnsupportedModelError(f"{path}: tokenizer.ggml.pre is {pre!r}; supported are {', '.join(SPLITTERS)}")
    splitter = SPLITTERS[pre]
    backend = Tokenizer(models.BPE(vocab=vocabulary.ids, merges=vocabulary.merges(), ignore_merges=splitter.whole_words_first))
    if splitter.compose:
        backend.normalizer = normalizers.NFC()
    splits: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splitter.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=vocabulary.flag("add_space_prefix", False), use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend, splitter.add_bos


def _sentencepiece(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    if vocabulary.file.metadata.get("tokenizer.ggml.precompiled_charsmap") is not None:
        raise UnsupportedModelError(f"{vocabulary.file.path}: tokenizer.ggml.precompiled_charsmap is not supported for tokenizer.ggml.model 'llama'")
    unknown = token_id(vocabulary.file, "unknown")
    backend = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=_merges_from_scores(vocabulary),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    add_space = vocabulary.flag("add_space_prefix", True)
    replace = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if add_space else replace
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if add_space else steps)
    return backend, True


def _merges_from_scores(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose joint piece has the best score. So every way to cut a piece into two pieces is a merge, in order of score."""
    scores, tokens = vocabulary.scores(), vocabulary.tokens
    pieces = {tokens[index]: index for index in np.flatnonzero(vocabulary.types == NORMAL).tolist()}
    lefts: list[int] = []
    rights: list[int] = []
    joints: list[int] = []
    for piece, index in pieces.items():
        for cut in range(1, len(piece)):
            left, right = pieces.get(piece[:cut]), pieces.get(piece[cut:])
            if left is not None and right is not None:
                lefts.append(left)
                rights.append(right)
                joints.append(index)
    order = np.lexsort(np.array([rights, lefts, -scores[joints]])) if joints else np.zeros(0, np.int64)
    return [(tokens[lefts[index]], tokens[rights[index]]) for index in order.tolist()]


def _add_ends(backend: Tokenizer, vocabulary: _Vocabulary, ids: Mapping[str, int | None], *, add_bos: bool) -> None:
    """Lets the backend put BOS before and EOS after a text, where the file says so."""
    wanted = {"bos_token": vocabulary.flag("add_bos_token", add_bos), "eos_token": vocabulary.flag("add_eos_token", False)}
    ends: dict[str, tuple[str, int]] = {}
    for role, asked in wanted.items():
        if asked and (value := ids[role]) is not None:
            ends[role] = (vocabulary.tokens[value], value)
        elif asked and vocabulary.file.metadata.get(f"tokenizer.ggml.add_{role}"):
            raise CheckpointError(f"{vocabulary.file.path}: tokenizer.ggml.add_{role} is set, but tokenizer.ggml.{role}_id is missing")
    if ends:
        before, after = ([ends[role][0]] if role in ends else [] for role in ("bos_token", "eos_token"))
        backend.post_processor = processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=sorted(set(ends.values())))

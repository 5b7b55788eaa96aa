"""A model's tokenizer: text to ids and back, chat to text. Built from a Hugging Face folder by transformers, or from GGUF metadata."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from jaxserve.chat_template import ChatTemplate
from jaxserve.detokenizer import Detokenizer, TokenBytes, decode
from jaxserve.errors import CheckpointError, ConfigError, InvalidRequestError, ModelError
from jaxserve.models.loading.folder_files import read_json

if TYPE_CHECKING:
    from jaxserve.models.loading.checkpoint import Checkpoint
    from jaxserve.models.loading.gguf_file import GGUFFile

SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerData:
    """A tokenizer as plain data, from which another process makes its own; the fields are those of :class:`Tokenizer`, ``backend`` as JSON."""

    backend: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    special_tokens: dict[str, str]
    chat_template: str | None
    template_source: str
    source: str


class Tokenizer:
    """Text to ids and back. Made by :func:`load_tokenizer`; safe to use from several threads.

    Special tokens are recognised wherever their text stands, also inside what a user wrote: that is what Hugging Face's tokenizers do, and
    chat templates need it. Who serves untrusted users to a model that trusts its control tokens should filter messages before.

    Args:
        backend: Encodes, and puts BOS and EOS where the model wants them.
        bos_token_id: Beginning of text, ``None`` where the model has none.
        eos_token_ids: Any of these ends a generation.
        special_tokens: Texts of the special tokens by role (``bos_token``, …), as templates use them.
        chat_template: Jinja source, ``None`` for a model without one.
        template_source: Where the template came from; for a model without one, why.
        source: Where the tokenizer itself came from.

    Raises:
        UnsupportedModelError: Its decoder is of no supported kind.
        ModelError: Its template is no valid Jinja.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Sequence[int] = (),
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        template_source: str = "the model has none",
        source: str = "memory",
    ) -> None:
        self._backend = backend
        # A tokenizer.json may keep the truncation and padding of its training.
        backend.no_truncation()
        backend.no_padding()
        self._pieces = TokenBytes(backend)
        self._special_tokens = dict(special_tokens or {})
        self._template = None if chat_template is None else ChatTemplate(chat_template, template_source)
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(eos_token_ids)
        self.chat_template = chat_template
        self.template_source = template_source
        self.source = source
        self._adds_bos = bos_token_id is not None and backend.encode("").ids[:1] == [bos_token_id]
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @classmethod
    def of(cls, data: TokenizerData) -> Tokenizer:
        """The tokenizer that :meth:`to_data` was called on, made again."""
        fields = {field.name: getattr(data, field.name) for field in dataclasses.fields(data)}
        return cls(tokenizers.Tokenizer.from_str(fields.pop("backend")), **fields)

    def to_data(self) -> TokenizerData:
        """See :class:`TokenizerData`."""
        return TokenizerData(
            backend=self._backend.to_str(),
            bos_token_id=self.bos_token_id,
            eos_token_ids=self.eos_token_ids,
            special_tokens=self._special_tokens,
            chat_template=self.chat_template,
            template_source=self.template_source,
            source=self.source,
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text.

        Args:
            text: Any text; the texts of special tokens in it become those tokens.
            add_special_tokens: Put BOS before and EOS after it where the model wants them. BOS is put once: not before a text that begins with it.

        Raises:
            InvalidRequestError: The text holds lone surrogates, which are no characters.
        """
        try:
            ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            # The only str that Rust does not take.
            where = next((index for index, character in enumerate(text) if "\ud800" <= character <= "\udfff"), 0)
            raise InvalidRequestError(f"the text is not valid Unicode: a lone surrogate at character {where}", param="prompt") from None
        if add_special_tokens and self._adds_bos and ids[1:2] == [self.bos_token_id]:
            logger.warning("a prompt begins with %r itself; the tokenizer's own is left out", self._special_tokens.get("bos_token"))
            del ids[0]
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids. Ids that the tokenizer does not have give no text; bytes that are no character give U+FFFD."""
        return decode(self._pieces, token_ids, skip_special_tokens=skip_special_tokens)

    def detokenizer(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> Detokenizer:
        """Decodes what follows a prompt as it comes; see :class:`~jaxserve.detokenizer.Detokenizer`."""
        return Detokenizer(self._pieces, prompt_token_ids, skip_special_tokens=skip_special_tokens)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **template_vars: Any) -> str:
        """The text of a conversation, by the model's chat template.

        Args:
            messages: At least one, each with ``role`` and ``content`` (text, or a list of text parts).
            add_generation_prompt: End with the beginning of an answer.
            template_vars: Further variables that the template knows, such as ``tools`` or ``enable_thinking``.

        Raises:
            InvalidRequestError: The model has no chat template, or the template refuses the messages; ``param`` is ``messages``.
        """
        if self._template is None:
            raise InvalidRequestError(f"this model has no chat template ({self.template_source}): use completions, or give a template", param="messages")
        if not messages:
            raise InvalidRequestError("messages is empty; at least one message is needed", param="messages")
        variables = self._special_tokens | {"tools": None, "documents": None} | template_vars | {"add_generation_prompt": add_generation_prompt}
        return self._template.render(messages, variables)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """The ids of a conversation: the template writes the special tokens itself, so none is added.

        Args:
            messages: As for :meth:`render_chat`.
            options: As for :meth:`render_chat`.
        """
        ids = self.encode(self.render_chat(messages, **options), add_special_tokens=False)
        if self.bos_token_id is not None and ids[:2] == [self.bos_token_id] * 2:
            logger.warning("a rendered chat begins with %r twice: its template or a message writes it once too often", self._special_tokens.get("bos_token"))
        return ids


def load_tokenizer(checkpoint: Checkpoint, *, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer of a model.

    The chat template is the first of: the one given here; ``chat_template.jinja`` in the folder; ``tokenizer_config.json``; GGUF metadata. Which one is logged.

    Args:
        checkpoint: The opened model.
        chat_template: Path of a Jinja file that replaces the model's own template.

    Raises:
        CheckpointError: Files or metadata are missing or broken.
        UnsupportedModelError: A kind of tokenizer that jaxserve does not have.
        ConfigError: The given template cannot be read.
    """
    if checkpoint.gguf is not None:
        tokenizer = _from_gguf(checkpoint, checkpoint.gguf, chat_template)
    else:
        tokenizer = _from_folder(checkpoint, chat_template)
    logger.info("chat template: %s", tokenizer.template_source)
    return tokenizer


def _from_gguf(checkpoint: Checkpoint, file: GGUFFile, given: str | None) -> Tokenizer:
    from jaxserve.models.loading.gguf_tokenizer import gguf_tokenizer  # with an array library, which a tokenizer made from data does without

    parts = gguf_tokenizer(file)
    template, source = _read_given(given) or (parts.chat_template, "GGUF metadata")
    return Tokenizer(
        parts.backend,
        bos_token_id=parts.bos_token_id,
        eos_token_ids=checkpoint.spec.eos_token_ids,
        special_tokens=parts.special_tokens,
        chat_template=template,
        template_source=source if template is not None else "its GGUF metadata holds none",
        source="gguf",
    )


def _from_folder(checkpoint: Checkpoint, given: str | None) -> Tokenizer:
    folder = checkpoint.path
    original = _original_tokenizer(folder)
    template, source = _read_given(given) or _folder_template(folder)
    special = {role: text for role in SPECIAL_ROLES if isinstance(text := getattr(original, role, None), str)}
    eos = [*checkpoint.spec.eos_token_ids, *([original.eos_token_id] if isinstance(original.eos_token_id, int) else [])]
    return Tokenizer(
        original.backend_tokenizer,
        bos_token_id=original.bos_token_id,
        eos_token_ids=sorted(set(eos), key=eos.index),
        special_tokens=special,
        chat_template=template,
        template_source=source,
        source="tokenizer.json" if (folder / "tokenizer.json").is_file() else type(original).__name__,
    )


def _original_tokenizer(folder: Path) -> Any:
    # Tokenizers need no torch: without this transformers says on import that it is missing.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # a second, which GGUF models need not wait for

    # tokenizer.json is the tokenizer. AutoTokenizer builds some anew from its vocabulary alone, by the rules of config.json's model_type.
    loader = PreTrainedTokenizerFast if (folder / "tokenizer.json").is_file() else AutoTokenizer
    try:
        tokenizer = loader.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        # transformers raises whatever its parsers raise on missing and broken files.
        raise CheckpointError(f"{folder}: its tokenizer cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(getattr(tokenizer, "backend_tokenizer", None), tokenizers.Tokenizer):
        raise CheckpointError(f"{folder}: {type(tokenizer).__name__} is no fast tokenizer; a tokenizer.json is needed")
    return tokenizer


def _read_given(path: str | None) -> tuple[str, str] | None:
    if path is None:
        return None
    try:
        return Path(path).expanduser().read_text("utf-8"), path
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.chat_template: {path} cannot be read: {error}") from error


def _folder_template(folder: Path) -> tuple[str | None, str]:
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text("utf-8"), file.name
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{file}: cannot be read: {error}") from error
    template = (read_json(folder / "tokenizer_config.json") or {}).get("chat_template")
    if isinstance(template, list):
        # Several named templates: the one for plain chat.
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = named.get("default")
    if template is None:
        return None, "neither chat_template.jinja nor tokenizer_config.json holds one"
    if not isinstance(template, str):
        raise ModelError(f"{folder / 'tokenizer_config.json'}: chat_template is a {type(template).__name__}, not text")
    return template, "tokenizer_config.json"

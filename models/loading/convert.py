"""Turns any model that can be opened into a self-contained folder with Orbax weights."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from jaxserve.config import ModelConfig
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.models.loading.checkpoint import Checkpoint, open_checkpoint
from jaxserve.models.loading.gguf_config import rope_factors
from jaxserve.models.loading.gguf_file import GGUFFile
from jaxserve.models.loading.gguf_tokenizer import gguf_tokenizer
from jaxserve.models.loading.orbax_format import write_orbax
from jaxserve.models.loading.orbax_layout import write_rope_factors
from jaxserve.models.loading.progress import Progress
from jaxserve.models.model import build_model

COPIED_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip


def convert(config: ModelConfig, destination: Path, *, progress: Progress | None = None) -> Path:
    """Writes a model as a folder that ``MODEL`` may name: Orbax weights in ``config.dtype``, config, tokenizer and chat template.

    The folder appears whole or not at all.

    Args:
        config: The model to read, and the dtype to write.
        destination: A folder that does not exist yet.
        progress: Told about downloads and loading.

    Returns:
        The folder.

    Raises:
        ConfigError: The destination exists.
        ModelError: The model cannot be read, or the folder cannot be written.
    """
    destination = destination.expanduser().absolute()
    if destination.exists():
        raise ConfigError(f"{destination} exists already; name a folder that does not")
    checkpoint = open_checkpoint(config, progress=progress)
    model = build_model(checkpoint.spec, dtype=config.dtype, layers="scan")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=destination.parent, prefix=f".{destination.name}.", ignore_cleanup_errors=True) as scratch:
            folder = Path(scratch) / "model"
            folder.mkdir()
            _write_files(checkpoint, folder)
            write_orbax(checkpoint.load_params(model, progress=progress), model, folder)
            folder.rename(destination)
    except OSError as error:
        raise CheckpointError(f"{destination} cannot be written: {error}") from error
    return destination


def _write_files(checkpoint: Checkpoint, folder: Path) -> None:
    if checkpoint.gguf is not None:
        _write_gguf_files(checkpoint, checkpoint.gguf, folder)
        return
    for name in COPIED_FILES:
        if (checkpoint.path / name).is_file():
            shutil.copyfile(checkpoint.path / name, folder / name)


def _write_gguf_files(checkpoint: Checkpoint, file: GGUFFile, folder: Path) -> None:
    """What a Hugging Face folder of the same model would hold."""
    (folder / "config.json").write_text(json.dumps(dict(checkpoint.config), indent=2), "utf-8")
    if (factors := rope_factors(file)) is not None:
        write_rope_factors(folder, factors)
    parts = gguf_tokenizer(file)
    parts.backend.save(str(folder / "tokenizer.json"))
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **parts.special_tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2), "utf-8")
    if parts.chat_template is not None:
        (folder / "chat_template.jinja").write_text(parts.chat_template, "utf-8")

"""A tiny model as a folder that the command line can serve: weights, configuration and tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models

from tests.loading.builders import random_tensors, tiny_config, write_folder

VOCAB_SIZE = 48


def tiny_checkpoint(folder: Path) -> Path:
    """Writes it; four heads of which two hold keys, two layers, 128 tokens of context."""
    config = tiny_config("llama", vocab_size=VOCAB_SIZE)
    write_folder(folder, config, random_tensors(config))
    backend = Tokenizer(models.BPE({chr(ord("A") + index): index for index in range(VOCAB_SIZE)}, []))
    backend.decoder = decoders.Fuse()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder

"""What a converted checkpoint's folder looks like. Apart from the reader and writer of weights, so that looking imports neither jax nor orbax."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from jaxserve.errors import CheckpointError
from jaxserve.models.loading.folder_files import read_json

WEIGHTS_FOLDER = "orbax"
CHUNK_BYTES = 1 << 25
"""Weights are packed in chunks of at most this, so that a part of an array can be read without the rest."""
ROPE_FACTORS_FILE = "rope_factors.json"
"""Of a model converted from a GGUF file whose rope scaling no Hugging Face config can express."""


def is_orbax_folder(folder: Path) -> bool:
    """Whether a model folder holds Orbax weights."""
    return (folder / WEIGHTS_FOLDER).is_dir()


def write_rope_factors(folder: Path, factors: Sequence[float]) -> None:
    """Keeps what inverse frequencies are divided by."""
    (folder / ROPE_FACTORS_FILE).write_text(json.dumps({"factors": list(factors)}), "utf-8")


def read_rope_factors(folder: Path) -> list[float] | None:
    """What :func:`write_rope_factors` kept, ``None`` where it kept nothing.

    Raises:
        CheckpointError: The file is broken.
    """
    content = read_json(folder / ROPE_FACTORS_FILE)
    if content is None:
        return None
    factors = content.get("factors")
    if not isinstance(factors, list) or not all(isinstance(factor, float) for factor in factors):
        raise CheckpointError(f"{folder / ROPE_FACTORS_FILE}: 'factors' is no list of numbers")
    return factors

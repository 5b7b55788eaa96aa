"""The small JSON files of a Hugging Face model folder."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.errors import CheckpointError

MAX_JSON_BYTES = 256 * 1024 * 1024
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p")
# Of generation_config.json: penalties that would change the output and that jaxserve cannot apply, with their neutral values.
UNSUPPORTED_SAMPLING = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "typical_p": 1.0, "num_beams": 1}

logger = logging.getLogger(__name__)


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; ``None`` where there is no such file.

    Raises:
        CheckpointError: It is no JSON object, or unreasonably large.
    """
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: {path.stat().st_size} bytes of JSON; at most {MAX_JSON_BYTES} are read")
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds no JSON object but a {type(value).__name__}")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json``, its end ids joined with those of ``generation_config.json``, which chat models often keep their end of turn in.

    Raises:
        CheckpointError: It is missing or broken.
    """
    config = read_json(folder / "config.json")
    if config is None:
        raise CheckpointError(f"{folder}: holds no config.json")
    generation = read_json(folder / "generation_config.json") or {}
    ids: list[Any] = []
    for value in (config.get("eos_token_id"), generation.get("eos_token_id")):
        ids += value if isinstance(value, list) else [] if value is None else [value]
    if ids:
        config["eos_token_id"] = sorted(set(ids), key=ids.index) if all(type(value) is int for value in ids) else ids
    return config


def read_generation_defaults(folder: Path) -> Mapping[str, Any]:
    """Sampling defaults of ``generation_config.json``, in the names of :class:`~jaxserve.request.SamplingParams`; empty without the file."""
    generation = read_json(folder / "generation_config.json") or {}
    for name, neutral in UNSUPPORTED_SAMPLING.items():
        if generation.get(name, neutral) not in (None, neutral):
            logger.warning("generation_config.json asks for %s=%r, which jaxserve does not implement: ignored", name, generation[name])
    if generation.get("do_sample") is False:
        return {"temperature": 0.0}
    return {name: generation[name] for name in SAMPLING_FIELDS if generation.get(name) is not None}

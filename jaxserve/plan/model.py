"""From MODEL to what a decoder is, without its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxserve.errors import ModelUnavailableError
from jaxserve.models.hf_config import spec_from_config
from jaxserve.models.spec import ModelSpec

CONFIGS = Path(__file__).parents[2] / "configs" / "models"
"""Hugging Face configurations of the usual models, by name."""


def read_spec(source: str) -> ModelSpec:
    """The model that MODEL names.

    Args:
        source: A name in ``configs/models``, a ``config.json``, or a folder that holds one.

    Raises:
        ModelUnavailableError: There is none.
        UnsupportedModelError: As ``spec_from_config``.
    """
    named = CONFIGS / f"{source}.json"
    path = Path(source)
    for candidate in (named, path, path / "config.json"):
        if candidate.is_file() and candidate.suffix == ".json":
            return spec_from_config(_read(candidate))
    names = sorted(file.stem for file in CONFIGS.glob("*.json"))
    raise ModelUnavailableError(f"{source!r} is no model configuration; must be a config.json, a folder that holds one, or one of {', '.join(names)}")


def _read(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelUnavailableError(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelUnavailableError(f"{file} is no JSON object")
    return config

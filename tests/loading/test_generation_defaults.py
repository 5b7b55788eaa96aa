"""A model's own sampling defaults: taken, logged, switched off, and named where they cannot be applied."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import ModelConfig
from jaxserve.models.loading.checkpoint import open_checkpoint
from tests.loading.builders import tiny_config, write_folder


def folder_with(path: Path, generation: dict[str, Any]) -> Path:
    folder = write_folder(path, tiny_config("llama"), {})
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({"temperature": 0.6, "top_p": 0.9, "top_k": None, "pad_token_id": 0}, {"temperature": 0.6, "top_p": 0.9}),
        ({"do_sample": True, "min_p": 0.1, "top_k": 20}, {"top_k": 20, "min_p": 0.1}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({}, {}),
    ],
)
def test_fields_of_the_file(tmp_path: Path, generation: dict[str, Any], expected: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    folder = folder_with(tmp_path, generation)
    with caplog.at_level(logging.INFO):
        assert open_checkpoint(ModelConfig(source=str(folder))).generation_defaults == expected
    assert str(expected) in caplog.text or not expected
    assert open_checkpoint(ModelConfig(source=str(folder), generation_config="none")).generation_defaults == {}


def test_what_cannot_be_applied_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = folder_with(tmp_path, {"repetition_penalty": 1.1, "num_beams": 1})
    assert open_checkpoint(ModelConfig(source=str(folder))).generation_defaults == {}
    assert "repetition_penalty=1.1" in caplog.text
    assert "num_beams" not in caplog.text

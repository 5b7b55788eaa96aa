"""What a model is, without its weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxserve.config import ModelConfig
from jaxserve.errors import CheckpointError, ModelUnavailableError, UnsupportedModelError
from jaxserve.models.loading import specs
from jaxserve.models.loading.aliases import ALIASES
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.specs import open_spec, shipped_names
from jaxserve.models.params import param_specs
from tests.loading.builders import random_tensors, tiny_config, write_gguf
from tests.real_models import require_model

NUM_PARAMETERS = {
    "gemma3-270m": 268_098_176,
    "gemma3-27b": 27_009_346_304,  # without the vision tower
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b": 7_248_023_552,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-32b": 32_762_123_264,
    "qwen3-8b": 8_190_735_360,
    "smollm2-135m": 134_515_008,
}
"""As their authors' weight files have them."""


def test_every_shipped_model_is_counted() -> None:
    assert shipped_names() == tuple(NUM_PARAMETERS)
    assert ALIASES.keys() <= set(shipped_names())


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_a_shipped_model_has_as_many_parameters_as_its_name_says(name: str) -> None:
    found, spec = open_spec(name)
    assert found == name
    assert spec.eos_token_ids and spec.bos_token_id is not None
    count = sum(param.num_values() for param in param_specs(spec).values())
    assert count == NUM_PARAMETERS[name]
    size = name.rpartition("-")[2]
    said = float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]]
    assert count == pytest.approx(said, rel=0.25)


@pytest.mark.parametrize("name", ALIASES)
def test_the_shipped_configuration_of_an_alias_is_that_of_its_weights(name: str) -> None:
    require_model(name)
    assert open_spec(name)[1] == open_checkpoint(ModelConfig(source=name)).spec


def test_bare_files_folders_and_gguf(tmp_path: Path) -> None:
    config = tiny_config("llama")
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    bare = tmp_path / "other.json"
    bare.write_text(json.dumps(config))
    gguf = write_gguf(tmp_path / "third.gguf", config, random_tensors(config))
    opened = [open_spec(str(path)) for path in (folder, folder / "config.json", bare, gguf)]
    assert [name for name, _ in opened] == ["my-model", "my-model", "other", "third"]
    assert all(spec == opened[0][1] for _, spec in opened)


def test_of_a_hub_model_only_the_configuration_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("qwen3")))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    asked: list[object] = []

    def fetch(*arguments: object, **options: object) -> tuple[Path, str]:
        asked.append((arguments, options))
        return tmp_path, "commit"

    monkeypatch.setattr(specs, "fetch_from_hub", fetch)
    name, spec = open_spec("somebody/some-model")
    assert name == "some-model" and spec.family == "qwen3" and spec.eos_token_ids == (7,)
    assert asked == [(("somebody/some-model", None), {"files": ("config.json", "generation_config.json")})]


def test_what_names_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailableError, match=r"no model 'Qwen3-9B'.*nor one of gemma3-270m, .*; did you mean qwen3-8b\?$"):
        open_spec("Qwen3-9B")
    for source in ("", "nowhere/config.json", "missing.gguf"):
        with pytest.raises(ModelUnavailableError, match="no model"):
            open_spec(source)
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        open_spec(str(tmp_path))
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"list\.json: holds no JSON object but a list"):
        open_spec(str(tmp_path / "list.json"))
    (tmp_path / "other.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    with pytest.raises(UnsupportedModelError, match="MambaForCausalLM"):
        open_spec(str(tmp_path / "other.json"))

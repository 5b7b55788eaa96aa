"""What a model is, without its weights: from a configuration that ships with jaxserve, a bare one, or a whole model."""

from __future__ import annotations

import difflib
from pathlib import Path

from jaxserve.config import ModelConfig
from jaxserve.errors import ModelUnavailableError
from jaxserve.models.hf_config import spec_from_config
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.folder_files import read_config, read_json
from jaxserve.models.loading.hub import CONFIG_FILES, HUB_ID, fetch_from_hub
from jaxserve.models.spec import ModelSpec

_SHIPPED = Path(__file__).parents[1] / "configs"
"""A link to ``configs/models`` in the repository, a folder in a wheel."""


def shipped_names() -> tuple[str, ...]:
    """Models whose configuration ships with jaxserve: those with an alias, and the usual larger ones."""
    return tuple(sorted(file.stem for file in _SHIPPED.glob("*.json")))


def open_spec(source: str) -> tuple[str, ModelSpec]:
    """The name of a model, and what it is. No weights are needed, and none are fetched.

    A shipped name comes first, then an existing folder or file, then a hub id.

    Args:
        source: One of :func:`shipped_names`, a Hugging Face config file (``.json``), a folder that holds ``config.json``, a ``.gguf`` file, or a hub id.

    Raises:
        ModelUnavailableError: It names nothing that can be found.
        CheckpointError: It is broken.
        UnsupportedModelError: jaxserve does not implement it.
    """
    path = Path(source).expanduser()
    if source in shipped_names():
        return source, _read_file(_SHIPPED / f"{source}.json")
    if path.is_file() and path.suffix == ".json":
        return path.resolve().parent.name if path.name == "config.json" else path.stem, _read_file(path)
    if source and (path.is_dir() or (path.is_file() and path.suffix == ".gguf")):
        checkpoint = open_checkpoint(ModelConfig(source=source))
        return checkpoint.name, checkpoint.spec
    if HUB_ID.fullmatch(source) and not path.exists() and path.suffix not in (".gguf", ".json"):
        folder, _ = fetch_from_hub(source, None, files=CONFIG_FILES)
        return source.rpartition("/")[2], spec_from_config(read_config(folder))
    nearest = difflib.get_close_matches(source.lower(), shipped_names(), n=1, cutoff=0.4)
    raise ModelUnavailableError(
        f"no model {source!r}: there is no such folder, .gguf or .json file, and it is neither a hub id (organisation/name) nor one of "
        f"{', '.join(shipped_names())}{f'; did you mean {nearest[0]}?' if nearest else ''}"
    )


def _read_file(path: Path) -> ModelSpec:
    return spec_from_config(read_json(path) or {})

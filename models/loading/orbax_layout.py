"""Where a converted checkpoint keeps its weights. Apart from the reader and writer, so that looking imports neither jax nor orbax."""

from __future__ import annotations

from pathlib import Path

WEIGHTS_FOLDER = "orbax"


def is_orbax_folder(folder: Path) -> bool:
    """Whether a model folder holds Orbax weights."""
    return (folder / WEIGHTS_FOLDER).is_dir()

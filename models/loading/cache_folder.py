"""Where downloaded models are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$JAXSERVE_CACHE``, or ``jaxserve`` under ``$XDG_CACHE_HOME``, or ``~/.cache/jaxserve``. It need not exist yet."""
    if override := os.environ.get("JAXSERVE_CACHE"):
        return Path(override).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "jaxserve"


def models_folder() -> Path:
    """Where the files of aliases lie, one folder an alias."""
    return cache_folder() / "models"

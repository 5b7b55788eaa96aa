"""``jaxserve version``: versions for a bug report."""

from __future__ import annotations

import importlib.metadata
import platform

from jaxserve import __version__
from jaxserve.cli.output import emit

_REPORTED = ("jax", "jaxlib", "flax", "transformers", "grpcio", "fastapi")


def version() -> None:
    """Print the versions of jaxserve and of what it stands on."""
    emit(f"jaxserve {__version__}\npython {platform.python_version()} ({platform.system()} {platform.machine()})")
    for name in _REPORTED:
        emit(f"{name} {importlib.metadata.version(name)}")

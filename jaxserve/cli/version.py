"""``jaxserve version``: versions for a bug report."""

from __future__ import annotations

import importlib.metadata
import platform

from jaxserve import __version__

_REPORTED = ("jax", "jaxlib", "flax", "transformers", "grpcio", "fastapi")


def version() -> None:
    """Print the versions of jaxserve and of what it stands on."""
    print(f"jaxserve {__version__}\npython {platform.python_version()} ({platform.system()} {platform.machine()})")
    for name in _REPORTED:
        print(f"{name} {importlib.metadata.version(name)}")

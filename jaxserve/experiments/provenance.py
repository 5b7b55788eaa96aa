"""Where results come from: revision, versions, devices. Enough to tell two runs apart, and to run one again."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path

from jaxserve import __version__

_PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "flax", "numpy")


def revision() -> str:
    """The commit of the checkout that this code runs from, with ``+changes`` where files differ from it; else the version of the package."""
    root = Path(__file__).parents[2]
    try:
        commit = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return __version__
    return f"{commit}{'+changes' if changed else ''}"


def versions() -> dict[str, str]:
    """Of Python, jaxserve and what it computes with."""
    found = {"python": platform.python_version(), "jaxserve": __version__}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def flags() -> Mapping[str, str]:
    """What the environment tells XLA."""
    return {name: os.environ[name] for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS") if name in os.environ}


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True, timeout=30)  # noqa: S603, S607
    return done.stdout.strip()

"""Chooses the platform before jax is imported, so that a plugin without its chip is never probed and the user sets no environment variable."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from pathlib import Path
from typing import Literal

from jaxserve.errors import ConfigError

logger = logging.getLogger(__name__)

Platform = Literal["cpu", "gpu", "tpu"]

_JAX_PLATFORMS: dict[Platform, str] = {"cpu": "cpu", "gpu": "cuda,cpu", "tpu": "tpu,cpu"}
_PLUGINS: dict[Platform, tuple[str, ...]] = {"cpu": (), "gpu": ("jax_cuda13_plugin", "jax_cuda12_plugin"), "tpu": ("libtpu",)}
_EXTRAS: dict[Platform, str] = {"gpu": "jaxserve[cuda]", "tpu": "jaxserve[tpu]"}
_GOOGLE_PCI_VENDOR = "0x1ae0"


def choose_platform(requested: Literal["auto", "cpu", "gpu", "tpu"] = "auto") -> str:
    """Sets ``JAX_PLATFORMS`` for this process, where that can still matter.

    Args:
        requested: ``auto`` keeps a ``JAX_PLATFORMS`` of the user's; without one it takes the chip whose device files and jax plugin are both here,
            else the CPU. Any other value wins over the environment.

    Returns:
        The value of ``JAX_PLATFORMS`` in force; the first name in it is the platform that jax will use.

    Raises:
        ConfigError: A requested chip whose jax plugin is not installed, or jax is imported already and set to another platform.
    """
    if "jax" in sys.modules:
        return _of_imported_jax(requested)
    if requested == "auto":
        return os.environ.setdefault("JAX_PLATFORMS", _JAX_PLATFORMS[detect_platform()])
    if not _has_plugin(requested):
        raise ConfigError(f"platform is {requested!r}, but its jax plugin is not installed; install {_EXTRAS[requested]}, or use platform=cpu")
    os.environ["JAX_PLATFORMS"] = _JAX_PLATFORMS[requested]
    return os.environ["JAX_PLATFORMS"]


def detect_platform(root: Path = Path("/")) -> Platform:
    """The platform of this machine by its device files under ``root``, as far as jax has the plugin for it. A chip that must stay idle is a warning."""
    chips: dict[Platform, bool] = {"tpu": _has_tpu(root), "gpu": (root / "dev/nvidiactl").exists() and any(root.glob("dev/nvidia[0-9]*"))}
    for platform, is_here in chips.items():
        if is_here and _has_plugin(platform):
            return platform
        if is_here:
            logger.warning("this machine has a %s, but its jax plugin is not installed: running on the CPU (install %s)", platform.upper(), _EXTRAS[platform])
    return "cpu"


def _has_tpu(root: Path) -> bool:
    if any(root.glob("dev/accel[0-9]*")):
        return True
    # vfio also passes other devices through: only Google's own PCI devices make it a TPU.
    vendors = (file.read_text().strip() for file in root.glob("sys/bus/pci/devices/*/vendor"))
    return any(root.glob("dev/vfio/[0-9]*")) and _GOOGLE_PCI_VENDOR in vendors


def _has_plugin(platform: Platform) -> bool:
    return platform == "cpu" or any(importlib.util.find_spec(name) is not None for name in _PLUGINS[platform])


def _of_imported_jax(requested: str) -> str:
    in_force: str = sys.modules["jax"].config.jax_platforms or ""
    names = {"cuda": "gpu", "rocm": "gpu"}
    first = in_force.split(",")[0]
    if requested != "auto" and in_force and names.get(first, first) != requested:
        raise ConfigError(f"platform is {requested!r}, but jax is imported already with JAX_PLATFORMS={in_force}; choose the platform before importing jax")
    return in_force

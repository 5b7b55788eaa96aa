"""What all tests share: the platform, the markers and the reasons of their skips. Fixtures of one area live in that area's own conftest."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

# Before any test imports jax. A compiler plugin beside jax must not be probed for chips; a run for real chips names its platform itself.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Eight devices on one CPU, for the tests of meshes; what names no device still runs on the first. A flag that is set already wins.
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {os.environ.get('XLA_FLAGS', '')}".rstrip()
# Tests never reach for the network; what needs a hub talks to a fake endpoint that it starts itself.
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"


# A machine that stands still while an example is drawn or run is no error of the example.
hypothesis.settings.register_profile("patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("patient")


def _has_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _platform_is(name: str) -> bool:
    return name in os.environ["JAX_PLATFORMS"].split(",")


REQUIREMENTS: dict[str, tuple[Callable[[], bool], str]] = {
    "gpu": (lambda: _platform_is("cuda") and Path("/dev/nvidiactl").exists(), "needs an NVIDIA GPU and JAX_PLATFORMS=cuda"),
    "tpu": (lambda: _platform_is("tpu"), "needs a TPU and JAX_PLATFORMS=tpu"),
    "aot": (lambda: _has_module("libtpu") or _has_module("jax_cuda13_plugin"), 'needs the compilers: pip install "jaxserve[aot-tpu]" or "jaxserve[aot-gpu]"'),
    "torch": (lambda: _has_module("torch"), "needs torch (CPU builds: Python 3.11)"),
}
"""Marker -> (is it met here, the reason of the skip when it is not)."""


@pytest.fixture(autouse=True)
def _logging_is_left_as_it_was() -> Iterator[None]:
    """A test that runs a command in this process sets logging up, for itself alone."""
    loggers = [logging.getLogger(), logging.getLogger("jaxserve")]
    before = [(logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (level, propagate) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.propagate = propagate


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skips = {name: pytest.mark.skip(reason=reason) for name, (is_met, reason) in REQUIREMENTS.items() if not is_met()}
    if not config.getoption("--slow"):
        skips["slow"] = pytest.mark.skip(reason="slow; run with --slow")
    for item in items:
        for marker in item.iter_markers():
            if marker.name in skips:
                item.add_marker(skips[marker.name])

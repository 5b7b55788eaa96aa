"""Logging of the command line: to stderr, one format, quiet about what other libraries say to themselves. The library itself configures nothing."""

from __future__ import annotations

import functools
import logging
import os
import sys
from typing import TYPE_CHECKING

from jaxserve.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

LEVELS = ("debug", "info", "warning", "error")

_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_QUIET_LIBRARIES = ("absl", "asyncio", "fsspec", "grpc", "hpack", "httpcore", "httpx", "huggingface_hub", "jax", "orbax", "transformers", "urllib3")
_QUIET_ENVIRONMENT = {
    "GRPC_VERBOSITY": "ERROR",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


def set_up_logging(level: str | None = None) -> None:
    """Sends log records of ``level`` and above to stderr: coloured where stderr is a terminal, plain lines elsewhere. Call before heavy imports.

    Args:
        level: One of :data:`LEVELS`; ``None`` takes ``JAXSERVE_LOG_LEVEL``, else info. Other libraries are held to warnings unless it is debug.

    Raises:
        ConfigError: No such level.
    """
    name = (level or os.environ.get("JAXSERVE_LOG_LEVEL") or "info").lower()
    if name not in LEVELS:
        raise ConfigError(f"the log level is {name!r}; must be one of {', '.join(LEVELS)}")
    for variable, value in _QUIET_ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    root = logging.getLogger()
    root.handlers[:] = [_terminal_handler() if sys.stderr.isatty() else _plain_handler()]
    root.setLevel(logging.WARNING)
    logging.getLogger("jaxserve").setLevel(name.upper())
    for library in _QUIET_LIBRARIES:
        logging.getLogger(library).setLevel(logging.INFO if name == "debug" else logging.WARNING)


def _plain_handler() -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT))
    return handler


@functools.cache
def stderr_console() -> Console:
    """The one rich console on stderr, so that log lines and progress bars do not write over each other."""
    from rich.console import Console

    return Console(stderr=True)


def _terminal_handler() -> logging.Handler:
    from rich.logging import RichHandler

    handler = RichHandler(console=stderr_console(), show_path=False, omit_repeated_times=False, log_time_format="%H:%M:%S")
    handler.setFormatter(logging.Formatter("%(message)s"))
    return handler

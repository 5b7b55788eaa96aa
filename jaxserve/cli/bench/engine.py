"""What the benchmarks share that run the engine in their own process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxserve.cli.progress import progress_bars
from jaxserve.config import Config

if TYPE_CHECKING:
    from jaxserve.engine.engine import Engine


def open_engine(config: Config) -> Engine:
    """Builds the engine of a configuration. ``platform.choose_platform`` comes before."""
    from jaxserve.engine.build import build_engine

    with progress_bars() as progress:
        return build_engine(config, progress=progress)

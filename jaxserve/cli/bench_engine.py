"""What the benchmarks share that run the engine in their own process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxserve.cli import bench_options
from jaxserve.cli.progress import progress_bars
from jaxserve.config import Config
from jaxserve.errors import ConfigError

if TYPE_CHECKING:
    from jaxserve.engine.engine import Engine


def open_engine(config: Config) -> Engine:
    """Builds the engine of a configuration. ``platform.choose_platform`` comes before."""
    from jaxserve.engine.build import build_engine

    with progress_bars() as progress:
        return build_engine(config, progress=progress)


def whole_numbers(text: str | None, option: str) -> list[int]:
    """Reads ``1,8,32``; none for an option that was not given.

    Raises:
        ConfigError: Not whole numbers of at least 1.
    """
    numbers = bench_options.numbers(text, option)
    if not all(number.is_integer() for number in numbers):
        raise ConfigError(f"{option} is {text!r}; must be whole numbers of at least 1 separated by commas")
    return [int(number) for number in numbers]

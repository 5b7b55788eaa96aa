"""Shows the progress of long work on stderr: a bar on a terminal, one log line a stage elsewhere."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Generator

from jaxserve.log import stderr_console

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def progress_bars() -> Generator[Callable[[str, int, int], None]]:
    """Yields what ``jaxserve.models.loading.progress.Progress`` describes. Stages may follow one another; each has its own bar."""
    if not sys.stderr.isatty():
        seen: set[str] = set()

        def log_once(stage: str, _done: int, _total: int) -> None:
            if stage not in seen:
                seen.add(stage)
                logger.info("%s", stage)

        yield log_once
        return

    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

    with Progress(TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), console=stderr_console()) as bars:
        tasks: dict[str, TaskID] = {}

        def update(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total or None)
            bars.update(tasks[stage], completed=done, total=total or None)

        yield update

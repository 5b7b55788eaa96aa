"""The way of results to stdout."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console

_FILE_WIDTH = 400
"""Columns of a file or a pipe, which wraps nothing: more than any of our tables takes."""


def tables_console() -> Console:
    """A rich console on stdout that cuts no table where no terminal limits it."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _FILE_WIDTH)


def emit(text: str, *, end: str = "\n") -> None:
    """Prints a result at once.

    Raises:
        typer.Exit: With status 0: whoever read stdout has seen enough and closed it.
    """
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        # Python flushes what is left at exit and would complain once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit from None

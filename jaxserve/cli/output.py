"""The way of results to stdout."""

from __future__ import annotations

import os
import sys

import typer


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

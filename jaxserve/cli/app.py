"""The ``jaxserve`` command: its sub-commands, and the one place where an error becomes a line on stderr and an exit status."""

from __future__ import annotations

import io
import logging
import os
import sys
import traceback
from typing import Annotated, NoReturn

import typer

from jaxserve import __version__
from jaxserve.cli.bench.group import bench
from jaxserve.cli.chat import chat
from jaxserve.cli.compile import compile_programs
from jaxserve.cli.convert import convert_model
from jaxserve.cli.generate import generate
from jaxserve.cli.kernels import kernels
from jaxserve.cli.models import models
from jaxserve.cli.output import emit
from jaxserve.cli.plan import plan
from jaxserve.cli.run import run
from jaxserve.cli.show_config import show_config
from jaxserve.cli.sweep import sweep
from jaxserve.cli.top import top
from jaxserve.cli.version import version
from jaxserve.errors import ConfigError, InvalidRequestError, JaxserveError

USAGE_STATUS = 2
FAILURE_STATUS = 1

app = typer.Typer(
    name="jaxserve",
    help="Serve and run language models in JAX.",
    epilog="Every command takes [bold]--config FILE[/bold] and words [bold]section.key=value[/bold]; [bold]jaxserve config[/bold] shows all keys.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run", rich_help_panel="Use a model")(run)
app.command("generate", rich_help_panel="Use a model")(generate)
app.command("chat", rich_help_panel="Use a model")(chat)
app.command("models", rich_help_panel="Manage models and settings")(models)
app.command("convert", rich_help_panel="Manage models and settings")(convert_model)
app.command("compile", rich_help_panel="Manage models and settings")(compile_programs)
app.command("config", rich_help_panel="Manage models and settings")(show_config)
app.command("plan", rich_help_panel="Measure")(plan)
app.command("sweep", rich_help_panel="Measure")(sweep)
app.add_typer(bench, name="bench", rich_help_panel="Measure")
app.add_typer(kernels, name="kernels", rich_help_panel="Manage models and settings")
app.command("top", rich_help_panel="Measure")(top)
app.command("version", rich_help_panel="Manage models and settings")(version)


def _print_version(wanted: bool) -> None:
    if wanted:
        emit(f"jaxserve {__version__}")
        raise typer.Exit


@app.callback()
def root(
    show_version: Annotated[bool, typer.Option("--version", metavar="", callback=_print_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Serve and run language models in JAX."""


def main() -> None:
    """Runs the command line and exits: 0, 2 for usage and configuration, 1 for every other failure."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a closed stream is None
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    try:
        app(prog_name="jaxserve")
    except Exception as error:
        _exit(_report(error))


def _exit(status: int) -> NoReturn:
    jax = sys.modules.get("jax")
    if jax is not None and jax.distributed.is_initialized():
        # jax's exit handler would wait for the other processes of the engine, and abort with a stack trace because they do not end with this one.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _report(error: Exception) -> int:
    if logging.getLogger("jaxserve").isEnabledFor(logging.DEBUG):
        traceback.print_exc()
    expected = isinstance(error, JaxserveError | OSError)
    hint = "" if expected else " (this is a bug; --debug prints the traceback)"
    print(f"error: {_message(error) if expected else f'{type(error).__name__}: {_message(error)}'}{hint}", file=sys.stderr)
    return USAGE_STATUS if isinstance(error, ConfigError | InvalidRequestError) else FAILURE_STATUS


def _message(error: Exception) -> str:
    return str(error).strip() or type(error).__name__

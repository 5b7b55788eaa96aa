"""``jaxserve bench startup``: how long the engine takes to be ready."""

from __future__ import annotations

from typing import Annotated

import typer

from jaxserve.cli.bench import options
from jaxserve.cli.options import CompiledOption, ConfigFiles, Debug, MeshOption, PlatformOption, Words, resolve_config
from jaxserve.cli.output import tables_console


def startup(
    words: Words = None,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Starts of each kind.")] = 3,
    json_file: options.JsonFile = None,
    config: ConfigFiles = None,
    platform: PlatformOption = None,
    mesh: MeshOption = None,
    compiled: CompiledOption = None,
    debug: Debug = False,
) -> None:
    """Start the engine again and again, each time in a process of its own, and report how long each phase takes, cold and warm.

    Cold finds no compiled program on disk, warm those of the start before. Exits with 130 after Ctrl-C, which reports what there was.

    Examples:

        jaxserve bench startup

        jaxserve bench startup gemma3-270m --repeats 1 --json startup.json
    """
    options.check_outputs(json_file)
    resolved = resolve_config(words, config, platform=platform, mesh=mesh, compiled=compiled, debug=debug)

    from jaxserve.bench.local.startup import measure_startup, print_startup, to_json

    found = measure_startup(resolved, repeats=repeats)
    options.all_of(lambda: print_startup(found, tables_console()), lambda: options.write_json(json_file, to_json(found)))
    if found.interrupted:
        raise typer.Exit(options.INTERRUPTED_STATUS)

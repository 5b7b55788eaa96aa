"""``jaxserve compile``: all programs of an engine, compiled ahead of time into a folder."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxserve.child_process import rows_of
from jaxserve.cli.options import ConfigFiles, Debug, MeshOption, Words, resolve_config
from jaxserve.cli.output import emit
from jaxserve.cli.progress import progress_bars
from jaxserve.engine.programs.manifest import MANIFEST, PROGRAMS, flatten, sections
from jaxserve.errors import CompileError, ConfigError
from jaxserve.kernels_pallas.proof import targets
from jaxserve.platform import choose_platform

_TIME_LIMIT_S = 6 * 3600.0
_HERE = ("here", "cpu", "gpu", "tpu")


def compile_programs(
    words: Words = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for the programs; new or empty.", show_default=False)] = None,
    on: Annotated[
        str, typer.Option("--on", metavar="TARGET", help="Chips that need not be here, such as v6e:2x4 or h200:8; or here, cpu, gpu, tpu: this machine's.")
    ] = "here",
    mesh: MeshOption = None,
    config: ConfigFiles = None,
    debug: Debug = False,
) -> None:
    """Compile every program that an engine of MODEL runs, for jaxserve run --compiled DIR.

    The folder holds machine code: use only folders of people whose code you would run. Its manifest.json tells what it was compiled for.

    Examples:

        jaxserve compile smollm2-135m --out compiled

        jaxserve compile llama-3.1-8b --on v6e:2x2 --mesh data=1,model=4 --out v6e-4 scheduler.max_num_seqs=64
    """
    if out is None:
        raise typer.BadParameter("a folder is needed", param_hint="--out")
    place = on.strip().lower()
    flags = {"platform": place} if place in _HERE[1:] else {}
    resolved = resolve_config(words, config, mesh=mesh, debug=debug, flags=flags)
    if place in _HERE:
        choose_platform(resolved.platform)
        target, environment = "", dict(os.environ)
    else:
        target, environment = _absent(place)
    _make_empty(out)

    settings = json.dumps(flatten(sections(resolved)))
    summary: dict[str, Any] = {}
    with _removed_if_unfinished(out), progress_bars() as progress:
        for row, reason in rows_of("jaxserve.ahead", [str(out), target, settings], environment, time_limit_s=_TIME_LIMIT_S):
            if row is None:
                raise CompileError(reason)
            if "error" in row:
                raise (ConfigError if row["kind"] == "config" else CompileError)(row["error"])
            if "done" in row:
                progress("compiling", row["done"], row["total"])
            else:
                summary = row
    emit(
        f"{out}: {summary['steps']} steps and {summary['others']} other programs, {summary['bytes'] / 2**20:.1f} MiB\n"
        f"for {summary['device_kind']}, {summary['mesh']}, {summary['num_pages']} pages of "
        f"{summary['page_size']} tokens, jax {summary['jax']}\n"
        f"jaxserve run --compiled {out}"
    )


@contextlib.contextmanager
def _removed_if_unfinished(folder: Path) -> Generator[None]:
    """Leaves an empty folder behind if the block fails."""
    try:
        yield
    finally:
        if not (folder / MANIFEST).exists():
            shutil.rmtree(folder / PROGRAMS, ignore_errors=True)


def _absent(text: str) -> tuple[str, dict[str, str]]:
    """A target that is not here, and the environment of a process that compiles for it."""
    from jaxserve.plan.topology import parse_topology

    target = parse_topology(text)
    missing = targets.missing(target.chip.name)
    if missing is not None:
        raise ConfigError(f"--on {text}: {missing}")
    return str(target), targets.environment(target.chip.name)


def _make_empty(folder: Path) -> None:
    """Makes a folder, or finds an empty one.

    Raises:
        ConfigError: It holds something, or cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"--out {folder} is not empty; must be a new or an empty folder")
    except OSError as error:
        raise ConfigError(f"--out {folder}: {error.strerror}") from None

"""Runs the cells of an experiment that have no result yet, one after the other, each in a process of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxserve.engine.programs.manifest import sections
from jaxserve.errors import JaxserveError
from jaxserve.experiments import provenance
from jaxserve.experiments.file import Cell, Experiment
from jaxserve.experiments.results import Result, Results

RunCell = Callable[[Cell, Path], dict[str, Any]]
"""Runs a cell, which may write to the folder; gives ``metrics``, ``times`` and ``record``. Raises ``CellFailedError``."""

Progress = Callable[[int, int], None]

logger = logging.getLogger(__name__)

_DEVICE_COUNT = "--xla_force_host_platform_device_count"


class CellFailedError(JaxserveError):
    """A cell that gave no figures, and why.

    Args:
        timed_out: Whether it was ended for taking too long.
    """

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


def run_sweep(experiment: Experiment, results: Results, run_cell: RunCell, *, retry_failed: bool = False, progress: Progress | None = None) -> None:
    """Gives every cell a result. A cell that fails is a result too; the others go on.

    Args:
        experiment: What to run.
        results: What there is already, and where new ones go.
        run_cell: Runs one.
        retry_failed: Also run cells anew that gave no figures.
        progress: Told how many cells are done, of how many.
    """
    revision = provenance.revision()
    total = len(experiment.cells)
    for done, cell in enumerate(experiment.cells):
        earlier = results.get(cell.id)
        if earlier is not None and (earlier.status == "done" or not retry_failed):
            continue
        if progress is not None:
            progress(done, total)
        logger.info("%d/%d %s", done + 1, total, experiment.label(cell))
        started = datetime.datetime.now(datetime.UTC)
        before = time.perf_counter()
        result, more = _attempt(cell, results.cell_folder(cell.id), run_cell)
        result = dataclasses.replace(result, times={**result.times, "seconds": round(time.perf_counter() - before, 2)})
        record = {
            **dataclasses.asdict(result),
            "config": sections(cell.config),
            "workload": cell.workload and dataclasses.asdict(cell.workload),
            "files_sha256": cell.files,
            "load": cell.load and dataclasses.asdict(cell.load),
            "revision": revision,
            "started": started.isoformat(timespec="seconds"),
            **more,
        }
        results.add(result, record)
        if result.status != "done":
            logger.warning("%s: %s", result.status, result.reason)
    if progress is not None:
        progress(total, total)


def _attempt(cell: Cell, folder: Path, run_cell: RunCell) -> tuple[Result, Mapping[str, Any]]:
    """What became of the cell, and what else its record holds."""
    failed = Result(cell=cell.id, settings=cell.settings, status="failed", reason=cell.problem)
    if cell.problem:
        return failed, {}
    try:
        row = run_cell(cell, folder)
    except CellFailedError as error:
        return dataclasses.replace(failed, status="timed out" if error.timed_out else "failed", reason=str(error)), {}
    return dataclasses.replace(failed, status="done", metrics=row["metrics"], times=row["times"]), row["record"]


def process_runner(file: Path, time_limit_s: float) -> RunCell:
    """Runs cells as processes, with what they print on stderr in ``log.txt``.

    Args:
        file: The experiment's.
        time_limit_s: After this a cell's process and all that it started are killed.
    """

    def run_cell(cell: Cell, folder: Path) -> dict[str, Any]:
        log = folder / "log.txt"
        alive, held = os.pipe()  # The cell ends when nobody holds the other end any more: whatever kills the sweep, no cell keeps the devices.
        command = [sys.executable, "-m", "jaxserve.experiments.cell", str(file), cell.id, str(alive)]
        with (
            os.fdopen(alive),
            os.fdopen(held, "w"),
            log.open("w", encoding="utf-8") as errors,
            subprocess.Popen(  # noqa: S603
                command, env=_environment(cell), stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True, pass_fds=(alive,)
            ) as process,
        ):
            try:
                output, _ = process.communicate(timeout=time_limit_s)
            except subprocess.TimeoutExpired:
                raise CellFailedError(f"killed after {time_limit_s:g} s; {log} holds what it said", timed_out=True) from None
            finally:
                _kill_group(process)
        row = _last_object(output)
        if row is None:
            said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
            code = process.returncode
            ended = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            raise CellFailedError(f"{ended}: {said[0][:400]}")
        if "error" in row:
            raise CellFailedError(row["error"])
        return row

    return run_cell


def _environment(cell: Cell) -> dict[str, str]:
    if cell.devices is None:
        return dict(os.environ)
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_DEVICE_COUNT)]
    return os.environ | {"XLA_FLAGS": " ".join([*flags, f"{_DEVICE_COUNT}={cell.devices}"])}


def _kill_group(process: subprocess.Popen[str]) -> None:
    """Ends a process and its children: compilers run as processes of their own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_object(output: str) -> dict[str, Any] | None:
    lines = [line for line in output.splitlines() if line.startswith("{")]
    try:
        return json.loads(lines[-1]) if lines else None
    except ValueError:
        return None

"""Runs one cell of an experiment. A process of its own: ``python -m jaxserve.experiments.cell FILE ID PIPE``."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from jaxserve.bench.report.report import environment
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.experiments import provenance
from jaxserve.experiments.file import Cell, read_experiment
from jaxserve.platform import choose_platform

if TYPE_CHECKING:
    from jaxserve.engine.engine import Engine


def main(arguments: list[str]) -> int:
    """Prints one JSON object: ``{"metrics", "times", "record"}``, or ``{"error"}``.

    Args:
        arguments: The experiment's file, the cell's id, and the reading end of a pipe: when its other end closes, the process group is killed.
    """
    file, cell_id, pipe = arguments
    threading.Thread(target=_end_with, args=(int(pipe),), daemon=True).start()
    try:
        cell = next((cell for cell in read_experiment(Path(file)).cells if cell.id == cell_id), None)
        if cell is None:
            raise ConfigError(f"{file}, or a file that it names, has changed since the sweep began: it has no cell {cell_id} any more")
        row = run_cell(cell)
    except JaxserveError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 1
    print(json.dumps(row), flush=True)
    return 0


def _end_with(pipe: int) -> None:
    os.read(pipe, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def run_cell(cell: Cell) -> dict[str, Any]:
    """Measures, plans, or both.

    Raises:
        JaxserveError: The cell cannot be run.
    """
    row: dict[str, Any] = {"metrics": {}, "times": {}, "record": {"versions": provenance.versions(), "machine": environment()}}
    if cell.mode != "live":
        _plan(cell, row)
    if cell.mode != "plan":
        _run(cell, row)
    row["record"]["flags"] = provenance.flags()
    return row


def _plan(cell: Cell, row: dict[str, Any]) -> None:
    if cell.mode == "plan":
        choose_platform("cpu")  # compilers need no chip, and must not look for one
    else:
        choose_platform(cell.config.platform)
        _check_devices(cell)
    from jaxserve.experiments.prediction import plan_cell

    metrics, times, record = plan_cell(cell)
    row["metrics"] |= metrics
    row["times"] |= times
    row["record"] |= record


def _check_devices(cell: Cell) -> None:
    """A prediction stands beside a measurement only on the chips that it is for."""
    assert cell.target is not None
    import jax

    here, chip = cast(Any, jax).devices()[0], cell.target.chip
    if here.platform == "cpu" or chip.kind not in here.device_kind.lower():
        raise ConfigError(f"mode is both and target {cell.target}, but the devices of this machine are {here.device_kind}; plan and run in cells of their own")


def _run(cell: Cell, row: dict[str, Any]) -> None:
    assert cell.workload is not None
    choose_platform(cell.config.platform)
    import jax

    from jaxserve.engine.build import build_engine
    from jaxserve.experiments.measure import measure_workload

    started = time.perf_counter()
    engine = build_engine(cell.config)
    row["times"]["start_s"] = round(time.perf_counter() - started, 2)
    row["metrics"] |= measure_workload(engine, cell.workload, slo=cell.slo, repeats=cell.repeats)
    row["metrics"]["num_pages"] = engine.stats().num_pages
    row["record"] |= _what_ran(engine)
    row["record"]["all_devices"] = [str(device) for device in cast(Any, jax).devices()]


def _what_ran(engine: Engine) -> dict[str, Any]:
    """The devices in the mesh's order, the mesh, and the compiled programs."""
    runner: Any = engine.runner
    mesh = runner.layout.mesh
    devices: list[Any] = list(mesh.devices.flat)
    return {
        "mesh": dict(mesh.shape),
        "devices": [f"{device} ({device.device_kind})" for device in devices],
        "programs_sha256": runner.programs_sha256(),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

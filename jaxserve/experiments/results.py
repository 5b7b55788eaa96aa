"""The folder of a sweep: one line a cell in ``results.jsonl``, one record a cell under ``cells/``. A kill loses one cell at most."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from jaxserve.errors import ConfigError

RESULTS = "results.jsonl"
SUMMARY = "summary.md"
CELLS = "cells"

Status = Literal["done", "failed", "timed out"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What became of a cell.

    Args:
        cell: Its id.
        settings: What it was.
        status: Whether it gave figures.
        metrics: The figures; of a plan the same in every run.
        times: Seconds that it took, in all and by part.
        reason: Why there are no figures.
    """

    cell: str
    settings: Mapping[str, Any]
    status: Status
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    times: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    reason: str = ""


class Results:
    """A sweep's folder, held by one process at a time.

    Args:
        folder: Exists.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._by_cell = {result.cell: result for result in read_results(folder, missing_ok=True)}
        self._drop_torn_line()

    def get(self, cell_id: str) -> Result | None:
        """A cell's result, if it has one."""
        return self._by_cell.get(cell_id)

    def of(self, cell_ids: Sequence[str]) -> list[Result]:
        """Results of these cells, in this order, of those that have one."""
        return [self._by_cell[cell_id] for cell_id in cell_ids if cell_id in self._by_cell]

    def add(self, result: Result, record: Mapping[str, Any]) -> None:
        """Writes the record, then the line: a line says that all of the cell is there. The last line of a cell counts."""
        folder = self.cell_folder(result.cell)
        (folder / "record.json").write_text(json.dumps(record, indent=1, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
        with (self.folder / RESULTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(result), ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._by_cell[result.cell] = result

    def cell_folder(self, cell_id: str) -> Path:
        folder = self.folder / CELLS / cell_id
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _drop_torn_line(self) -> None:
        """What a kill in the middle of writing left."""
        file = self.folder / RESULTS
        if file.exists() and (data := file.read_bytes()) and not data.endswith(b"\n"):
            with file.open("r+b") as stream:
                stream.truncate(data.rfind(b"\n") + 1)


def read_results(folder: Path, *, missing_ok: bool = False) -> list[Result]:
    """Every cell's last result, in the order in which cells were first finished.

    Raises:
        ConfigError: There is no such file, or a line of it is none of a sweep's.
    """
    file = folder / RESULTS
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        if missing_ok:
            return []
        raise ConfigError(f"{folder} is no folder of a sweep: it has no {RESULTS}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    found: dict[str, Result] = {}
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last line's end is nothing, or torn
        try:
            result = Result(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{file}, line {number} is no result of a sweep: {error}") from None
        found[result.cell] = result
    return list(found.values())


@contextlib.contextmanager
def held(folder: Path) -> Generator[None]:
    """Makes the folder and keeps other sweeps out of it.

    Raises:
        ConfigError: Another sweep writes there, or it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock", timeout=0)
        lock.acquire()
    except Timeout:
        raise ConfigError(f"another sweep is writing to {folder}") from None
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}") from None
    try:
        yield
    finally:
        lock.release()

"""How long the engine takes to start, cold and warm, by phase: every start is a process of its own."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from jaxserve.bench.local.stopwatch import OTHER
from jaxserve.bench.report.report import make_table, median_range, print_notes
from jaxserve.bench.report.surroundings import Surroundings, Watch, readable_device
from jaxserve.child_process import rows_of
from jaxserve.config import Config, to_yaml
from jaxserve.errors import BenchmarkError
from jaxserve.models.loading.cache_folder import cache_folder, models_folder

TIME_LIMIT_S = 3600.0

Kind = Literal["cold", "warm"]
KINDS: tuple[Kind, ...] = ("cold", "warm")
"""Cold finds no compiled program on disk, warm those of a start before."""

BEFORE_READY: Mapping[str, str] = {
    "interpreter": "Python's own start",
    "imports": "jax and the engine",
    "device": "jax's backend",
    "open": "model and its facts",
    "weights": "onto the device",
    "pool": "keys and values",
    "compile": "or from disk",
    "tokenizer": "",
    OTHER: "in no phase",
}
"""Phase -> what it is."""

FIRST_TOKEN = "first token"  # noqa: S105
"""The phase after the engine is ready."""

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Start:
    """One start.

    Args:
        kind: Cold or warm.
        phases_s: Seconds of each phase; one that did not happen is missing.
    """

    kind: Kind
    phases_s: Mapping[str, float]

    @property
    def ready_s(self) -> float:
        """From the start of the process to an engine that takes requests."""
        return sum(self.phases_s.get(phase, 0.0) for phase in BEFORE_READY)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Startup:
    """All starts of one model.

    Args:
        model: Its name.
        starts: In order.
        surroundings: Of the starts that count.
        interrupted: Ctrl-C came before the last.
    """

    model: str
    starts: Sequence[Start]
    surroundings: Surroundings
    interrupted: bool

    def values(self, kind: Kind, phase: str) -> list[float]:
        """Seconds of a phase, or of ``ready``, in each start of a kind."""
        starts = [start for start in self.starts if start.kind == kind]
        return [start.ready_s if phase == "ready" else start.phases_s.get(phase, 0.0) for start in starts]


def measure_startup(config: Config, *, repeats: int, time_limit_s: float = TIME_LIMIT_S) -> Startup:
    """Starts the engine of a configuration: once without counting, which downloads and brings files into memory, then cold and warm in turn.

    Compiled programs go to a folder that is thrown away, so that what was compiled before plays no part.

    Args:
        config: What to start.
        repeats: How often, cold and warm each.
        time_limit_s: Of one start.

    Raises:
        BenchmarkError: The engine cannot be built.
    """
    starts: list[Start] = []
    interrupted = False
    with tempfile.TemporaryDirectory(prefix="jaxserve-startup-") as name:
        folder = Path(name)
        wanted, prepared = folder / "config.yaml", folder / "prepare.yaml"
        wanted.write_text(to_yaml(config, show_secrets=True), encoding="utf-8")  # nobody else reads this folder
        lazy = dataclasses.replace(config, engine=dataclasses.replace(config.engine, warmup=False))
        prepared.write_text(to_yaml(lazy, show_secrets=True), encoding="utf-8")
        logger.info("one start that does not count")
        facts = _start(prepared, cache_folder(), time_limit_s)
        watch = Watch()
        try:
            for repeat in range(repeats):
                cache = folder / f"cache-{repeat}"
                cache.mkdir()
                if models_folder().exists():
                    (cache / "models").symlink_to(models_folder().resolve())
                for kind in KINDS:
                    facts = _start(wanted, cache, time_limit_s)
                    starts.append(Start(kind, facts["phases"]))
                    logger.info("%s start %d of %d: ready after %.1f s", kind, repeat + 1, repeats, starts[-1].ready_s)
                shutil.rmtree(cache)
        except KeyboardInterrupt:
            interrupted = True
        around = Surroundings(device=readable_device(facts["device"]), jax_version=facts["jax"], others=watch.others())
    return Startup(model=facts["model"], starts=starts, surroundings=around, interrupted=interrupted)


def to_json(found: Startup) -> dict[str, Any]:
    """All starts as a JSON object: for each kind, ``median_ready_s``, and the median and all values of each phase, in seconds."""
    kinds: dict[str, Any] = {}
    for kind in KINDS:
        phases = {phase: found.values(kind, phase) for phase in ("ready", *BEFORE_READY, FIRST_TOKEN)}
        if phases["ready"]:
            medians = {f"median_{phase.replace(' ', '_')}_s": statistics.median(values) for phase, values in phases.items()}
            kinds[kind] = {**medians, "phases_s": phases}
    return {"model_id": found.model, **kinds, "interrupted": found.interrupted, **found.surroundings.to_json()}


def print_startup(found: Startup, console: Console) -> None:
    """A row for each phase: medians, and their range where there is one. Nothing where nothing was measured."""
    if not found.starts:
        return
    kinds: list[Kind] = [kind for kind in KINDS if found.values(kind, "ready")]
    around = found.surroundings
    counts = " and ".join(f"{len(found.values(kind, 'ready'))} {kind}" for kind in kinds)
    table = make_table(f"{found.model} on {around.device}, jax {around.jax_version}: seconds, medians (range) of {counts} starts")
    table.add_column("", no_wrap=True)
    for kind in kinds:
        table.add_column(kind, justify="right", no_wrap=True)
    table.add_column("")

    def row(phase: str, meaning: str, *, style: str | None = None, last: bool = False) -> None:
        table.add_row(phase, *(median_range(found.values(kind, phase), ".2f") for kind in kinds), meaning, style=style, end_section=last)

    *first, last_phase = BEFORE_READY
    for phase in first:
        row(phase, BEFORE_READY[phase])
    row(last_phase, BEFORE_READY[last_phase], last=True)
    row("ready", "the sum", style="bold")
    row(FIRST_TOKEN, "of a first request")
    console.print(table)
    print_notes(console, around.notes())


def _start(config_file: Path, cache: Path, time_limit_s: float) -> dict[str, Any]:
    """One start, in a process of its own.

    Raises:
        BenchmarkError: It failed.
    """
    environment_ = os.environ | {"JAXSERVE_CACHE": str(cache)}
    arguments = [str(config_file), repr(time.time())]
    row, reason = next(rows_of("jaxserve.bench.local.startup_child", arguments, environment_, time_limit_s=time_limit_s))
    if row is None or "error" in row:
        raise BenchmarkError(f"the engine did not start: {reason or (row or {}).get('error')}")
    return row

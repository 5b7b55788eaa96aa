"""The proof harness of all ops, ``jaxserve kernels check``: numerics in both interpreters and real compiles, with one cell for each check."""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from jaxserve.child_process import rows_of
from jaxserve.kernels_pallas.proof import targets
from jaxserve.kernels_pallas.proof.op import OpProof

Op = OpProof[Any, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """The result of one check.

    Args:
        op: Name of the op.
        implementation: Name of the implementation.
        shape: Name of the case or of the combination.
        check: ``numerics`` (fast interpreter or XLA, against the reference), ``refusal``, ``races`` (checking interpreter), or ``compile``.
        target: Name of the chip, for a compile; else empty.
        held: Whether the result is as it should be: right, or refused if the documentation says so.
        detail: The error, the refusal, or the reason of a failure.
        seconds: Duration of the check.
        error: Relative norm of the difference from the reference, for numerics.
        fast_memory_bytes: Bytes of VMEM or shared memory that the tiles take, for a compile.
        temp_bytes: Bytes of device memory beyond arguments and results, for a compile.
        pool_copies: Number of copies as large as the pool in the compiled program, for a compile.
    """

    op: str
    implementation: str
    shape: str
    check: str
    held: bool
    target: str = ""
    detail: str = ""
    seconds: float = 0.0
    error: float | None = None
    fast_memory_bytes: int | None = None
    temp_bytes: int | None = None
    pool_copies: int | None = None


def numerics_cells(op: Op, implementations: Sequence[str] = ()) -> Iterator[Cell]:
    """Yields a cell for each of the named implementations (all if none is named) on every case, and for each documented refusal. Runs in another process."""
    for row, failure in rows_of("jaxserve.kernels_pallas.proof.numerics", [op.name, *implementations], _cpu_environment(), time_limit_s=900):
        if row is None:
            yield Cell(op=op.name, implementation="all", shape="", check="numerics", held=False, detail=failure)
        else:
            fields: dict[str, Any] = {"check": "numerics"} | row
            yield Cell(op=op.name, **fields)


def race_cells(op: Op, cases: Sequence[str] = ()) -> Iterator[Cell]:
    """Yields a cell for the op's TPU kernels on each named small case (all if none is named), in the checking interpreter. Runs in another process."""
    for row, failure in rows_of("jaxserve.kernels_pallas.proof.checked", [op.name, *cases], _cpu_environment(), time_limit_s=600):
        common: dict[str, Any] = {"op": op.name, "implementation": op.checked_implementation, "check": "races"}
        if row is None:
            yield Cell(**common, shape="", held=False, detail=failure)
        else:
            yield Cell(
                **common, shape=row["name"], held=row["problem"] is None, detail=row["problem"] or "", seconds=row["seconds"], error=row.get("error")
            )  # fmt: skip


def compile_cells(op: Op, target: str, combinations: str) -> Iterator[Cell]:
    """Yields a cell for each real compile of a set of combinations for one target, in another process. A missing compiler is one cell that did not hold."""
    common: dict[str, Any] = {"op": op.name, "implementation": op.compiled_implementation(target), "check": "compile", "target": target}
    absent = targets.missing(target)
    if absent is not None:
        yield Cell(**common, shape=combinations, held=False, detail=absent)
        return
    module = "jaxserve.kernels_pallas.proof.compile_check"
    for row, failure in rows_of(module, [op.name, target, combinations], targets.environment(target), time_limit_s=900):
        if row is None:
            yield Cell(**common, shape="", held=False, detail=failure)
        elif "error" in row:
            yield Cell(**common, shape=row["name"], held=False, detail=row["error"])
        else:
            detail = "" if row["in_place"] else f"the pool of {row['pool_bytes']} bytes is not updated in place: {row['alias_bytes']} bytes aliased"
            yield Cell(
                **common, shape=row["name"], held=row["in_place"], detail=detail, seconds=row["seconds"], fast_memory_bytes=row["fast_memory_bytes"],
                temp_bytes=row["temp_bytes"], pool_copies=row["pool_copies"],
            )  # fmt: skip


def run(*, ops: Sequence[Op], chosen_targets: Sequence[str], quick: bool) -> Iterator[Cell]:
    """Yields the cells of all checks as they are done. Two processes run at a time.

    Args:
        ops: The ops to check.
        chosen_targets: Targets to compile for; may be empty.
        quick: Whether only a part of each kind of check is made, for continuous integration.
    """
    jobs: list[Callable[[], Iterator[Cell]]] = []
    for op in ops:
        jobs.append(partial(numerics_cells, op, op.quick_implementations if quick else ()))
        jobs.append(partial(race_cells, op, op.quick_checked_cases if quick else ()))
        jobs += [partial(compile_cells, op, target, "quick" if quick else "all") for target in chosen_targets]
    done: queue.Queue[Cell | None] = queue.Queue()

    def work(job: Callable[[], Iterator[Cell]]) -> None:
        try:
            for cell in job():
                done.put(cell)
        finally:
            done.put(None)

    with ThreadPoolExecutor(max_workers=2) as executor:
        futures = [executor.submit(work, job) for job in jobs]
        left = len(jobs)
        while left:
            cell = done.get()
            if cell is None:
                left -= 1
            else:
                yield cell
        for future in futures:
            future.result()


def summary(cells: Sequence[Cell]) -> dict[str, Any]:
    """The object that ``--json`` prints: all cells, and how many of them held and failed."""
    held = sum(cell.held for cell in cells)
    return {"cells": [dataclasses.asdict(cell) for cell in cells], "held": held, "failed": len(cells) - held}


def report(*, ops: Sequence[Op], chosen_targets: Sequence[str] | None = None, quick: bool = False, as_json: bool = False) -> int:
    """Makes the checks and prints a table as it goes. With several ops, each line begins with the op's name.

    Args:
        ops: The ops to check.
        chosen_targets: Chips to compile for; ``None`` takes all whose compilers are installed.
        quick: Whether only a part of each kind of check is made.
        as_json: Whether the last line is a JSON object with all results.

    Returns:
        0 only if every cell held.
    """
    left_out: dict[str, str] = {}
    if chosen_targets is None:
        left_out = {target: reason for target in targets.TARGETS if (reason := targets.missing(target)) is not None}
        chosen_targets = [target for target in targets.TARGETS if target not in left_out]
    cells: list[Cell] = []
    started = time.monotonic()
    op_width = max(len(op.name) + 1 for op in ops) if len(ops) > 1 else 0
    print(f"{'op' if op_width else '':{op_width}}{_HEADER}")
    for cell in run(ops=ops, chosen_targets=chosen_targets, quick=quick):
        cells.append(cell)
        print(f"{cell.op if op_width else '':{op_width}}{_line(cell)}", flush=True)
    totals = summary(cells)
    for target, reason in left_out.items():
        print(f"not compiled for {target}: {reason}")
    print(f"{totals['held']} held, {totals['failed']} failed, {time.monotonic() - started:.0f} s")
    if as_json:
        print(json.dumps(totals))
    return int(totals["failed"] > 0)


_HEADER = f"{'':4} {'check':8} {'target':6} {'implementation':14} {'shape':48} {'seconds':>7} {'error':>8} {'fast MiB':>8} {'temp MiB':>8} copies"


def _line(cell: Cell) -> str:
    def mib(value: int | None) -> str:
        return "" if value is None else f"{value / 2**20:.2f}"

    error = "" if cell.error is None else f"{cell.error:.1e}"
    copies = "" if cell.pool_copies is None else str(cell.pool_copies)
    detail = f"  {cell.detail.splitlines()[0][:160]}" if cell.detail else ""
    return (
        f"{'ok' if cell.held else 'FAIL':4} {cell.check:8} {cell.target:6} {cell.implementation:14} {cell.shape:48} {cell.seconds:7.1f} {error:>8} "
        f"{mib(cell.fast_memory_bytes):>8} {mib(cell.temp_bytes):>8} {copies}{detail}"
    )  # fmt: skip


def _cpu_environment() -> dict[str, str]:
    return os.environ | {"JAX_PLATFORMS": "cpu"}

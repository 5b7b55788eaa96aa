"""Runs small cases of the TPU kernels in the interpreter that executes copies only when waited for, detects races and fills memory with NaN.

A wrong semaphore hangs it, so it runs as a process of its own with a time limit: ``python -m``, see ``check.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import sys
import time
from typing import Any

from jax.experimental.pallas import tpu as pltpu

from jaxserve.kernels_pallas.proof import numerics
from jaxserve.kernels_pallas.ragged_paged_attention import pallas_tpu
from jaxserve.kernels_pallas.ragged_paged_attention.shapes import CASES, Case
from jaxserve.kernels_pallas.ragged_paged_attention.tpu_tiles import Tiles
from jaxserve.kernels_pallas.ragged_paged_attention.tpu_write import write_windows

SMALL_TILES = Tiles(block_pages=2, query_block=16, write_buffers=2)
"""So that even small cases have several blocks and work items, and use every buffer again."""


def small_cases() -> tuple[Case, ...]:
    """The cases that the checking interpreter runs in seconds."""
    return tuple(case for case in CASES if case.is_small)


def check_case(case: Case, *, write_phase: Any = write_windows) -> dict[str, Any]:
    """Runs one case.

    Args:
        case: A small one.
        write_phase: The kernel's write phase; tests put broken ones here.

    Returns:
        ``name``, ``seconds``, ``error`` (relative norm, where it got that far), and ``problem``: what the interpreter or the comparison found, or ``None``.
    """
    interpret = pltpu.InterpretParams(dma_execution_mode="on_wait", detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan")
    implementation = pallas_tpu.make_implementation(interpret=interpret, tiles=SMALL_TILES, write_phase=write_phase)
    result: dict[str, Any] = {"name": case.name, "problem": None}
    start = time.perf_counter()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            comparison = numerics.compare(implementation, case, checked=True)
        except Exception as error:  # The interpreter raises many types, most of them through a callback.
            result["problem"] = f"{type(error).__name__}: {str(error)[-600:]}"
            pltpu.reset_tpu_interpret_mode_state()
        else:
            result["error"] = comparison.error
            if not comparison.held:
                result["problem"] = f"wrong result: {dataclasses.asdict(comparison)}"
    if "RACE" in printed.getvalue():  # jax 0.10 only prints it.
        result["problem"] = "race detected"
    return result | {"seconds": round(time.perf_counter() - start, 2)}


def main(names: list[str]) -> int:
    """Runs the small cases of these names, all of them without names; prints one JSON object a line."""
    failed = False
    for case in small_cases():
        if not names or case.name in names:
            result = check_case(case)
            failed |= result["problem"] is not None
            print(json.dumps(result), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

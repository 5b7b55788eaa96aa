"""Runs an op's TPU kernels on small cases in the interpreter that executes copies only when waited for, detects races and fills memory with NaN.

A wrong semaphore hangs it, so it runs as a process of its own with a time limit: ``python -m``, see ``check.py``.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from jax.experimental.pallas import tpu as pltpu

from jaxserve.kernels_pallas.proof.op import Comparison
from jaxserve.kernels_pallas.proof.ops import OPS


def check(name: str, compare: Callable[[Any], Comparison]) -> dict[str, Any]:
    """The result of one case in the checking interpreter.

    Args:
        name: Name of the case.
        compare: Runs the kernels on the case with the interpreter's parameters, and compares the result with the reference.

    Returns:
        ``name``, ``seconds``, ``error`` (the relative norm, missing if the run failed), and ``problem``, which the interpreter or the comparison found, or
        ``None``.
    """
    interpret = pltpu.InterpretParams(dma_execution_mode="on_wait", detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan")
    result: dict[str, Any] = {"name": name, "problem": None}
    start = time.perf_counter()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            comparison = compare(interpret)
        except Exception as error:  # The interpreter raises many types, most of them through a callback.
            result["problem"] = f"{type(error).__name__}: {str(error)[-600:]}"
            pltpu.reset_tpu_interpret_mode_state()
        else:
            result["error"] = comparison.error
            if not comparison.held:
                result["problem"] = f"wrong result: {comparison}"
    if "RACE" in printed.getvalue():  # jax 0.10 only prints it.
        result["problem"] = "race detected"
    return result | {"seconds": round(time.perf_counter() - start, 2)}


def main(arguments: list[str]) -> int:
    """Runs ``OP [CASE …]``: the op's small cases of these names, or all if none is named. Prints one JSON object for each, on a line of its own."""
    op, names = OPS[arguments[0]], arguments[1:]
    failed = False
    for case in op.checked_cases:
        if not names or case.name in names:
            result = check(case.name, lambda interpret, case=case: op.compare_checked(case, interpret))
            failed |= result["problem"] is not None
            print(json.dumps(result), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

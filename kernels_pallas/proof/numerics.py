"""Compares an op's implementations with its reference, case by case, and checks that what is documented as refused is refused.

Runs as a process of its own: ``python -m``, see ``check.py``. It prints a JSON object for each implementation and case, then one for each refusal.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from jaxserve.kernels_pallas.proof.op import OpProof, Refusal
from jaxserve.kernels_pallas.proof.ops import OPS


def evaluate(op: OpProof[Any, Any], implementation: str, case: Any) -> dict[str, Any]:
    """The result of one implementation on one case: ``implementation``, ``shape``, ``held``, ``detail``, ``seconds``, ``error``."""
    result: dict[str, Any] = {"implementation": implementation, "shape": case.name, "error": None}
    start = time.perf_counter()
    reason = op.refusal(implementation, case)
    if reason is not None:
        result |= {"held": False, "detail": f"refused: {reason}"}
    else:
        comparison = op.compare(implementation, case)
        result |= {"held": comparison.held, "error": comparison.error, "detail": "" if comparison.held else str(comparison)}
    return result | {"seconds": round(time.perf_counter() - start, 2)}


def refusal_row(refusal: Refusal) -> dict[str, Any]:
    """The result of a documented refusal, which holds if the message contains the reason."""
    message = refusal.message
    held = message is not None and refusal.reason in message
    detail = f"refused: {message}" if message else "it is served"
    return {"check": "refusal", "implementation": refusal.implementation, "shape": refusal.name, "held": held, "detail": detail}


def main(arguments: list[str]) -> int:
    """Runs ``OP [IMPLEMENTATION …]``: compares these implementations, or all if none is named, and then checks the refusals."""
    op, names = OPS[arguments[0]], arguments[1:]
    all_held = True
    for name in names or op.implementations:
        for case in op.cases:
            row = evaluate(op, name, case)
            all_held &= row["held"]
            print(json.dumps(row), flush=True)
    for refusal in op.refusals:
        row = refusal_row(refusal)
        all_held &= row["held"]
        print(json.dumps(row), flush=True)
    return int(not all_held)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

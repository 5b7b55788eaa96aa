"""Compiles an op for one target and prints a JSON line for each combination. Runs as a process of its own: ``python -m``, see ``check.py``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

from jaxserve.kernels_pallas.proof.op import OpProof
from jaxserve.kernels_pallas.proof.ops import OPS


def check(op: OpProof[Any, Any], target: str, combination: Any) -> dict[str, Any]:
    """The fields of one combination's report, or ``{"error": …}``."""
    try:
        compiled = op.compile(target, combination)
    except NotImplementedError as error:
        return {"error": f"refused: {error}"}
    except Exception as error:  # The compilers raise many types; each becomes a cell that did not hold.
        return {"error": f"{type(error).__name__}: {str(error)[:2000]}"}
    return dataclasses.asdict(compiled.report) | {"in_place": compiled.report.in_place, "fast_memory_bytes": compiled.fast_memory_bytes}


def main(arguments: list[str]) -> int:
    """Runs ``OP TARGET SET``: prints one JSON object for each combination, ``{"name", …}``, on a line of its own; a failure is ``{"name", "error"}``."""
    parser = argparse.ArgumentParser(prog="compile_check")
    parser.add_argument("op", choices=tuple(OPS))
    parser.add_argument("target")
    parser.add_argument("combinations", choices=("quick", "core", "all"))
    options = parser.parse_args(arguments)
    op = OPS[options.op]
    failed = False
    for combination in op.combinations[options.combinations]:
        result = check(op, options.target, combination)
        failed |= "error" in result
        print(json.dumps({"name": combination.name} | result), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

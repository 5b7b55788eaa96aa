"""The proof harness on an op that it has never heard of: what the op registers is all that it needs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jaxserve.kernels_pallas.proof import compile_check, numerics
from jaxserve.kernels_pallas.proof.check import report
from jaxserve.kernels_pallas.proof.compiling import CompileReport
from jaxserve.kernels_pallas.proof.op import CompiledOp, OpProof
from jaxserve.kernels_pallas.proof.ops import OPS


@dataclasses.dataclass(frozen=True)
class Number:
    name: str
    value: float


@dataclasses.dataclass(frozen=True)
class Distance:
    error: float

    @property
    def held(self) -> bool:
        return self.error < 0.1


@dataclasses.dataclass(frozen=True)
class Refused:
    message: str | None
    implementation: str = "fast"
    name: str = "zero"
    reason: str = "no zero"


IMPLEMENTATIONS = {"fast": lambda x: 2 * x, "rough": lambda x: 2.5 * x}


def compile_for(target: str, number: Number) -> CompiledOp:
    if number.value == 0:
        raise NotImplementedError("no zero")
    if number.value < 0:
        raise ValueError("it crashed")
    report = CompileReport(seconds=1.0, temp_bytes=0, alias_bytes=8, pool_bytes=8, pool_copies=0)
    return CompiledOp(report=report, fast_memory_bytes=len(target))


NUMBERS = (Number("one", 1.0), Number("zero", 0.0), Number("minus_one", -1.0))
DOUBLING: OpProof[Number, Number] = OpProof(
    name="doubling",
    implementations=tuple(IMPLEMENTATIONS),
    quick_implementations=("fast",),
    cases=NUMBERS,
    refusal=lambda implementation, case: "no zero" if implementation == "fast" and case.value == 0 else None,
    compare=lambda implementation, case: Distance(abs(IMPLEMENTATIONS[implementation](case.value) - 2 * case.value)),
    refusals=(Refused("fast has no zero for you"),),
    checked_implementation="fast",
    checked_cases=NUMBERS[:1],
    quick_checked_cases=("one",),
    compare_checked=lambda case, interpret: Distance(0.0),
    combinations={"quick": NUMBERS[:1], "core": NUMBERS, "all": NUMBERS},
    compiled_implementation=lambda target: "fast",
    compile=compile_for,
)


def test_numbers_are_compared_and_refusals_fail() -> None:
    def row(implementation: str, case: Number) -> tuple[Any, ...]:
        found = numerics.evaluate(DOUBLING, implementation, case)
        return found["implementation"], found["shape"], found["held"], found["error"], found["detail"]

    assert row("fast", NUMBERS[0]) == ("fast", "one", True, 0.0, "")
    assert row("rough", NUMBERS[0]) == ("rough", "one", False, 0.5, "Distance(error=0.5)")
    assert row("fast", NUMBERS[1]) == ("fast", "zero", False, None, "refused: no zero")


@pytest.mark.parametrize(
    ("message", "held", "detail"),
    [("fast has no zero", True, "refused: fast has no zero"), ("something else", False, "refused: something else"), (None, False, "it is served")],
)
def test_a_documented_refusal_holds_if_it_gives_its_reason(message: str | None, held: bool, detail: str) -> None:
    expected = {"check": "refusal", "implementation": "fast", "shape": "zero", "held": held, "detail": detail}
    assert numerics.refusal_row(Refused(message)) == expected


def test_compiles_are_reported_or_say_why_not() -> None:
    one, zero, minus_one = (compile_check.check(DOUBLING, "v6e", number) for number in NUMBERS)
    assert (one["in_place"], one["fast_memory_bytes"], one["pool_copies"]) == (True, 3, 0)
    assert zero == {"error": "refused: no zero"}
    assert minus_one == {"error": "ValueError: it crashed"}


def test_an_op_without_a_registration_is_a_failed_cell(capsys: pytest.CaptureFixture[str]) -> None:
    """The processes that check know ops by their registration; each that finds none ends, and says so."""
    assert report(ops=[DOUBLING], chosen_targets=[], quick=True) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("0 held, 2 failed")
    assert all("KeyError: 'doubling'" in line for line in lines[1:3]), lines


def test_registered_ops_have_what_a_quick_run_names() -> None:
    for name, op in OPS.items():
        assert op.name == name
        assert set(op.quick_implementations) <= set(op.implementations)
        assert set(op.quick_checked_cases) <= {case.name for case in op.checked_cases} <= {case.name for case in op.cases}
        assert set(op.combinations) == {"quick", "core", "all"}
        assert set(op.combinations["quick"]) | set(op.combinations["core"]) <= set(op.combinations["all"])

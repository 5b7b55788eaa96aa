"""What an op tells the proof harness of itself. Each op registers one :class:`OpProof`, made in its own folder; the harness knows no op by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from jaxserve.kernels_pallas.proof.compiling import CompileReport


class Named(Protocol):
    """A case or a combination of sizes. Its name is unique among those of the op."""

    @property
    def name(self) -> str: ...


class Comparison(Protocol):
    """How a result compares with the reference's. Its ``str`` says what is wrong where it did not hold."""

    @property
    def error(self) -> float:
        """Relative norm of the difference."""
        ...

    @property
    def held(self) -> bool:
        """Whether all of the result is right."""
        ...


class Refusal(Protocol):
    """A problem that an implementation is documented to refuse."""

    @property
    def implementation(self) -> str: ...

    @property
    def name(self) -> str:
        """Unique among the implementation's refusals; says what is refused."""
        ...

    @property
    def reason(self) -> str:
        """A part of the message that the caller must get."""
        ...

    @property
    def message(self) -> str | None:
        """What the caller gets, or ``None`` if the problem is served."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledOp:
    """What compiling one combination gave.

    Args:
        report: Of the compiled program.
        fast_memory_bytes: VMEM or shared memory that the kernels' tiles take.
    """

    report: CompileReport
    fast_memory_bytes: int


CaseT = TypeVar("CaseT", bound=Named)
CombinationT = TypeVar("CombinationT", bound=Named)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpProof(Generic[CaseT, CombinationT]):
    """Everything that the harness needs of one op.

    Args:
        name: The op's.
        implementations: Those that are compared with the reference.
        quick_implementations: Those of them that a quick run compares.
        cases: Calls of the op that every implementation must get right.
        refusal: Why an implementation refuses a case, or ``None``.
        compare: An implementation's result on a case against the reference's.
        refusals: What is documented to be refused.
        checked_implementation: The one whose kernels run in the checking interpreter, which is Pallas's for TPUs.
        checked_cases: Cases small enough for that interpreter.
        quick_checked_cases: Names of those that a quick run checks.
        compare_checked: The kernels' result on a case in an interpreter with these parameters (``pltpu.InterpretParams``) against the reference's.
        combinations: Name of a set (``quick``, ``core``, ``all``) -> what it compiles.
        compiled_implementation: The implementation that is compiled for a target.
        compile: Compiles a combination for a target; raises ``NotImplementedError`` with the reason where the implementation refuses it.
    """

    name: str
    implementations: Sequence[str]
    quick_implementations: Sequence[str]
    cases: Sequence[CaseT]
    refusal: Callable[[str, CaseT], str | None]
    compare: Callable[[str, CaseT], Comparison]
    refusals: Sequence[Refusal]
    checked_implementation: str
    checked_cases: Sequence[CaseT]
    quick_checked_cases: Sequence[str]
    compare_checked: Callable[[CaseT, Any], Comparison]
    combinations: Mapping[str, Sequence[CombinationT]]
    compiled_implementation: Callable[[str], str]
    compile: Callable[[str, CombinationT], CompiledOp]

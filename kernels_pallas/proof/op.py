"""The interface between an op and the proof harness. Each op registers one :class:`OpProof`, made in its own folder; the harness knows no op by name."""

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
    """The comparison of a result with the reference's. Its ``str`` says what is wrong if it did not hold."""

    @property
    def error(self) -> float:
        """Relative norm of the difference."""
        ...

    @property
    def held(self) -> bool:
        """Whether the whole result is right."""
        ...


class Refusal(Protocol):
    """A problem that an implementation is documented to refuse."""

    @property
    def implementation(self) -> str: ...

    @property
    def name(self) -> str:
        """Name of the refused problem, unique among the implementation's refusals."""
        ...

    @property
    def reason(self) -> str:
        """A part of the message that the caller must get."""
        ...

    @property
    def message(self) -> str | None:
        """The message that the caller gets; ``None`` if the problem is served."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledOp:
    """The result of compiling one combination.

    Args:
        report: Report of the compiled program.
        fast_memory_bytes: Bytes of VMEM or shared memory that the kernels' tiles take.
    """

    report: CompileReport
    fast_memory_bytes: int


CaseT = TypeVar("CaseT", bound=Named)
CombinationT = TypeVar("CombinationT", bound=Named)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpProof(Generic[CaseT, CombinationT]):
    """The registration of one op: everything that the harness needs of it.

    Args:
        name: Name of the op.
        implementations: Names of the implementations that are compared with the reference.
        quick_implementations: Names of those that a quick run compares.
        cases: Calls of the op that every implementation must get right.
        refusal: Gives the reason why an implementation refuses a case; ``None`` if it serves it.
        compare: Compares an implementation's result on a case with the reference's.
        refusals: The documented refusals.
        checked_implementation: Name of the implementation whose kernels run in the checking interpreter, which is Pallas's for TPUs.
        checked_cases: Cases small enough for that interpreter.
        quick_checked_cases: Names of those cases that a quick run checks.
        compare_checked: Compares the kernels' result on a case, in an interpreter with the given ``pltpu.InterpretParams``, with the reference's.
        combinations: Combinations to compile, by the name of their set (``quick``, ``core``, ``all``).
        compiled_implementation: Gives the name of the implementation that is compiled for a target.
        compile: Compiles a combination for a target; raises ``NotImplementedError`` with the reason if the implementation refuses it.
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

"""Reads the text of a compiled XLA program into computations and instructions. What they amount to is counted in ``traffic.py``."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

_ELEMENT = re.compile(r"(\w+)\[([\d,]*)\](?:\{[^}]*\})?")
_ARRAY = re.compile(r"\w+\[[\d,]*\](?:\{[^}]*\})?")
_MEMORY_SPACE = re.compile(r"S\((\d+)\)\}")
_NAME = re.compile(r"%[\w.$-]+")
_HEADER = re.compile(r"(ENTRY )?(%[\w.$-]+) \(")
_DONE = ("-done", "-update")

DTYPE_BYTES: Mapping[str, float] = {
    "pred": 1, "s2": 0.25, "u2": 0.25, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "s32": 4, "u32": 4, "s64": 8, "u64": 8,
    "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16,
}  # fmt: skip
"""Bytes of an element; every ``f8…`` is 1, every ``f4…`` a half, tokens and opaque values none."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Args:
        name: With its percent sign.
        opcode: Such as ``all-reduce``.
        shape: Of the result, as text.
        operands: Names, or the text inside the parentheses of a parameter or constant.
        attributes: The rest of the line.
        is_root: Whether it is the computation's result.
    """

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of the result, all elements of a tuple together."""
        return shape_bytes(self.shape)

    @property
    def ends_asynchronous(self) -> bool:
        """Whether it is the second half of a pair, whose first half says everything."""
        return self.opcode.endswith(_DONE)

    def called(self, attribute: str) -> str | None:
        """The computation that an attribute such as ``body`` names."""
        match = re.search(rf"\b{attribute}=(%[\w.$-]+)", self.attributes)
        return match and match.group(1)

    def branches(self) -> list[str]:
        """The computations of a conditional, one of which runs."""
        match = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
        if match:
            return _NAME.findall(match.group(1))
        return [name for name in (self.called("true_computation"), self.called("false_computation")) if name]

    def integer(self, pattern: str) -> int | None:
        """The number that a pattern with one group finds among the attributes."""
        match = re.search(pattern, self.attributes)
        return int(match.group(1)) if match else None


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions by name, in program order."""

    name: str
    instructions: Mapping[str, Instruction]

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    @property
    def root(self) -> Instruction:
        return next(instruction for instruction in self if instruction.is_root)


@dataclasses.dataclass(frozen=True)
class Program:
    """All computations by name, and the one that runs."""

    computations: Mapping[str, Computation]
    entry: Computation

    def written_shape(self, instruction: Instruction) -> str:
        """The shape of what an instruction writes; of the first half of an asynchronous pair, whose own shape holds the operands too, what the pair writes."""
        if not instruction.opcode.endswith("-start"):
            return instruction.shape
        called = self.computations.get(instruction.called("calls") or "")
        arrays = _ARRAY.findall(instruction.shape)
        return called.root.shape if called is not None else arrays[0] if instruction.opcode == "copy-start" else arrays[1]


def parse_program(text: str) -> Program:
    """Reads ``compiled.as_text()``.

    Raises:
        ValueError: The text has no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry = None
    current: dict[str, Instruction] | None = None
    for line in text.splitlines():
        if current is None:
            header = _HEADER.match(line)
            if header and line.rstrip().endswith("{"):
                current = {}
                computation = Computation(header.group(2), current)
                computations[computation.name] = computation
                entry = computation if header.group(1) else entry
        elif line.startswith("}"):
            current = None
        elif " = " in line:
            instruction = _parse_instruction(line.strip())
            current[instruction.name] = instruction
    if entry is None:
        raise ValueError("the program has no entry computation")
    return Program(computations, entry)


def shape_bytes(shape: str) -> int:
    """Bytes of a shape's text, such as ``(bf16[2,3]{1,0}, f32[])``."""
    total = 0.0
    for dtype, dimensions in _ELEMENT.findall(shape):
        size = DTYPE_BYTES.get(dtype, 1 if dtype.startswith("f8") else 0.5 if dtype.startswith("f4") else 0)
        total += size * math.prod(int(dimension) for dimension in dimensions.split(",") if dimension)
    return math.ceil(total)


def is_in_main_memory(shape: str) -> bool:
    """Whether an array lies in HBM, not in a core's own memory."""
    return _MEMORY_SPACE.search(shape) is None


def _parse_instruction(line: str) -> Instruction:
    is_root = line.startswith("ROOT ")
    name, rest = line.removeprefix("ROOT ").split(" = ", 1)
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    inside = rest[opening + 1 : closing]
    opcode = rest[:opening]
    operands = (inside,) if opcode in ("parameter", "constant") else tuple(_NAME.findall(inside))
    return Instruction(name, opcode, shape, operands, rest[closing + 1 :], is_root)


def _closing(text: str, opening: int) -> int:
    """Index of the parenthesis that closes the one at ``opening``."""
    depth = 0
    for index in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    raise ValueError(f"unclosed parenthesis in {text[:200]!r}")

"""What one run of a compiled program moves: collectives by kind and mesh axis, and copies of weights, counted through calls, loops and branches."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxserve.plan.hlo import Computation, Instruction, Program, is_in_main_memory, parse_program, shape_bytes

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute", "collective-broadcast")
"""Opcodes of collectives, without the ``-start`` of asynchronous ones."""

_MOVES = {"bitcast", "copy", "transpose", "reshape", "convert", "dynamic-slice", "slice", "parameter", "constant", "copy-start", "slice-start"}
"""Opcodes that change where or in which order values lie, or their type, but not the values."""
_COPIES = {"copy", "transpose", "convert", "dynamic-slice", "slice", "fusion", "fusion-start", "copy-start", "slice-start"}
_PASSES = {"bitcast", "copy", "copy-start", "copy-done", "transpose", "convert", "reshape", "dynamic-slice", "slice", "optimization-barrier"}

_LIST = re.compile(r"replica_groups=\{(\{[\d,{}\s]*\})\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")
_NUMBERING = re.compile(r"device_ids=\(\[([\d,]+)\]T\(([\d,]+)\)\)")
"""How the devices of such a mesh are numbered where that is not in its own order (JAX 0.10)."""
_PAIRS = re.compile(r"source_target_pairs=\{(\{[\d,{}\s]*\})\}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """Collectives of one kind over one mesh axis.

    Args:
        kind: One of :data:`KINDS`.
        axis: ``data``, ``model``, ``data+model``, or ``other`` where the groups match no axis.
        count: How many one step runs.
        bytes: Of all of them together, on one device: the whole array of each, before or after (the gathered one of an all-gather, the scattered one of a
            reduce-scatter). What crosses links is in ``roofline.py``.
        group_size: Devices that take part in each.
    """

    kind: str
    axis: str
    count: int
    bytes: int
    group_size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """What one step moves on each device.

    Args:
        collectives: That every step runs.
        sometimes: Those of branches that only some steps take; of each conditional, the branch that moves most.
        weight_copy_bytes: Bytes written into copies of weights, in device memory: layers copied out of a stack, another layout, another dtype.
        num_unknown_loops: Loops with collectives or copies whose number of turns the program does not tell; their content counts once.
    """

    collectives: tuple[Collective, ...]
    sometimes: tuple[Collective, ...]
    weight_copy_bytes: int
    num_unknown_loops: int


def measure_traffic(text: str, mesh: Mapping[str, int], *, weights: str = "params") -> Traffic:
    """Counts what one run of a compiled program moves.

    Args:
        text: ``compiled.as_text()``.
        mesh: Axis name -> size, in the order in which devices are numbered, the last axis fastest.
        weights: Name of the argument of the jitted function that holds the weights.
    """
    walk = _Walk(parse_program(text), mesh, weights)
    walk.run()
    return Traffic(
        collectives=_merge(walk.collectives), sometimes=_merge(walk.sometimes), weight_copy_bytes=walk.copied_bytes, num_unknown_loops=walk.num_unknown_loops
    )


_Source = str | tuple[Any, ...] | None
"""Which entry argument a value is a mere rearrangement of; a tuple for a tuple."""


class _Walk:
    """One pass through a program as it runs, each loop body visited once with its number of turns."""

    def __init__(self, program: Program, mesh: Mapping[str, int], weights: str) -> None:
        self._program, self._mesh, self._weights = program, mesh, weights
        self.collectives: list[Collective] = []
        self.sometimes: list[Collective] = []
        self.copied_bytes = 0
        self.num_unknown_loops = 0

    def run(self) -> None:
        arguments = sorted((i for i in self._program.entry if i.opcode == "parameter"), key=lambda i: int(i.operands[0]))
        names = [re.search(r'op_name="([^"]*)"', argument.attributes) for argument in arguments]
        self._visit(self._program.entry, 1, [match.group(1) if match else None for match in names], is_fused=False)

    def _visit(self, computation: Computation, times: int, arguments: Sequence[_Source], *, is_fused: bool) -> _Source:
        """Adds what ``times`` runs of a computation move; returns the source of its result."""
        sources: dict[str, _Source] = {}
        for instruction in computation:
            sources[instruction.name] = self._step(computation, instruction, times, arguments, sources, is_fused=is_fused)
        return sources.get(computation.root.name)

    def _step(
        self, computation: Computation, instruction: Instruction, times: int, arguments: Sequence[_Source], sources: Mapping[str, _Source], *, is_fused: bool
    ) -> _Source:  # fmt: skip
        operands = [sources.get(name) for name in instruction.operands]
        opcode = instruction.opcode
        if opcode == "parameter":
            index = int(instruction.operands[0])
            return arguments[index] if index < len(arguments) else None
        if opcode == "tuple":
            return tuple(operands)
        if opcode == "get-tuple-element":
            index = instruction.integer(r"index=(\d+)")
            whole = operands[0]
            return whole[index] if isinstance(whole, tuple) and index is not None and index < len(whole) else None
        if opcode == "call-update":  # The call runs on another core, and here it gets its arguments.
            called = computation.instructions[instruction.operands[0]].called("to_apply")
            return self._visit(self._program.computations[called or ""], times, operands[1:], is_fused=False)
        if instruction.ends_asynchronous:
            return operands[0] if operands and isinstance(operands[0], str) else None
        if opcode == "while":
            return self._loop(computation, instruction, times, operands)
        if opcode == "conditional":
            self._branches(instruction, times, operands[1:])
            return None
        kind = opcode.removesuffix("-start")
        if kind in KINDS:
            self.collectives.append(_collective(kind, computation, instruction, self._mesh, times))
            return None
        result: _Source = operands[0] if opcode in _PASSES and operands and isinstance(operands[0], str) else None
        called = instruction.called("calls") or (instruction.called("to_apply") if self._is_call(computation, instruction) else None)
        if called is not None and called in self._program.computations:
            inner = self._program.computations[called]
            fuses = opcode.startswith("fusion")
            result = self._visit(inner, times, operands, is_fused=is_fused or fuses)
            if fuses and not all(i.opcode in _MOVES or i.opcode.startswith("fusion") for i in inner):
                result = None
        if isinstance(result, str) and not is_fused and opcode in _COPIES and self._is_weight(result):
            written = self._program.written_shape(instruction)
            self.copied_bytes += times * shape_bytes(written) * is_in_main_memory(written)
        return result

    def _is_call(self, computation: Computation, instruction: Instruction) -> bool:
        if instruction.opcode == "call-start":
            return not any(other.opcode == "call-update" and other.operands[0] == instruction.name for other in computation)
        return instruction.opcode == "call"

    def _loop(self, computation: Computation, loop: Instruction, times: int, operands: Sequence[_Source]) -> _Source:
        turns = loop.integer(r'"known_trip_count":\{"n":"(\d+)"')
        if turns is None:
            turns = _count_turns(self._program, computation, loop)
        before = (len(self.collectives), len(self.sometimes), self.copied_bytes)
        body = self._program.computations[loop.called("body") or ""]
        after = self._visit(body, times * (1 if turns is None else turns), operands[:1], is_fused=False)
        if turns is None and before != (len(self.collectives), len(self.sometimes), self.copied_bytes):
            self.num_unknown_loops += 1
        initial = operands[0]
        if isinstance(initial, tuple) and isinstance(after, tuple):
            return tuple(first if first == last else None for first, last in zip(initial, after, strict=True))
        return initial

    def _branches(self, conditional: Instruction, times: int, operands: Sequence[_Source]) -> None:
        taken: list[_Walk] = []
        for index, name in enumerate(conditional.branches()):
            branch = _Walk(self._program, self._mesh, self._weights)
            branch._visit(self._program.computations[name], times, operands[index : index + 1], is_fused=False)
            taken.append(branch)
        largest = max(taken, key=lambda branch: (sum(c.bytes for c in branch.collectives + branch.sometimes), branch.copied_bytes), default=None)
        if largest is not None:
            self.sometimes += largest.collectives + largest.sometimes
            self.num_unknown_loops += largest.num_unknown_loops

    def _is_weight(self, source: str) -> bool:
        return source == self._weights or source.startswith((f"{self._weights}[", f"{self._weights}."))


def _count_turns(program: Program, computation: Computation, loop: Instruction) -> int | None:
    """Turns of a loop that counts up by one to a constant, as ``lax.scan`` does; ``None`` for any other."""
    condition = program.computations[loop.called("condition") or ""]
    compare = condition.root
    inner = program.computations.get(compare.called("calls") or "")
    bounds = [_constant(i) for c in (condition, inner) if c is not None for i in c if i.opcode == "constant"]
    indices = [i.integer(r"index=(\d+)") for i in condition if i.opcode == "get-tuple-element"]
    comparison = compare if inner is None else inner.root
    if comparison.opcode != "compare" or "direction=LT" not in comparison.attributes or len(bounds) != 1 or len(indices) != 1:
        return None
    bound, index = bounds[0], indices[0]
    start = _resolve(computation, loop.operands[0], index)
    return None if bound is None or start is None else max(0, bound - start)


def _resolve(computation: Computation, name: str, index: int | None) -> int | None:
    """The constant that element ``index`` of a tuple starts with."""
    tuple_instruction = computation.instructions[name]
    if tuple_instruction.opcode != "tuple" or index is None:
        return None
    instruction = computation.instructions[tuple_instruction.operands[index]]
    while instruction.opcode in ("copy", "bitcast"):
        instruction = computation.instructions[instruction.operands[0]]
    return _constant(instruction)


def _constant(instruction: Instruction) -> int | None:
    text = instruction.operands[0] if instruction.opcode == "constant" else ""
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def _collective(kind: str, computation: Computation, instruction: Instruction, mesh: Mapping[str, int], times: int) -> Collective:
    groups = _groups(instruction.attributes)
    size = len(groups[0]) if groups else math.prod(mesh.values())
    axis = _axis_of_pairs(groups, mesh) if kind == "collective-permute" else _axis(groups, mesh)
    operand_bytes = sum(computation.instructions[name].num_bytes for name in instruction.operands if name in computation.instructions)
    if kind == "collective-permute":
        size = math.prod(mesh[name] for name in axis.split("+") if name in mesh)
    return Collective(kind=kind, axis=axis, count=times, bytes=times * operand_bytes * (size if kind == "all-gather" else 1), group_size=size)


def _groups(attributes: str) -> list[list[int]]:
    """The groups of devices that work together: written out, as a permuted iota, or by names of a mesh. Pairs for a permute. Empty: all devices."""
    for pattern in (_LIST, _PAIRS):
        match = pattern.search(attributes)
        if match:
            return [[int(number) for number in group.split(",")] for group in re.findall(r"\{([\d,\s]+)\}", match.group(1))]
    match = _IOTA.search(attributes)
    if match:
        shape, dimensions = _numbers(match.group(1)), _numbers(match.group(2))
        devices = np.arange(math.prod(dimensions)).reshape(dimensions)
        if match.group(3):
            devices = devices.transpose(_numbers(match.group(3)))
        return devices.reshape(shape).reshape(shape[0], -1).tolist()
    match = _MESH.search(attributes)
    if match:
        axes = {name: int(size) for name, size in re.findall(r"'?([\w]+)'?=(\d+)", match.group(1))}
        chosen = re.findall(r"[A-Za-z_]\w*", match.group(2))
        devices = np.arange(math.prod(axes.values()))
        numbering = _NUMBERING.search(attributes)
        if numbering:
            devices = devices.reshape(_numbers(numbering.group(1))).transpose(_numbers(numbering.group(2)))
        devices = devices.reshape(tuple(axes.values()))
        order = [*(i for i, name in enumerate(axes) if name not in chosen), *(list(axes).index(name) for name in chosen)]
        return devices.transpose(order).reshape(-1, math.prod(axes[name] for name in chosen)).tolist()
    return []


def _axis(groups: list[list[int]], mesh: Mapping[str, int]) -> str:
    """The mesh axes over which groups run; axes of size one are none."""
    if not groups:
        return "+".join(mesh)
    wanted = {frozenset(group) for group in groups}
    for names in _subsets([name for name, size in mesh.items() if size > 1]):
        devices = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
        order = [*(i for i, name in enumerate(mesh) if name not in names), *(list(mesh).index(name) for name in names)]
        rows = devices.transpose(order).reshape(-1, math.prod(mesh[name] for name in names)).tolist()
        if {frozenset(row) for row in rows} == wanted:
            return "+".join(names)
    return "other"


def _axis_of_pairs(pairs: list[list[int]], mesh: Mapping[str, int]) -> str:
    """The mesh axes along which a permute moves."""
    sizes = tuple(mesh.values())
    moved = {name for pair in pairs for name, *ends in zip(mesh, *(np.unravel_index(device, sizes) for device in pair), strict=True) if len(set(ends)) > 1}
    return "+".join(name for name in mesh if name in moved) or "other"


def _subsets(names: Sequence[str]) -> Iterator[list[str]]:
    for bits in range(1, 2 ** len(names)):
        yield [name for index, name in enumerate(names) if bits >> index & 1]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _merge(collectives: Sequence[Collective]) -> tuple[Collective, ...]:
    """One entry for each kind and axis, largest first. Collectives of one device each are none."""
    merged: dict[tuple[str, str], Collective] = {}
    for item in collectives:
        if item.group_size > 1 and item.count:
            key = (item.kind, item.axis)
            known = merged.get(key)
            merged[key] = item if known is None else dataclasses.replace(known, count=known.count + item.count, bytes=known.bytes + item.bytes)
    return tuple(sorted(merged.values(), key=lambda c: (-c.bytes, c.kind, c.axis)))

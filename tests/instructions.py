"""What Python code costs, in numbers that no other work on the machine changes: bytecode instructions and the most memory held on the way."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_instructions(run: Callable[[], object]) -> int:
    """The bytecode instructions that ``run`` executes in this thread. What a function written in C does counts as one."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes that ``run`` holds at a time beyond what there was before it."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

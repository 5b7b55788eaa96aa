"""A clock that jumps: an event loop whose time is moved to the next timer as soon as nothing else is to be done."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Waits for nothing: the selector is asked without a timeout, and the clock stands where the next timer is due."""

    def __init__(self) -> None:
        super().__init__(_JumpingSelector(self))
        self.now_s = 0.0

    def time(self) -> float:
        return self.now_s


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "nothing will ever happen"
        if timeout > 0 and self._loop._scheduled:  # a heap, and the loop has just dropped the cancelled timers at its top
            self._loop.now_s = max(self._loop.now_s, self._loop._scheduled[0].when())
        return super().select(0)


@pytest.fixture
def virtual() -> Callable[[Coroutine[Any, Any, T]], T]:
    """Runs a coroutine on the jumping clock."""

    def run(main: Coroutine[Any, Any, T]) -> T:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(main)

    return run

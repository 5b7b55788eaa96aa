"""Where the time of a piece of code goes, by phase, without a line in the code itself."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Generator
from typing import Any

OTHER = "other"
"""The phase of what no other one covers."""


class Stopwatch:
    """Times phases. One runs at any moment: while a phase runs inside another, the outer one stands still, so that nothing counts twice.

    For one thread. What a watched function does in other threads is time that its caller waits.

    Args:
        clock: Gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._phase = OTHER
        self._since_s = clock()
        self._seconds: dict[str, float] = {}

    def start(self) -> None:
        """Forgets what was."""
        self._seconds.clear()
        self._since_s = self._clock()

    def read(self) -> dict[str, float]:
        """Seconds of each phase since ``start``; their sum is all the time since then."""
        self._switch(self._phase)
        return dict(self._seconds)

    @contextlib.contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Times a block."""
        outer = self._switch(name)
        try:
            yield
        finally:
            self._switch(outer)

    def watch(self, owner: object, name: str, phase: str) -> None:
        """Times every call of ``owner.name`` from now on. For functions of modules, methods of classes and bound methods of single objects."""
        function: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            outer = self._switch(phase)
            try:
                return function(*args, **kwargs)
            finally:
                self._switch(outer)

        setattr(owner, name, watched)

    def _switch(self, phase: str) -> str:
        """Ends the phase under way and begins another; returns the one that ended."""
        now_s = self._clock()
        ended = self._phase
        self._seconds[ended] = self._seconds.get(ended, 0.0) + now_s - self._since_s
        self._since_s, self._phase = now_s, phase
        return ended

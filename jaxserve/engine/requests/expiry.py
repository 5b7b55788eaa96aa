"""Times at which requests end by themselves. Plain Python; imports no jax."""

from __future__ import annotations

import math

from jaxserve.engine.requests.live_heap import LiveHeap
from jaxserve.engine.scheduling.sequence import Sequence, SequenceStatus


class Expiry:
    """Sequences by the time at which something becomes of them, unless they have ended before."""

    def __init__(self) -> None:
        self._sequences = LiveHeap(lambda sequence: sequence.status is not SequenceStatus.FINISHED)

    def add(self, sequence: Sequence, due_s: float) -> None:
        """Adds a sequence."""
        self._sequences.push(due_s, sequence)

    def take_due(self, now_s: float) -> list[Sequence]:
        """Takes out those whose time has come, earliest first."""
        due: list[Sequence] = []
        while self.next_s <= now_s:
            due.append(self._sequences.pop())
        return due

    @property
    def next_s(self) -> float:
        """The next time to look; infinity for never."""
        first = self._sequences.peek()
        return math.inf if first is None else first[0]

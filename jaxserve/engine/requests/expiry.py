"""Sequences sorted by the time at which something is due for them. Plain Python; imports no jax."""

from __future__ import annotations

import math

from jaxserve.engine.requests.live_heap import LiveHeap
from jaxserve.engine.scheduling.sequence import Sequence, SequenceStatus


class Expiry:
    """A collection of sequences, each with a time at which it is due, unless it ends before."""

    def __init__(self) -> None:
        self._sequences = LiveHeap(lambda sequence: sequence.status is not SequenceStatus.FINISHED)

    def add(self, sequence: Sequence, due_s: float) -> None:
        """Adds a sequence that is due at ``due_s``, in seconds of the engine's clock."""
        self._sequences.push(due_s, sequence)

    def take_due(self, now_s: float) -> list[Sequence]:
        """Removes and returns the sequences that are due, earliest first."""
        due: list[Sequence] = []
        while self.next_s <= now_s:
            due.append(self._sequences.pop())
        return due

    @property
    def next_s(self) -> float:
        """Time at which the next sequence is due; infinity if there is none."""
        first = self._sequences.peek()
        return math.inf if first is None else first[0]

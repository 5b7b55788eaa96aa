"""Times at which requests end by themselves. Plain Python; imports no jax."""

from __future__ import annotations

import heapq

from jaxserve.engine.sequence import Sequence, SequenceStatus

_COMPACT_AT = 256
"""Fewer entries than this are not worth a search for those whose sequences have ended."""


class Expiry:
    """Sequences by the time at which something becomes of them. Adding and taking cost O(log n), with the entries of ended sequences dropped now and then."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._compact_at = _COMPACT_AT

    def add(self, sequence: Sequence, due_s: float) -> None:
        """Adds a sequence that the scheduler has taken; once at most."""
        heapq.heappush(self._heap, (due_s, sequence.order[1], sequence))
        if len(self._heap) > self._compact_at:
            self._heap = [entry for entry in self._heap if entry[2].status is not SequenceStatus.FINISHED]
            heapq.heapify(self._heap)
            self._compact_at = max(_COMPACT_AT, 2 * len(self._heap))

    def take_due(self, now_s: float) -> list[Sequence]:
        """Takes out those whose time has come and that have not ended."""
        due: list[Sequence] = []
        while self._heap and self._heap[0][0] <= now_s:
            sequence = heapq.heappop(self._heap)[2]
            if sequence.status is not SequenceStatus.FINISHED:
                due.append(sequence)
        return due

    @property
    def next_s(self) -> float:
        """The next time to look; infinity for never."""
        while self._heap and self._heap[0][2].status is SequenceStatus.FINISHED:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else float("inf")

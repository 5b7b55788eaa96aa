"""A heap of sequences of which many end before they reach the front. Plain Python; imports no jax."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from jaxserve.engine.scheduling.sequence import Sequence

_COMPACT_AT = 256
"""Number of items up to which the heap is not searched for dead ones."""


class LiveHeap:
    """A heap of sequences: smallest key first; of equal keys the one that was pushed last.

    Nobody tells the heap when a sequence dies. Dead sequences are dropped when they reach the front, and all at once when they may be half of all, so that
    every operation costs O(log n), on average.

    Args:
        is_live: Tells whether a sequence still counts. A sequence that has died must stay dead.
    """

    def __init__(self, is_live: Callable[[Sequence], bool]) -> None:
        self._is_live = is_live
        self._heap: list[tuple[float, int, Sequence]] = []
        self._num_pushes = 0
        self._compact_at = _COMPACT_AT

    def push(self, key: float, sequence: Sequence) -> None:
        self._num_pushes += 1
        heapq.heappush(self._heap, (key, -self._num_pushes, sequence))
        if len(self._heap) > self._compact_at:
            self._heap = [entry for entry in self._heap if self._is_live(entry[2])]
            heapq.heapify(self._heap)
            self._compact_at = max(_COMPACT_AT, 2 * len(self._heap))

    def peek(self) -> tuple[float, Sequence] | None:
        """The first live sequence with its key; ``None`` if there is none."""
        heap = self._heap
        while heap and not self._is_live(heap[0][2]):
            heapq.heappop(heap)
        return (heap[0][0], heap[0][2]) if heap else None

    def pop(self) -> Sequence:
        """Removes the sequence that ``peek`` has just returned."""
        return heapq.heappop(self._heap)[2]

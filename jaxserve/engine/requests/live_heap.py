"""Sequences by a key of which many end before they come to the front. Plain Python; imports no jax."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from jaxserve.engine.scheduling.sequence import Sequence

_COMPACT_AT = 256
"""Fewer entries than this are not worth a search for the dead among them."""


class LiveHeap:
    """Smallest key first; of equal ones the one that was pushed last.

    A sequence dies unseen. It is dropped when it comes to the front, or with all other dead ones when they may be half of all. So every operation costs
    O(log n), on average.

    Args:
        is_live: Whether a sequence still counts; one that has died stays dead.
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
        """The first with its key; ``None`` when there is none."""
        heap = self._heap
        while heap and not self._is_live(heap[0][2]):
            heapq.heappop(heap)
        return (heap[0][0], heap[0][2]) if heap else None

    def pop(self) -> Sequence:
        """Takes out the one that ``peek`` has shown."""
        return heapq.heappop(self._heap)[2]

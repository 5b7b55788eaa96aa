"""The queue of sequences that wait to be admitted. Plain Python; imports no jax."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from jaxserve.engine.scheduling.sequence import Sequence

_COMPACT_AT = 64
"""Dead entries below this number are left where they are."""


class WaitingQueue:
    """Sequences by their ``order``, which must not change as long as they live; the smallest is the head. Every operation costs O(log n).

    Removal leaves a dead entry in the heap. Those are dropped when they reach the head, and all at once when they outnumber the living.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int], Sequence]] = []
        self._dead: set[Sequence] = set()
        self._live: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._live

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._live)

    def push(self, sequence: Sequence) -> None:
        """Takes a sequence; one that has been here before gets its old place."""
        assert sequence not in self._live
        self._live.add(sequence)
        if sequence in self._dead:
            self._dead.remove(sequence)
        else:
            heapq.heappush(self._heap, (sequence.order, sequence))

    def peek(self) -> Sequence | None:
        """The head; ``None`` when nobody waits."""
        heap, dead = self._heap, self._dead
        while heap and heap[0][1] in dead:
            dead.remove(heapq.heappop(heap)[1])
        return heap[0][1] if heap else None

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it stands."""
        self._live.remove(sequence)
        if self._heap[0][1] is sequence:
            heapq.heappop(self._heap)
            return
        self._dead.add(sequence)
        if len(self._dead) > max(_COMPACT_AT, len(self._live)):
            self._heap = [entry for entry in self._heap if entry[1] not in self._dead]
            heapq.heapify(self._heap)
            self._dead.clear()

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """Nothing here depends on what has been served."""

    def check_integrity(self) -> None:
        """Raises:
        AssertionError: An entry is lost, doubled, or both dead and alive.
        """
        entries = [sequence for _, sequence in self._heap]
        assert len(entries) == len(set(entries)) and set(entries) == self._live | self._dead and not self._live & self._dead

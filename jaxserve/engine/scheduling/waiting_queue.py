"""The queue of sequences that wait to be admitted. Plain Python; imports no jax."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from jaxserve.engine.scheduling.sequence import Sequence

_COMPACT_AT = 64
"""Number of removed entries up to which they are left in the heap."""


class WaitingQueue:
    """A queue of sequences sorted by their ``order``, which must not change; the smallest is the head. Every operation costs O(log n), on average.

    A removed sequence leaves a dead entry in the heap. Dead entries are dropped when they reach the head, and all at once when they outnumber the live ones.
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
        """Adds a sequence; one that has been here before gets its old place."""
        assert sequence not in self._live
        self._live.add(sequence)
        if sequence in self._dead:
            self._dead.remove(sequence)
        else:
            heapq.heappush(self._heap, (sequence.order, sequence))

    def peek(self) -> Sequence | None:
        """The sequence at the head; ``None`` if the queue is empty."""
        heap, dead = self._heap, self._dead
        while heap and heap[0][1] in dead:
            dead.remove(heapq.heappop(heap)[1])
        return heap[0][1] if heap else None

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence, wherever in the queue it is."""
        self._live.remove(sequence)
        if self._heap[0][1] is sequence:
            heapq.heappop(self._heap)
            return
        self._dead.add(sequence)
        if len(self._dead) > max(_COMPACT_AT, len(self._live)):
            self._heap = [entry for entry in self._heap if entry[1] not in self._dead]
            heapq.heapify(self._heap)
            self._dead.clear()

    def charge(self, served: Iterable[tuple[Sequence, int]]) -> None:
        """Does nothing: this order does not depend on the tokens served."""

    def check_integrity(self) -> None:
        """Checks the heap against the sets of live and dead sequences.

        Raises:
            AssertionError: An entry is lost, doubled, or both dead and live.
        """
        entries = [sequence for _, sequence in self._heap]
        assert len(entries) == len(set(entries)) and set(entries) == self._live | self._dead and not self._live & self._dead

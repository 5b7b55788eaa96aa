"""The order in which cached pages are evicted. Imports no jax."""

from __future__ import annotations

import heapq
import itertools
from typing import Generic, Protocol, TypeVar

LastUse = tuple[float, int, int]
"""Time of use, a number that grows with each use, and minus the pages before this one: of those used at once, the end of a sequence goes first."""


class Evictable(Protocol):
    """What stands in the order.

    Attributes:
        last_use: Only ever grows.
        is_queued: Whether it has an entry in the order; the order's own.
    """

    last_use: LastUse
    is_queued: bool


E = TypeVar("E", bound=Evictable)


class EvictionOrder(Generic[E]):
    """Entries by last use. Using one costs nothing here: its old entry is corrected when it comes to the front."""

    def __init__(self) -> None:
        self._heap: list[tuple[LastUse, int, E]] = []
        self._entries = itertools.count()
        self._uses = itertools.count()

    def use(self, time_s: float) -> LastUse:
        """A use at this time, later than all others of the same time."""
        return time_s, next(self._uses), 0

    def push(self, item: E) -> None:
        """Adds an item, unless it is there."""
        if not item.is_queued:
            item.is_queued = True
            heapq.heappush(self._heap, (item.last_use, next(self._entries), item))

    def pop(self) -> E | None:
        """Takes out the item used least recently; ``None`` when there is none."""
        while self._heap:
            last_use, _, item = heapq.heappop(self._heap)
            item.is_queued = False
            if item.last_use == last_use:
                return item
            self.push(item)
        return None

    def clear(self) -> None:
        self._heap.clear()

"""The order in which cached pages are evicted. Imports no jax."""

from __future__ import annotations

import itertools
from heapq import heappop, heappush
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
    """Items by last use. Using one costs nothing here: its old entry is corrected when it comes to the front.

    Items that are held are parked beside it, so that taking one out costs the same however many those are.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[LastUse, int, E]] = []
        self._parked: dict[int, E] = {}
        self._entries = itertools.count()
        self._uses = itertools.count()

    def use(self, time_s: float) -> LastUse:
        """A use at this time, later than all others of the same time."""
        return time_s, next(self._uses), 0

    def push(self, item: E) -> None:
        """Adds an item, unless it is there."""
        if not item.is_queued:
            item.is_queued = True
            heappush(self._heap, (item.last_use, next(self._entries), item))

    def park(self, item: E, page_id: int) -> None:
        """Adds an item as soon as nobody holds one of its pages, which is held now."""
        self._parked[page_id] = item

    def unpark(self, page_id: int) -> None:
        """Told that nobody holds a page any more."""
        item = self._parked.pop(page_id, None)
        if item is not None:
            self.push(item)

    def is_parked(self, item: E, page_id: int) -> bool:
        return self._parked.get(page_id) is item

    def pop(self) -> E | None:
        """Takes out the item used least recently; ``None`` when there is none."""
        while self._heap:
            last_use, _, item = heappop(self._heap)
            item.is_queued = False
            if item.last_use == last_use:
                return item
            self.push(item)
        return None

    def clear(self) -> None:
        self._heap.clear()
        self._parked.clear()

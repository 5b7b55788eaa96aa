"""The order in which cached pages are evicted. Imports no jax."""

from __future__ import annotations

import itertools
from heapq import heappop, heappush
from typing import Generic, Protocol, TypeVar

LastUse = tuple[float, int, int]
"""The time of use, a number that grows with each use, and minus the number of pages before this one, so that of pages used at once the last of a sequence
is evicted first.
"""


class Evictable(Protocol):
    """The interface of items in the order of eviction.

    Attributes:
        last_use: Last use of the item; may only grow.
        is_queued: Whether the item is in the order's heap. Only the order changes it.
    """

    last_use: LastUse
    is_queued: bool


E = TypeVar("E", bound=Evictable)


class EvictionOrder(Generic[E]):
    """Items sorted by last use. Using an item costs nothing here: its place is corrected when it reaches the front.

    Items that are held are kept apart (parked), so that ``pop`` costs the same however many there are.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[LastUse, int, E]] = []
        self._parked: dict[int, E] = {}
        self._entries = itertools.count()
        self._uses = itertools.count()

    def use(self, time_s: float) -> LastUse:
        """A new use at ``time_s``, which is later than all earlier uses at the same time."""
        return time_s, next(self._uses), 0

    def push(self, item: E) -> None:
        """Adds an item, unless it is in the order already."""
        if not item.is_queued:
            item.is_queued = True
            heappush(self._heap, (item.last_use, next(self._entries), item))

    def park(self, item: E, page_id: int) -> None:
        """Keeps an item apart until ``unpark`` says that ``page_id``, one of its pages that is held now, is no longer held."""
        self._parked[page_id] = item

    def unpark(self, page_id: int) -> None:
        """Adds the item that was parked with a page, if there is one, because nobody holds the page any more."""
        item = self._parked.pop(page_id, None)
        if item is not None:
            self.push(item)

    def is_parked(self, item: E, page_id: int) -> bool:
        return self._parked.get(page_id) is item

    def pop(self) -> E | None:
        """Removes and returns the item used least recently; ``None`` if there is none."""
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

"""Keeps full garbage collections away from the steps: over the objects of 100,000 waiting requests one stops Python for 350 ms."""

from __future__ import annotations

import gc
import time
from types import TracebackType

_YOUNG_COLLECTIONS = 1000
"""A full collection is due by itself after as many of the middle generation; Python's own value is 10."""
_IDLE_INTERVAL_S = 10.0


class FullCollections:
    """While it is entered, full collections run when the engine is idle, and else hardly ever. What lives at that moment is never looked at again.

    It changes the collector of the whole process, and gives it back as it was.
    """

    def __enter__(self) -> FullCollections:
        self._thresholds = gc.get_threshold()
        gc.collect()
        gc.freeze()
        gc.set_threshold(self._thresholds[0], self._thresholds[1], _YOUNG_COLLECTIONS)
        self._collected_s = time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        gc.set_threshold(*self._thresholds)
        gc.unfreeze()

    def on_idle(self) -> None:
        """Collects, unless that was done a moment ago."""
        if time.monotonic() - self._collected_s > _IDLE_INTERVAL_S:
            gc.collect()
            self._collected_s = time.monotonic()

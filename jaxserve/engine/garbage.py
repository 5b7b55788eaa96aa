"""Control of Python's garbage collector. It keeps full collections away from steps, since one with 100,000 waiting requests stops Python for 350 ms."""

from __future__ import annotations

import gc
import time
from types import TracebackType

_YOUNG_COLLECTIONS = 1000
"""Number of collections of the middle generation after which Python does a full one by itself; Python's own value is 10."""
_IDLE_INTERVAL_S = 10.0


class FullCollections:
    """A context in which full garbage collections run when the engine is idle and hardly ever otherwise.

    Objects that exist when it is entered are not examined while it lasts. It changes the collector of the whole process, and restores it at the end.
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
        """Runs a full collection, unless the last one was less than 10 s ago. Call it when the engine has nothing to do."""
        if time.monotonic() - self._collected_s > _IDLE_INTERVAL_S:
            gc.collect()
            self._collected_s = time.monotonic()

"""Waiting for what must happen. No limit here is met by a machine that stands still for seconds: only by what never happens."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable

LIMIT_S = 300.0
"""For anything that must happen; it costs nothing when it does."""


async def until(condition: Callable[[], object | Awaitable[object]], limit_s: float = LIMIT_S) -> None:
    """Waits on the event loop for a condition, which may itself have to be awaited; fails when it does not come."""
    deadline = time.monotonic() + limit_s
    while True:
        found = condition()
        if await found if inspect.isawaitable(found) else found:
            return
        assert time.monotonic() < deadline, f"the condition did not come true within {limit_s:g} s"
        await asyncio.sleep(0.002)


def wait_until(condition: Callable[[], object], what: str = "the condition", limit_s: float = LIMIT_S) -> None:
    """Likewise, in this thread."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come in {limit_s:g} s"
        time.sleep(0.02)


def longer_and_longer(first_s: float) -> tuple[float, ...]:
    """Time limits to try in turn, for what is to keep one that is also waited for: the first is short, the last longer than any stall of the machine."""
    return first_s, 10 * first_s, 100 * first_s

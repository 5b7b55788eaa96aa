"""The binding of XLA's compute threads on CPU to one processor each. Works on Linux only, which has ``/proc``."""

from __future__ import annotations

import os
from pathlib import Path

_COMPUTE_THREAD = "tf_XLAEigen"
"""Name of the threads with which XLA:CPU computes within an operation. There is one for each processor that the process may use."""


def bind_compute_threads() -> list[int]:
    """Binds XLA's compute threads to the processors of this process, one each.

    The threads work in bursts of some ten microseconds and wait for one another. Linux sees each of them idle half of the time and now and then leaves two of
    them on one processor for seconds, during which every step takes twice as long (measured: 24 ms instead of 13 for the same program).

    Returns:
        The processors, in the order of the threads; empty if nothing was bound because the system has no ``/proc``, there are fewer than two threads, or their
            number is not that of the processors.
    """
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        return []
    threads = [int(task.name) for task in tasks.iterdir() if _name(task) == _COMPUTE_THREAD]
    processors = sorted(os.sched_getaffinity(0))
    if len(threads) != len(processors) or len(threads) < 2:
        return []
    for thread, processor in zip(sorted(threads), processors, strict=True):
        os.sched_setaffinity(thread, {processor})
    return processors


def _name(task: Path) -> str:
    try:
        return (task / "comm").read_text().strip()
    except OSError:  # it has ended
        return ""

"""Compute threads and the processors they are bound to."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.waiting import LIMIT_S

SCRIPT = """
import os
from pathlib import Path
from jaxserve.engine.device.cpu_threads import bind_compute_threads
assert bind_compute_threads() == [], "there are no threads before jax"
import jax
jax.devices()
threads = {int(task.name) for task in Path("/proc/self/task").iterdir() if "Eigen" in (task / "comm").read_text()}
bound = bind_compute_threads()
assert bound == sorted(os.sched_getaffinity(0)), (bound, threads)
assert sorted(min(os.sched_getaffinity(thread)) for thread in threads) == bound
assert all(len(os.sched_getaffinity(thread)) == 1 for thread in threads)
assert float(jax.numpy.ones((600, 600)).dot(jax.numpy.ones((600, 600))).sum()) == 600.0**3
"""


@pytest.mark.skipif(sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="binding needs Linux and two processors")
def test_each_compute_thread_has_a_processor_of_its_own() -> None:
    """In a process of its own: the threads of this one stay free, and belong to eight fake devices."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr

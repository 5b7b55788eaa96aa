"""A device that takes a fixed time a step and computes nothing: what the engine's own loop costs beside a chip that is not here."""

from __future__ import annotations

import time

from jaxserve.engine.scheduling.schedule import RunnerCosts, Schedule, SequenceResult
from jaxserve.engine.step.batch import BatchBuilder
from jaxserve.engine.step.buckets import Buckets


class SimulatedDevice:
    """A runner (``schedule.Runner``) that builds every batch as the real one does, and then lets ``step_s`` pass on a device of its own.

    Args:
        buckets: The shapes that batches are built for.
        step_s: How long each step keeps the device busy, in seconds.
        num_pages: Pages of the pool.
        page_size: Places of a page.
        max_num_seqs: Sequence slots.
        token_id: The token that every sequence gets in every step.

    Attributes:
        busy_s: Time since the start in which the device was busy.
        idle_s: Time between the end of one step and the begin of the next.
    """

    num_ranks = 1
    num_host_pages = 0
    can_copy_pages = True
    page_bytes = 1
    costs: RunnerCosts | None = None
    num_late_compiles = 0
    num_programs = 0
    is_compiling = False

    def __init__(self, buckets: Buckets, *, step_s: float, num_pages: int, page_size: int, max_num_seqs: int, token_id: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.max_num_seqs = max_num_seqs
        self.token_buckets = buckets.mixed_tokens
        self.step_s = step_s
        self.busy_s = 0.0
        self.idle_s = 0.0
        self._token_id = token_id
        self._builder = BatchBuilder(buckets, max_num_seqs=max_num_seqs)
        self._ends_s: float | None = None

    def warmup(self) -> None:
        """Does nothing: there is nothing to compile."""

    def dispatch(self, schedule: Schedule) -> SimulatedStep:
        """Starts a step once those before it have ended."""
        bucket = self._builder.build(schedule).bucket
        now_s = time.perf_counter()
        if self._ends_s is not None:
            self.idle_s += max(0.0, now_s - self._ends_s)
        self._ends_s = max(now_s, self._ends_s or now_s) + self.step_s
        self.busy_s += self.step_s
        results = [SequenceResult([self._token_id] if scheduled.num_samples else []) for scheduled in schedule.sequences]
        return SimulatedStep(bucket.num_tokens, bucket.num_rows, results, self._ends_s)

    def forget(self) -> None:
        """Begins to count anew, with a device that has never run."""
        self.busy_s = self.idle_s = 0.0
        self._ends_s = None


class SimulatedStep:
    """A step under way."""

    def __init__(self, num_bucket_tokens: int, num_bucket_sequences: int, results: list[SequenceResult], ends_s: float) -> None:
        self.num_bucket_tokens = num_bucket_tokens
        self.num_bucket_sequences = num_bucket_sequences
        self._results = results
        self._ends_s = ends_s

    def fetch(self) -> list[SequenceResult]:
        """Waits for the end of the step."""
        time.sleep(max(0.0, self._ends_s - time.perf_counter()))
        return self._results

"""The time limits that end requests: deadlines, the longest wait in the queue, and clients that do not read. Plain Python; imports no jax."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from jaxserve.engine.observation.stats import RefusalReason
from jaxserve.engine.requests.expiry import Expiry
from jaxserve.engine.scheduling.sequence import Sequence
from jaxserve.errors import DeadlineExceededError, JaxserveError, OverloadedError, ReaderTimeoutError


class TimeLimits:
    """Watches the time limits of the sequences in flight.

    Args:
        queue_timeout_s: Longest time from arrival to the first step, in seconds; ``None`` for no limit.
        reader_timeout_s: Longest time that a sequence may be paused, in seconds; ``None`` for no limit.
        retry_after_s: Gives the seconds after which a request that has not begun may be tried again.
    """

    def __init__(self, queue_timeout_s: float | None, reader_timeout_s: float | None, retry_after_s: Callable[[], float]) -> None:
        self._queue_timeout_s = queue_timeout_s
        self._reader_timeout_s = reader_timeout_s
        self._retry_after_s = retry_after_s
        self._queue_timeouts = Expiry()
        self._deadlines = Expiry()
        self._paused: dict[Sequence, float] = {}  # since when; in this order

    @property
    def next_s(self) -> float:
        """Time at which the next limit is reached, if nothing happens before; infinity for never."""
        return min(self._queue_timeouts.next_s, self._deadlines.next_s, self._next_reader_timeout_s)

    def watch(self, sequence: Sequence, *, may_wait_for_ever: bool) -> None:
        """Watches a sequence that has been queued.

        Args:
            sequence: The new sequence.
            may_wait_for_ever: Whether it is exempt from the longest wait in the queue.
        """
        arrival_s, deadline_ms = sequence.request.arrival_s, sequence.request.options.deadline_ms
        if deadline_ms is not None:
            self._deadlines.add(sequence, arrival_s + deadline_ms / 1000)
        if self._queue_timeout_s is not None and not may_wait_for_ever:
            self._queue_timeouts.add(sequence, arrival_s + self._queue_timeout_s)

    def pause(self, sequence: Sequence, now_s: float) -> None:
        """Records that a sequence is paused because its client has stopped reading."""
        self._paused[sequence] = now_s

    def is_paused(self, sequence: Sequence) -> bool:
        """Whether a sequence is paused."""
        return sequence in self._paused

    def resume(self, sequence: Sequence) -> None:
        """Records that the client of a sequence reads again, or that the sequence has ended."""
        self._paused.pop(sequence, None)

    def take_due(self, now_s: float) -> Iterator[tuple[Sequence, JaxserveError, RefusalReason]]:
        """Yields each sequence whose time is up, with the error for its client and the reason to count. End each one before taking the next, as a sequence may
        exceed two limits at once.
        """
        for sequence in self._deadlines.take_due(now_s):
            retry_after_s = self._retry_after_s() if sequence.num_cached_tokens is None else None
            message = f"the request was not {'begun' if retry_after_s else 'finished'} within its deadline_ms of {sequence.request.options.deadline_ms}"
            yield sequence, DeadlineExceededError(message, retry_after_s=retry_after_s), "deadline"
        for sequence in self._queue_timeouts.take_due(now_s):
            if sequence.num_cached_tokens is None:
                message = f"the request has waited for {now_s - sequence.request.arrival_s:.1f} s and has not begun (scheduler.queue_timeout_s)"
                yield sequence, OverloadedError(message, retry_after_s=self._retry_after_s()), "queue_timeout"
        while self._next_reader_timeout_s <= now_s:
            sequence, since_s = next(iter(self._paused.items()))
            message = f"the client has not read its answer for {now_s - since_s:.1f} s, and has more waiting than is kept for it (engine.reader_timeout_s)"
            yield sequence, ReaderTimeoutError(message), "reader_timeout"

    @property
    def _next_reader_timeout_s(self) -> float:
        """Time at which the request that has been paused longest ends; infinity for never."""
        timeout_s = self._reader_timeout_s
        return next(iter(self._paused.values())) + timeout_s if self._paused and timeout_s is not None else math.inf

"""When waiting sequences may join the running ones: at any time, or in batches that run to their end. Plain Python; imports no jax."""

from __future__ import annotations

import math
from typing import Protocol

from jaxserve.config import SchedulerConfig
from jaxserve.engine.scheduling.sequence import Sequence
from jaxserve.errors import ConfigError


class Batching(Protocol):
    """Decides whether the waiting sequence at the head of the queue may be admitted. The scheduler asks it in every step."""

    def open(self, *, num_waiting: int, num_running: int, num_slots: int, head: Sequence | None, now_s: float) -> None:
        """Receives the state at the beginning of a step, before anything is admitted."""
        ...

    def admits(self, head: Sequence) -> bool:
        """Whether the head of the queue may be admitted."""
        ...

    def admitted(self, sequence: Sequence) -> None:
        """Receives each sequence that has just been admitted."""
        ...

    def close(self) -> None:
        """Receives the news that no rank had room for the head although the step had tokens left."""
        ...

    def wake_at_s(self, head: Sequence | None) -> float:
        """The time at which the head may be admitted if nothing is running until then, in seconds; infinity if that takes a new event."""
        ...


class Continuous:
    """Continuous batching: a waiting sequence may be admitted at any time."""

    def open(self, *, num_waiting: int, num_running: int, num_slots: int, head: Sequence | None, now_s: float) -> None:
        pass

    def admits(self, head: Sequence) -> bool:  # noqa: ARG002
        return True

    def admitted(self, sequence: Sequence) -> None:
        pass

    def close(self) -> None:
        pass

    def wake_at_s(self, head: Sequence | None) -> float:  # noqa: ARG002
        return math.inf


class Batches:
    """Batches that run to their end: sequences are admitted only when nothing runs, at most as many as there are slots, and no more until the last has ended.

    A batch begins when ``preferred_size`` sequences wait or the first has waited for ``max_delay_s``. A preempted sequence still belongs to its batch and may
    come back to it.

    Args:
        preferred_size: Number of waiting sequences that begins a batch at once, ``>= 1``.
        max_delay_s: Longest wait for ``preferred_size`` to be reached, in seconds; 0 begins with whatever waits.
    """

    def __init__(self, preferred_size: int, max_delay_s: float) -> None:
        self._preferred_size = preferred_size
        self._max_delay_s = max_delay_s
        self._num_left = 0

    def open(self, *, num_waiting: int, num_running: int, num_slots: int, head: Sequence | None, now_s: float) -> None:
        if num_running or head is None:
            return
        if num_waiting >= self._preferred_size or now_s >= self.wake_at_s(head):
            self._num_left = min(num_waiting, num_slots)

    def admits(self, head: Sequence) -> bool:
        return self._num_left > 0 or head.num_preemptions > 0

    def admitted(self, sequence: Sequence) -> None:
        if not sequence.num_preemptions:
            self._num_left -= 1

    def close(self) -> None:
        self._num_left = 0

    def wake_at_s(self, head: Sequence | None) -> float:
        return math.inf if head is None else head.request.arrival_s + self._max_delay_s


def make_batching(config: SchedulerConfig, num_slots: int) -> Batching:
    """The batching that ``scheduler.policy`` names.

    Raises:
        ConfigError: The preferred batch size is larger than the number of slots.
    """
    if config.preferred_batch_size is not None and config.preferred_batch_size > num_slots:
        raise ConfigError(
            f"scheduler.preferred_batch_size is {config.preferred_batch_size}; must be at most the number of sequence slots, {num_slots} "
            f"(scheduler.max_num_seqs times the data ranks)"
        )
    if config.policy == "static":
        return Batches(1, 0.0)
    if config.policy == "dynamic":
        return Batches(config.preferred_batch_size or config.max_num_seqs, config.max_batch_delay_s)
    return Continuous()

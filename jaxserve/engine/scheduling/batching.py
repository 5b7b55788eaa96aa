"""When waiting sequences may join those that run: at any time, or in batches that run to their end. Plain Python; imports no jax."""

from __future__ import annotations

import math
from typing import Protocol

from jaxserve.config import SchedulerConfig
from jaxserve.engine.scheduling.sequence import Sequence
from jaxserve.errors import ConfigError


class Batching(Protocol):
    """Asked by the scheduler, in every step."""

    def open(self, *, num_waiting: int, num_running: int, num_slots: int, head: Sequence | None, now_s: float) -> None:
        """Told the state before anything is admitted in a step."""
        ...

    def admits(self, head: Sequence) -> bool:
        """Whether the head of the queue may be admitted."""
        ...

    def admitted(self, sequence: Sequence) -> None:
        """Told about a sequence that was."""
        ...

    def close(self) -> None:
        """Told that the head found no room although the step has tokens left."""
        ...

    def wake_at_s(self, head: Sequence | None) -> float:
        """With nothing running: when the head is to be looked at again; infinity for not before something new comes."""
        ...


class Continuous:
    """At any time."""

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
    """Only when nothing runs: then as many as there are slots, and no more until the last of them has ended.

    A batch begins when ``preferred_size`` sequences wait or the first has waited for ``max_delay_s``. One that was preempted belongs to its batch.

    Args:
        preferred_size: At least 1.
        max_delay_s: 0 takes what is there.
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
    """What ``scheduler.policy`` names.

    Raises:
        ConfigError: A preferred batch that is larger than all slots.
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

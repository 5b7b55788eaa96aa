"""The steps under way on the device: dispatched in order, fetched in order. Knows when the next one is due; decides nothing about what runs. Imports no jax."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from jaxserve.engine.scheduling.schedule import PendingStep, Runner, Schedule, SequenceResult

_SAFETY = 0.15
"""Share of a step's expected time by which the next one is dispatched before it ends."""
_GROWTH = 1.05
"""An expected time follows shorter steps at once and longer ones by this factor a step: dispatching early costs nothing, dispatching late stops the device."""


@dataclasses.dataclass(frozen=True, slots=True)
class FetchedStep:
    """A step that has ended.

    Args:
        schedule: What ran.
        step: What it was padded to.
        results: One for each scheduled sequence.
        fetched_s: When its results were there.
        total_s: Time that it took out of the engine's: since the step before was fetched, or since its own scheduling began if the device was idle then.
        wait_s: How long of this the host had nothing to do but wait for the device.
    """

    schedule: Schedule
    step: PendingStep
    results: SequenceOf[SequenceResult]
    fetched_s: float
    total_s: float
    wait_s: float


@dataclasses.dataclass(slots=True)
class _Flight:
    schedule: Schedule
    step: PendingStep
    began_s: float  # the host turned to it
    dispatched_s: float


class Pipeline:
    """Keeps up to ``depth`` steps on the device while the one before them is fetched, so that the device goes from step to step without waiting for the host.

    With depth 0 each step is fetched before the next is dispatched. With depth 1, step n + 1 is dispatched while step n runs, as late as is safe: requests
    that come until then are part of it.

    Args:
        runner: Runs the steps.
        depth: Steps that run ahead of the one that is fetched, ``>= 0``.
        clock: Gives the time in seconds.
    """

    def __init__(self, runner: Runner, depth: int, clock: Callable[[], float]) -> None:
        self._runner = runner
        self._depth = depth
        self._clock = clock
        self._flights: deque[_Flight] = deque()
        self._expected_s: dict[tuple[int, int], float] = {}  # by bucket: how long its step keeps the device busy
        self._launch_s = 0.0  # how long the host took to schedule and dispatch the last step
        self._fetched_s = 0.0  # when the last step was fetched
        self._slept_s = 0.0  # since then, because no step was due

    @property
    def num_steps(self) -> int:
        """Steps under way."""
        return len(self._flights)

    @property
    def is_full(self) -> bool:
        """Whether the oldest step is to be fetched before another one is dispatched."""
        return len(self._flights) > self._depth

    @property
    def slack_s(self) -> float:
        """How long the next dispatch can be put off, in seconds, without leaving the device idle; 0 where that is not known, and where nothing is under way."""
        if len(self._flights) != self._depth or not self._depth:
            return 0.0
        flight = self._flights[-1]
        expected_s = self._expected_s.get(_bucket(flight.step))
        if expected_s is None:
            return 0.0
        due_s = max(flight.dispatched_s, self._fetched_s) + (1 - _SAFETY) * expected_s - 2 * self._launch_s
        return max(0.0, due_s - self._clock())

    def note_sleep(self, seconds: float) -> None:
        """Notes that the host slept, because ``slack_s`` allowed it to."""
        self._slept_s += seconds

    def launch(self, schedule: Schedule, began_s: float) -> None:
        """Dispatches a step.

        Args:
            schedule: It has sequences.
            began_s: When the host began to schedule it.

        Raises:
            Exception: What ``Runner.dispatch`` raises. The steps under way can still be fetched.
        """
        step = self._runner.dispatch(schedule)
        now_s = self._clock()
        self._launch_s = now_s - began_s
        self._flights.append(_Flight(schedule, step, began_s, now_s))

    def fetch(self) -> FetchedStep:
        """Waits for the oldest step under way.

        Raises:
            Exception: What ``PendingStep.fetch`` raises. The step stays the oldest one; call ``lose``.
        """
        flight = self._flights[0]
        before_s = self._clock()
        results = flight.step.fetch()
        fetched_s = self._clock()
        self._flights.popleft()
        was_idle = flight.began_s > self._fetched_s
        busy_s = fetched_s - max(flight.dispatched_s, self._fetched_s)
        bucket = _bucket(flight.step)
        self._expected_s[bucket] = min(busy_s, _GROWTH * self._expected_s.get(bucket, busy_s))
        total_s = fetched_s - (flight.began_s if was_idle else self._fetched_s)
        slept_s, self._slept_s = (0.0 if was_idle else self._slept_s), 0.0
        self._fetched_s = fetched_s
        return FetchedStep(flight.schedule, flight.step, results, fetched_s, total_s, fetched_s - before_s + slept_s)

    def lose(self) -> list[Schedule]:
        """Forgets all steps under way, whose results cannot be had any more. Returns what they were to run, oldest first."""
        schedules = [flight.schedule for flight in self._flights]
        self._flights.clear()
        return schedules


def _bucket(step: PendingStep) -> tuple[int, int]:
    return step.num_bucket_tokens, step.num_bucket_sequences

"""The steps in flight on the device, dispatched and fetched in order. Knows when the next one is due, but not what runs in it. Imports no jax."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from jaxserve.engine.scheduling.schedule import PendingStep, Runner, Schedule, SequenceResult

_SAFETY = 0.15
"""Fraction of a step's expected time by which the next step is dispatched before that one ends."""
_GROWTH = 1.05
"""Most that an expected time grows from one step to the next. It shrinks at once: dispatching too early costs nothing, too late leaves the device idle."""


@dataclasses.dataclass(frozen=True, slots=True)
class FetchedStep:
    """A step that has ended, with its results and times.

    Args:
        schedule: The schedule that ran.
        step: The step on the device, which knows the shapes it was padded to.
        results: One result for each scheduled sequence.
        fetched_s: Time at which its results arrived on the host.
        total_s: Seconds that the step took: since the previous step was fetched, or since its own scheduling began if the device was idle then.
        wait_s: The part of ``total_s`` in which the host only waited for the device.
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
    """Keeps up to ``depth`` further steps on the device while the oldest one is fetched, so that the device never waits for the host.

    With depth 0 each step is fetched before the next is dispatched. With depth 1, step n + 1 is dispatched while step n runs, as late as is safe, so that
    requests that arrive until then can be part of it.

    Args:
        runner: Runs the steps.
        depth: Number of steps that may be in flight behind the one that is fetched next, ``>= 0``.
        clock: Function that returns the time in seconds.
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
        """Number of steps in flight."""
        return len(self._flights)

    @property
    def is_full(self) -> bool:
        """Whether the oldest step must be fetched before another one is dispatched."""
        return len(self._flights) > self._depth

    @property
    def slack_s(self) -> float:
        """Seconds by which the next dispatch can be delayed without leaving the device idle; 0 if that is not known or no step is in flight."""
        if len(self._flights) != self._depth or not self._depth:
            return 0.0
        flight = self._flights[-1]
        expected_s = self._expected_s.get(_bucket(flight.step))
        if expected_s is None:
            return 0.0
        due_s = max(flight.dispatched_s, self._fetched_s) + (1 - _SAFETY) * expected_s - 2 * self._launch_s
        return max(0.0, due_s - self._clock())

    def note_sleep(self, seconds: float) -> None:
        """Records that the host slept for ``seconds`` because ``slack_s`` allowed it to. The time counts as waiting for the device."""
        self._slept_s += seconds

    def launch(self, schedule: Schedule, began_s: float) -> None:
        """Dispatches a step.

        Args:
            schedule: The schedule to run; it has at least one sequence.
            began_s: Time at which the host began to schedule it.

        Raises:
            Exception: Whatever ``Runner.dispatch`` raises. The steps in flight can still be fetched.
        """
        step = self._runner.dispatch(schedule)
        now_s = self._clock()
        self._launch_s = now_s - began_s
        self._flights.append(_Flight(schedule, step, began_s, now_s))

    def fetch(self) -> FetchedStep:
        """Waits for the oldest step in flight.

        Raises:
            Exception: Whatever ``PendingStep.fetch`` raises. The step stays the oldest one in flight; call ``lose`` then.
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
        """Forgets all steps in flight because their results are lost. Returns their schedules, oldest first."""
        schedules = [flight.schedule for flight in self._flights]
        self._flights.clear()
        return schedules


def _bucket(step: PendingStep) -> tuple[int, int]:
    return step.num_bucket_tokens, step.num_bucket_sequences

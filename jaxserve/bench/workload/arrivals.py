"""When requests arrive: endless, non-decreasing times in seconds from the start, one generator a kind. A closed loop has none: its requests arrive when
one ends.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

Times = Iterator[float]


def steady(rate: float) -> Times:
    """Equal gaps; the first at 0."""
    index = 0
    while True:
        yield index / rate
        index += 1


def poisson(rate: float, rng: random.Random) -> Times:
    """Exponential gaps."""
    return gamma(rate, 1.0, rng)


def gamma(rate: float, shape: float, rng: random.Random) -> Times:
    """Gamma-distributed gaps of mean ``1 / rate``; their coefficient of variation is ``shape ** -0.5``. Shape 1 is Poisson."""
    time_s = 0.0
    while True:
        time_s += rng.gammavariate(shape, 1 / (rate * shape))
        yield time_s


def burst(rate: float, size: int) -> Times:
    """``size`` at once every ``size / rate`` seconds; the first at 0."""
    index = 0
    while True:
        yield index // size * (size / rate)
        index += 1


def diurnal(rate: float, swing: float, period_s: float, rng: random.Random) -> Times:
    """Poisson with ``rate * (1 + swing * sin(2 pi t / period_s))``."""
    turn = 2 * math.pi / period_s

    def expected(time_s: float) -> float:
        return rate * (time_s + swing / turn * (1 - math.cos(turn * time_s)))

    return _inhomogeneous(expected, rng)


def ramp(rate: float, end_rate: float, span_s: float, rng: random.Random) -> Times:
    """Poisson whose rate goes from ``rate`` to ``end_rate`` in a straight line over ``span_s``, and stays there."""

    def expected(time_s: float) -> float:
        inside_s = min(time_s, span_s)
        return rate * inside_s + (end_rate - rate) * inside_s**2 / (2 * span_s) + end_rate * (time_s - inside_s)

    return _inhomogeneous(expected, rng)


def _inhomogeneous(expected: Callable[[float], float], rng: random.Random) -> Times:
    """Poisson by time rescaling: the k-th arrival is where the expected number of arrivals reaches the sum of k unit exponentials.

    Args:
        expected: Arrivals expected by a time: non-decreasing, without bound.
    """
    goal, low = 0.0, 0.0
    while True:
        goal += rng.gammavariate(1.0, 1.0)
        step = 1e-3
        while expected(low + step) < goal:
            step *= 2
        high = low + step
        for _ in range(60):  # halves the bracket down to the last bit
            middle = (low + high) / 2
            low, high = (middle, high) if expected(middle) < goal else (low, middle)
        yield high

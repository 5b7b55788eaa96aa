"""The engine's measurements while it serves, as histograms of plain numbers. Most tokens cost one comparison. Imports no jax and no metrics library."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Mapping
from typing import get_args

from jaxserve.engine.scheduling.schedule import PendingStep, Schedule, SequenceResult
from jaxserve.engine.scheduling.sequence import Sequence, SequenceStatus
from jaxserve.request import FinishReason, RequestTimes

TOKEN_BOUNDS_S = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
"""Bounds of histograms of times between tokens and of steps."""
HOST_BOUNDS_S = (0.00005, 0.0001, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)
REQUEST_BOUNDS_S = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
"""Bounds of histograms of times that depend on a whole prompt, a queue or an answer."""
COUNT_BOUNDS = tuple(float(2**power) for power in range(20))
"""Bounds of histograms of numbers of tokens and sequences."""


@dataclasses.dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """A histogram at one moment.

    Args:
        bounds: Upper ends of all buckets but the last, which has none. A value equal to a bound is in the bucket that ends there.
        counts: Number of values in each bucket; there is one more than bounds.
        total: Sum of the values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def num_values(self) -> int:
        return sum(self.counts)


class Histogram:
    """Counts values in fixed buckets. One thread writes, any thread may read.

    Args:
        bounds: Upper ends of the buckets, ascending; see :class:`HistogramSnapshot`.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Counts a value, ``count`` times."""
        self._counts[bisect.bisect_left(self._bounds, value)] += count
        self._total += value * count

    def snapshot(self) -> HistogramSnapshot:
        return HistogramSnapshot(self._bounds, tuple(self._counts), self._total)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measurements:
    """All histograms at one moment. Times are in seconds.

    Args:
        queue_s: Time from arrival to the first step, of each request that came to run.
        prefill_s: Time from the first step to the first token, of each request that got a token.
        first_token_s: Time from arrival to the first token (TTFT), of each request that got a token.
        inter_token_s: Time between two consecutive tokens of a request (ITL), for each token but the first one and the first one after a pause.
        decode_s: Time from the first token to the last, without the intervals in which the request was paused, of each ended request that has a
            ``per_token_s``.
        per_token_s: ``decode_s`` divided by the number of the request's tokens that ``inter_token_s`` counts (TPOT).
        end_to_end_s: Time from arrival to the end, by finish reason, of every request that was queued and has ended.
        prompt_tokens: Number of prompt tokens of each such request.
        generated_tokens: Number of generated tokens of each such request.
        step_s: Duration of a step: scheduling, device and output together. If steps overlap, it is the time from the end of one to the end of the next.
        step_host_s: The part of a step's duration in which the host did not wait for the device.
        step_sequences: Number of sequences of a step.
        step_tokens: Number of tokens of a step.
        bucket_sequences: Number of sequences that the step's bucket has room for, on all data ranks together.
        bucket_tokens: Number of tokens that the step's bucket has room for, on all data ranks together. What exceeds ``step_tokens`` is padding.
    """

    queue_s: HistogramSnapshot
    prefill_s: HistogramSnapshot
    first_token_s: HistogramSnapshot
    inter_token_s: HistogramSnapshot
    decode_s: HistogramSnapshot
    per_token_s: HistogramSnapshot
    end_to_end_s: Mapping[FinishReason, HistogramSnapshot]
    prompt_tokens: HistogramSnapshot
    generated_tokens: HistogramSnapshot
    step_s: HistogramSnapshot
    step_host_s: HistogramSnapshot
    step_sequences: HistogramSnapshot
    step_tokens: HistogramSnapshot
    bucket_sequences: HistogramSnapshot
    bucket_tokens: HistogramSnapshot


class Meter:
    """Records the engine's measurements. ``snapshot`` may be called from any thread, everything else from the engine's thread only."""

    def __init__(self) -> None:
        self._queue_s = Histogram(REQUEST_BOUNDS_S)
        self._prefill_s = Histogram(REQUEST_BOUNDS_S)
        self._first_token_s = Histogram(REQUEST_BOUNDS_S)
        self._inter_token_s = Histogram(TOKEN_BOUNDS_S)
        self._decode_s = Histogram(REQUEST_BOUNDS_S)
        self._per_token_s = Histogram(TOKEN_BOUNDS_S)
        self._end_to_end_s: dict[FinishReason, Histogram] = {reason: Histogram(REQUEST_BOUNDS_S) for reason in get_args(FinishReason)}
        self._prompt_tokens = Histogram(COUNT_BOUNDS)
        self._generated_tokens = Histogram(COUNT_BOUNDS)
        self._step_s = Histogram(TOKEN_BOUNDS_S)
        self._step_host_s = Histogram(HOST_BOUNDS_S)
        self._step_sequences = Histogram(COUNT_BOUNDS)
        self._step_tokens = Histogram(COUNT_BOUNDS)
        self._bucket_sequences = Histogram(COUNT_BOUNDS)
        self._bucket_tokens = Histogram(COUNT_BOUNDS)
        self._last_tokens_s = 0.0

    def tokens(self, grown: Iterable[tuple[Sequence, SequenceResult]], now_s: float) -> None:
        """Records that sequences got tokens at ``now_s``. Tokens of a sequence that come together share the time since its previous token in equal parts.

        Most sequences of a step also got a token in the step before. Their intervals are all equal and are counted at once.
        """
        previous_s, num_steady = self._last_tokens_s, 0
        for sequence, result in grown:
            last_s, num_tokens = sequence.last_token_s, len(result.token_ids)
            if last_s == previous_s and num_tokens == 1:
                num_steady += 1
            elif last_s is None:
                self._tokens_after_none(sequence, now_s, num_tokens)
                if sequence.status is SequenceStatus.PAUSED:
                    sequence.paused_token_s = now_s
                    continue
            else:
                self._inter_token_s.observe((now_s - last_s) / num_tokens, num_tokens)
            sequence.last_token_s = now_s
        if num_steady:
            self._inter_token_s.observe(now_s - previous_s, num_steady)
        self._last_tokens_s = now_s

    def pause(self, sequence: Sequence) -> None:
        """Records that a sequence is paused because of its reader. The time until its next token is not counted, since it says nothing about the engine."""
        if sequence.last_token_s is not None:
            sequence.paused_token_s, sequence.last_token_s = sequence.last_token_s, None

    def step(self, schedule: Schedule, step: PendingStep, *, total_s: float, wait_s: float) -> None:
        """Records a step that did not fail.

        Args:
            schedule: The schedule that ran.
            step: The step, which knows the shapes it was padded to.
            total_s: Duration of the step in seconds. Durations of overlapping steps do not overlap; see :class:`Measurements`.
            wait_s: The part of ``total_s`` in which the host waited for the device.
        """
        self._step_s.observe(total_s)
        self._step_host_s.observe(total_s - wait_s)
        self._step_sequences.observe(sum(len(rank.sequences) for rank in schedule.ranks))
        self._step_tokens.observe(sum(rank.num_tokens for rank in schedule.ranks))
        self._bucket_sequences.observe(step.num_bucket_sequences)
        self._bucket_tokens.observe(step.num_bucket_tokens)

    def finish(self, sequence: Sequence, reason: FinishReason, now_s: float) -> RequestTimes:
        """Records the end of a request. Returns its times."""
        arrival_s = sequence.request.arrival_s
        self._end_to_end_s[reason].observe(now_s - arrival_s)
        self._prompt_tokens.observe(sequence.num_prompt_tokens)
        self._generated_tokens.observe(sequence.num_generated_tokens)
        if sequence.first_token_s is None and sequence.scheduled_s is not None:
            self._queue_s.observe(sequence.scheduled_s - arrival_s)
        times = RequestTimes(
            arrival_s=arrival_s,
            scheduled_s=sequence.scheduled_s,
            first_token_s=sequence.first_token_s,
            last_token_s=sequence.paused_token_s if sequence.last_token_s is None else sequence.last_token_s,
            finished_s=now_s,
            num_gaps=sequence.num_gaps,
            gaps_s=sequence.gaps_s,
        )
        decode_s, per_token_s = times.decode_s, times.per_token_s(sequence.num_generated_tokens)
        if decode_s is not None and per_token_s is not None:
            self._decode_s.observe(decode_s)
            self._per_token_s.observe(per_token_s)
        return times

    def snapshot(self) -> Measurements:
        return Measurements(
            queue_s=self._queue_s.snapshot(),
            prefill_s=self._prefill_s.snapshot(),
            first_token_s=self._first_token_s.snapshot(),
            inter_token_s=self._inter_token_s.snapshot(),
            decode_s=self._decode_s.snapshot(),
            per_token_s=self._per_token_s.snapshot(),
            end_to_end_s={reason: histogram.snapshot() for reason, histogram in self._end_to_end_s.items()},
            prompt_tokens=self._prompt_tokens.snapshot(),
            generated_tokens=self._generated_tokens.snapshot(),
            step_s=self._step_s.snapshot(),
            step_host_s=self._step_host_s.snapshot(),
            step_sequences=self._step_sequences.snapshot(),
            step_tokens=self._step_tokens.snapshot(),
            bucket_sequences=self._bucket_sequences.snapshot(),
            bucket_tokens=self._bucket_tokens.snapshot(),
        )

    def _tokens_after_none(self, sequence: Sequence, now_s: float, num_tokens: int) -> None:
        """Records a sequence's first tokens, its first after a pause, or those that were in flight when it was paused: these do belong to the time before."""
        paused_s = sequence.paused_token_s
        if paused_s is not None and sequence.status is SequenceStatus.PAUSED:
            self._inter_token_s.observe((now_s - paused_s) / num_tokens, num_tokens)
            return
        if num_tokens > 1:
            self._inter_token_s.observe(0.0, num_tokens - 1)
        if paused_s is not None:
            sequence.num_gaps += 1
            sequence.gaps_s += now_s - paused_s
            return
        arrival_s, scheduled_s = sequence.request.arrival_s, sequence.scheduled_s
        assert scheduled_s is not None
        sequence.first_token_s = now_s
        self._queue_s.observe(scheduled_s - arrival_s)
        self._prefill_s.observe(now_s - scheduled_s)
        self._first_token_s.observe(now_s - arrival_s)

"""Histograms as Prometheus counts them: how many values lie in each bucket, and what that says about their distribution."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class Buckets:
    """A histogram of values that are not negative.

    Args:
        bounds: Upper ends, the last one infinite; ascending.
        counts: Values in each bucket.
    """

    bounds: tuple[float, ...] = ()
    counts: tuple[float, ...] = ()

    @classmethod
    def of_totals(cls, totals: Mapping[float, float]) -> Buckets:
        """From upper end -> values up to there, as Prometheus writes them."""
        bounds = tuple(sorted(totals))
        cumulative = [0.0, *(totals[bound] for bound in bounds)]
        return cls(bounds, tuple(after - before for before, after in itertools.pairwise(cumulative)))

    @property
    def num_values(self) -> float:
        return sum(self.counts)

    def quantile(self, share: float) -> float | None:
        """The value below which ``share`` of the values lie, as if they were spread evenly over each bucket; ``None`` without values.

        Of values above the last bound no more is known than that.
        """
        totals = list(itertools.accumulate(self.counts))
        if not totals or totals[-1] <= 0:
            return None
        wanted = share * totals[-1]
        index = bisect.bisect_left(totals, wanted)
        low, high = self._ends(index)
        return low + (high - low) * (wanted - (totals[index] - self.counts[index])) / self.counts[index]

    def std(self) -> float | None:
        """Standard deviation of the population, on the same assumption."""
        if self.num_values <= 0:
            return None
        spans = [(*self._ends(index), count / self.num_values) for index, count in enumerate(self.counts)]
        mean = sum((low + high) / 2 * share for low, high, share in spans)
        return math.sqrt(max(0.0, sum((low * low + low * high + high * high) / 3 * share for low, high, share in spans) - mean * mean))

    def since(self, earlier: Buckets) -> Buckets:
        """The values that have come since an earlier reading; all of them where the two do not fit: the server was started anew."""
        if self.bounds != earlier.bounds or self.num_values < earlier.num_values:
            return self
        return Buckets(self.bounds, tuple(max(0.0, now - before) for now, before in zip(self.counts, earlier.counts, strict=True)))

    def _ends(self, index: int) -> tuple[float, float]:
        low = self.bounds[index - 1] if index else 0.0
        return (low, low) if math.isinf(self.bounds[index]) else (low, self.bounds[index])

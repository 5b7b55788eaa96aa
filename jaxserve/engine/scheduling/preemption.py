"""What becomes of a preempted sequence's keys and values: forgotten and recomputed, or kept in host memory. Plain Python; imports no jax."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxserve.engine.scheduling.schedule import RunnerCosts


@dataclasses.dataclass(frozen=True)
class Preemption:
    """Chooses between the two.

    Args:
        kind: ``auto`` takes what costs less time.
        costs: Measured by the runner; without them ``auto`` recomputes.
    """

    kind: Literal["auto", "recompute", "swap"] = "recompute"
    costs: RunnerCosts | None = None

    def swaps(self, *, num_pages: int, num_tokens: int) -> bool:
        """Whether to swap, if there is room.

        Args:
            num_pages: Pages that go to the host and come back.
            num_tokens: Tokens that would have to be computed again.
        """
        if self.kind != "auto":
            return self.kind == "swap"
        return self.costs is not None and 2 * num_pages * self.costs.page_swap_s < num_tokens * self.costs.token_s

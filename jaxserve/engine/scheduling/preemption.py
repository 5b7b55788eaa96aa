"""Whether the keys and values of a preempted sequence are recomputed later or kept in host memory. Plain Python; imports no jax."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxserve.engine.scheduling.schedule import RunnerCosts


@dataclasses.dataclass(frozen=True)
class Preemption:
    """Chooses between swapping a preempted sequence to host memory and recomputing it.

    Args:
        kind: ``swap`` or ``recompute`` always does that; ``auto`` takes what costs less time.
        costs: Times measured by the runner; if ``None``, ``auto`` recomputes.
    """

    kind: Literal["auto", "recompute", "swap"] = "recompute"
    costs: RunnerCosts | None = None

    def swaps(self, *, num_pages: int, num_tokens: int) -> bool:
        """Whether to swap a sequence to host memory, provided that there is room.

        Args:
            num_pages: Pages that would be moved to the host and back.
            num_tokens: Tokens that would have to be recomputed otherwise.
        """
        if self.kind != "auto":
            return self.kind == "swap"
        return self.costs is not None and 2 * num_pages * self.costs.page_swap_s < num_tokens * self.costs.token_s

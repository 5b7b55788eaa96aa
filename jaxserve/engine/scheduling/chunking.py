"""How much of a prompt goes into one step."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

from jaxserve.config import SchedulerConfig
from jaxserve.models.params import product_flops
from jaxserve.models.spec import ModelSpec

_LEAST_SHARE = 2 / 3
"""A chunk gives up at most a third of its tokens to fit a smaller bucket."""


@dataclasses.dataclass(frozen=True, slots=True)
class ContextCost:
    """What a prompt token costs by the context before it: 1 where a sequence begins, more where attention has more to read.

    Args:
        windows: Kinds of layers, as (window in tokens, cost): all layers of a kind together add ``cost`` for each token before this one, up to their window.
    """

    windows: tuple[tuple[float, float], ...] = ()

    def at(self, context: int) -> float:
        """The cost of a token with ``context`` tokens before it."""
        return 1.0 + sum(cost * min(context, window) for window, cost in self.windows)


def context_cost(spec: ModelSpec) -> ContextCost:
    """The cost in FLOPs: a token's products with weights are the same everywhere, and attention adds some in each layer for each token it sees."""
    products, _ = product_flops(spec)
    attention = spec.attention.flops_per_seen_token
    kinds = Counter(math.inf if layer.window is None else layer.window for layer in spec.layers)
    return ContextCost(tuple((window, count * attention / products) for window, count in sorted(kinds.items())))


@dataclasses.dataclass(frozen=True, slots=True)
class Chunking:
    """How long chunks are while others decode, for whom the whole step is the time between two tokens.

    A chunk deep in a prompt is shorter than one at its beginning, so that both take the same time (Medha's adaptive chunking, arXiv:2409.17264, from FLOPs
    instead of a table of run times). Where nobody decodes, chunks fill the step.

    Args:
        cost: Of a token by its context.
        buckets: Token counts that steps are compiled for, in order: a step costs what its bucket costs.
    """

    cost: ContextCost = ContextCost()
    buckets: tuple[int, ...] = ()

    def fit(self, num_pending: int, budget: int, *, context: int, num_beside: int) -> tuple[int, int]:
        """The length of a chunk beside decodes.

        Args:
            num_pending: Tokens that the sequence has left, ``>= 1``.
            budget: What the step has left for chunks, in tokens at the beginning of a sequence.
            context: Tokens of the sequence that are computed already.
            num_beside: Tokens of the step without the chunk.

        Returns:
            The tokens of the chunk, at most ``num_pending`` and ``budget``, and what they take of the budget: all of it, unless the chunk ends the prompt.
        """
        cost = self.cost.at(context)
        if num_pending * cost <= budget:
            return num_pending, math.ceil(num_pending * cost)
        if budget <= 0:
            return 0, 0
        num_tokens = num_beside + max(1, int(budget / cost))
        index = bisect.bisect_right(self.buckets, num_tokens)
        if index and self.buckets[index - 1] >= max(num_beside + 1, _LEAST_SHARE * num_tokens):
            num_tokens = self.buckets[index - 1]
        return num_tokens - num_beside, budget


def make_chunking(config: SchedulerConfig, spec: ModelSpec, token_buckets: Sequence[int]) -> Chunking:
    """The chunking that a configuration calls for."""
    return Chunking(context_cost(spec), tuple(token_buckets)) if config.chunk_by == "work" else Chunking()

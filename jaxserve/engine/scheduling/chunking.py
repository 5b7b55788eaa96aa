"""The length of prefill chunks: how many tokens of a prompt go into one step. Plain Python."""

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
"""Smallest fraction of its length to which a chunk is cut so that the step fits a smaller bucket."""


@dataclasses.dataclass(frozen=True, slots=True)
class ContextCost:
    """The cost of computing one prompt token, which depends on how many tokens stand before it. The unit is the cost of a sequence's first token.

    Args:
        windows: One pair (window in tokens, cost) for each kind of layer: all layers of a kind together add ``cost`` for each token before this one, counting
            at most ``window`` tokens.
    """

    windows: tuple[tuple[float, float], ...] = ()

    def at(self, context: int) -> float:
        """The cost of a token with ``context`` tokens before it."""
        return 1.0 + sum(cost * min(context, window) for window, cost in self.windows)


def context_cost(spec: ModelSpec) -> ContextCost:
    """The cost of a model's tokens in FLOPs: products with weights cost the same for every token; attention adds a cost for each earlier token it sees."""
    products, _ = product_flops(spec)
    attention = spec.attention.flops_per_seen_token
    kinds = Counter(math.inf if layer.window is None else layer.window for layer in spec.layers)
    return ContextCost(tuple((window, count * attention / products) for window, count in sorted(kinds.items())))


@dataclasses.dataclass(frozen=True, slots=True)
class Chunking:
    """The length of prefill chunks in steps that also decode other sequences, whose time between two tokens is the time of the whole step.

    A chunk deep in a prompt is shorter than one at its beginning, so that both take about the same time. This is the adaptive chunking of Medha
    (arXiv:2409.17264), computed from FLOPs instead of a table of run times. In steps that decode nothing, chunks fill the step.

    Args:
        cost: Cost of a token by the number of tokens before it.
        buckets: Token counts that steps are compiled for, ascending. A step takes as long as its bucket does.
    """

    cost: ContextCost = ContextCost()
    buckets: tuple[int, ...] = ()

    def fit(self, num_pending: int, budget: int, *, context: int, num_beside: int) -> tuple[int, int]:
        """The length of the next chunk of a sequence, in a step that also decodes others.

        Args:
            num_pending: Tokens of the sequence that are not computed yet, ``>= 1``.
            budget: Cost that the step has left for chunks, in units of a sequence's first token.
            context: Tokens of the sequence that are computed already.
            num_beside: Tokens that the step has without this chunk.

        Returns:
            The number of tokens of the chunk, at most ``num_pending`` and ``budget``, and its cost: all of the budget unless the chunk ends the prompt.
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
    """The chunking for ``scheduler.chunk_by``: by cost and bucket for "work", else by the number of tokens alone."""
    return Chunking(context_cost(spec), tuple(token_buckets)) if config.chunk_by == "work" else Chunking()

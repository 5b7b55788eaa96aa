"""Which requests must leave a full queue to make room for a new one, depending on the order of the queue. Plain Python; imports no jax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

from jaxserve.engine.requests.live_heap import LiveHeap
from jaxserve.engine.scheduling.sequence import Sequence, SequenceStatus
from jaxserve.request import Request


class Shedding(Protocol):
    """Chooses the sequences that leave a full queue. It learns of every sequence that joins the queue; sequences that have left it are never chosen."""

    def enter(self, sequence: Sequence) -> None:
        """Takes a sequence that has joined the queue, or that was chosen and then stays in it after all."""
        ...

    def choose(self, request: Request, num_queued_tokens: Mapping[str, int]) -> LiveHeap | None:
        """Chooses the sequence that must leave next.

        Args:
            request: The new request.
            num_queued_tokens: Number of prompt tokens that wait, by tenant, those of the new request included.

        Returns:
            The heap at whose front that sequence is; ``None`` if no sequence has to leave for this request.
        """
        ...


class NoShedding:
    """Shedding that removes nobody: every sequence keeps its place in the queue."""

    def enter(self, sequence: Sequence) -> None:
        pass

    def choose(self, request: Request, num_queued_tokens: Mapping[str, int]) -> LiveHeap | None:  # noqa: ARG002
        return None


class SheddingByPriority:
    """Shedding by priority: the sequence of lowest priority leaves, of equal ones the one that came last, if the new request has a higher priority."""

    def __init__(self) -> None:
        self._sequences = LiveHeap(_is_queued)

    def enter(self, sequence: Sequence) -> None:
        self._sequences.push(-sequence.request.options.priority, sequence)

    def choose(self, request: Request, num_queued_tokens: Mapping[str, int]) -> LiveHeap | None:  # noqa: ARG002
        lowest = self._sequences.peek()
        return self._sequences if lowest is not None and -lowest[0] > request.options.priority else None


class SheddingByShare:
    """Shedding by share: of the tenant with most queued tokens, relative to its weight, the sequence that came last leaves. So a flood of requests costs the
    tenant it comes from.

    Nobody leaves for a request whose own tenant has the largest share.

    Args:
        weights: Weight of each tenant by name; 1 for tenants that are not named.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._sequences: dict[str, LiveHeap] = {}

    def enter(self, sequence: Sequence) -> None:
        self._sequences.setdefault(sequence.request.options.tenant, LiveHeap(_is_queued)).push(0.0, sequence)

    def choose(self, request: Request, num_queued_tokens: Mapping[str, int]) -> LiveHeap | None:
        def share(tenant: str) -> float:
            return num_queued_tokens[tenant] / self._weights.get(tenant, 1.0)

        tenant = max(num_queued_tokens, key=share)
        sequences = self._sequences.get(tenant)
        is_more = share(tenant) > share(request.options.tenant)
        return sequences if is_more and sequences is not None and sequences.peek() is not None else None


def make_shedding(order: Literal["fcfs", "priority", "deadline", "fair"], weights: Mapping[str, float]) -> Shedding:
    """The shedding that fits an order of the queue: by priority for "priority", by share for "fair", none for the others."""
    if order == "priority":
        return SheddingByPriority()
    return SheddingByShare(weights) if order == "fair" else NoShedding()


def _is_queued(sequence: Sequence) -> bool:
    return sequence.num_cached_tokens is None and sequence.status is not SequenceStatus.FINISHED

"""Who must leave a full queue for a newcomer, by the order of the queue. Plain Python; imports no jax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

from jaxserve.engine.requests.live_heap import LiveHeap
from jaxserve.engine.scheduling.sequence import Sequence, SequenceStatus
from jaxserve.request import Request


class Shedding(Protocol):
    """Told about every sequence that joins the queue. Those that have left it by themselves are out of the question."""

    def enter(self, sequence: Sequence) -> None:
        """Told about a sequence that has joined the queue, or has kept its place in it though it was chosen."""
        ...

    def choose(self, request: Request, num_queued_tokens: Mapping[str, int]) -> LiveHeap | None:
        """Chooses the sequence that must leave next.

        Args:
            request: The newcomer.
            num_queued_tokens: Tokens of the prompts that wait, by tenant; those of the newcomer included.

        Returns:
            Where it is the first; ``None`` if nobody has to leave for this request.
        """
        ...


class NoShedding:
    """Who waits keeps the place."""

    def enter(self, sequence: Sequence) -> None:
        pass

    def choose(self, request: Request, num_queued_tokens: Mapping[str, int]) -> LiveHeap | None:  # noqa: ARG002
        return None


class SheddingByPriority:
    """The lowest priority leaves, of equals the last that came, for a request of higher priority."""

    def __init__(self) -> None:
        self._sequences = LiveHeap(_is_queued)

    def enter(self, sequence: Sequence) -> None:
        self._sequences.push(-sequence.request.options.priority, sequence)

    def choose(self, request: Request, num_queued_tokens: Mapping[str, int]) -> LiveHeap | None:  # noqa: ARG002
        lowest = self._sequences.peek()
        return self._sequences if lowest is not None and -lowest[0] > request.options.priority else None


class SheddingByShare:
    """The last that came leaves of the tenant with most tokens in the queue, by weight, unless the request is that tenant's own: a flood costs whom it
    comes from.

    Args:
        weights: By tenant; 1 for those that are not named.
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
    """What goes with an order of the queue: a priority, or a tenant's share, counts here where it counts there."""
    if order == "priority":
        return SheddingByPriority()
    return SheddingByShare(weights) if order == "fair" else NoShedding()


def _is_queued(sequence: Sequence) -> bool:
    return sequence.num_cached_tokens is None and sequence.status is not SequenceStatus.FINISHED

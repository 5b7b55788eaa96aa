"""In which order sequences run and wait. Every order is a number that a sequence gets once, so a step never has to look at those that wait."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, Protocol

from jaxserve.engine.scheduling.sequence import Sequence
from jaxserve.engine.scheduling.waiting_queue import WaitingQueue

NO_DEADLINE_S = 60.0
"""A request without a deadline is ordered as if it had this one."""

OrderName = Literal["fcfs", "priority", "deadline", "fair"]

Key = Callable[[Sequence], float]
"""Smaller runs first; of equals the one that came first."""


class Queue(Protocol):
    """Sequences that wait; see :class:`WaitingQueue`. Every operation costs O(log n)."""

    def __len__(self) -> int: ...

    def __contains__(self, sequence: Sequence) -> bool: ...

    def __iter__(self) -> Iterator[Sequence]: ...

    def push(self, sequence: Sequence) -> None: ...

    def peek(self) -> Sequence | None: ...

    def remove(self, sequence: Sequence) -> None: ...

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """Notes that tokens of a sequence, waiting or not, have been served."""
        ...

    def check_integrity(self) -> None: ...


class FairQueue:
    """One queue for each tenant; the head is that of the tenant who has been served least.

    Every token served counts 1 / weight on its tenant's account. A tenant who comes back from having nobody here starts level with the least served of
    those who are: idleness earns no credit. (Virtual token counter; Sheng et al., Fairness in Serving Large Language Models, 2024.)

    Args:
        weights: By tenant; 1 for those that are not named.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._queues: dict[str, WaitingQueue] = {}
        self._served: dict[str, float] = {}
        self._level = 0.0  # the account of the tenant that was head last: nobody here has less
        self._num_sequences = 0  # may be asked from any thread, as a dictionary that changes may not
        self._heap: list[tuple[float, int, str]] = []  # one entry for each of ``_entered``, of an account as it was
        self._entered: set[str] = set()  # all tenants with a queue, and some without
        self._entries = itertools.count()

    def __len__(self) -> int:
        return self._num_sequences

    def __contains__(self, sequence: Sequence) -> bool:
        queue = self._queues.get(sequence.request.options.tenant)
        return queue is not None and sequence in queue

    def __iter__(self) -> Iterator[Sequence]:
        return itertools.chain.from_iterable(self._queues.values())

    def push(self, sequence: Sequence) -> None:
        tenant = sequence.request.options.tenant
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = WaitingQueue()
            self._served[tenant] = max(self._served.get(tenant, 0.0), self._level)
            if tenant not in self._entered:
                self._entered.add(tenant)
                self._enter(tenant)
        queue.push(sequence)
        self._num_sequences += 1

    def peek(self) -> Sequence | None:
        heap = self._heap
        while heap:
            served, _, tenant = heap[0]
            if tenant not in self._queues:
                heapq.heappop(heap)
                self._entered.remove(tenant)
            elif served < self._served[tenant]:
                heapq.heappop(heap)
                self._enter(tenant)
            else:
                self._level = served
                return self._queues[tenant].peek()
        return None

    def remove(self, sequence: Sequence) -> None:
        tenant = sequence.request.options.tenant
        queue = self._queues[tenant]
        queue.remove(sequence)
        self._num_sequences -= 1
        if not queue:
            del self._queues[tenant]

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        tenant = sequence.request.options.tenant
        self._served[tenant] = self._served.get(tenant, self._level) + num_tokens / self._weights.get(tenant, 1.0)

    def check_integrity(self) -> None:
        for queue in self._queues.values():
            queue.check_integrity()
        assert self._num_sequences == sum(len(queue) for queue in self._queues.values())
        tenants = [tenant for _, _, tenant in self._heap]
        assert len(tenants) == len(set(tenants)) and set(tenants) == self._entered >= set(self._queues)

    def _enter(self, tenant: str) -> None:
        heapq.heappush(self._heap, (self._served[tenant], next(self._entries), tenant))


def make_queue(name: OrderName, weights: Mapping[str, float]) -> Queue:
    """The queue of an order."""
    return FairQueue(weights) if name == "fair" else WaitingQueue()


def make_key(name: OrderName, *, ageing_s: float) -> Key:
    """The order itself.

    Args:
        name: ``fcfs`` and ``fair`` go by arrival (``fair`` admits by tenant), ``deadline`` by the time of the deadline, ``priority`` by priority and age.
        ageing_s: What one step of priority is worth in seconds of waiting. All age alike, so their order never changes, and a sequence is overtaken only by
            those that come within ``ageing_s`` times the difference in priority after it.
    """
    if name == "priority":
        return lambda sequence: sequence.request.arrival_s + ageing_s * sequence.request.options.priority
    if name == "deadline":
        return _deadline
    return lambda _: 0.0


def _deadline(sequence: Sequence) -> float:
    deadline_ms = sequence.request.options.deadline_ms
    return sequence.request.arrival_s + (NO_DEADLINE_S if deadline_ms is None else deadline_ms / 1000)

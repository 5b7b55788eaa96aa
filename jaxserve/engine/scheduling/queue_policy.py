"""The order in which sequences run and wait. A sequence gets its place once, as a number, so a step never has to look at all that wait."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, Protocol

from jaxserve.engine.scheduling.sequence import Sequence
from jaxserve.engine.scheduling.waiting_queue import WaitingQueue

NO_DEADLINE_S = 60.0
"""Deadline, in seconds after arrival, by which a request that has none is ordered."""

OrderName = Literal["fcfs", "priority", "deadline", "fair"]

Key = Callable[[Sequence], float]
"""Function that gives a sequence its number in the order: smaller runs first; of equal ones the one that arrived first."""


class Queue(Protocol):
    """The interface of a queue of waiting sequences; see :class:`WaitingQueue` for its methods. Every operation costs O(log n)."""

    def __len__(self) -> int: ...

    def __contains__(self, sequence: Sequence) -> bool: ...

    def __iter__(self) -> Iterator[Sequence]: ...

    def push(self, sequence: Sequence) -> None: ...

    def peek(self) -> Sequence | None: ...

    def remove(self, sequence: Sequence) -> None: ...

    def charge(self, served: Iterable[tuple[Sequence, int]]) -> None:
        """Records that tokens of sequences, waiting or not, have been computed or generated.

        Args:
            served: Each sequence with the number of its tokens.
        """
        ...

    def check_integrity(self) -> None: ...


class FairQueue:
    """One queue for each tenant. The head of the whole is the head of the queue whose tenant has been served least.

    Every token served counts 1 / weight on its tenant's account. A tenant that had no sequence waiting and returns starts with the account of the least
    served tenant that waits, so that idleness earns no credit. This is the virtual token counter of Sheng et al., Fairness in Serving Large Language Models,
    2024.

    Args:
        weights: Weight of each tenant by name; 1 for tenants that are not named.
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

    def charge(self, served: Iterable[tuple[Sequence, int]]) -> None:
        for sequence, num_tokens in served:
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
    """A new, empty queue for an order."""
    return FairQueue(weights) if name == "fair" else WaitingQueue()


def make_key(name: OrderName, *, ageing_s: float) -> Key:
    """The function that gives a sequence its number in an order.

    Args:
        name: ``fcfs`` and ``fair`` order by arrival (``fair`` chooses the tenant in :class:`FairQueue`), ``deadline`` by the time of the deadline, ``priority``
            by priority and time of arrival.
        ageing_s: Seconds of waiting that are worth one level of priority. All sequences age at the same rate, so their order never changes, and a sequence is
            overtaken only by those that arrive within ``ageing_s`` times the difference in priority after it.
    """
    if name == "priority":
        return lambda sequence: sequence.request.arrival_s + ageing_s * sequence.request.options.priority
    if name == "deadline":
        return _deadline
    return lambda _: 0.0


def _deadline(sequence: Sequence) -> float:
    deadline_ms = sequence.request.options.deadline_ms
    return sequence.request.arrival_s + (NO_DEADLINE_S if deadline_ms is None else deadline_ms / 1000)

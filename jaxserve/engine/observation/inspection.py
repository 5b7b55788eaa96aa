"""A view of the scheduler's state, request by request, as plain data for people. Contains no text of prompts or answers. Imports no jax."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable

from jaxserve.engine.scheduling.scheduler import Scheduler
from jaxserve.engine.scheduling.sequence import Sequence, SequenceStatus, by_order

MAX_WAITING = 100
"""Largest number of waiting requests in a view, from the head of the queue."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceView:
    """The view of one request.

    Args:
        request_id: Id of the request.
        status: Value of :class:`SequenceStatus`.
        rank: Index of the data rank that holds its pages or host pages; ``None`` if none does.
        age_s: Seconds since its arrival.
        tenant: Name of its tenant.
        priority: Its priority; see ``RequestOptions``.
        num_prompt_tokens: Number of tokens of its prompt.
        num_cached_tokens: Number of prompt tokens found in a prefix cache; ``None`` before it has run.
        num_scheduled_tokens: Number of tokens whose keys and values are in the pool, or will be after the steps in flight.
        num_generated_tokens: Number of tokens generated so far.
        max_tokens: Largest number of tokens that it may generate.
        num_pages: Number of pages that it holds; of host pages while it is swapped.
        num_preemptions: Number of its preemptions so far.
    """

    request_id: str
    status: str
    rank: int | None
    age_s: float
    tenant: str
    priority: int
    num_prompt_tokens: int
    num_cached_tokens: int | None
    num_scheduled_tokens: int
    num_generated_tokens: int
    max_tokens: int
    num_pages: int
    num_preemptions: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankView:
    """The view of one data rank.

    Args:
        rank: Index of the rank.
        num_running: Number of running requests.
        num_swapped: Number of requests in host memory.
        num_pages: Number of pages of its pool.
        num_used_pages: Number of pages that requests hold.
        num_idle_pages: Number of pages that only the prefix cache keeps; they are evicted when they are needed.
        num_free_pages: Number of pages that are neither held nor cached.
        num_cached_pages: Number of pages that the prefix cache keeps, held or not.
        num_host_pages: Number of pages of host memory.
        num_free_host_pages: Number of host pages that are free.
    """

    rank: int
    num_running: int
    num_swapped: int
    num_pages: int
    num_used_pages: int
    num_idle_pages: int
    num_free_pages: int
    num_cached_pages: int
    num_host_pages: int
    num_free_host_pages: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerView:
    """The view of a scheduler.

    Args:
        ranks: The data ranks.
        running: The running requests, rank by rank, each rank's in their order.
        swapped: The requests in host memory, in the same order.
        paused: The requests whose clients read too slowly.
        num_waiting: Number of requests in the queue.
        waiting: The first ``MAX_WAITING`` of them.
    """

    ranks: tuple[RankView, ...]
    running: tuple[SequenceView, ...]
    swapped: tuple[SequenceView, ...]
    paused: tuple[SequenceView, ...]
    num_waiting: int
    waiting: tuple[SequenceView, ...]


def inspect_scheduler(scheduler: Scheduler, now_s: float) -> SchedulerView:
    """The view of a scheduler between two steps.

    Args:
        scheduler: The scheduler, which is not changed.
        now_s: The time, by the clock of ``Request.arrival_s``.
    """

    def views(sequences: Iterable[Sequence]) -> tuple[SequenceView, ...]:
        return tuple(_view(sequence, now_s) for sequence in sequences)

    ranks = scheduler.ranks
    return SchedulerView(
        ranks=tuple(
            RankView(
                rank=rank.index,
                num_running=len(rank.running),
                num_swapped=len(rank.swap_space.sequences),
                num_pages=rank.pool.num_pages,
                num_used_pages=rank.pool.num_pages - rank.pool.num_available,
                num_idle_pages=rank.pool.num_idle,
                num_free_pages=rank.pool.num_free,
                num_cached_pages=rank.pool.num_cached,
                num_host_pages=rank.swap_space.num_pages,
                num_free_host_pages=rank.swap_space.num_free_pages,
            )
            for rank in ranks
        ),
        running=views(sequence for rank in ranks for sequence in rank.running),
        swapped=views(sequence for rank in ranks for sequence in rank.swap_space.sequences),
        paused=views(sorted(scheduler.paused, key=by_order)),
        num_waiting=scheduler.num_waiting,
        waiting=views(heapq.nsmallest(MAX_WAITING, scheduler.waiting, key=by_order)),
    )


def _view(sequence: Sequence, now_s: float) -> SequenceView:
    options = sequence.request.options
    return SequenceView(
        request_id=sequence.request.request_id,
        status=sequence.status.value,
        rank=sequence.rank if sequence.status in (SequenceStatus.RUNNING, SequenceStatus.SWAPPED) else None,
        age_s=round(now_s - sequence.request.arrival_s, 3),
        tenant=options.tenant,
        priority=options.priority,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_cached_tokens=sequence.num_cached_tokens,
        num_scheduled_tokens=sequence.num_scheduled_tokens,
        num_generated_tokens=sequence.num_generated_tokens,
        max_tokens=sequence.max_tokens,
        num_pages=len(sequence.page_ids) or len(sequence.host_page_ids),
        num_preemptions=sequence.num_preemptions,
    )

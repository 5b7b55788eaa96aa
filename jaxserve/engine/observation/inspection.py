"""The scheduler's state request by request, as plain data for a person who looks. Tells nothing of what prompts and answers say; imports no jax."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable

from jaxserve.engine.scheduling.scheduler import Scheduler
from jaxserve.engine.scheduling.sequence import Sequence, SequenceStatus, by_order

MAX_WAITING = 100
"""Of a long queue only the head is shown."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceView:
    """One request.

    Args:
        status: Of :class:`SequenceStatus`.
        rank: The data rank that holds its pages, or its host pages; ``None`` if none does.
        age_s: Time since its arrival.
        num_prompt_tokens: Of its prompt.
        num_cached_tokens: Those of them found in the prefix cache; ``None`` before it has run.
        num_scheduled_tokens: Tokens whose keys and values are there.
        num_generated_tokens: So far.
        max_tokens: At most.
        num_pages: Pages held; while swapped, host pages.
        num_preemptions: So far.
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
    """One data rank's pool.

    Args:
        num_used_pages: Held by requests.
        num_idle_pages: Held by none, kept by the prefix cache: given up when they are needed.
        num_free_pages: Neither.
        num_cached_pages: Kept by the prefix cache, held or not.
        num_host_pages: Of host memory.
        num_free_host_pages: Those of them that hold nothing.
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
    """The whole.

    Args:
        running: Rank by rank, first in order first.
        swapped: Likewise.
        paused: Those whose clients read too slowly.
        num_waiting: Of the queue.
        waiting: Its first ``MAX_WAITING``.
    """

    ranks: tuple[RankView, ...]
    running: tuple[SequenceView, ...]
    swapped: tuple[SequenceView, ...]
    paused: tuple[SequenceView, ...]
    num_waiting: int
    waiting: tuple[SequenceView, ...]


def inspect_scheduler(scheduler: Scheduler, now_s: float) -> SchedulerView:
    """Looks at a scheduler between two steps.

    Args:
        scheduler: Is not changed.
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

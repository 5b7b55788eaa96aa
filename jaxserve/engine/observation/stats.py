"""The engine's counts of what it has done and what it holds, as plain numbers."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Literal, get_args

from jaxserve.engine.scheduling.schedule import Runner
from jaxserve.engine.scheduling.scheduler import Scheduler
from jaxserve.request import FinishReason

RefusalReason = Literal["quota", "overload", "shed", "queue_timeout", "deadline", "reader_timeout"]
"""The reason why a request got an error for want of room or time. ``quota`` and ``overload`` mean that it was never queued; with the others it was."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A snapshot of the engine's counts. The fields before ``num_requests`` describe the engine's state at that moment; the others count since its start.

    Every request that was queued is in exactly one place: ``num_requests == num_running + num_waiting + sum(finished.values())``.

    Args:
        num_running: Number of requests that hold a slot and pages.
        num_waiting: Number of all other requests in flight: queued, preempted, swapped or paused.
        num_swapped: Number of requests whose keys and values are in host memory.
        num_paused: Number of requests whose client reads too slowly.
        num_queued_tokens: Number of prompt tokens of requests that have not run yet.
        num_pages: Number of pages of all data ranks.
        num_free_pages: Number of pages that no request holds, including cached ones, which are evicted when they are needed.
        num_cached_pages: Number of pages that the prefix caches keep, whether a request holds them or not.
        num_idle_pages: Number of pages that the prefix caches keep and no request holds.
        page_bytes: Bytes of one page on one device.
        max_num_seqs: Number of sequence slots of all data ranks.
        num_requests: Number of requests that were queued.
        num_preemptions: Number of preemptions; a request may have several.
        num_swap_outs: Number of preempted requests that were swapped to host memory.
        num_steps: Number of steps, failed ones included.
        num_programs: Number of programs compiled, or loaded already compiled.
        num_late_compiles: Number of programs compiled after warm-up, while requests waited for them.
        num_prompt_tokens: Number of prompt tokens of the requests that were queued.
        num_generated_tokens: Number of generated tokens.
        num_evicted_pages: Number of cached pages that were evicted.
        num_page_copies: Number of pages copied for requests that share only the first part of a cached page.
        prefix_hit_tokens: Number of prompt tokens found in a prefix cache. Every request counts once, when it is first admitted.
        prefix_miss_tokens: Number of prompt tokens not found in a prefix cache, counted in the same way.
        finished: Number of requests ended, by finish reason; every reason has an item.
        refused: Number of requests that got an error for want of room or time, by reason. Those that had been queued count as finished too.
    """

    num_running: int
    num_waiting: int
    num_swapped: int
    num_paused: int
    num_queued_tokens: int
    num_pages: int
    num_free_pages: int
    num_cached_pages: int
    num_idle_pages: int
    page_bytes: int
    max_num_seqs: int
    num_requests: int
    num_preemptions: int
    num_swap_outs: int
    num_steps: int
    num_programs: int
    num_late_compiles: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_evicted_pages: int
    num_page_copies: int
    prefix_hit_tokens: int
    prefix_miss_tokens: int
    finished: Mapping[FinishReason, int]
    refused: Mapping[RefusalReason, int]


@dataclasses.dataclass(slots=True)
class Counts:
    """The counts that the engine itself keeps since its start; for the fields see :class:`EngineStats`."""

    num_requests: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    finished: Counter[FinishReason] = dataclasses.field(default_factory=Counter[FinishReason])
    refused: Counter[RefusalReason] = dataclasses.field(default_factory=Counter[RefusalReason])

    def snapshot(self, scheduler: Scheduler, runner: Runner, max_num_seqs: int) -> EngineStats:
        """A snapshot of these counts and those of the scheduler and the runner. Taken from another thread, they may be one step apart from each other.

        Args:
            scheduler: The engine's scheduler.
            runner: The engine's runner.
            max_num_seqs: Number of sequence slots of all data ranks.
        """
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + scheduler.num_swapped + scheduler.num_paused,
            num_swapped=scheduler.num_swapped,
            num_paused=scheduler.num_paused,
            num_queued_tokens=scheduler.num_queued_tokens,
            num_pages=scheduler.num_pages,
            num_free_pages=scheduler.num_free_pages,
            num_cached_pages=scheduler.num_cached_pages,
            num_idle_pages=scheduler.num_idle_pages,
            page_bytes=runner.page_bytes,
            max_num_seqs=max_num_seqs,
            num_requests=self.num_requests,
            num_preemptions=scheduler.num_preemptions,
            num_swap_outs=scheduler.num_swap_outs,
            num_steps=self.num_steps,
            num_programs=runner.num_programs,
            num_late_compiles=runner.num_late_compiles,
            num_prompt_tokens=self.num_prompt_tokens,
            num_generated_tokens=self.num_generated_tokens,
            num_evicted_pages=scheduler.num_evicted_pages,
            num_page_copies=scheduler.num_page_copies,
            prefix_hit_tokens=scheduler.num_hit_tokens,
            prefix_miss_tokens=scheduler.num_miss_tokens,
            finished={reason: self.finished[reason] for reason in get_args(FinishReason)},
            refused={reason: self.refused[reason] for reason in get_args(RefusalReason)},
        )

"""What an engine has done and holds, as plain numbers."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Literal, get_args

from jaxserve.engine.scheduling.schedule import Runner
from jaxserve.engine.scheduling.scheduler import Scheduler
from jaxserve.request import FinishReason

RefusalReason = Literal["quota", "overload", "shed", "queue_timeout", "deadline", "reader_timeout"]
"""Why a request got an error in place of an answer: ``quota`` and ``overload`` were not taken at all, the others waited or ran before."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A snapshot. Those before ``num_requests`` are of the engine's state at that moment, the others count since its start.

    Every request taken is in exactly one place: ``num_requests == num_running + num_waiting + sum(finished.values())``.

    Args:
        num_running: Sequences that hold a slot and pages.
        num_waiting: All other requests in flight: queued, preempted, swapped, paused.
        num_swapped: Those of them whose keys and values are in host memory.
        num_paused: Those whose client reads too slowly.
        num_queued_tokens: Prompt tokens of those that have not begun.
        num_pages: Pages of all data ranks.
        num_free_pages: Pages that no request holds. Some may be cached: they are given up when they are needed.
        num_cached_pages: Pages that the prefix caches keep, whether a request holds them too or not.
        num_idle_pages: Those of them that no request holds.
        page_bytes: Bytes of one page on one device.
        max_num_seqs: Sequence slots of all data ranks.
        num_requests: Requests taken.
        num_preemptions: Preemptions; one request may have several.
        num_swap_outs: Preemptions that went to host memory.
        num_steps: Device steps, failed ones included.
        num_programs: Programs compiled, or found compiled.
        num_late_compiles: Those that held up running requests although all should have been ready.
        num_prompt_tokens: Prompt tokens of the requests taken.
        num_generated_tokens: Tokens sampled.
        num_evicted_pages: Cached pages given up for others.
        num_page_copies: Pages copied because a request went on within a cached one.
        prefix_hit_tokens: Prompt tokens found in a prefix cache. Every request counts once, when it is first admitted.
        prefix_miss_tokens: Prompt tokens not found there.
        finished: Requests ended, by reason; every reason has an entry.
        refused: Requests that got an error for want of room or time, by reason. Those that had been taken count as finished too.
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
    """What an engine counts itself, since its start; the fields are those of :class:`EngineStats`."""

    num_requests: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    finished: Counter[FinishReason] = dataclasses.field(default_factory=Counter[FinishReason])
    refused: Counter[RefusalReason] = dataclasses.field(default_factory=Counter[RefusalReason])

    def snapshot(self, scheduler: Scheduler, runner: Runner, max_num_seqs: int) -> EngineStats:
        """These counts and those of the scheduler and the runner; taken from another thread they may be a step apart.

        Args:
            scheduler: Of the engine.
            runner: Of the engine.
            max_num_seqs: Sequence slots of all data ranks.
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

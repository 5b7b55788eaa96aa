"""What an engine has done and holds, as plain numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxserve.request import FinishReason


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A snapshot. The first seven are of the engine's state at that moment, the others count since its start.

    Every request taken is in exactly one place: ``num_requests == num_running + num_waiting + sum(finished.values())``.

    Args:
        num_running: Sequences that hold a slot and pages.
        num_waiting: Sequences in the queue, preempted ones included.
        num_pages: Pages of all data ranks.
        num_free_pages: Pages that no request holds. Some may be cached: they are given up when they are needed.
        num_cached_pages: Pages that the prefix caches keep, whether a request holds them too or not.
        page_bytes: Bytes of one page on one device.
        max_num_seqs: Sequence slots of all data ranks.
        num_requests: Requests taken.
        num_preemptions: Preemptions; one request may have several.
        num_steps: Device steps, failed ones included.
        num_prompt_tokens: Prompt tokens of the requests taken.
        num_generated_tokens: Tokens sampled.
        num_evicted_pages: Cached pages given up for others.
        num_page_copies: Pages copied because a request went on within a cached one.
        prefix_hit_tokens: Prompt tokens found in a prefix cache. Every request counts once, when it is first admitted.
        prefix_miss_tokens: Prompt tokens not found there.
        finished: Requests ended, by reason; every reason has an entry.
    """

    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
    num_cached_pages: int
    page_bytes: int
    max_num_seqs: int
    num_requests: int
    num_preemptions: int
    num_steps: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_evicted_pages: int
    num_page_copies: int
    prefix_hit_tokens: int
    prefix_miss_tokens: int
    finished: Mapping[FinishReason, int]

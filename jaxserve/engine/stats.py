"""What an engine has done and holds, as plain numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxserve.request import FinishReason


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A snapshot. The first five are read from the engine's state at that moment, the others count since its start.

    Every request taken is in exactly one place: ``num_requests == num_running + num_waiting + sum(finished.values())``.

    Args:
        num_running: Sequences that hold a slot and pages.
        num_waiting: Sequences in the queue, preempted ones included.
        num_pages: Pages of all data ranks.
        num_free_pages: Pages that nobody holds.
        max_num_seqs: Sequence slots of all data ranks.
        num_requests: Requests taken.
        num_preemptions: Preemptions; one request may have several.
        num_steps: Device steps, failed ones included.
        num_prompt_tokens: Prompt tokens of the requests taken.
        num_generated_tokens: Tokens sampled.
        finished: Requests ended, by reason; every reason has an entry.
    """

    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
    max_num_seqs: int
    num_requests: int
    num_preemptions: int
    num_steps: int
    num_prompt_tokens: int
    num_generated_tokens: int
    finished: Mapping[FinishReason, int]

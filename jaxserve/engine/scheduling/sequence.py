"""The sequence: the state of one request inside the engine. Plain Python; imports no jax."""

from __future__ import annotations

import dataclasses
import enum

from jaxserve.engine.pages.prefix_cache.interface import CachePath
from jaxserve.request import FinishReason, Request

NO_TENURE = -1
"""Tenure of a sequence that has never had a slot."""


class SequenceStatus(enum.Enum):
    WAITING = "waiting"
    """Not admitted yet, or preempted. Holds no slot and no page."""
    RUNNING = "running"
    """Holds a slot and pages."""
    SWAPPED = "swapped"
    """Preempted, with its keys and values in host memory. Holds host pages."""
    PAUSED = "paused"
    """Stopped because its reader is slow. Holds no slot and no page, and does not wait for any."""
    FINISHED = "finished"
    """Holds nothing."""


class Lag(enum.Enum):
    """What a sequence does in the next step while its latest token is known to the device only."""

    NONE = "none"
    """The sequence takes part: the token goes from step to step on the device."""
    SITS_OUT = "sits out"
    """The sequence is left out of steps until the host knows the token."""
    HOLDS_STEP = "holds step"
    """No step is scheduled at all until the host knows the token."""


@dataclasses.dataclass(eq=False, slots=True)
class Sequence:
    """A request's tokens, pages and progress. Only the scheduler changes it; the meter writes the times of its tokens.

    Args:
        request: The request that the sequence was made from.
        seed: The 32-bit seed of its randomness.
        token_ids: Prompt and generated tokens whose values the host knows.
        num_prompt_tokens: Length of the prompt.
        max_tokens: Largest number of tokens to generate, already limited by the context length.
        cache_path: The tokens as a prefix cache sees them; refers to the same list as ``token_ids``.
        order: Place among all sequences, smaller first; set once, when the scheduler takes the sequence.
        num_scheduled_tokens: Number of tokens whose keys and values are in the pool, or will be once the steps dispatched so far have run.
        num_in_flight: Number of tokens that dispatched steps will generate and that have not been fetched. The host counts on them without knowing their
            values.
        decode_width: Largest number of pending tokens that counts as a decode and not as a prefill chunk: 1, the token generated last.
        lag: What the sequence does in the next step while one of its tokens is in flight.
        rank: Index of the data rank whose pages and slot, or host pages, it holds; has no meaning unless RUNNING or SWAPPED.
        page_ids: Pages that it holds, in order of position.
        host_page_ids: Host pages that hold its keys and values while SWAPPED.
        slot: Index into the rank's per-sequence state on the device while RUNNING, else -1.
        tenure: Number of the rank's that tells this stay in the slot from all others, of this sequence or another; ``NO_TENURE`` before the first.
        status: Where the sequence is in its life.
        finish_reason: Why it ended; ``None`` before.
        num_preemptions: How often it lost its pages, whatever the reason.
        num_cached_tokens: Prompt tokens found in a prefix cache when it was first admitted; ``None`` before that.
        scheduled_s: Time of its first admission, in seconds of the engine's clock; so are the times below.
        first_token_s: Time at which its first generated token arrived on the host.
        last_token_s: Time at which its latest generated token arrived; ``None`` again after a pause.
        paused_token_s: Time at which its latest generated token before a pause arrived.
        num_gaps: Number of intervals between two consecutive tokens that were measured.
        gaps_s: Sum of these intervals.
    """

    request: Request
    seed: int
    token_ids: list[int]
    num_prompt_tokens: int
    max_tokens: int
    cache_path: CachePath
    order: tuple[float, int] = (0.0, 0)
    num_scheduled_tokens: int = 0
    num_in_flight: int = 0
    decode_width: int = 1
    lag: Lag = Lag.NONE
    rank: int = 0
    page_ids: list[int] = dataclasses.field(default_factory=list[int])
    host_page_ids: list[int] = dataclasses.field(default_factory=list[int])
    slot: int = -1
    tenure: int = NO_TENURE
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    num_preemptions: int = 0
    num_cached_tokens: int | None = None
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    paused_token_s: float | None = None
    num_gaps: int = 0
    gaps_s: float = 0.0

    @classmethod
    def of(cls, request: Request, *, seed: int, max_tokens: int, namespace: bytes = b"") -> Sequence:
        """A new sequence for a request.

        Args:
            request: The request.
            seed: See the class.
            max_tokens: See the class.
            namespace: Namespace of its keys in a prefix cache; see ``CachePath``.
        """
        token_ids = list(request.prompt_token_ids)
        return cls(request, seed, token_ids, len(token_ids), max_tokens, CachePath(namespace, token_ids))

    @property
    def num_generated_tokens(self) -> int:
        """Number of generated tokens whose values the host knows."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the sequence will have when the steps in flight have been fetched, unless it ends before."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_pending_tokens(self) -> int:
        """Number of tokens that the next step can run: those that the sequence has, tokens in flight included, and that are not scheduled.

        It is 0 while the sequence's last token is in flight, or while any is in flight and ``lag`` is not NONE.
        """
        num_tokens = len(self.token_ids)
        if not self.num_in_flight:
            return num_tokens - self.num_scheduled_tokens
        num_tokens += self.num_in_flight
        is_last = num_tokens >= self.num_prompt_tokens + self.max_tokens
        return 0 if is_last or self.lag is not Lag.NONE else num_tokens - self.num_scheduled_tokens


def by_order(sequence: Sequence) -> tuple[float, int]:
    """The ``order`` of a sequence, as a key for sorting."""
    return sequence.order

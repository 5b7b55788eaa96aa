"""The state of one request inside the engine. Plain Python; imports no jax."""

from __future__ import annotations

import dataclasses
import enum

from jaxserve.engine.pages.prefix_cache.interface import CachePath
from jaxserve.request import FinishReason, Request


class SequenceStatus(enum.Enum):
    WAITING = "waiting"
    """Not admitted, or preempted: holds no slot and no page."""
    RUNNING = "running"
    """Holds a slot and pages."""
    SWAPPED = "swapped"
    """Preempted: holds host pages."""
    PAUSED = "paused"
    """Its reader is slow: holds no slot and no page, and does not wait for any."""
    FINISHED = "finished"
    """Holds nothing."""


class Lag(enum.Enum):
    """What becomes of a sequence's next step while the token before it is still on the device."""

    NONE = "none"
    """It is dispatched: the token goes from step to step on the device."""
    SITS_OUT = "sits out"
    """The sequence is left out of steps until the host knows the token."""
    HOLDS_STEP = "holds step"
    """No step is scheduled at all until the host knows the token."""


@dataclasses.dataclass(eq=False, slots=True)
class Sequence:
    """A request's tokens, pages and progress. Mutated by the scheduler alone, the times of its tokens by the meter.

    Args:
        request: What it came from.
        seed: The 32-bit seed of its randomness.
        token_ids: Prompt and generated tokens whose values the host knows.
        num_prompt_tokens: Length of the prompt.
        max_tokens: Most tokens to generate, already resolved against the context length.
        cache_path: Its tokens as a prefix cache sees them; of the same list as ``token_ids``.
        order: Its place among all sequences, smaller first; given once, when the scheduler takes it.
        num_scheduled_tokens: Tokens whose keys and values are in the pool, or will be once the steps dispatched so far have run.
        num_in_flight: Tokens that these steps will give it and that have not been fetched: the host counts on them without knowing their values.
        decode_width: Tokens of its next step if it decodes: the one generated last, later with drafts behind it.
        lag: What becomes of its next step while a token of it is in flight.
        rank: The data rank whose pages and slot it holds, or whose host pages; has no meaning unless RUNNING or SWAPPED.
        page_ids: Pages held, in order of position.
        host_page_ids: Host pages that hold what its pages held while SWAPPED.
        slot: Index into the rank's per-sequence state on the device while RUNNING, else -1.
        num_preemptions: How often it lost its pages, whatever the reason.
        num_cached_tokens: Prompt tokens that it found in a prefix cache when it was first admitted; ``None`` before.
        scheduled_s: When that was, by the engine's clock.
        first_token_s: When its first generated token was there.
        last_token_s: When its last one was; ``None`` again since a pause.
        paused_token_s: When its last one before a pause was.
        num_gaps: Pauses between two of its tokens.
        gaps_s: Time between these tokens.
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
        """A new sequence.

        Args:
            request: What it comes from.
            seed: See the class.
            max_tokens: See the class.
            namespace: Of its keys in a prefix cache.
        """
        token_ids = list(request.prompt_token_ids)
        return cls(request, seed, token_ids, len(token_ids), max_tokens, CachePath(namespace, token_ids))

    @property
    def num_generated_tokens(self) -> int:
        """Generated tokens whose values the host knows."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens that it has once the steps in flight have been fetched, unless one of them ends it."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that its next step can run: those that it has and that are not scheduled. None while its last token is in flight, or while it may not run
        ahead of a token in flight.
        """
        num_tokens = len(self.token_ids)
        if not self.num_in_flight:
            return num_tokens - self.num_scheduled_tokens
        num_tokens += self.num_in_flight
        is_last = num_tokens >= self.num_prompt_tokens + self.max_tokens
        return 0 if is_last or self.lag is not Lag.NONE else num_tokens - self.num_scheduled_tokens


def by_order(sequence: Sequence) -> tuple[float, int]:
    """A key for sorting."""
    return sequence.order

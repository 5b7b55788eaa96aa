"""What the load generator knows of a server: a request goes in, pieces of an answer come out. No transport lives here."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any, Literal, Protocol

from jaxserve.bench.workload.plan import PlannedRequest

Outcome = Literal["success", "cancelled", "refused", "timed_out", "error"]
"""How a request ended. ``cancelled`` by us, on plan; ``refused`` is a server that says it is full or not ready (429, 503) before any token."""

OUTCOMES: tuple[Outcome, ...] = ("success", "cancelled", "refused", "timed_out", "error")


class RequestFailedError(Exception):
    """A request that the server did not answer as asked.

    Args:
        message: What happened, for a report.
        outcome: ``refused``, ``timed_out`` or ``error``.
        unreachable: There was no connection to be had: the server is gone rather than displeased.
    """

    def __init__(self, message: str, *, outcome: Outcome = "error", unreachable: bool = False) -> None:
        super().__init__(message)
        self.outcome: Outcome = outcome
        self.unreachable = unreachable


@dataclasses.dataclass(slots=True)
class Stream:
    """The answer to one request as it comes in. A system under test calls the methods below at the moment something arrives; times are those of the event loop.

    Attributes:
        piece_times_s: When each piece with new text came.
        end_s: When the last piece, or the end of the generation, came.
        texts: The pieces, kept only with ``keep_text``.
    """

    keep_text: bool = False
    piece_times_s: list[float] = dataclasses.field(default_factory=list[float])
    texts: list[str] = dataclasses.field(default_factory=list[str])
    end_s: float | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None

    def piece(self, text: str) -> None:
        """New text, of one or more tokens, came."""
        self.end_s = asyncio.get_running_loop().time()
        self.piece_times_s.append(self.end_s)
        if self.keep_text:
            self.texts.append(text)

    def finish(self, reason: str) -> None:
        """The generation ended: its last token is here, if perhaps without text."""
        self.end_s = asyncio.get_running_loop().time()
        self.finish_reason = reason

    def usage(self, prompt_tokens: int | None, completion_tokens: int | None, cached_tokens: int | None = None) -> None:
        """The server counted. ``None`` leaves what was known."""
        self.prompt_tokens = self.prompt_tokens if prompt_tokens is None else prompt_tokens
        self.completion_tokens = self.completion_tokens if completion_tokens is None else completion_tokens
        self.cached_tokens = self.cached_tokens if cached_tokens is None else cached_tokens


class SystemUnderTest(Protocol):
    """What load is sent to (the word is MLPerf LoadGen's): a server, or an engine in this process."""

    def prepare(self, request: PlannedRequest) -> Any:
        """Everything that can be done before a request is due, such as its body's bytes."""
        ...

    async def run(self, prepared: Any, stream: Stream) -> None:
        """Sends a prepared request and reports its answer to ``stream``; returns when the answer is complete. Cancelling it closes the connection.

        Raises:
            RequestFailedError: Every failure that is the server's or the network's.
        """
        ...

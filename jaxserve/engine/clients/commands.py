"""What goes between the engine's thread and its clients, as plain data: all of it can be sent to another process as it is."""

from __future__ import annotations

from typing import Any

import msgspec

from jaxserve.engine.observation.inspection import SchedulerView
from jaxserve.request import Request, RequestOutput


class Add(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Submit a request.

    Args:
        stream: The client's own number for it, never used twice.
        request: See :class:`~jaxserve.request.Request`.
    """

    stream: int
    request: Request


class Leave(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Abort the request of a stream: nobody reads it any more. Nothing if it has ended."""

    stream: int


class LeaveAll(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Abort all requests of the client, and send it nothing any more: it is gone."""


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Abort a request by its id, whichever client's it is; answered by :class:`Aborted`.

    Args:
        question: The client's own number for what it asks.
        request_id: Of the request.
        tenant: Whose request it must be; ``None`` for anybody's.
    """

    question: int
    request_id: str
    tenant: str | None


class SetPaused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Hold the request of a stream, or let it go on. Nothing if it has ended."""

    stream: int
    is_paused: bool


class Stop(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End the request of a stream as of its first ``num_tokens`` generated tokens: its text ends there. Nothing if it has ended."""

    stream: int
    num_tokens: int


class GiveBack(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Give a tenant tokens back that a request generated beyond the end of its text, where it had ended before :class:`Stop` came."""

    tenant: str
    num_tokens: int


class Inspect(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Tell what runs and who waits; answered by :class:`Inspected`."""

    question: int


Command = Add | Leave | LeaveAll | Abort | SetPaused | Stop | GiveBack | Inspect


class Aborted(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to :class:`Abort`: whether such a request was in flight."""

    question: int
    was_in_flight: bool


class Inspected(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to :class:`Inspect`."""

    question: int
    view: SchedulerView


Answer = Aborted | Inspected


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a client needs to know of an engine to check requests before they are sent.

    Args:
        model_name: What the model is called.
        model_revision: The commit of its files, where one is known.
        sampling_defaults: The model's own values for sampling fields that a request leaves out.
        max_model_len: Most tokens of prompt and output together.
        vocab_size: V.
        num_pages: Pages of one data rank's pool.
        page_size: Tokens that one page holds.
        max_num_seqs: Sequence slots of all data ranks.
        reader_buffer: See ``EngineConfig``.
    """

    model_name: str
    model_revision: str | None
    sampling_defaults: dict[str, Any]
    max_model_len: int
    vocab_size: int
    num_pages: int
    page_size: int
    max_num_seqs: int
    reader_buffer: int


class Delivery(msgspec.Struct):
    """What one turn of the engine's thread has for one client.

    Args:
        outputs: Of its streams, by their numbers, in the order in which they were made.
        answers: To its questions.
    """

    outputs: list[tuple[int, RequestOutput]] = msgspec.field(default_factory=list[tuple[int, RequestOutput]])
    answers: list[Answer] = msgspec.field(default_factory=list[Answer])

"""The messages between the engine's thread and its clients, as plain data that can also be sent to another process."""

from __future__ import annotations

from typing import Any

import msgspec

from jaxserve.engine.observation.inspection import SchedulerView
from jaxserve.request import Request, RequestOutput


class Add(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The command to submit a request.

    Args:
        stream: The client's own number for the request's stream of outputs, never used twice.
        request: See :class:`~jaxserve.request.Request`.
    """

    stream: int
    request: Request


class Leave(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The command to abort the request of a stream, because nobody reads it any more. Has no effect if the request has ended."""

    stream: int


class LeaveAll(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The command to abort all requests of a client that is gone, and to send it nothing any more."""


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The command to abort a request by its id, whichever client it belongs to. The answer is :class:`Aborted`.

    Args:
        question: The client's own number for this question.
        request_id: Id of the request.
        tenant: Tenant that the request must belong to; ``None`` for any.
    """

    question: int
    request_id: str
    tenant: str | None


class SetPaused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The command to pause the request of a stream, or to let it go on. Has no effect if the request has ended."""

    stream: int
    is_paused: bool


class Stop(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The command to end the request of a stream after its first ``num_tokens`` generated tokens, where its text ends. Has no effect if it has ended."""

    stream: int
    num_tokens: int


class GiveBack(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The command to return tokens to a tenant's quota that a request generated beyond the end of its text, if it had ended before :class:`Stop` arrived."""

    tenant: str
    num_tokens: int


class Inspect(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The question which requests run and wait. The answer is :class:`Inspected`."""

    question: int


Command = Add | Leave | LeaveAll | Abort | SetPaused | Stop | GiveBack | Inspect


class Aborted(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to :class:`Abort`: whether such a request was in flight."""

    question: int
    was_in_flight: bool


class Inspected(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to :class:`Inspect`: a view of all running and waiting requests."""

    question: int
    view: SchedulerView


Answer = Aborted | Inspected


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about an engine that a client needs to check requests before it sends them.

    Args:
        model_name: The model's name.
        model_revision: The commit of the model's files; ``None`` if it is not known.
        sampling_defaults: The model's own values for sampling fields that a request leaves out.
        max_model_len: Largest number of tokens that prompt and output may have together.
        vocab_size: V, the size of the vocabulary.
        num_pages: Pages of one data rank's pool.
        page_size: Tokens that one page holds.
        max_num_seqs: Sequence slots of all data ranks together.
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
    """All messages of one turn of the engine's thread to one client.

    Args:
        outputs: Outputs of its streams, each with the stream's number, in the order in which they were made.
        answers: Answers to its questions.
    """

    outputs: list[tuple[int, RequestOutput]] = msgspec.field(default_factory=list[tuple[int, RequestOutput]])
    answers: list[Answer] = msgspec.field(default_factory=list[Answer])

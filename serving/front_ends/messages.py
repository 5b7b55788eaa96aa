"""The messages between the engine's process and front-end processes, as frames of MessagePack.

The engine's process sends each front end one frame for each step; a front end sends at most one frame for each turn of its event loop.
"""

from __future__ import annotations

import msgspec

from jaxserve.engine.clients.commands import Answer, Command, Delivery, EngineFacts
from jaxserve.engine.observation.stats import EngineStats
from jaxserve.errors import ErrorData
from jaxserve.request import FinishReason, RequestOutput
from jaxserve.tokenizer import TokenizerData


class Setup(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The first message to a front end.

    Args:
        config: The whole configuration as YAML, with its secrets.
        log_level: Name of the log level.
        started_s: Time of the server's start, in seconds since the epoch.
        grpc_port: The gRPC port that the front ends share; ``None`` for no gRPC.
    """

    config: str
    log_level: str
    started_s: int
    grpc_port: int | None


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The message that the engine is built, with what a front end needs to serve it."""

    facts: EngineFacts
    tokenizer: TokenizerData


class Step(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A :class:`Delivery` of the engine's thread to a front end, in a compact form, since most of it is tokens of streams that go on.

    Args:
        streams: Numbers of the streams that go on and have new tokens.
        token_ids: New tokens of each of these streams.
        outputs: All other outputs, each with the number of its stream.
        answers: Answers to the front end's questions.
    """

    streams: list[int]
    token_ids: list[tuple[int, ...]]
    outputs: list[tuple[int, RequestOutput]]
    answers: list[Answer]

    @classmethod
    def of(cls, delivery: Delivery) -> Step:
        """The message for a delivery whose outputs have no text."""
        streams: list[int] = []
        token_ids: list[tuple[int, ...]] = []
        outputs: list[tuple[int, RequestOutput]] = []
        for number, output in delivery.outputs:
            if output.finish_reason is None:
                streams.append(number)
                token_ids.append(output.token_ids)
            else:
                outputs.append((number, output))
        return cls(streams, token_ids, outputs, delivery.answers)


class Ended(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The message that the engine has ended. All streams end with this reason and error, and the front end ends too."""

    reason: FinishReason
    error: ErrorData | None


class Drain(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The command to refuse new requests, let those in flight end, and then end."""


class Page(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to :class:`AskPage`: the page and its media type."""

    question: int
    content: bytes
    media_type: str


class Stats(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to :class:`AskStats`: the engine's counts."""

    question: int
    stats: EngineStats


ToFrontEnd = Setup | Ready | Step | Ended | Drain | Page | Stats


class Listening(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The message that a front end answers on its ports."""


class Counted(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The message that a front end has answered a call; see ``metrics.CountsResponses``."""

    api: str
    endpoint: str
    status: str


class AskPage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The question for the page of ``/metrics``, which is the same through any front end."""

    question: int
    accept: str


class AskStats(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The question for the engine's counts."""

    question: int


FromFrontEnd = Command | Listening | Counted | AskPage | AskStats

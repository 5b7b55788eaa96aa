"""What goes between the engine's process and a front end's, each message a frame of MessagePack: one a step to each front end, and at most one a turn of its
event loop back.
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
        log_level: A level's name.
        started_s: When the server was started, in seconds of the epoch.
        grpc_port: To be shared; ``None`` for no gRPC.
    """

    config: str
    log_level: str
    started_s: int
    grpc_port: int | None


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The engine is built."""

    facts: EngineFacts
    tokenizer: TokenizerData


class Step(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What a turn of the engine's thread has for the front end: a :class:`Delivery`, of which most is tokens of streams that go on.

    Args:
        streams: Numbers of those.
        token_ids: New tokens of each.
        outputs: All other outputs, by the numbers of their streams.
        answers: To its questions.
    """

    streams: list[int]
    token_ids: list[tuple[int, ...]]
    outputs: list[tuple[int, RequestOutput]]
    answers: list[Answer]

    @classmethod
    def of(cls, delivery: Delivery) -> Step:
        """The message for a delivery of outputs without text."""
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
    """The engine has ended: all streams end with this reason and error, and so does the front end."""

    reason: FinishReason
    error: ErrorData | None


class Drain(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Take no new requests, let those in flight end, and end."""


class Page(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to :class:`AskPage`."""

    question: int
    content: bytes
    media_type: str


class Stats(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to :class:`AskStats`."""

    question: int
    stats: EngineStats


ToFrontEnd = Setup | Ready | Step | Ended | Drain | Page | Stats


class Listening(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The front end answers on its ports."""


class Counted(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The front end has answered a call; see ``metrics.CountsResponses``."""

    api: str
    endpoint: str
    status: str


class AskPage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Give the page of ``/metrics``, which is the same through any front end."""

    question: int
    accept: str


class AskStats(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Give the engine's counts."""

    question: int


FromFrontEnd = Command | Listening | Counted | AskPage | AskStats

"""All errors that jaxserve raises on purpose, and their form as plain data, in which they travel from the engine to its clients.

Only ``serving/error_table.py`` maps them to HTTP status and gRPC code. A message says what was wrong, which value was found, and what is allowed. "No space
in the pool" is a return value, not an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar


class JaxserveError(Exception):
    """The base class of all errors whose messages are meant for users.

    Attributes:
        FIELDS: Names of the attributes that errors of the class have besides the message. The constructor takes them as keywords.
    """

    FIELDS: ClassVar[tuple[str, ...]] = ()


class ConfigError(JaxserveError):
    """A configuration key or value that cannot be used; the message holds the full key path."""


class HostLostError(JaxserveError):
    """Another process of the same engine is gone, or never came."""


class ModelError(JaxserveError):
    """A model that cannot be served: unsupported architecture or attribute, or a broken checkpoint."""


class UnsupportedModelError(ModelError):
    """An architecture, or an attribute of its config that changes the maths, that jaxserve does not implement."""


class CheckpointError(ModelError):
    """A checkpoint whose bytes or keys are not what the model needs: truncated, misshapen, missing, extra, unknown type."""


class ModelUnavailableError(ModelError):
    """A model that cannot be found or fetched."""


class RequestError(JaxserveError):
    """A request that is refused because of the client.

    Args:
        message: What was wrong, which value was found, and what is allowed.
        param: Name of the request field at fault, as the client spelled it.
        code: Stable machine-readable reason, in OpenAI's vocabulary where it has one.
    """

    FIELDS = ("param", "code")

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class InvalidRequestError(RequestError):
    """A field with a wrong type or value, an unknown field, or one that jaxserve does not implement."""


class ContextLengthError(InvalidRequestError):
    """Prompt, or prompt plus ``max_tokens``, longer than the context length or than the page pool can ever hold."""

    FIELDS = ("param",)

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class UnknownModelError(RequestError):
    """The request names a model that this server does not serve."""


class UnauthenticatedError(RequestError):
    """No API key, or a wrong one."""


class ForbiddenError(RequestError):
    """A valid API key, used for something that needs another kind of key."""


class PayloadTooLargeError(RequestError):
    """The request body is larger than the server accepts."""


class QuotaExceededError(RequestError):
    """The request's tenant has used up its quota for now.

    Args:
        message: What was used up, and the limit.
        retry_after_s: Seconds after which another attempt is likely to succeed.
    """

    FIELDS = ("retry_after_s",)

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message, code="rate_limit_exceeded")
        self.retry_after_s = retry_after_s


class ReaderTimeoutError(RequestError):
    """The client left its outputs unread for too long."""


class EngineError(JaxserveError):
    """The engine cannot take or finish a request, through no fault of the client's."""


class EngineNotReadyError(EngineError):
    """The engine is still starting, or is draining and admits nothing new."""


class OverloadedError(EngineError):
    """The engine has more work than it can take: the request was refused before it ran, waited too long, or was removed to make room for another one.

    Args:
        message: What is full.
        retry_after_s: Seconds after which another attempt is likely to succeed.
    """

    FIELDS = ("retry_after_s",)

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceededError(EngineError):
    """The request's own deadline passed before it was finished.

    Args:
        message: The deadline.
        retry_after_s: Seconds after which another attempt is likely to succeed; ``None`` if the request had begun to run.
    """

    FIELDS = ("retry_after_s",)

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDeadError(EngineError):
    """The engine stopped after an internal error; it will answer nothing any more."""


class UnexpectedError(EngineError):
    """An error that nobody foresaw, in one request. Its message may contain anything, so it must not go into the log of requests."""


class BenchmarkError(JaxserveError):
    """A benchmark that cannot be run or has nothing to report: the server is not there, refuses, or answers nothing."""


class CompileError(JaxserveError):
    """A compiler gave up, or the process that it ran in died."""


ERROR_CODES: Mapping[type[JaxserveError], str] = {
    JaxserveError: "error",
    ConfigError: "config_error",
    HostLostError: "host_lost",
    ModelError: "model_error",
    UnsupportedModelError: "unsupported_model",
    CheckpointError: "checkpoint_error",
    ModelUnavailableError: "model_unavailable",
    RequestError: "request_error",
    InvalidRequestError: "invalid_value",
    ContextLengthError: "context_length_exceeded",
    UnknownModelError: "model_not_found",
    UnauthenticatedError: "invalid_api_key",
    ForbiddenError: "admin_key_required",
    PayloadTooLargeError: "request_too_large",
    QuotaExceededError: "rate_limit_exceeded",
    ReaderTimeoutError: "reader_timeout",
    EngineError: "engine_error",
    EngineNotReadyError: "not_ready",
    OverloadedError: "overloaded",
    DeadlineExceededError: "deadline_exceeded",
    EngineDeadError: "engine_dead",
    UnexpectedError: "unexpected",
    BenchmarkError: "benchmark_error",
    CompileError: "compile_error",
}
"""The code of each class, which stands for it in :class:`ErrorData`."""

_CLASSES = {code: cls for cls, code in ERROR_CODES.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class ErrorData:
    """An error as plain data.

    Args:
        code: Code of its class, from :data:`ERROR_CODES`.
        message: The error's message.
        fields: The values of the class's ``FIELDS``, by name.
    """

    code: str
    message: str
    fields: Mapping[str, str | float | None] = dataclasses.field(default_factory=dict[str, str | float | None])

    @property
    def error_class(self) -> type[JaxserveError]:
        """The class that the code stands for."""
        return _CLASSES[self.code]


def to_data(error: BaseException) -> ErrorData:
    """The data of an error. An exception that is not a :class:`JaxserveError` becomes an :class:`UnexpectedError` whose message names its class."""
    if not isinstance(error, JaxserveError):
        return ErrorData(ERROR_CODES[UnexpectedError], f"{type(error).__name__}: {error}")
    known = [cls for cls in type(error).__mro__ if issubclass(cls, JaxserveError) and cls in ERROR_CODES]
    return ErrorData(ERROR_CODES[known[0]], str(error), {name: getattr(error, name) for name in known[0].FIELDS})


def from_data(data: ErrorData) -> JaxserveError:
    """The error that the data describes: the inverse of :func:`to_data`, without the traceback."""
    return data.error_class(data.message, **data.fields)

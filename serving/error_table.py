"""The one table from exceptions to HTTP status, OpenAI error type and gRPC status. Messages pass through; unexpected errors do not.

``error.code`` is the exception's own; where it has none, that of the row's class in ``errors.ERROR_CODES``.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import uuid

from jaxserve import errors

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class ErrorRow:
    """How one exception class, and its subclasses that have no row of their own, look from outside.

    Args:
        http_status: HTTP status code.
        type: ``error.type`` in OpenAI's error form.
        grpc_code: Name of a ``grpc.StatusCode``.
    """

    http_status: int
    type: str
    grpc_code: str


ERROR_TABLE: dict[type[Exception], ErrorRow] = {
    errors.InvalidRequestError: ErrorRow(400, "invalid_request_error", "INVALID_ARGUMENT"),
    errors.UnauthenticatedError: ErrorRow(401, "invalid_request_error", "UNAUTHENTICATED"),
    errors.ForbiddenError: ErrorRow(403, "invalid_request_error", "PERMISSION_DENIED"),
    errors.UnknownModelError: ErrorRow(404, "invalid_request_error", "NOT_FOUND"),
    errors.PayloadTooLargeError: ErrorRow(413, "invalid_request_error", "RESOURCE_EXHAUSTED"),
    errors.ReaderTimeoutError: ErrorRow(408, "invalid_request_error", "ABORTED"),
    errors.QuotaExceededError: ErrorRow(429, "rate_limit_error", "RESOURCE_EXHAUSTED"),
    errors.OverloadedError: ErrorRow(503, "server_error", "UNAVAILABLE"),
    errors.DeadlineExceededError: ErrorRow(504, "server_error", "DEADLINE_EXCEEDED"),
    errors.EngineNotReadyError: ErrorRow(503, "server_error", "UNAVAILABLE"),
    errors.EngineDeadError: ErrorRow(503, "server_error", "UNAVAILABLE"),
    errors.EngineError: ErrorRow(500, "server_error", "INTERNAL"),
    Exception: ErrorRow(500, "server_error", "INTERNAL"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class ErrorReport:
    """One error as both APIs send it. ``retry_after_s`` is in whole seconds; ``None`` where trying again does not help."""

    row: ErrorRow
    message: str
    param: str | None
    code: str | None
    retry_after_s: int | None = None

    def body(self) -> dict[str, dict[str, str | None]]:
        """OpenAI's error form."""
        return {"error": {"message": self.message, "type": self.row.type, "param": self.param, "code": self.code}}


def report_error(error: Exception) -> ErrorReport:
    """Looks an exception up. One that no row but ``Exception`` covers is logged with its traceback; the client sees only the id of that log line."""
    cls = next(cls for cls in type(error).__mro__ if cls in ERROR_TABLE)
    row = ERROR_TABLE[cls]
    if not issubclass(cls, errors.JaxserveError):
        error_id = uuid.uuid4().hex[:12]
        logger.error("internal error %s", error_id, exc_info=error)
        return ErrorReport(row, f"internal error; the server's log has it under the id {error_id}", None, "internal_error")
    code, retry_after_s = errors.ERROR_CODES[cls], None
    if isinstance(error, (errors.QuotaExceededError, errors.OverloadedError, errors.DeadlineExceededError)):
        retry_after_s = None if error.retry_after_s is None else max(1, math.ceil(error.retry_after_s))
    elif row.http_status == 503:
        retry_after_s = 1
    if isinstance(error, errors.RequestError):
        return ErrorReport(row, str(error), error.param, error.code or code, retry_after_s)
    return ErrorReport(row, str(error), None, code, retry_after_s)

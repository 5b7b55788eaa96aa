"""The one table from exceptions to HTTP status, OpenAI error type and code, and gRPC status. Messages pass through; unexpected errors do not."""

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
        code: ``error.code`` where the exception brings none of its own.
        grpc_code: Name of a ``grpc.StatusCode``.
    """

    http_status: int
    type: str
    code: str | None
    grpc_code: str


ERROR_TABLE: dict[type[Exception], ErrorRow] = {
    errors.InvalidRequestError: ErrorRow(400, "invalid_request_error", "invalid_value", "INVALID_ARGUMENT"),
    errors.UnauthenticatedError: ErrorRow(401, "invalid_request_error", "invalid_api_key", "UNAUTHENTICATED"),
    errors.ForbiddenError: ErrorRow(403, "invalid_request_error", "admin_key_required", "PERMISSION_DENIED"),
    errors.UnknownModelError: ErrorRow(404, "invalid_request_error", "model_not_found", "NOT_FOUND"),
    errors.PayloadTooLargeError: ErrorRow(413, "invalid_request_error", "request_too_large", "RESOURCE_EXHAUSTED"),
    errors.ReaderTimeoutError: ErrorRow(408, "invalid_request_error", "reader_timeout", "ABORTED"),
    errors.QuotaExceededError: ErrorRow(429, "rate_limit_error", "rate_limit_exceeded", "RESOURCE_EXHAUSTED"),
    errors.OverloadedError: ErrorRow(503, "server_error", "overloaded", "UNAVAILABLE"),
    errors.DeadlineExceededError: ErrorRow(504, "server_error", "deadline_exceeded", "DEADLINE_EXCEEDED"),
    errors.EngineNotReadyError: ErrorRow(503, "server_error", "not_ready", "UNAVAILABLE"),
    errors.EngineDeadError: ErrorRow(503, "server_error", "engine_dead", "UNAVAILABLE"),
    errors.EngineError: ErrorRow(500, "server_error", "engine_error", "INTERNAL"),
    Exception: ErrorRow(500, "server_error", "internal_error", "INTERNAL"),
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
    row = next(ERROR_TABLE[cls] for cls in type(error).__mro__ if cls in ERROR_TABLE)
    if row is ERROR_TABLE[Exception]:
        error_id = uuid.uuid4().hex[:12]
        logger.error("internal error %s", error_id, exc_info=error)
        return ErrorReport(row, f"internal error; the server's log has it under the id {error_id}", None, row.code)
    retry_after_s = None
    if isinstance(error, (errors.QuotaExceededError, errors.OverloadedError, errors.DeadlineExceededError)):
        retry_after_s = None if error.retry_after_s is None else max(1, math.ceil(error.retry_after_s))
    elif row.http_status == 503:
        retry_after_s = 1
    if isinstance(error, errors.RequestError):
        return ErrorReport(row, str(error), error.param, error.code or row.code, retry_after_s)
    return ErrorReport(row, str(error), None, row.code, retry_after_s)

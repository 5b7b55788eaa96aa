"""From the bytes of a request to a JSON object: bounded in size and depth, and strict."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from jaxserve.errors import InvalidRequestError, PayloadTooLargeError

MAX_DEPTH = 64


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body, never holding more than ``max_bytes`` and one chunk of it.

    Raises:
        PayloadTooLargeError: As soon as the announced or the received length passes ``max_bytes``.
        InvalidRequestError: A compressed body, or a client that left.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise InvalidRequestError(f"the request body must not be compressed, got Content-Encoding {encoding[:64]!r}", code="unsupported_encoding")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    num_bytes = 0
    try:
        async for chunk in request.stream():
            num_bytes += len(chunk)
            if num_bytes > max_bytes:
                raise _too_large(max_bytes)
            chunks.append(chunk)
    except ClientDisconnect:
        raise InvalidRequestError("the connection closed before the whole body had arrived") from None
    return b"".join(chunks)


def parse_object(body: bytes) -> dict[str, Any]:
    """A JSON object as RFC 8259 has it: UTF-8, no NaN or Infinity, no repeated names, no halves of surrogate pairs, at most ``MAX_DEPTH`` deep.

    Raises:
        InvalidRequestError: Anything else.
    """
    try:
        value = json.loads(body.decode(), object_pairs_hook=_unique_names, parse_constant=_refuse_constant)
    except RecursionError:
        raise _too_deep() from None
    except UnicodeDecodeError as error:
        raise _malformed(f"byte {error.start} is not UTF-8") from None
    except ValueError as error:
        raise _malformed(str(error)) from None
    if not isinstance(value, dict):
        raise InvalidRequestError("the request body must be a JSON object", code="invalid_json")
    # Only a body with many brackets or with escaped surrogates can break these two rules: others are not walked.
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH or b"\\ud" in body.lower():
        _check_tree(value)
    return value


def _check_tree(root: dict[str, Any]) -> None:
    level: list[Any] = [root]
    for _ in range(MAX_DEPTH):
        strings: list[str] = []
        below: list[Any] = []
        for node in level:
            children: Iterable[Any] = node.values() if isinstance(node, dict) else node
            if isinstance(node, dict):
                strings.extend(node)
            for child in children:
                if isinstance(child, str):
                    strings.append(child)
                elif isinstance(child, (dict, list)):
                    below.append(child)
        for text in strings:
            _check_text(text)
        if not below:
            return
        level = below
    raise _too_deep()


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _malformed(f"a string holds \\u{ord(text[error.start]):04x}, half of a surrogate pair") from None


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the name {name[:64]!r} appears more than once in an object")
            seen.add(name)
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _malformed(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"the request body is not valid JSON: {reason}", code="invalid_json")


def _too_deep() -> InvalidRequestError:
    return InvalidRequestError(f"the request body is nested too deeply; at most {MAX_DEPTH} levels are allowed", code="invalid_json")


def _too_large(max_bytes: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"the request body is larger than {max_bytes} bytes (server.max_body_bytes)")

"""The API key check, for both APIs."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from jaxserve.errors import UnauthenticatedError


def require_key(authorization: bytes, api_keys: Sequence[str]) -> None:
    """Checks an ``Authorization: Bearer KEY`` header. Takes the same time for every wrong key of a length.

    Args:
        authorization: The header's value; empty without one.
        api_keys: Any of these is right; empty lets everyone in.

    Raises:
        UnauthenticatedError: No key, or none of these.
    """
    if not api_keys:
        return
    scheme, _, key = authorization.partition(b" ")
    if scheme.lower() != b"bearer" or not key.strip():
        raise UnauthenticatedError("no API key: send it as the header 'Authorization: Bearer KEY'")
    matches = [hmac.compare_digest(key.strip(), allowed.encode()) for allowed in api_keys]  # no early exit
    if not any(matches):
        raise UnauthenticatedError("incorrect API key")

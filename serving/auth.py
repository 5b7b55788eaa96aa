"""The API key check, for both APIs."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from jaxserve.errors import UnauthenticatedError


def require_key(authorization: bytes, tenants_by_key: Mapping[str, str]) -> str:
    """Checks an ``Authorization: Bearer KEY`` header. Takes the same time for every wrong key of a length.

    Args:
        authorization: The header's value; empty without one.
        tenants_by_key: Any of these keys is right; empty lets everyone in.

    Returns:
        Whose key it is.

    Raises:
        UnauthenticatedError: No key, or none of these.
    """
    if not tenants_by_key:
        return ""
    scheme, _, key = authorization.partition(b" ")
    if scheme.lower() != b"bearer" or not key.strip():
        raise UnauthenticatedError("no API key: send it as the header 'Authorization: Bearer KEY'")
    tenants = [tenant for allowed, tenant in tenants_by_key.items() if hmac.compare_digest(key.strip(), allowed.encode())]  # no early exit
    if not tenants:
        raise UnauthenticatedError("incorrect API key")
    return tenants[0]

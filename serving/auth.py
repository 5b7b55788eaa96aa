"""The checks of API keys, for both APIs, and of admin keys."""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence

from jaxserve.errors import ForbiddenError, UnauthenticatedError


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
    given = _key_of(authorization, "API")
    tenants = [tenant for key, tenant in tenants_by_key.items() if hmac.compare_digest(given, key.encode())]  # no early exit
    if not tenants:
        raise UnauthenticatedError("incorrect API key")
    return tenants[0]


def require_admin(authorization: bytes, admin_keys: Sequence[str], tenants_by_key: Mapping[str, str]) -> None:
    """Checks the same header for an admin key.

    Args:
        authorization: As for :func:`require_key`.
        admin_keys: Any of these is right.
        tenants_by_key: Keys that are right elsewhere.

    Raises:
        UnauthenticatedError: No key, or one that opens nothing.
        ForbiddenError: A key of the API.
    """
    given = _key_of(authorization, "admin")
    if any([hmac.compare_digest(given, key.encode()) for key in admin_keys]):  # noqa: C419  (no early exit)
        return
    if any([hmac.compare_digest(given, key.encode()) for key in tenants_by_key]):  # noqa: C419
        raise ForbiddenError("this key opens the API; what is under /debug takes one of server.admin_keys")
    raise UnauthenticatedError("incorrect admin key")


def _key_of(authorization: bytes, kind: str) -> bytes:
    scheme, _, key = authorization.partition(b" ")
    if scheme.lower() != b"bearer" or not key.strip():
        raise UnauthenticatedError(f"no {kind} key: send it as the header 'Authorization: Bearer KEY'")
    return key.strip()

"""Tenants: whose API key a request came with, and what each may use. Plain data and its reading from the configuration's texts."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from jaxserve.errors import ConfigError

_KINDS: Mapping[str, type[int] | type[float]] = {"max_requests": int, "tokens_per_minute": int, "weight": float}
"""Fields of :class:`TenantLimits`."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TenantLimits:
    """What one tenant may use.

    Args:
        max_requests: Most requests in flight, waiting or running; ``None`` for any number.
        tokens_per_minute: Budget of tokens, of prompts and answers; a minute's worth may be spent at once. ``None`` for any number.
        weight: Share beside other tenants where ``scheduler.order`` is ``fair``; more than 0.
    """

    max_requests: int | None = None
    tokens_per_minute: int | None = None
    weight: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tenants:
    """All that the configuration says about tenants.

    Args:
        by_key: API key -> tenant. The tenant ``""`` is everybody who came with a key of ``server.api_keys``, or with none.
        limits: By tenant, where they are its own.
        default: Those of all others.
    """

    by_key: Mapping[str, str]
    limits: Mapping[str, TenantLimits]
    default: TenantLimits

    def of(self, tenant: str) -> TenantLimits:
        return self.limits.get(tenant, self.default)

    @property
    def has_weights(self) -> bool:
        """Whether any tenant weighs more or less than others."""
        return any(limits.weight != self.default.weight for limits in self.limits.values())

    @property
    def weights(self) -> dict[str, float]:
        """Of the tenants that have limits of their own."""
        return {name: limits.weight for name, limits in self.limits.items()}


def read_tenants(api_keys: Iterable[str], keys: Iterable[str], limits: Iterable[str], default: TenantLimits) -> Tenants:
    """Reads the texts of the configuration.

    Args:
        api_keys: Keys of nobody in particular.
        keys: ``NAME=KEY`` each; a tenant may have several.
        limits: ``NAME.max_requests=8``, ``NAME.tokens_per_minute=1000`` or ``NAME.weight=2`` each.
        default: Where there is nothing else.

    Raises:
        ConfigError: A text that is none of these, an unknown tenant, a key that is two tenants'.
    """
    by_key = dict.fromkeys(api_keys, "")
    for text in keys:
        name, separator, key = text.partition("=")
        if not separator or not _NAME.fullmatch(name) or not key:
            # The text may hold a key: it is not shown.
            raise ConfigError("an entry of tenants.keys is not NAME=KEY; a name has 1 to 64 of the characters A-Z a-z 0-9 _ -")
        if key in by_key:
            raise ConfigError(f"a key of the tenant {name!r} in tenants.keys is given twice, there or in server.api_keys; each must be one tenant's")
        by_key[key] = name
    own: dict[str, dict[str, Any]] = {}
    for text in limits:
        target, separator, value = text.partition("=")
        name, dot, field = target.partition(".")
        if name not in by_key.values() or not name:
            raise ConfigError(f"tenants.limits has {text!r}; {name!r} is no tenant of tenants.keys: {', '.join(sorted({*by_key.values()} - {''})) or 'none'}")
        if not separator or not dot or field not in _KINDS:
            raise ConfigError(f"tenants.limits has {text!r}; must be NAME.FIELD=VALUE with a FIELD of {', '.join(_KINDS)}")
        own.setdefault(name, {})[field] = _positive(text, value, _KINDS[field])
    return Tenants(by_key=by_key, limits={name: dataclasses.replace(default, **fields) for name, fields in own.items()}, default=default)


def _positive(text: str, value: str, kind: type[int] | type[float]) -> int | float:
    try:
        number = kind(value)
    except ValueError:
        number = 0
    if not 0 < number < 2**63:
        raise ConfigError(f"tenants.limits has {text!r}; {value!r} must be a {'whole ' if kind is int else ''}number above 0")
    return number

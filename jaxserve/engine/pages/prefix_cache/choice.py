"""The choice of the prefix cache by its name in the configuration. Imports no jax."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Literal

from jaxserve.engine.pages.pool import PagePool
from jaxserve.engine.pages.prefix_cache.hashed import HashedPrefixCache
from jaxserve.engine.pages.prefix_cache.interface import NoPrefixCache, PrefixCache
from jaxserve.engine.pages.prefix_cache.radix import RadixPrefixCache

MakePrefixCache = Callable[[PagePool], PrefixCache]


def choose_prefix_cache(name: Literal["radix", "hash", "off"]) -> MakePrefixCache:
    """The function that makes the prefix cache of a data rank's pool. Call this once for each engine: its ranks must share the secret of their digests."""
    if name == "radix":
        return RadixPrefixCache
    if name == "off":
        return lambda _: NoPrefixCache()
    secret = os.urandom(32)
    return lambda pool: HashedPrefixCache(pool, secret)

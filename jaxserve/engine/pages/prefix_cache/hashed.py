"""A prefix cache as a table from digests to pages. A page's digest covers all tokens up to its end. Imports no jax."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from array import array
from collections.abc import Iterable, Sequence

from jaxserve.engine.pages.pool import PagePool
from jaxserve.engine.pages.prefix_cache.interface import CachePath, Match, is_worth_copying
from jaxserve.engine.pages.prefix_cache.lru import EvictionOrder, LastUse


@dataclasses.dataclass(eq=False, slots=True)
class _Block:
    """A cached page.

    Args:
        digest: Its key in the table.
        page_id: The page.
        last_use: Its last use, which is not before that of any page behind it in a sequence.
        is_queued: See ``EvictionOrder``.
    """

    digest: bytes
    page_id: int
    last_use: LastUse
    is_queued: bool = False


class HashedPrefixCache:
    """A :class:`PrefixCache` that finds whole pages, and for a prompt that is cached to its very end also the last page, which is then copied.

    A digest is SHA-256 over a secret of this process, the namespace and all tokens up to the page's end, so that nobody can choose prompts that collide.

    Args:
        pool: The pool whose pages are cached.
        secret: Secret of the digests; ``None`` draws one.
    """

    def __init__(self, pool: PagePool, secret: bytes | None = None) -> None:
        self.num_evicted = 0
        self._pool = pool
        self._secret = os.urandom(32) if secret is None else secret
        self._blocks: dict[bytes, _Block] = {}
        self._order: EvictionOrder[_Block] = EvictionOrder()
        pool.on_idle = self._order.unpark

    def match(self, path: CachePath, max_tokens: int) -> Match:
        page_size = self._pool.page_size
        page_ids: list[int] = []
        for digest in self._digests(path, max_tokens // page_size):
            block = self._blocks.get(digest)
            if block is None:
                return Match(tuple(page_ids))
            page_ids.append(block.page_id)
        num_left = max_tokens - len(page_ids) * page_size
        if is_worth_copying(num_left, page_size) and len(path.token_ids) >= (len(page_ids) + 1) * page_size:
            block = self._blocks.get(self._digests(path, len(page_ids) + 1)[-1])
            if block is not None:
                return Match(tuple(page_ids), block.page_id, num_left)
        return Match(tuple(page_ids))

    def use(self, path: CachePath, num_pages: int, now_s: float) -> None:
        time_s, use, _ = self._order.use(now_s)
        for index, digest in enumerate(self._digests(path, num_pages)):
            block = self._blocks[digest]
            block.last_use = max(block.last_use, (time_s, use, -index))

    def insert(self, path: CachePath, page_ids: Sequence[int], now_s: float, *, release: bool, keep_until_s: float = 0.0) -> None:
        time_s, use, _ = self._order.use(max(now_s, keep_until_s))
        for index, (digest, page_id) in enumerate(zip(self._digests(path, len(page_ids)), page_ids, strict=True)):
            last_use = time_s, use, -index
            block = self._blocks.get(digest)
            if block is None:
                self._pool.mark_cached(page_id)
                self._blocks[digest] = block = _Block(digest, page_id, last_use)
                self._order.park(block, page_id)
            elif block.page_id != page_id and not release:
                break
            else:
                block.last_use = max(block.last_use, last_use)

    def evict(self, num_pages: int) -> None:
        while num_pages > 0:
            block = self._order.pop()
            assert block is not None, "an idle page is in no block"
            if self._pool.is_held(block.page_id):
                self._order.park(block, block.page_id)
                continue
            del self._blocks[block.digest]
            self._pool.unmark_cached(block.page_id)
            self.num_evicted += 1
            num_pages -= 1

    def clear(self) -> None:
        for page_id in self.cached_page_ids():
            self._pool.unmark_cached(page_id)
        self._blocks.clear()
        self._order.clear()

    def cached_page_ids(self) -> Iterable[int]:
        return [block.page_id for block in self._blocks.values()]

    def check_integrity(self) -> None:
        for digest, block in self._blocks.items():
            is_parked = self._pool.is_held(block.page_id) and self._order.is_parked(block, block.page_id)
            assert block.digest == digest and block.is_queued != is_parked

    def _digests(self, path: CachePath, num_pages: int) -> list[bytes]:
        """The digests of a sequence's first ``num_pages`` pages."""
        known, page_size = path.digests, self._pool.page_size
        while len(known) < num_pages:
            before = known[-1] if known else self._secret + path.namespace
            tag = b"page" if known else b"first page"
            tokens = array("Q", path.token_ids[len(known) * page_size : (len(known) + 1) * page_size])
            known.append(hashlib.sha256(tag + len(before).to_bytes(8, "little") + before + tokens.tobytes()).digest())
        return known[:num_pages]

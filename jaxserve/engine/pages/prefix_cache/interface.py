"""The interface of prefix caches. Each data rank has one, which shares whole pages of the rank's pool. Imports no jax."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from typing import Protocol


@dataclasses.dataclass(slots=True)
class CachePath:
    """A sequence as a prefix cache sees it.

    Args:
        namespace: Digest of everything that changes the keys and values of the same tokens; see :func:`make_namespace`.
        token_ids: The sequence's own list of token ids, which grows.
        digests: Digests of its first whole pages, as far as a cache has computed them.
    """

    namespace: bytes
    token_ids: list[int]
    digests: list[bytes] = dataclasses.field(default_factory=list[bytes])


@dataclasses.dataclass(frozen=True, slots=True)
class Match:
    """The cached pages that a sequence can use.

    Args:
        page_ids: Pages that hold the sequence's first tokens and can be shared as they are.
        copy_page_id: A page whose first ``num_copied`` tokens come next in the sequence. It must be copied, because the sequence goes on differently within it.
            ``None`` if there is none.
        num_copied: Number of those tokens, less than a page.
    """

    page_ids: tuple[int, ...] = ()
    copy_page_id: int | None = None
    num_copied: int = 0

    @property
    def all_page_ids(self) -> tuple[int, ...]:
        """Ids of the pages to share and of the one to copy from, if there is one."""
        return self.page_ids if self.copy_page_id is None else (*self.page_ids, self.copy_page_id)


NO_MATCH = Match()


class PrefixCache(Protocol):
    """Remembers which pages hold which tokens. A page that it remembers is *cached*; a cached page that no sequence holds is *idle* and can be evicted.

    One call of ``evict`` can evict every idle page, and never evicts a held one, so idle pages count as available. The pages used least recently are evicted
    first. Times are those of a monotonic clock, in seconds.
    """

    @property
    def num_evicted(self) -> int:
        """Number of pages evicted since the start."""
        ...

    def match(self, path: CachePath, max_tokens: int) -> Match:
        """The cached pages for the longest prefix of the sequence's first ``max_tokens`` tokens. Changes nothing."""
        ...

    def use(self, path: CachePath, num_pages: int, now_s: float) -> None:
        """Records that the first ``num_pages`` pages of a sequence, all of them cached, are used now."""
        ...

    def insert(self, path: CachePath, page_ids: Sequence[int], now_s: float, *, release: bool, keep_until_s: float = 0.0) -> None:
        """Caches a sequence's first pages. Tokens whose pages are cached already stay where they are.

        Args:
            path: The sequence.
            page_ids: The first pages that it holds and has filled, in order of position.
            now_s: The time.
            release: Whether the sequence releases all its pages right after this call. If it does not, and one of its pages is cached in another sequence's
                copy, the pages from there on are not cached: they would be held while cached pages before them are not, and these could not be evicted.
            keep_until_s: Time of use to record instead of now, if it is later. The pages then outlast all that are not used after that time.
        """
        ...

    def evict(self, num_pages: int) -> None:
        """Gives ``num_pages`` idle pages back to the pool as free ones. There must be at least as many."""
        ...

    def clear(self) -> None:
        """Forgets all pages. Idle pages become free."""
        ...

    def cached_page_ids(self) -> Iterable[int]:
        """Ids of all cached pages, each once."""
        ...

    def check_integrity(self) -> None:
        """Checks the cache's own structure.

        Raises:
            AssertionError: The structure is broken.
        """
        ...


class NoPrefixCache:
    """A :class:`PrefixCache` that caches nothing."""

    num_evicted = 0

    def match(self, path: CachePath, max_tokens: int) -> Match:  # noqa: ARG002
        return NO_MATCH

    def use(self, path: CachePath, num_pages: int, now_s: float) -> None:
        pass

    def insert(self, path: CachePath, page_ids: Sequence[int], now_s: float, *, release: bool, keep_until_s: float = 0.0) -> None:
        pass

    def evict(self, num_pages: int) -> None:
        assert not num_pages, "nothing is cached, so nothing is idle"

    def clear(self) -> None:
        pass

    def cached_page_ids(self) -> Iterable[int]:
        return ()

    def check_integrity(self) -> None:
        pass


def make_namespace(*parts: str) -> bytes:
    """The digest of a namespace, which differs if any part differs.

    Args:
        parts: Everything that changes the keys and values of the same tokens, or says who may share them.
    """
    digest = hashlib.sha256(b"jaxserve prefix namespace 1")
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def is_worth_copying(num_tokens: int, page_size: int) -> bool:
    """Whether it is better to copy a page for its first ``num_tokens`` tokens than to recompute them: if they are at least half of the page, but not all.

    So no page is copied for the few tokens with which all prompts begin.
    """
    return 2 * num_tokens >= page_size > num_tokens > 0

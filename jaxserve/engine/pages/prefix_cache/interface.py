"""What a prefix cache does, whoever does it. One belongs to each data rank; it shares whole pages of the rank's pool. Imports no jax."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from typing import Protocol


@dataclasses.dataclass(slots=True)
class CachePath:
    """A sequence as a prefix cache sees it.

    Args:
        namespace: Digest of all that changes the keys and values of the same tokens; see :func:`make_namespace`.
        token_ids: The sequence's own list, which grows.
        digests: Of its whole pages, as far as a cache has computed them.
    """

    namespace: bytes
    token_ids: list[int]
    digests: list[bytes] = dataclasses.field(default_factory=list[bytes])


@dataclasses.dataclass(frozen=True, slots=True)
class Match:
    """What a cache holds of a sequence.

    Args:
        page_ids: Whole pages from its start, to be shared.
        copy_page_id: A page whose first ``num_copied`` tokens are those that follow; to be copied, for the sequence goes on in it. ``None`` for none.
        num_copied: Tokens; less than a page.
    """

    page_ids: tuple[int, ...] = ()
    copy_page_id: int | None = None
    num_copied: int = 0

    @property
    def all_page_ids(self) -> tuple[int, ...]:
        """The pages to share and the one to copy from."""
        return self.page_ids if self.copy_page_id is None else (*self.page_ids, self.copy_page_id)


NO_MATCH = Match()


class PrefixCache(Protocol):
    """Remembers which pages hold which tokens. A page it remembers is *cached*; one that no sequence holds either is *idle*, and can be evicted.

    Every idle page can be evicted, sooner or later within one call of ``evict``; a held one never is. So the pool's count of idle pages is room.
    Times are those of a monotonic clock, in seconds; the pages used least recently go first.
    """

    @property
    def num_evicted(self) -> int:
        """Pages evicted since the start."""
        ...

    def match(self, path: CachePath, max_tokens: int) -> Match:
        """The longest prefix of the sequence's first ``max_tokens`` tokens that is cached. Changes nothing."""
        ...

    def use(self, path: CachePath, num_pages: int, now_s: float) -> None:
        """Notes that the first ``num_pages`` pages of a sequence, all cached, are used now."""
        ...

    def insert(self, path: CachePath, page_ids: Sequence[int], now_s: float, *, release: bool, keep_until_s: float = 0.0) -> None:
        """Caches pages of a sequence that hold its tokens from the start on. What is cached already stays as it is.

        Args:
            path: The sequence.
            page_ids: Pages that it holds and has filled, in order of position.
            now_s: The time.
            release: Whether the sequence releases all its pages at once after this. One that goes on adds nothing behind a page that another's copy is
                cached of: a cached page whose holder does not hold those before it would keep them from being evicted.
            keep_until_s: Count them as used at this time rather than now, if it is later: they outlast all that is not used after it.
        """
        ...

    def evict(self, num_pages: int) -> None:
        """Gives idle pages, at least ``num_pages`` of which there are, back to the pool."""
        ...

    def clear(self) -> None:
        """Forgets everything; idle pages go back to the pool."""
        ...

    def cached_page_ids(self) -> Iterable[int]:
        """All cached pages, each once."""
        ...

    def check_integrity(self) -> None:
        """Raises:
        AssertionError: The cache's own structure is broken.
        """
        ...


class NoPrefixCache:
    """Remembers nothing."""

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
    """A digest that differs when any part does, or their number. Parts are what changes the keys and values of the same tokens, and who may share them."""
    digest = hashlib.sha256(b"jaxserve prefix namespace 1")
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def is_worth_copying(num_tokens: int, page_size: int) -> bool:
    """Whether so many tokens at the start of a page are worth a copy of it, against computing them: at least half of it, so that no prompt is copied for the
    few tokens that all begin with.
    """
    return 2 * num_tokens >= page_size > num_tokens > 0

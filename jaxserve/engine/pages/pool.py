"""The page pool: the pages of the KV pool as numbers with reference counts. Knows nothing of sequences or of the arrays behind the pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence


class PagePool:
    """Hands out page ids ``0 .. num_pages - 1`` and takes them back. Every operation costs O(1) for each page and is deterministic.

    A page is either free, or held by one or more holders, or idle, which means that it is cached and has no holder. A page that is cached or has several
    holders must not be written to.

    Args:
        num_pages: Number of pages; may be 0.
        page_size: Tokens that one page holds, ``>= 1``.

    Attributes:
        on_idle: Called with each page that becomes idle. The pool's prefix cache sets it.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        assert num_pages >= 0 and page_size >= 1, (num_pages, page_size)
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: the page freed last is warm and goes out first
        self._num_holders = [0] * num_pages
        self._is_cached = bytearray(num_pages)
        self._num_idle = 0
        self.on_idle: Callable[[int], None] = lambda _: None

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Number of pages that are cached and have no holder."""
        return self._num_idle

    @property
    def num_available(self) -> int:
        """Number of pages that are free or idle."""
        return len(self._free) + self._num_idle

    @property
    def num_cached(self) -> int:
        """Number of pages that are cached, held or not."""
        return self._is_cached.count(1)

    def is_held(self, page_id: int) -> bool:
        return self._num_holders[page_id] > 0

    def is_shared(self, page_id: int) -> bool:
        """Whether a page has several holders."""
        return self._num_holders[page_id] > 1

    def pages_for(self, num_tokens: int) -> int:
        """Number of pages that ``num_tokens`` tokens of one sequence need."""
        return -(-num_tokens // self.page_size)

    def allocate(self, num_pages: int) -> list[int] | None:
        """Takes ``num_pages >= 0`` free pages, which have one holder each afterwards. If too few are free, takes none.

        Returns:
            The page ids; ``None`` if too few pages are free.
        """
        first = len(self._free) - num_pages
        if first < 0:
            return None
        page_ids = self._free[first:]
        del self._free[first:]
        for page_id in page_ids:
            self._num_holders[page_id] = 1
        return page_ids

    def share(self, page_ids: Iterable[int]) -> None:
        """Adds a holder to pages that are held or idle."""
        for page_id in page_ids:
            if self._num_holders[page_id] == 0:
                assert self._is_cached[page_id], f"page {page_id} is free and cannot be shared"
                self._num_idle -= 1
            self._num_holders[page_id] += 1

    def release(self, page_ids: Iterable[int]) -> None:
        """Removes one holder from each page. A page without holders is idle if it is cached, else free."""
        for page_id in page_ids:
            assert self._num_holders[page_id] > 0, f"page {page_id} is released more often than it was taken"
            self._num_holders[page_id] -= 1
            if self._num_holders[page_id] == 0:
                if self._is_cached[page_id]:
                    self._num_idle += 1
                    self.on_idle(page_id)
                else:
                    self._free.append(page_id)

    def mark_cached(self, page_id: int) -> None:
        """Marks a held page as cached."""
        assert self._num_holders[page_id] > 0 and not self._is_cached[page_id], f"page {page_id} is free, or cached already"
        self._is_cached[page_id] = 1

    def unmark_cached(self, page_id: int) -> None:
        """Removes the mark of a cached page. An idle page is free then."""
        assert self._is_cached[page_id], f"page {page_id} is not cached"
        self._is_cached[page_id] = 0
        if self._num_holders[page_id] == 0:
            self._num_idle -= 1
            self._free.append(page_id)

    def check_integrity(self, held: Iterable[Sequence[int]], cached: Iterable[int] = ()) -> None:
        """Recomputes all counts from the page lists of every holder, and compares them with those that are kept.

        Args:
            held: One list of page ids for each holder; a holder has a page once.
            cached: All pages that are cached.

        Raises:
            AssertionError: A page is leaked, owned or cached twice, or both free and held.
        """
        num_holders = [0] * self.num_pages
        for page_ids in held:
            assert len(set(page_ids)) == len(page_ids), f"a holder has a page twice: {page_ids}"
            for page_id in page_ids:
                num_holders[page_id] += 1
        wrong = [page_id for page_id in range(self.num_pages) if num_holders[page_id] != self._num_holders[page_id]]
        assert not wrong, f"holders of pages {wrong[:8]} are {[num_holders[p] for p in wrong[:8]]}, counted as {[self._num_holders[p] for p in wrong[:8]]}"
        assert sorted(cached) == [page_id for page_id in range(self.num_pages) if self._is_cached[page_id]], "marked pages are not those that are cached"
        unheld = [page_id for page_id in range(self.num_pages) if not num_holders[page_id]]
        assert sorted(self._free) == [page_id for page_id in unheld if not self._is_cached[page_id]], "the free list is not the set of unheld pages"
        assert self._num_idle == len(unheld) - len(self._free)

"""The pages of the KV pool as numbers with reference counts. Knows nothing of sequences or of the arrays behind the pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class PagePool:
    """Hands out page ids ``0 .. num_pages - 1`` and takes them back. Every operation costs O(1) a page and is deterministic.

    A page is free, or held with a count of its holders. A page with more than one holder is read-only to all of them.

    Args:
        num_pages: Pages of the pool, ``>= 1``.
        page_size: Slots (tokens) of one page, ``>= 1``.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        assert num_pages >= 1 and page_size >= 1, (num_pages, page_size)
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: the page freed last is warm and goes out first
        self._num_holders = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold ``num_tokens`` tokens of one sequence."""
        return -(-num_tokens // self.page_size)

    def allocate(self, num_pages: int) -> list[int] | None:
        """Takes ``num_pages >= 0`` free pages, one holder each; all of them or, when there are too few, none.

        Returns:
            The page ids, or ``None`` for no space.
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
        """Adds a holder to pages that are held already."""
        for page_id in page_ids:
            assert self._num_holders[page_id] > 0, f"page {page_id} is free and cannot be shared"
            self._num_holders[page_id] += 1

    def release(self, page_ids: Iterable[int]) -> None:
        """Takes one holder away from each page; a page without holders is free again."""
        for page_id in page_ids:
            assert self._num_holders[page_id] > 0, f"page {page_id} is released more often than it was taken"
            self._num_holders[page_id] -= 1
            if self._num_holders[page_id] == 0:
                self._free.append(page_id)

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Recomputes all counts from the page lists of every holder and compares.

        Args:
            held: One list of page ids for each holder; a holder has a page once.

        Raises:
            AssertionError: A page is leaked, owned twice, or both free and held.
        """
        num_holders = [0] * self.num_pages
        for page_ids in held:
            assert len(set(page_ids)) == len(page_ids), f"a holder has a page twice: {page_ids}"
            for page_id in page_ids:
                num_holders[page_id] += 1
        wrong = [page_id for page_id in range(self.num_pages) if num_holders[page_id] != self._num_holders[page_id]]
        assert not wrong, f"holders of pages {wrong[:8]} are {[num_holders[p] for p in wrong[:8]]}, counted as {[self._num_holders[p] for p in wrong[:8]]}"
        assert sorted(self._free) == [page_id for page_id in range(self.num_pages) if not num_holders[page_id]], "the free list is not the set of unheld pages"

"""The host memory of one data rank: its pages and the sequences whose keys and values are there. Plain Python; imports no jax."""

from __future__ import annotations

import bisect
from collections.abc import Sequence as SequenceOf

from jaxserve.engine.pages.pool import PagePool
from jaxserve.engine.scheduling.sequence import Sequence, by_order


class SwapSpace:
    """The preempted sequences whose keys and values are kept in host memory.

    Args:
        num_pages: Number of host pages; may be 0.
        page_size: Tokens that one page holds.

    Attributes:
        sequences: The sequences in host memory, sorted by ``order``.
        num_swap_outs: Sequences swapped out since the start.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.sequences: list[Sequence] = []
        self.num_swap_outs = 0
        self._pool = PagePool(num_pages, page_size)
        self._moves: list[tuple[int, int]] = []  # decided, but not in a schedule yet

    @property
    def num_pages(self) -> int:
        return self._pool.num_pages

    @property
    def num_free_pages(self) -> int:
        return self._pool.num_free

    def has_room(self, num_pages: int) -> bool:
        return self._pool.num_free >= num_pages

    def swap_out(self, sequence: Sequence) -> None:
        """Takes a sequence, for whose pages there must be room. Its pages may be given to others right afterwards, as moves run before a step's tokens."""
        host_page_ids = self._pool.allocate(len(sequence.page_ids))
        assert host_page_ids is not None
        sequence.host_page_ids = host_page_ids
        self._moves += zip(sequence.page_ids, host_page_ids, strict=True)
        bisect.insort(self.sequences, sequence, key=by_order)
        self.num_swap_outs += 1

    def swap_in(self, sequence: Sequence, page_ids: SequenceOf[int]) -> list[tuple[int, int]]:
        """Gives a sequence back into ``page_ids``, as many pages as it had. Returns the moves as pairs (host page, page)."""
        moves = list(zip(sequence.host_page_ids, page_ids, strict=True))
        self._remove(sequence)  # it may come back in the very schedule that carries its moves out: those run first
        return moves

    def drop(self, sequence: Sequence) -> None:
        """Forgets a sequence; its host pages are free at once."""
        if self._moves:
            gone = set(sequence.host_page_ids)
            self._moves = [move for move in self._moves if move[1] not in gone]
        self._remove(sequence)

    def take_moves(self) -> tuple[tuple[int, int], ...]:
        """Takes the moves to host memory, as pairs (page, host page), that no schedule has carried yet."""
        moves, self._moves = tuple(self._moves), []
        return moves

    def check_integrity(self) -> None:
        """Checks the records of host pages against the sequences.

        Raises:
            AssertionError: A host page is leaked or owned twice.
        """
        assert [sequence.order for sequence in self.sequences] == sorted(sequence.order for sequence in self.sequences)
        self._pool.check_integrity(sequence.host_page_ids for sequence in self.sequences)
        assert {host for _, host in self._moves} <= {page for sequence in self.sequences for page in sequence.host_page_ids}

    def _remove(self, sequence: Sequence) -> None:
        index = bisect.bisect_left(self.sequences, sequence.order, key=by_order)
        assert self.sequences[index] is sequence
        del self.sequences[index]
        self._pool.release(sequence.host_page_ids)
        sequence.host_page_ids = []

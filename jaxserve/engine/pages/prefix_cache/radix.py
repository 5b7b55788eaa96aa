"""A prefix cache as a radix tree. Each edge holds a run of pages without a branch. Imports no jax."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from jaxserve.engine.pages.pool import PagePool
from jaxserve.engine.pages.prefix_cache.interface import CachePath, Match, is_worth_copying
from jaxserve.engine.pages.prefix_cache.lru import EvictionOrder, LastUse

PageTokens = tuple[int, ...]


@dataclasses.dataclass(eq=False, slots=True)
class _Node:
    """A node of the tree, with the edge that leads to it.

    Args:
        parent: The node above; ``None`` for a root and for a node that is no longer in the tree.
        token_ids: Tokens of the edge, whole pages of them.
        page_ids: Pages of the edge; empty only for a root.
        children: The nodes below, by the tokens of their first page.
        branches: The keys of ``children`` in ascending order. The neighbours of a prompt's next page in this order share the longest beginning with it.
        last_use: Last use, which is not before that of any node below.
        namespace: Namespace of a root; empty for other nodes.
        is_queued: See ``EvictionOrder``.
    """

    parent: _Node | None
    token_ids: list[int]
    page_ids: list[int]
    last_use: LastUse
    children: dict[PageTokens, _Node] = dataclasses.field(default_factory=dict[PageTokens, "_Node"])
    branches: list[PageTokens] = dataclasses.field(default_factory=list[PageTokens])
    namespace: bytes = b""
    is_queued: bool = False


class RadixPrefixCache:
    """A :class:`PrefixCache` that finds the longest cached prefix to the token, also if it ends within a page.

    A sequence that holds a cached page also holds all cached pages before it, so idle pages are at the ends of branches. Eviction takes them from the leaves.

    Args:
        pool: The pool whose pages are cached.
    """

    def __init__(self, pool: PagePool) -> None:
        self.num_evicted = 0
        self._pool = pool
        self._roots: dict[bytes, _Node] = {}
        self._order: EvictionOrder[_Node] = EvictionOrder()
        pool.on_idle = self._order.unpark

    def match(self, path: CachePath, max_tokens: int) -> Match:
        page_size, token_ids = self._pool.page_size, path.token_ids
        node = self._roots.get(path.namespace)
        if node is None:
            return Match()
        page_ids: list[int] = []
        start = 0
        while (child := self._child(node, token_ids, start, max_tokens)) is not None:
            num_pages = self._common_pages(child, token_ids, start, max_tokens)
            page_ids += child.page_ids[:num_pages]
            start += num_pages * page_size
            if num_pages < len(child.page_ids):
                rest = child.token_ids[num_pages * page_size : (num_pages + 1) * page_size]
                return self._with_copy(page_ids, [(child.page_ids[num_pages], rest)], token_ids[start:max_tokens])
            node = child
        wanted = token_ids[start : min(start + page_size, max_tokens)]
        index = bisect.bisect_left(node.branches, tuple(wanted))
        neighbours = [(node.children[key].page_ids[0], key) for key in node.branches[max(0, index - 1) : index + 1]]
        return self._with_copy(page_ids, neighbours, wanted)

    def use(self, path: CachePath, num_pages: int, now_s: float) -> None:
        if num_pages:
            self._walk(path, num_pages, self._order.use(now_s))

    def insert(self, path: CachePath, page_ids: Sequence[int], now_s: float, *, release: bool, keep_until_s: float = 0.0) -> None:
        if not page_ids:
            return
        page_size = self._pool.page_size
        last_use = self._order.use(max(now_s, keep_until_s))
        node, num_known = self._walk(path, len(page_ids), last_use, None if release else page_ids)
        if node is None or num_known == len(page_ids):
            return
        new_page_ids = list(page_ids[num_known:])
        new_token_ids = path.token_ids[num_known * page_size : len(page_ids) * page_size]
        for page_id in new_page_ids:
            self._pool.mark_cached(page_id)
        if node.parent is not None and not node.children:
            node.page_ids += new_page_ids
            node.token_ids += new_token_ids
        else:
            parent, node = node, _Node(node, new_token_ids, new_page_ids, last_use)
            self._attach(parent, node)
        self._order.park(node, page_ids[-1])

    def evict(self, num_pages: int) -> None:
        while num_pages > 0:
            node = self._order.pop()
            assert node is not None, "an idle page is not at the end of a branch"
            if node.parent is None or node.children:
                continue  # it has its entry again when it is a leaf again
            num_left = num_pages
            while num_left and node.page_ids and not self._pool.is_held(node.page_ids[-1]):
                self._pool.unmark_cached(node.page_ids.pop())
                num_left -= 1
            self.num_evicted += num_pages - num_left
            num_pages = num_left
            if not node.page_ids:
                self._remove(node)
                continue
            del node.token_ids[len(node.page_ids) * self._pool.page_size :]
            if num_left:  # the rest of it is held
                self._order.park(node, node.page_ids[-1])
            else:
                self._order.push(node)

    def clear(self) -> None:
        for page_id in self.cached_page_ids():
            self._pool.unmark_cached(page_id)
        self._roots.clear()
        self._order.clear()

    def cached_page_ids(self) -> Iterable[int]:
        return [page_id for node in self._nodes() for page_id in node.page_ids]

    def check_integrity(self) -> None:
        page_size = self._pool.page_size
        for node in self._nodes():
            assert len(node.token_ids) == len(node.page_ids) * page_size
            assert sorted(node.children) == node.branches
            if node.parent is None:
                assert self._roots[node.namespace] is node and node.children and not node.page_ids
            else:
                assert node.page_ids
                is_parked = self._pool.is_held(node.page_ids[-1]) and self._order.is_parked(node, node.page_ids[-1])
                assert node.children or node.is_queued or is_parked, "a leaf that is never evicted"
            held = [self._pool.is_held(page_id) for page_id in node.page_ids]
            assert held == sorted(held, reverse=True), "a page is held, one before it is not"
            for key, child in node.children.items():
                assert child.parent is node and tuple(child.token_ids[:page_size]) == key
                assert child.last_use <= node.last_use or node.parent is None
                assert not held or held[-1] or not self._pool.is_held(child.page_ids[0]), "a page is held, one before it is not"

    def _nodes(self) -> Iterator[_Node]:
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def _child(self, node: _Node, token_ids: list[int], start: int, max_tokens: int) -> _Node | None:
        """The child whose first page has the tokens that come next, if they are a whole page within ``max_tokens``; else ``None``."""
        end = start + self._pool.page_size
        return node.children.get(tuple(token_ids[start:end])) if end <= max_tokens else None

    def _common_pages(self, node: _Node, token_ids: list[int], start: int, max_tokens: int) -> int:
        """Number of pages of the node's edge that are also the next whole pages of ``token_ids[start:max_tokens]``. The first page must be."""
        page_size = self._pool.page_size
        num_pages = min(len(node.page_ids), (max_tokens - start) // page_size)
        if node.token_ids[: num_pages * page_size] == token_ids[start : start + num_pages * page_size]:
            return num_pages
        return next(
            page
            for page in range(1, num_pages)
            if node.token_ids[page * page_size : (page + 1) * page_size] != token_ids[start + page * page_size : start + (page + 1) * page_size]
        )

    def _with_copy(self, page_ids: list[int], candidates: Sequence[tuple[int, Sequence[int]]], wanted: Sequence[int]) -> Match:
        """The match, including a copy of the candidate page that shares the longest beginning with ``wanted``, if that is worth it."""
        num_common, page_id = max(((_num_common(tokens, wanted), page_id) for page_id, tokens in candidates), default=(0, 0))
        if not is_worth_copying(num_common, self._pool.page_size):
            return Match(tuple(page_ids))
        return Match(tuple(page_ids), page_id, num_common)

    def _walk(self, path: CachePath, num_pages: int, last_use: LastUse, page_ids: Sequence[int] | None = None) -> tuple[_Node | None, int]:
        """Follows a sequence's first pages through the tree as far as they are cached, and records the use of all nodes on the way.

        Args:
            path: The sequence.
            num_pages: Largest number of pages to follow.
            last_use: The use to record.
            page_ids: If given, the pages that must be cached for these tokens; if others are, there is no node.

        Returns:
            The node at which the pages end, made by a split if that is within an edge, or ``None``; and the number of pages up to there.
        """
        page_size = self._pool.page_size
        node = self._roots.get(path.namespace)
        if node is None:
            node = self._roots[path.namespace] = _Node(None, [], [], last_use, namespace=path.namespace)
        done, max_tokens = 0, num_pages * page_size
        while (child := self._child(node, path.token_ids, done * page_size, max_tokens)) is not None:
            num_common = self._common_pages(child, path.token_ids, done * page_size, max_tokens)
            if page_ids is not None and child.page_ids[:num_common] != list(page_ids[done : done + num_common]):
                return None, done
            if num_common < len(child.page_ids):
                child = self._split(child, num_common)
            child.last_use = max(child.last_use, last_use)
            done += num_common
            node = child
        return node, done

    def _split(self, node: _Node, num_pages: int) -> _Node:
        """Inserts a node after the first ``num_pages`` pages of an edge and returns it. The old node keeps the rest."""
        parent, num_tokens = node.parent, num_pages * self._pool.page_size
        assert parent is not None
        upper = _Node(parent, node.token_ids[:num_tokens], node.page_ids[:num_pages], node.last_use)
        parent.children[tuple(node.token_ids[: self._pool.page_size])] = upper
        del node.token_ids[:num_tokens], node.page_ids[:num_pages]
        self._attach(upper, node)
        return upper

    def _attach(self, parent: _Node, node: _Node) -> None:
        key = tuple(node.token_ids[: self._pool.page_size])
        node.parent = parent
        parent.children[key] = node
        bisect.insort(parent.branches, key)

    def _remove(self, node: _Node) -> None:
        """Removes a leaf without pages. Its parent may become a leaf by that."""
        parent = node.parent
        assert parent is not None
        key = tuple(node.token_ids[: self._pool.page_size])
        del parent.children[key]
        del parent.branches[bisect.bisect_left(parent.branches, key)]
        node.parent = None
        if parent.children:
            return
        if parent.parent is None:
            del self._roots[parent.namespace]
        else:
            self._order.push(parent)


def _num_common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))

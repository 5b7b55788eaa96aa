"""The moves of whole pages of the KV pool: from page to page, to host memory and back. A page is a run of rows in any layout of the pool."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jaxserve.dims import ceil_div
from jaxserve.engine.programs.pool_plan import PoolPlan
from jaxserve.engine.scheduling.schedule import PageMoves
from jaxserve.kernels_pallas.ragged_paged_attention.api import KVPool
from jaxserve.mesh import EACH_DEVICE, EACH_RANK

PAGES_A_CALL = 8
"""Number of pages of each rank that one call moves. A call with fewer is padded with pages out of range, which are dropped."""

Pairs = Sequence[tuple[int, int]]


class PageMover:
    """Carries out the page moves of a step, for all data ranks at once.

    Args:
        plan: The plan of the pool.
        num_host_pages: Pages of host memory for each data rank. They take memory only when they are first written.
    """

    def __init__(self, plan: PoolPlan, num_host_pages: int) -> None:
        self.num_host_pages = num_host_pages
        self._num_pages = plan.shape.num_pages
        self._num_ranks = plan.layout.shape.data
        self._num_parts = plan.layout.shape.size // self._num_ranks
        shape = plan.shape
        self._programs = _Programs(plan)
        # Of each array of the pool: [ranks, host pages, devices of a rank, layers, rows of a page, …].
        self._host = [
            np.empty((self._num_ranks, num_host_pages, self._num_parts, shape.num_layers, *page), array.dtype)
            for array, page in zip(jax.tree.leaves(plan.abstract()), plan.page_shapes, strict=True)
        ]

    def apply(self, pool: KVPool, moves: Sequence[PageMoves]) -> KVPool:
        """The pool after the moves of each rank: first swaps out, then swaps in, then copies. Waits for pages that go to the host."""
        for pairs in self._calls([rank.swap_outs for rank in moves]):
            self._swap_out(pool, pairs)
        for pairs in self._calls([rank.swap_ins for rank in moves]):
            pool = self._swap_in(pool, pairs)
        for pairs in self._calls([rank.copies for rank in moves]):
            pool = self._programs.copy(pool, self._pages(pairs, 0), self._pages(pairs, 1))
        return pool

    def warmup(self) -> None:
        """Compiles the programs that ``apply`` runs."""
        self._programs.compile(with_swaps=self.num_host_pages > 0)

    def _calls(self, pairs: Sequence[Pairs]) -> list[list[Pairs]]:
        """The pairs of each rank, in portions that one call moves."""
        num_calls = ceil_div(max(map(len, pairs)), PAGES_A_CALL)
        return [[rank[call * PAGES_A_CALL : (call + 1) * PAGES_A_CALL] for rank in pairs] for call in range(num_calls)]

    def _pages(self, pairs: Sequence[Pairs], side: int) -> np.ndarray:
        """``[ranks, PAGES_A_CALL]`` page ids of one side of the pairs, filled up with one that is out of range."""
        pages = np.full((self._num_ranks, PAGES_A_CALL), self._num_pages, np.int32)
        for rank, rank_pairs in enumerate(pairs):
            pages[rank, : len(rank_pairs)] = [pair[side] for pair in rank_pairs]
        return pages

    def _swap_out(self, pool: KVPool, pairs: Sequence[Pairs]) -> None:
        taken = self._programs.take(pool, self._pages(pairs, 0))
        for host, array in zip(self._host, taken, strict=True):
            pages = np.asarray(array).reshape(self._num_ranks, self._num_parts, *array.shape[1:])
            for rank, rank_pairs in enumerate(pairs):
                for index, (_, host_page) in enumerate(rank_pairs):
                    host[rank, host_page] = pages[rank, :, :, index]

    def _swap_in(self, pool: KVPool, pairs: Sequence[Pairs]) -> KVPool:
        values = []
        for host in self._host:
            pages = np.zeros((self._num_ranks, self._num_parts, host.shape[3], PAGES_A_CALL, *host.shape[4:]), host.dtype)
            for rank, rank_pairs in enumerate(pairs):
                for index, (host_page, _) in enumerate(rank_pairs):
                    pages[rank, :, :, index] = host[rank, host_page]
            values.append(pages.reshape(-1, *pages.shape[2:]))
        return self._programs.put(pool, self._pages(pairs, 1), tuple(values))


class _Programs:
    """The compiled programs of the moves. Programs that change a pool donate it."""

    def __init__(self, plan: PoolPlan) -> None:
        layout, shape = plan.layout, plan.shape
        page_shapes = plan.page_shapes

        def rows(pages_N: Int32[Array, "N"], rows_a_page: int) -> Int32[Array, "R"]:
            """Rows of the pages in each layer; out of range for a page that is out of range."""
            first_LN = (jnp.arange(shape.num_layers)[:, None] * shape.num_pages + pages_N) * rows_a_page
            first_LN = jnp.where(pages_N < shape.num_pages, first_LN, shape.num_layers * shape.num_pages * rows_a_page)
            return (first_LN[..., None] + jnp.arange(rows_a_page)).reshape(-1)

        def take_one(pool: KVPool, pages_1N: Array) -> tuple[Array, ...]:
            taken = []
            for array, page in zip(jax.tree.leaves(pool), page_shapes, strict=True):
                values = array.at[rows(pages_1N[0], page[0])].get(mode="clip")
                taken.append(values.reshape(1, shape.num_layers, PAGES_A_CALL, *page))
            return tuple(taken)

        def put_one(pool: KVPool, pages_1N: Array, values: tuple[Array, ...]) -> KVPool:
            arrays = [
                array.at[rows(pages_1N[0], page[0])].set(new.reshape(-1, *array.shape[1:]), mode="drop")
                for array, page, new in zip(jax.tree.leaves(pool), page_shapes, values, strict=True)
            ]
            return jax.tree.unflatten(jax.tree.structure(pool), arrays)

        def copy_one(pool: KVPool, sources_1N: Array, destinations_1N: Array) -> KVPool:
            return put_one(pool, destinations_1N, take_one(pool, sources_1N))

        self._from_host = layout.from_host
        abstract = plan.abstract()
        pages = jax.ShapeDtypeStruct((layout.shape.data, PAGES_A_CALL), jnp.int32, sharding=layout.sharding(EACH_RANK))
        values = tuple(
            jax.ShapeDtypeStruct((layout.mesh.size, shape.num_layers, PAGES_A_CALL, *page), array.dtype, sharding=layout.sharding(EACH_DEVICE))
            for array, page in zip(jax.tree.leaves(abstract), page_shapes, strict=True)
        )

        def lazy(function: Callable[..., Any], specs: tuple[Any, ...], donated: tuple[int, ...], arguments: tuple[Any, ...]) -> Callable[[], Any]:
            def compiled() -> Any:
                with layout.tracing():
                    mapped = layout.map_devices(function, specs, EACH_DEVICE)
                    return jax.jit(mapped, donate_argnums=donated).lower(*arguments).compile()

            return functools.cache(compiled)

        self._take = lazy(take_one, (EACH_DEVICE, EACH_RANK), (), (abstract, pages))
        self._put = lazy(put_one, (EACH_DEVICE, EACH_RANK, EACH_DEVICE), (0,), (abstract, pages, values))
        self._copy = lazy(copy_one, (EACH_DEVICE, EACH_RANK, EACH_RANK), (0,), (abstract, pages, pages))

    def compile(self, *, with_swaps: bool) -> None:
        for program in (self._take, self._put, self._copy) if with_swaps else (self._copy,):
            program()

    def take(self, pool: KVPool, pages_RN: np.ndarray) -> tuple[Array, ...]:
        return self._take()(pool, self._from_host(pages_RN, EACH_RANK))

    def put(self, pool: KVPool, pages_RN: np.ndarray, values: tuple[np.ndarray, ...]) -> KVPool:
        return self._put()(pool, self._from_host(pages_RN, EACH_RANK), values)

    def copy(self, pool: KVPool, sources_RN: np.ndarray, destinations_RN: np.ndarray) -> KVPool:
        return self._copy()(pool, self._from_host(sources_RN, EACH_RANK), self._from_host(destinations_RN, EACH_RANK))

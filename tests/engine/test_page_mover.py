"""Page moves on the device against the same moves of numpy arrays, in every layout of the pool and on a mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import CacheConfig, ShardingConfig
from jaxserve.engine.device.page_mover import PAGES_A_CALL, PageMover
from jaxserve.engine.programs.memory import Memory
from jaxserve.engine.programs.pool_plan import PoolPlan, plan_pool
from jaxserve.engine.scheduling.schedule import PageMoves
from jaxserve.kernels_pallas.ragged_paged_attention.api import IMPLEMENTATIONS, KVPool
from jaxserve.mesh import make_layout
from jaxserve.mesh_shape import MeshShape
from tests.engine.tiny import tiny_spec

NUM_PAGES, NUM_HOST_PAGES = 24, 12


def make_plan(attention: str, mesh: MeshShape) -> PoolPlan:
    layout = make_layout(mesh, ShardingConfig())
    return plan_pool(
        tiny_spec(), CacheConfig(page_size=8, num_pages=NUM_PAGES), attention=IMPLEMENTATIONS[attention], dtype=jnp.float32, table_width=8, max_num_seqs=4,
        memory=Memory(2**30, 2**30), is_cpu=True, layout=layout,
    )  # fmt: skip


def filled(plan: PoolPlan) -> KVPool:
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda array: jax.device_put(rng.normal(size=array.shape).astype(array.dtype), array.sharding), plan.abstract())


def pages(pool: KVPool, plan: PoolPlan) -> list[np.ndarray]:
    """Each array as ``[ranks, model ranks, layers, pages, the rest]``."""
    return [np.asarray(array).reshape(*plan.layout.shape.values(), plan.shape.num_layers, NUM_PAGES, -1) for array in jax.tree.leaves(pool)]


@pytest.mark.parametrize(
    ("attention", "mesh"),
    [("xla", MeshShape()), ("pallas_tpu", MeshShape()), ("pallas_gpu", MeshShape()), ("xla", MeshShape(2, 2)), ("pallas_gpu", MeshShape(4, 1))],
)
def test_swaps_and_copies_move_whole_pages_of_every_layer_and_nothing_else(attention: str, mesh: MeshShape) -> None:
    plan = make_plan(attention, mesh)
    mover = PageMover(plan, NUM_HOST_PAGES)
    pool = filled(plan)
    want = [array.copy() for array in pages(pool, plan)]
    host: dict[tuple[int, int], list[np.ndarray]] = {}
    rng = np.random.default_rng(1)
    for _ in range(3):
        moves = []
        for rank in range(mesh.data):
            ids = rng.permutation(NUM_PAGES)
            count = int(rng.integers(0, PAGES_A_CALL + 4)) if rank == 0 else int(rng.integers(0, 3))
            outs = tuple(zip(ids[:count].tolist(), rng.permutation(NUM_HOST_PAGES)[:count].tolist(), strict=True))
            for page, host_page in outs:
                host[rank, host_page] = [array[rank, :, :, page].copy() for array in want]
            known = [host_page for owner, host_page in host if owner == rank][:2]
            ins = tuple(zip(known, ids[12 : 12 + len(known)].tolist(), strict=True))
            for host_page, page in ins:
                for array, values in zip(want, host[rank, host_page], strict=True):
                    array[rank, :, :, page] = values
            copies = ((int(ids[16]), int(ids[17])),)
            for array in want:
                array[rank, :, :, copies[0][1]] = array[rank, :, :, copies[0][0]]
            moves.append(PageMoves(swap_outs=outs, swap_ins=ins, copies=copies))
        pool = mover.apply(pool, moves)
        for got, expected in zip(pages(pool, plan), want, strict=True):
            np.testing.assert_array_equal(got, expected)

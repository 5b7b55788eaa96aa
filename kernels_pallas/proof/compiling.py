"""The compiling of one function for one target, with a report of seconds, memory, and copies as large as the KV pool."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.kernels_pallas.proof.targets import TPU_TOPOLOGIES, gpu_config


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileReport:
    """The report of a compile.

    Args:
        seconds: Duration of lowering and compiling.
        temp_bytes: Bytes of device memory beyond arguments and results.
        alias_bytes: Bytes of results that take the place of donated arguments.
        pool_bytes: Bytes of the KV pool.
        pool_copies: Number of instructions that copy an array as large as the smallest of the pool's.
    """

    seconds: float
    temp_bytes: int
    alias_bytes: int
    pool_bytes: int
    pool_copies: int

    @property
    def in_place(self) -> bool:
        """Whether the pool is updated in place: aliased, not copied, and no temporary near its size."""
        return self.pool_copies == 0 and self.alias_bytes >= self.pool_bytes and self.temp_bytes < 0.1 * self.pool_bytes


@contextmanager
def device_of(target: str) -> Iterator[NamedSharding]:
    """The sharding of arrays on one device of a target; code traced inside sees that device. Needs ``targets.environment(target)``."""
    if target in TPU_TOPOLOGIES:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=TPU_TOPOLOGIES[target])
    else:
        topology = topologies.get_topology_desc("", "cuda", target_config=gpu_config(target), topology="1x1x1")
    mesh = Mesh(np.array(topology.devices).reshape(-1)[:1], ("device",))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        yield NamedSharding(mesh, PartitionSpec())


def place(tree: Any, sharding: NamedSharding) -> Any:
    """A tree of arrays as abstract arrays with a sharding."""
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding), tree)


def compile_report(lower: Callable[[], jax.stages.Lowered], pool: Any) -> CompileReport:
    """The report of lowering and compiling a program.

    Args:
        lower: Traces and lowers it for the device that its abstract arguments are on; called once, inside :func:`device_of`.
        pool: The KV pool among the arguments.
    """
    start = time.perf_counter()
    compiled = lower().compile()
    seconds = time.perf_counter() - start
    memory, program = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and program is not None
    arrays = jax.tree.leaves(pool)
    sizes = [math.prod(array.shape) * array.dtype.itemsize for array in arrays]
    return CompileReport(
        seconds=round(seconds, 2), temp_bytes=memory.temp_size_in_bytes, alias_bytes=memory.alias_size_in_bytes, pool_bytes=sum(sizes),
        pool_copies=large_copies(program, min(sizes)),
    )  # fmt: skip


_COPY = re.compile(r"= \(?(\w+)\[([\d,]*)\][^=\n]*? (copy|copy-start|transpose|convert)\(")


def large_copies(program: str, num_bytes: int) -> int:
    """The number of instructions of a compiled program that copy at least ``num_bytes`` bytes."""
    count = 0
    for dtype, dimensions, _ in _COPY.findall(program):
        bits = re.search(r"\d+", dtype)
        size = math.prod(int(d) for d in dimensions.split(",") if d) * (int(bits.group()) if bits else 8) // 8
        count += size >= num_bytes
    return count

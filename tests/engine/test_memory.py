"""How much memory there is, and how large a pool it makes."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxserve.config import CacheConfig, Config, EngineConfig, SchedulerConfig, ShardingConfig
from jaxserve.engine.programs.memory import Memory, _cgroup_memory
from jaxserve.engine.programs.plan import make_model, plan_programs
from jaxserve.engine.programs.pool_plan import PoolPlan, plan_pool
from jaxserve.engine.step.execution import choose_execution
from jaxserve.errors import ConfigError
from jaxserve.kernels_pallas.ragged_paged_attention.api import IMPLEMENTATIONS
from jaxserve.mesh import make_layout
from jaxserve.mesh_shape import MeshShape
from tests.engine.tiny import tiny_spec

UNLIMITED = 2**63 - 1


def plan(config: CacheConfig, memory: Memory, *, max_num_seqs: int = 1000, table_width: int = 1000, is_cpu: bool = True) -> PoolPlan:
    return plan_pool(
        tiny_spec(), config, attention=IMPLEMENTATIONS["xla"], dtype=jnp.float32, table_width=table_width, max_num_seqs=max_num_seqs, memory=memory,
        is_cpu=is_cpu, layout=make_layout(MeshShape(), ShardingConfig()),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("files", "memory"),
    [
        ({"memory.max": "1000", "memory.current": "900", "memory.stat": "anon 100\nactive_file 300\ninactive_file 400\n"}, Memory(1000, 800)),
        ({"memory.max": "max", "memory.current": "900", "memory.stat": "active_file 300\ninactive_file 400\n"}, Memory(UNLIMITED, UNLIMITED)),
        (
            {
                "memory/memory.limit_in_bytes": "1000",
                "memory/memory.usage_in_bytes": "900",
                "memory/memory.stat": "active_file 1\ntotal_active_file 300\ntotal_inactive_file 400\n",
            },
            Memory(1000, 800),
        ),
        ({}, Memory(UNLIMITED, UNLIMITED)),
    ],
    ids=["v2", "v2-no-limit", "v1", "none"],
)
def test_the_limit_of_a_control_group(tmp_path: Path, files: dict[str, str], memory: Memory) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert _cgroup_memory(tmp_path) == memory


def test_the_pool_is_a_share_of_all_memory_as_far_as_it_is_free() -> None:
    page_bytes = plan(CacheConfig(num_pages=1), Memory(2**30, 2**30)).page_bytes
    total = 1000 * page_bytes
    assert plan(CacheConfig(), Memory(total, total)).shape.num_pages == 96  # a tenth, cut to three significant bits
    assert plan(CacheConfig(), Memory(total, total), is_cpu=False).shape.num_pages == 900
    assert plan(CacheConfig(memory_fraction=0.5), Memory(total, total), is_cpu=False).shape.num_pages == 500
    assert plan(CacheConfig(memory_fraction=0.5), Memory(total, 100 * page_bytes), is_cpu=False).shape.num_pages == 90
    assert plan(CacheConfig(), Memory(total, total), max_num_seqs=2, table_width=7).shape.num_pages == 14  # all that can ever be used


def test_a_pool_that_does_not_fit_is_refused() -> None:
    page_bytes = plan(CacheConfig(num_pages=1), Memory(2**30, 2**30)).page_bytes
    with pytest.raises(ConfigError, match="at most 9 fit"):
        plan(CacheConfig(num_pages=10), Memory(100 * page_bytes, 10 * page_bytes - 1))
    with pytest.raises(ConfigError, match="holds no page"):
        plan(CacheConfig(), Memory(9 * page_bytes, 9 * page_bytes))


@pytest.mark.parametrize(("num_gib", "key_bytes"), [(1.5, 1.5 * 2**30), (2, 2 * 2**30), (3, 2 * 2**30), (4, 2 * 2**30), (5, 5 * 2**30)])
def test_a_pool_of_a_size_that_attention_refuses_is_cut(num_gib: float, key_bytes: float, caplog: pytest.LogCaptureFixture) -> None:
    """Pallas Triton's offsets overflow in one-byte arrays of more than 2 and at most 4 GiB."""
    spec = tiny_spec(layers=tiny_spec().layers[:2])  # a token's keys take 64 bytes
    config = Config(
        cache=CacheConfig(page_size=128, dtype="fp8"), engine=EngineConfig(attention="pallas_gpu"),
        scheduler=SchedulerConfig(max_num_seqs=512, max_tokens_per_step=2048),
    )  # fmt: skip
    execution, layout = choose_execution(config, "gpu"), make_layout(MeshShape(), ShardingConfig())
    model = make_model(spec, config, execution, layout)
    max_model_len = int(num_gib * 2**30 / 64 / 512)
    planned, _ = plan_programs(config, model, execution, layout, max_model_len=max_model_len, memory=Memory(2**40, 2**40))
    assert planned.shape.num_pages * planned.shape.page_size * 64 == key_bytes
    assert planned.attention.name == "pallas_gpu"
    assert ("which pallas_gpu does not serve" in caplog.text) == (num_gib in (3, 4))

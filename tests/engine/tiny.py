"""A tiny model on the real engine: float32 or bfloat16, seeded weights, every size small and none a power of two by accident."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax

from jaxserve.config import CacheConfig, Config, EngineConfig, MeshConfig, ModelConfig, SchedulerConfig, ShardingConfig
from jaxserve.engine.device.runner import DeviceRunner
from jaxserve.engine.engine import Engine
from jaxserve.engine.programs.compiled_folder import compile_program
from jaxserve.engine.programs.memory import Memory
from jaxserve.engine.programs.plan import make_model
from jaxserve.engine.programs.pool_plan import plan_pool
from jaxserve.engine.step.buckets import Bucket, make_buckets, table_width
from jaxserve.engine.step.execution import choose_execution
from jaxserve.engine.step.slot_state import SlotState
from jaxserve.kernels_pallas.ragged_paged_attention.api import IMPLEMENTATIONS
from jaxserve.mesh import make_layout
from jaxserve.mesh_shape import MeshShape
from jaxserve.models.attention_kind import GroupedQueryAttention
from jaxserve.models.mlp_kind import GatedMlp
from jaxserve.models.spec import LayerGroup, LayerSpec, ModelSpec, RopeSpec
from jaxserve.request import SamplingParams
from tests.engine_host.fakes import FakeTokenizer

MAX_POSITION = 96


def tiny_spec(*, layers: tuple[LayerSpec, ...] = (LayerSpec(), LayerSpec(window=10), LayerSpec()), **changes: Any) -> ModelSpec:
    """Three layers, one of them with a window; grouped heads; a vocabulary that fills no whole chunk of the sampler's.

    Changes are fields of the spec, of its attention, or with ``mlp_`` before their names of its MLP.
    """
    head_dim = 16
    attention = GroupedQueryAttention(num_heads=6, num_kv_heads=2, head_dim=head_dim, scale=head_dim**-0.5)
    of_attention = {field.name: changes.pop(field.name) for field in dataclasses.fields(attention) if field.name in changes}
    of_mlp = {name.removeprefix("mlp_"): changes.pop(name) for name in list(changes) if name.startswith("mlp_")}
    mlp = dataclasses.replace(GatedMlp(width=80, activation="silu"), **of_mlp)
    spec = ModelSpec(
        family="llama",
        vocab_size=300,
        width=48,
        groups=(LayerGroup.uniform(dataclasses.replace(attention, **of_attention), mlp, layers),),
        max_position=MAX_POSITION,
        norm_eps=1e-5,
        ropes=(RopeSpec(inv_freq=tuple(10_000.0 ** (-2 * i / head_dim) for i in range(head_dim // 2))),),
        tied=True,
    )
    return dataclasses.replace(spec, **changes)


def tiny_engine(
    *,
    dtype: Literal["bfloat16", "float32"] = "float32",
    page_size: int = 8,
    num_pages: int = 64,
    max_num_seqs: int = 4,
    max_tokens_per_step: int = 32,
    token_buckets: tuple[int, ...] = (8, 32),
    warmup: bool = False,
    layers: Literal["auto", "scan", "unroll"] = "auto",
    spec: ModelSpec | None = None,
    attention: str = "xla",
    cache_dtype: Literal["auto", "fp8"] = "auto",
    mesh: MeshShape = MeshShape(),
    sharding: ShardingConfig = ShardingConfig(),
    prefix: Literal["radix", "hash", "off"] = "radix",
    preemption: Literal["recompute", "swap"] = "recompute",
    num_host_pages: int = 0,
    overlap: bool = False,
    states: Sequence[SlotState] = (),
    optimized: bool = False,
) -> Engine:
    """An engine on the tiny model. Without warm-up each bucket compiles when it is first met. KV heads are repeated where the mesh needs it.

    Programs are compiled without LLVM's optimizations, which takes half as long, unless ``optimized`` asks for those that are served.
    """
    spec = spec or tiny_spec()
    config = Config(
        model=ModelConfig(dtype=dtype),
        mesh=MeshConfig(data=mesh.data, model=mesh.model, replicate_kv_heads=True),
        sharding=sharding,
        cache=CacheConfig(page_size=page_size, num_pages=num_pages, dtype=cache_dtype, prefix=prefix),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_tokens_per_step=max_tokens_per_step, preemption=preemption),
        engine=EngineConfig(layers=layers, token_buckets=token_buckets, sequence_buckets=(2, 4, 8)),
    )
    execution = choose_execution(config, "cpu")
    layout = make_layout(mesh, sharding)
    model = make_model(spec, config, execution, layout)
    spec = model.spec
    width = table_width(spec.max_position, page_size)
    plan = plan_pool(
        spec, config.cache, attention=IMPLEMENTATIONS[attention], dtype=execution.kv_dtype,
        table_width=width, max_num_seqs=max_num_seqs, memory=Memory(2**30, 2**30), is_cpu=True, layout=layout,
    )  # fmt: skip
    buckets = make_buckets(token_buckets, (2, 4, 8), max_tokens=max_tokens_per_step, max_rows=max_num_seqs, table_width=width)
    params = model.random_params(0, layout, randomize_all=True)
    runner = DeviceRunner(
        model,
        params,
        plan,
        buckets,
        max_num_seqs=max_num_seqs,
        num_host_pages=num_host_pages,
        states=states,
        compile_program=compile_program if optimized else _compile_quickly,
    )
    if warmup:
        runner.warmup()
    return Engine(runner, FakeTokenizer(), spec, config, overlap=overlap)


def _compile_quickly(lowered: jax.stages.Lowered, _bucket: Bucket) -> jax.stages.Compiled:
    return lowered.compile({"xla_backend_optimization_level": 0})


def overlapped(engine: Engine) -> Engine:
    """Another engine on the same runner, with overlap."""
    return Engine(engine.runner, FakeTokenizer(), engine.spec, engine._config, overlap=True)


def run(engine: Engine, requests: list[tuple[list[int], SamplingParams]], *, arrivals: list[int] | None = None) -> list[tuple[int, ...]]:
    """Generated ids of each request; request i is added before step ``arrivals[i]`` (all before the first without it)."""
    arrivals = arrivals or [0] * len(requests)
    ids: dict[str, int] = {}
    tokens: list[list[int]] = [[] for _ in requests]
    step = 0
    while len(ids) < len(requests) or engine.has_work:
        for index, (prompt, params) in enumerate(requests):
            if arrivals[index] == step:
                request = engine.make_request(prompt, params, f"r{index}")
                engine.add(request)
                ids[request.request_id] = index
        for output in engine.step():
            assert output.error is None, output.error
            tokens[ids[output.request_id]] += output.token_ids
        step += 1
    engine.check_integrity()
    return [tuple(generated) for generated in tokens]

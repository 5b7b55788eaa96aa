"""The programs of an engine: the model on its mesh, the sized pool, the buckets and their steps. The devices may be present, or only compiled for."""

from __future__ import annotations

import bisect
import dataclasses
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import jax

from jaxserve.config import CacheConfig, Config
from jaxserve.engine.programs.memory import Memory
from jaxserve.engine.programs.pool_plan import PoolPlan, device_pool_shape, plan_pool
from jaxserve.engine.step.buckets import Bucket, Buckets, make_buckets, table_width
from jaxserve.engine.step.execution import Execution
from jaxserve.engine.step.function import abstract_carry, attention_problem, lower_step, make_step
from jaxserve.engine.step.slot_state import SlotState
from jaxserve.errors import ConfigError
from jaxserve.kernels_pallas.ragged_paged_attention.api import Implementation, PoolShape, choose_implementation
from jaxserve.mesh import Layout
from jaxserve.mesh_shape import MeshShape
from jaxserve.models.model import Model, build_model
from jaxserve.models.params import Params
from jaxserve.models.sharding import check_layout, fit_kv_heads
from jaxserve.models.spec import ModelSpec
from jaxserve.sharding_rules import ShardingRules

logger = logging.getLogger(__name__)

_UNLIMITED = Memory(total_bytes=2**63, free_bytes=2**63)


def plan_programs(
    config: Config, model: Model, execution: Execution, layout: Layout, *, max_model_len: int, memory: Memory
) -> tuple[PoolPlan, Buckets]:  # fmt: skip
    """The plan of the pool, and the buckets to compile for.

    Args:
        config: The configuration.
        model: The model, built for the layout.
        execution: The execution for the layout's platform.
        layout: The mesh and the sharding rules.
        max_model_len: Largest number of tokens of a sequence.
        memory: Memory of a device on which the weights are loaded already.

    Raises:
        ConfigError: The pool does not fit into memory, or no implementation of attention serves it.
    """
    width = table_width(max_model_len, config.cache.page_size)
    buckets = make_buckets(
        execution.token_buckets,
        execution.sequence_buckets,
        max_tokens=config.scheduler.max_tokens_per_step,
        max_rows=config.scheduler.max_num_seqs,
        table_width=width,
        sampling=execution.sampling,
    )
    shape = device_pool_shape(model.spec, layout, num_pages=config.cache.num_pages or 1, page_size=config.cache.page_size, dtype=execution.kv_dtype)
    plan = plan_pool(
        model.spec,
        config.cache,
        attention=_choose_attention(config.engine.attention, model, buckets.all(), shape, layout),
        dtype=execution.kv_dtype,
        table_width=width,
        max_num_seqs=config.scheduler.max_num_seqs,
        memory=memory,
        is_cpu=execution.platform == "cpu",
        layout=layout,
    )
    plan = _served_pool(plan, model, buckets.all()[-1])
    return plan, dataclasses.replace(buckets, table_width=min(width, plan.shape.num_pages))  # no sequence has more pages than there are


def pool_of_size(
    model: Model, layout: Layout, buckets: Sequence[Bucket], *, num_pages: int, page_size: int, kv_dtype: Any, attention: str = "auto"
) -> PoolPlan:
    """The plan of a pool of a given size, whatever memory there is, with the attention that serves some buckets. For benchmarks, tests and estimates.

    Args:
        model: The model, built for the layout.
        layout: The mesh and the sharding rules.
        buckets: The buckets to serve, all with the same table width.
        num_pages: Pages of one layer and one data rank.
        page_size: Tokens of one page.
        kv_dtype: Dtype of keys and values.
        attention: Name of the implementation of attention, or ``auto``.

    Raises:
        ConfigError: No implementation of attention serves the pool.
    """
    shape = device_pool_shape(model.spec, layout, num_pages=num_pages, page_size=page_size, dtype=kv_dtype)
    return plan_pool(
        model.spec,
        CacheConfig(num_pages=num_pages, page_size=page_size),
        attention=_choose_attention(attention, model, buckets, shape, layout),
        dtype=kv_dtype,
        table_width=buckets[0].table_width,
        max_num_seqs=max(bucket.num_rows for bucket in buckets),
        memory=_UNLIMITED,
        is_cpu=False,
        layout=layout,
    )


def fit_model(spec: ModelSpec, config: Config, mesh: MeshShape) -> ModelSpec:
    """The specification of a model as it is split over a mesh, with its KV heads repeated if needed and allowed by the configuration.

    Raises:
        ConfigError: The model cannot be split in this way.
    """
    rules = ShardingRules(config.sharding, mesh)
    fitted = fit_kv_heads(spec, rules, replicate=config.mesh.replicate_kv_heads)
    check_layout(fitted, rules)
    if (repeat := fitted.attention.kv_repeat) > 1:
        logger.info("each of the %d KV heads is held by %d model ranks: keys and values take %d times the memory", spec.attention.num_kv_heads, repeat, repeat)
    return fitted


def make_model(spec: ModelSpec, config: Config, execution: Execution, layout: Layout) -> Model:
    """The model of a specification, built for a layout; see :func:`fit_model`."""
    fitted = fit_model(spec, config, layout.shape)
    return build_model(fitted, dtype=config.model.dtype, layers=execution.layers, is_split=layout.rules.splits_anything)


def compile_all(buckets: Buckets, compile_one: Callable[[Bucket], object], progress: Callable[[int, int], None] | None = None) -> None:
    """Compiles every bucket, several at a time, since XLA compiles outside the interpreter lock.

    Args:
        buckets: The buckets.
        compile_one: Compiles and keeps one bucket; called from several threads.
        progress: Called with the number of buckets done and the number of all.
    """
    every = buckets.all()
    if progress is not None:
        progress(0, len(every))
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1, thread_name_prefix="compile") as executor:
        # The largest first: they take longest, and nothing long is left for the end.
        futures = [executor.submit(compile_one, bucket) for bucket in reversed(every)]
        for done, future in enumerate(as_completed(futures), start=1):
            future.result()
            if progress is not None:
                progress(done, len(every))


def lower_bucket(model: Model, params: Params, plan: PoolPlan, bucket: Bucket, *, max_num_seqs: int, states: Sequence[SlotState] = ()) -> jax.stages.Lowered:
    """The step of a bucket, ready to compile. This is the only place where model, pool, attention, mesh and bucket become a program.

    Args:
        model: The model to run.
        params: The parameters, real or abstract with their shardings.
        plan: The plan of the pool, which also has the mesh.
        bucket: The bucket.
        max_num_seqs: Sequence slots of a data rank.
        states: The kinds of wide state that each slot has.
    """
    step = make_step(model, bucket, shape=plan.shape, attention=plan.attention, layout=plan.layout, states=states)
    return lower_step(step, params, plan.abstract(), abstract_carry(max_num_seqs, plan.layout, states), bucket, plan.layout)


def _choose_attention(name: str, model: Model, buckets: Sequence[Bucket], shape: PoolShape, layout: Layout) -> Implementation:
    """The named implementation of attention if it serves every bucket in a pool of this shape; for ``auto`` the first one that does."""
    try:
        return choose_implementation(name, *(attention_problem(model, bucket, shape, layout) for bucket in buckets))
    except (NotImplementedError, ValueError) as error:
        raise ConfigError(f"engine.attention={name}: {error}") from error


def _served_pool(plan: PoolPlan, model: Model, bucket: Bucket) -> PoolPlan:
    """The plan with as many pages as its attention serves, which is checked only now that the size is known."""

    def refusal(num_pages: int) -> str | None:
        shape = dataclasses.replace(plan.shape, num_pages=num_pages)
        return plan.attention.refusal(attention_problem(model, bucket, shape, plan.layout))

    num_pages = plan.shape.num_pages
    reason = refusal(num_pages)
    if reason is None:
        return plan
    served = bisect.bisect_left(range(1, num_pages), True, key=lambda pages: refusal(pages) is not None)  # pages from 1 to the first that are too many
    logger.warning("the pool has %d pages and not the %d that the memory holds, which %s does not serve: %s", served, num_pages, plan.attention.name, reason)
    return dataclasses.replace(plan, shape=dataclasses.replace(plan.shape, num_pages=served))

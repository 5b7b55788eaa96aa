"""One call of ``bench step``: measures the ceilings, builds the engine, runs the steps."""

# pyright: basic
# jax is not typed strictly.
from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxserve.bench.local.ceilings import measure_ceilings
from jaxserve.bench.local.step_report import StepReport, StepResult
from jaxserve.bench.local.steps import StepBench, StepShape, StepTimes, check_shapes, step_work
from jaxserve.bench.report.surroundings import Watch, surroundings
from jaxserve.config import Config
from jaxserve.engine.build import build_engine
from jaxserve.engine.step.execution import choose_execution
from jaxserve.mesh_shape import choose_mesh_shape
from jaxserve.models.loading.progress import Progress
from jaxserve.plan.roofline import Split


def measure_steps(config: Config, shapes: Sequence[StepShape], *, context: int, repeats: int, progress: Progress | None = None) -> StepReport:
    """Measures steps of the engine of a configuration. ``platform.choose_platform`` comes before. Ctrl-C ends it early; the report says so.

    Args:
        config: What to build.
        shapes: What the steps do; at least one.
        context: See :class:`StepBench`.
        repeats: Likewise.
        progress: Told about loading.

    Raises:
        ConfigError: A shape that the scheduler's limits split into several steps, or a context too long for the model.
        ModelError: The model cannot be served.
        BenchmarkError: The engine does not run a shape as one step.
    """
    platform = jax.devices()[0].platform
    mesh = choose_mesh_shape(config.mesh, jax.device_count(), is_cpu=platform == "cpu")
    limits = config.scheduler
    check_shapes(shapes, max_num_seqs=limits.max_num_seqs, max_tokens_per_step=limits.max_tokens_per_step, num_ranks=mesh.data)
    watch = Watch()
    ceilings = measure_ceilings(config.model.dtype)  # before the pool takes the memory
    alone = dataclasses.replace(config.engine, overlap=False)  # a step's parts are taken one after the other
    engine = build_engine(dataclasses.replace(config, engine=alone), progress=progress)
    bench = StepBench(engine, repeats=repeats, context=context)
    measured: list[StepTimes] = []
    interrupted = False
    try:
        for shape in shapes:
            measured.append(bench.measure(shape))  # noqa: PERF401 - Ctrl-C keeps what there is
    except KeyboardInterrupt:
        interrupted = True
    kv_dtype = choose_execution(config, platform).kv_dtype
    weight_bytes = jnp.dtype(config.model.dtype).itemsize
    split = Split(spec=engine.spec, mesh=mesh, rules=config.sharding, weight_bytes=weight_bytes, kv_bytes=kv_dtype.itemsize)
    return StepReport(
        model=engine.model_name,
        mesh=str(mesh),
        dtype=config.model.dtype,
        kv_dtype=kv_dtype.name,
        ceilings=ceilings,
        results=[StepResult(times=times, work=step_work(split, times), ceilings=ceilings) for times in measured],
        surroundings=surroundings(watch),
        interrupted=interrupted,
    )

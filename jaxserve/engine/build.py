"""The building of an engine from a configuration: find and load the model, size the pool, compile. The one place where all pieces meet."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxserve.config import Config
from jaxserve.engine.device.cpu_threads import bind_compute_threads
from jaxserve.engine.device.runner import DeviceRunner
from jaxserve.engine.engine import Engine
from jaxserve.engine.multihost.processes import Processes
from jaxserve.engine.programs.compiled_folder import CompiledFolder, compile_program, live_facts, spec_sha256
from jaxserve.engine.programs.memory import device_memory, release_unused
from jaxserve.engine.programs.plan import make_model, plan_programs
from jaxserve.engine.programs.pool_plan import PoolPlan, num_host_pages
from jaxserve.engine.step.execution import choose_execution
from jaxserve.errors import ConfigError
from jaxserve.mesh import Layout, make_layout
from jaxserve.mesh_shape import MeshShape, choose_mesh_shape
from jaxserve.models.context_length import check_context_length
from jaxserve.models.loading.cache_folder import cache_folder
from jaxserve.models.loading.checkpoint import Checkpoint, open_checkpoint
from jaxserve.models.loading.progress import Progress
from jaxserve.models.model import Model
from jaxserve.models.params import Params
from jaxserve.models.spec import ModelSpec
from jaxserve.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

_CACHE_MAX_BYTES = 4 * 2**30
"""Largest size of jax's cache of compiled programs on disk; the least recently used are deleted first."""


class Built(NamedTuple):
    """The device half of an engine, ready to run steps, and the model that it runs."""

    runner: DeviceRunner
    model: Model
    checkpoint: Checkpoint


ONE_PROCESS = Processes()


def build_engine(config: Config, processes: Processes = ONE_PROCESS, *, progress: Progress | None = None) -> Engine:
    """The engine that a configuration describes, compiled for every bucket unless ``engine.warmup`` is off.

    Call ``platform.choose_platform`` first.

    Args:
        config: The configuration.
        processes: The engine's processes, of which this one leads.
        progress: Called with the progress of downloads, loading and compiling.

    Raises:
        ConfigError: The configuration does not fit the model or the machine.
        ModelError: The model cannot be found, read or served.
    """
    runner, model, checkpoint = build_runner(config, processes, progress=progress)
    tokenizer = load_tokenizer(checkpoint, chat_template=config.model.chat_template)
    return make_engine(runner, tokenizer, model, checkpoint, config)


def build_runner(config: Config, processes: Processes = ONE_PROCESS, *, progress: Progress | None = None) -> Built:
    """The device half of an engine, which every process builds; see :func:`build_engine`."""
    if config.engine.compilation_cache:
        _enable_compilation_cache()
    started = time.monotonic()
    device = jax.devices()[0]
    is_cpu = device.platform == "cpu"
    execution = choose_execution(config, device.platform)
    mesh_shape = choose_mesh_shape(config.mesh, jax.device_count(), is_cpu=is_cpu)
    layout = make_layout(mesh_shape, config.sharding)
    _check_processes(config, processes, mesh_shape)

    checkpoint = open_checkpoint(config.model, progress=progress)
    model = make_model(checkpoint.spec, config, execution, layout)
    spec = model.spec
    folder = _open_compiled(config, layout, spec)
    max_model_len = check_context_length(config.model.max_model_len, spec, key="model.max_model_len", model=checkpoint.name)
    params = checkpoint.load_params(model, layout=layout, progress=progress)
    logger.info("loaded %s (%s, %s) in %.1f s", checkpoint.name, checkpoint.format, config.model.dtype, time.monotonic() - started)

    memory = processes.smallest(device_memory(jax.local_devices()[0]))
    plan, buckets = plan_programs(config, model, execution, layout, max_model_len=max_model_len, memory=memory)
    processes.agree({"the model": spec_sha256(spec)[:12], "layers": execution.layers, "attention": plan.attention.name, "pages": plan.shape.num_pages})
    logger.info("%s, mesh %s: jax %s, layers: %s, attention: %s", device.device_kind, mesh_shape, jax.__version__, execution.layers, plan.attention.name)
    _log_what_fits(params, plan, max_model_len)
    if is_cpu and config.engine.bind_threads and (processors := bind_compute_threads()):
        logger.info("bound %d compute threads to a processor each: %s", len(processors), ", ".join(map(str, processors)))
    with contextlib.nullcontext() if folder is None else folder.in_use():
        runner = DeviceRunner(
            model, params, plan, buckets,
            max_num_seqs=config.scheduler.max_num_seqs,
            num_host_pages=num_host_pages(plan, config.cache, is_cpu=is_cpu) if processes.count == 1 else 0,
            on_step=None if processes.sender is None else processes.sender.send,
            compile_program=compile_program if folder is None else folder.compile,
        )  # fmt: skip
        if config.engine.warmup:
            runner.warmup(None if progress is None else lambda done, total: progress("compiling", done, total))
        else:
            logger.info("no warm-up: programs are compiled when they are needed")
    if folder is not None and config.engine.warmup:
        folder.log_summary()
    release_unused()
    processes.meet()
    return Built(runner, model, checkpoint)


def make_engine(runner: DeviceRunner, tokenizer: Tokenizer, model: Model, checkpoint: Checkpoint, config: Config) -> Engine:
    """The engine on a runner that is ready: its host half, which only the leading process has."""
    name = config.server.served_model_name or checkpoint.name
    defaults = checkpoint.generation_defaults
    return Engine(
        runner, tokenizer, model.spec, config, model_name=name, model_revision=checkpoint.revision, sampling_defaults=defaults, overlap=overlaps(config)
    )  # fmt: skip


def overlaps(config: Config) -> bool:
    """Whether steps overlap: as configured, else on accelerators only. On a CPU the host's work and the step share the processors."""
    return jax.default_backend() != "cpu" if config.engine.overlap is None else config.engine.overlap


def _check_processes(config: Config, processes: Processes, mesh: MeshShape) -> None:
    if processes.count == 1 and len(config.distributed.hosts) > 1:
        raise ConfigError(f"distributed.hosts names {len(config.distributed.hosts)} hosts; only jaxserve run works on several, here it must be empty")
    if processes.count > 1 and mesh.size != jax.device_count():
        raise ConfigError(f"the mesh {mesh} leaves devices of the {processes.count} hosts unused; it must take all {jax.device_count()}")
    if processes.count > 1 and config.scheduler.preemption == "swap":
        raise ConfigError("scheduler.preemption is swap; on several hosts it must be recompute or auto: no page is swapped there")


def _open_compiled(config: Config, layout: Layout, spec: ModelSpec) -> CompiledFolder | None:
    if config.engine.compiled is None:
        return None
    return CompiledFolder(Path(config.engine.compiled), facts=live_facts(list(layout.mesh.devices.flat)), config=config, spec=spec)


def _log_what_fits(params: Params, plan: PoolPlan, max_model_len: int) -> None:
    weight_bytes = sum(array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(params))
    each = "" if plan.layout.is_single_device else " a device"
    logger.info(
        "weights %.2f GiB%s, KV pool %.2f GiB%s: %d pages of %d tokens (%s), %d tokens in all",
        weight_bytes / 2**30, each, plan.device_bytes / 2**30, each, plan.shape.num_pages, plan.shape.page_size, plan.shape.dtype, plan.num_tokens,
    )  # fmt: skip
    lengths = sorted({length for length in (1024, 4096, 16384) if length < max_model_len} | {max_model_len})
    logger.info("room for %s", ", ".join(f"{plan.num_tokens / length:.1f} sequences of {length} tokens" for length in lengths))


def _enable_compilation_cache() -> None:
    settings: dict[str, Any] = {
        "jax_compilation_cache_dir": str(cache_folder() / "compiled"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        "jax_compilation_cache_max_size": _CACHE_MAX_BYTES,
    }
    for name, value in settings.items():
        jax.config.update(name, value)

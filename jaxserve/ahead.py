"""Compiles all programs of an engine ahead of time, for devices of this machine or chips that are not here, into a folder.

Runs as a process of its own: ``python -m jaxserve.ahead``. A GPU's compiler serves one kind of chip a process.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

import jax

from jaxserve.config import Config, load_config
from jaxserve.engine.device.runner import DeviceRunner
from jaxserve.engine.programs.compiled_folder import ProgramRecorder, live_facts
from jaxserve.engine.programs.manifest import Manifest
from jaxserve.engine.programs.memory import Memory, device_memory
from jaxserve.engine.programs.plan import compile_all, lower_bucket, make_model, plan_programs
from jaxserve.engine.programs.pool_plan import PoolPlan
from jaxserve.engine.step.execution import Execution, choose_execution
from jaxserve.engine.step.function import abstract_params
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.mesh import Layout, make_layout
from jaxserve.mesh_axes import MESH_AXES, axis_names
from jaxserve.mesh_shape import MeshShape, choose_mesh_shape, configured_sizes
from jaxserve.models.context_length import check_context_length
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.specs import open_spec
from jaxserve.models.model import Model
from jaxserve.plan.compile_layout import compiler_words, device_bytes, topology_devices
from jaxserve.plan.topology import Topology, parse_topology

Progress = Callable[[int, int], None]


def main(arguments: list[str]) -> int:
    """``FOLDER TARGET SETTINGS``: compiles; prints JSON objects, one a line.

    ``{"done", "total"}`` as programs are made, a summary at the end, or ``{"error", "kind"}``.

    Args:
        arguments: The folder, which exists and is empty; the target, empty for the devices of this machine; full key -> value of the configuration as JSON.
    """
    folder, target, settings = arguments

    def show(done: int, total: int) -> None:
        print(json.dumps({"done": done, "total": total}), flush=True)

    try:
        manifest = compile_ahead(load_config(values=json.loads(settings)), Path(folder), parse_topology(target) if target else None, show)
    except JaxserveError as error:
        print(json.dumps({"error": str(error), "kind": "config" if isinstance(error, ConfigError) else "failed"}), flush=True)
        return 1
    except jax.errors.JaxRuntimeError as error:
        print(json.dumps({"error": compiler_words(str(error)), "kind": "failed"}), flush=True)
        return 1
    steps = [program for program in manifest.programs if program.program_sha256]
    summary = {
        "steps": len(steps), "others": len(manifest.programs) - len(steps), "bytes": sum(program.num_bytes for program in manifest.programs),
        "compile_s": round(sum(program.compile_s for program in steps), 1), "device_kind": manifest.facts.device_kind, "jax": manifest.facts.jax,
        "runtime": manifest.facts.runtime, "mesh": str(MeshShape(**{axis: manifest.config["mesh"][axis] for axis in axis_names(MESH_AXES)})),
        "num_pages": manifest.config["cache"]["num_pages"],
        "page_size": manifest.config["cache"]["page_size"],
    }  # fmt: skip
    print(json.dumps(summary), flush=True)
    return 0


def compile_ahead(config: Config, folder: Path, target: Topology | None, progress: Progress) -> Manifest:
    """Compiles every bucket and writes the folder.

    Args:
        config: The engine's.
        folder: Exists and is empty.
        target: What for; ``None`` is the devices of this machine.
        progress: Called with the number of buckets done and of all.

    Raises:
        ConfigError: The configuration does not fit the model, the mesh or the memory.
        ModelError: The model cannot be found or served.
        jax.errors.JaxRuntimeError: The compiler gives up.
    """
    devices = jax.devices() if target is None else topology_devices(target)
    platform = devices[0].platform if target is None else target.chip.platform
    if target is None:
        mesh = choose_mesh_shape(config.mesh, len(devices), is_cpu=platform == "cpu")
    else:
        mesh = target.mesh(configured_sizes(config.mesh))
    layout = make_layout(mesh, config.sharding, devices)
    execution = choose_execution(config, platform)
    if target is None:
        checkpoint = open_checkpoint(config.model)
        name, whole = checkpoint.name, checkpoint.spec
    else:
        name, whole = open_spec(config.model.source)
    model = make_model(whole, config, execution, layout)
    max_model_len = check_context_length(config.model.max_model_len, model.spec, key="model.max_model_len", model=name)
    memory = _memory_beside(model, layout, target)
    plan, buckets = plan_programs(config, model, execution, layout, max_model_len=max_model_len, memory=memory)
    recorder = ProgramRecorder(folder)
    with recorder.in_use():
        if target is None:
            # An engine without weights: what it compiles beside its steps, to make and move pages, is kept too.
            runner = DeviceRunner(
                model, abstract_params(model, layout), plan, buckets, max_num_seqs=config.scheduler.max_num_seqs, compile_program=recorder.compile
            )
            runner.warmup(progress)
        else:
            params, max_num_seqs = abstract_params(model, layout), config.scheduler.max_num_seqs
            compile_all(buckets, lambda bucket: recorder.compile(lower_bucket(model, params, plan, bucket, max_num_seqs=max_num_seqs), bucket), progress)
    return recorder.finish(
        target="" if target is None else str(target),
        facts=live_facts(list(layout.mesh.devices.flat)),
        config=_pinned(config, execution, layout, plan, max_model_len),
        spec=model.spec,
    )


def _memory_beside(model: Model, layout: Layout, target: Topology | None) -> Memory:
    """A device's memory with the weights in it."""
    weight_bytes = device_bytes(abstract_params(model, layout))
    if target is not None:
        chip = target.chip
        if weight_bytes >= chip.usable_bytes:
            raise ConfigError(
                f"the weights take {weight_bytes / 2**30:.1f} GiB of each device of {target} on the mesh {layout.shape}; a program may use "
                f"{chip.usable_bytes / 2**30:.1f} GiB there (jaxserve plan says what would fit)"
            )
        return Memory(chip.usable_bytes, chip.usable_bytes - weight_bytes)
    memory = device_memory(jax.devices()[0])
    sharers = layout.mesh.size if jax.devices()[0].platform == "cpu" else 1
    return Memory(memory.total_bytes, max(0, memory.free_bytes - sharers * weight_bytes))


def _pinned(config: Config, execution: Execution, layout: Layout, plan: PoolPlan, max_model_len: int) -> Config:
    """The configuration with everything that programs hang on and that it left open."""
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, max_model_len=max_model_len),
        mesh=dataclasses.replace(config.mesh, **layout.shape),
        cache=dataclasses.replace(config.cache, num_pages=plan.shape.num_pages, dtype=execution.kv_dtype.name),
        engine=dataclasses.replace(
            config.engine,
            attention=plan.attention.name,
            layers=execution.layers,
            token_buckets=execution.token_buckets,
            sequence_buckets=execution.sequence_buckets,
            compiled=None,
        ),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

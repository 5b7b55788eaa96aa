"""Compiles one step of one layout for one topology. Runs as a process of its own: ``python -m jaxserve.plan.compile_layout REQUEST``."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from jaxserve.config import load_config
from jaxserve.dims import ceil_div
from jaxserve.engine.programs.plan import lower_bucket, make_model, pool_of_size
from jaxserve.engine.step.buckets import Bucket
from jaxserve.engine.step.execution import choose_execution
from jaxserve.engine.step.function import abstract_params
from jaxserve.errors import JaxserveError
from jaxserve.kernels_pallas.proof.targets import gpu_config
from jaxserve.mesh import make_layout
from jaxserve.models.loading.specs import open_spec
from jaxserve.plan.request import STEPS, LayoutRequest
from jaxserve.plan.topology import Topology, parse_topology
from jaxserve.plan.traffic import measure_traffic

_OUT_OF_MEMORY = re.compile(r"[^.\n]*(?:out of memory|OOM)[^\n]*", re.IGNORECASE)


def main(request_json: str) -> int:
    """Prints JSON objects, one a line: ``{"arrays": …}``, then what the compile gave, or ``{"error": …, "kind": …}``."""
    request = LayoutRequest.from_json(request_json)
    target = parse_topology(request.target)
    try:
        for row in compile_step(request, topology_devices(target), platform=target.chip.platform):
            print(json.dumps(row), flush=True)
    except JaxserveError as error:
        print(json.dumps({"error": str(error), "kind": "refused"}), flush=True)
    except jax.errors.JaxRuntimeError as error:
        print(json.dumps({"error": compiler_words(str(error)), "kind": "memory" if "RESOURCE_EXHAUSTED" in str(error) else "failed"}), flush=True)
    return 0


def topology_devices(topology: Topology) -> list[Any]:
    """The devices of chips that need not be here."""
    if topology.chip.platform == "tpu":
        return list(topologies.get_topology_desc(platform="tpu", topology_name=str(topology)).devices)
    return list(topologies.get_topology_desc("", "cuda", target_config=gpu_config(topology.chip.name), topology=f"1x1x{topology.num_chips}").devices)


def compile_step(request: LayoutRequest, devices: list[Any], *, platform: str) -> Iterator[dict[str, Any]]:
    """Compiles one step; yields what ``main`` prints.

    Args:
        request: What to compile.
        devices: Real ones, or those of a topology that is only compiled for.
        platform: jax's name: ``cpu``, ``gpu`` or ``tpu``.

    Raises:
        ConfigError: The model cannot be split so, or no attention serves it.
        jax.errors.JaxRuntimeError: The compiler gives up; out of memory above all.
    """
    load, mesh, config = request.load, request.mesh, load_config(overrides=request.settings)
    layout = make_layout(mesh, config.sharding, devices)
    execution = choose_execution(config, platform)
    model = make_model(open_spec(request.source)[1], config, execution, layout)
    rows, page_size = load.rows(mesh.data), config.cache.page_size
    table_width = ceil_div(load.context, page_size)
    buckets = {step: Bucket(load.tokens(step, mesh.data), rows, table_width, step == "decode", execution.sampling[-1]) for step in STEPS}
    plan = pool_of_size(
        model, layout, list(buckets.values()), num_pages=load.sequences(mesh.data) * table_width, page_size=page_size, kv_dtype=execution.kv_dtype,
        attention=config.engine.attention,
    )  # fmt: skip
    params = abstract_params(model, layout)
    yield {"arrays": {"weights": device_bytes(params), "kv": plan.device_bytes}, "attention": plan.attention.name, "layers": execution.layers}
    started = time.perf_counter()
    compiled = lower_bucket(model, params, plan, buckets[request.step], max_num_seqs=rows).compile()
    seconds = time.perf_counter() - started
    memory, program = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and program is not None, "every backend that we compile for tells both"
    yield {
        "compile_s": round(seconds, 2),
        "temp": memory.temp_size_in_bytes,
        "total": memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes,
        "traffic": dataclasses.asdict(measure_traffic(program, mesh)),
        "program_sha256": hashlib.sha256(program.encode()).hexdigest(),
    }


def device_bytes(tree: Any) -> int:
    """Bytes of arrays, abstract or real, on one device."""
    return sum(int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def compiler_words(message: str) -> str:
    """What a compiler's error says, without the list of buffers that follows it."""
    match = _OUT_OF_MEMORY.search(message)
    return (match.group() if match else message.splitlines()[0]).strip()[:400]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

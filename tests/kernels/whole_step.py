"""Compiles whole decode and mixed steps of large models for one target. A process of its own: ``python -m tests.kernels.whole_step TARGET MODEL…``."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from functools import partial

import jax.numpy as jnp

from jaxserve.config import ShardingConfig
from jaxserve.engine.programs.plan import lower_bucket, pool_of_size
from jaxserve.engine.step.buckets import Bucket
from jaxserve.engine.step.function import abstract_params
from jaxserve.kernels_pallas.proof.compiling import compile_report, device_of
from jaxserve.kernels_pallas.proof.targets import TPU_TOPOLOGIES
from jaxserve.mesh import make_layout
from jaxserve.mesh_shape import MeshShape
from jaxserve.models.loading.specs import open_spec
from jaxserve.models.model import build_model
from jaxserve.models.spec import LayerGroup, ModelSpec

SHAPES = {"decode": (64, 64, 512, True), "mixed": (512, 64, 512, False)}


def local_spec(name: str, ranks: int) -> ModelSpec:
    """The model with the shapes of one of ``ranks`` tensor-parallel ranks."""
    spec = open_spec(name)[1]
    (group,) = spec.groups
    (kind,) = group.unit
    attention = dataclasses.replace(kind.attention, num_heads=kind.attention.num_heads // ranks, num_kv_heads=kind.attention.num_kv_heads // ranks)
    mlp = dataclasses.replace(kind.mlp, width=kind.mlp.width // ranks)
    return dataclasses.replace(spec, groups=(LayerGroup.uniform(attention, mlp, group.layers),), vocab_size=spec.vocab_size // ranks)


MODELS = {"llama-3.1-8b": (1, 2048), "llama-3.1-70b": (8, 4096)}
"""Ranks that share the model, and pages."""


def main(target: str, *names: str) -> None:
    layers, sampling = ("scan", "any") if target in TPU_TOPOLOGIES else ("unroll", "filtered")
    for name in names:
        ranks, num_pages = MODELS[name]
        spec = local_spec(name, ranks)
        model = build_model(spec, dtype=jnp.dtype(jnp.bfloat16), layers=layers)
        for kind, sizes in SHAPES.items():
            bucket = Bucket(*sizes, sampling)
            with device_of(target) as sharding:
                layout = make_layout(MeshShape(), ShardingConfig(), list(sharding.mesh.devices.flat))
                plan = pool_of_size(model, layout, [bucket], num_pages=num_pages, page_size=16, kv_dtype=jnp.bfloat16)
                params = abstract_params(model, layout)
                begin_s = time.process_time()
                report = compile_report(partial(lower_bucket, model, params, plan, bucket, max_num_seqs=64), plan.abstract())
                cpu_s = time.process_time() - begin_s
            result = {"model": name, "kind": kind, "attention": plan.attention.name, "cpu_seconds": round(cpu_s, 2)} | dataclasses.asdict(report)
            result["in_place"] = report.in_place
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Compiles whole decode and mixed steps of large models for one target. A process of its own: ``python -m tests.kernels.whole_step TARGET MODEL…``."""

from __future__ import annotations

import dataclasses
import json
import sys
import time

import jax
import jax.numpy as jnp

from jaxserve.config import ShardingConfig
from jaxserve.engine.step.batch import Bucket
from jaxserve.engine.step.function import Carry, attention_problem, make_step
from jaxserve.kernels_pallas.proof.compiling import compile_report, device_of, place
from jaxserve.kernels_pallas.proof.targets import TPU_TOPOLOGIES
from jaxserve.kernels_pallas.ragged_paged_attention.api import PoolShape, choose_implementation
from jaxserve.mesh import make_layout
from jaxserve.mesh_shape import MeshShape
from jaxserve.models.loading.specs import open_spec
from jaxserve.models.model import build_model
from jaxserve.models.spec import ModelSpec

BUCKETS = {"decode": Bucket(64, 64, 512, True), "mixed": Bucket(512, 64, 512, False)}


def local_spec(name: str, ranks: int) -> ModelSpec:
    """The model with the shapes of one of ``ranks`` tensor-parallel ranks."""
    spec = open_spec(name)[1]
    return dataclasses.replace(
        spec, num_heads=spec.num_heads // ranks, num_kv_heads=spec.num_kv_heads // ranks, mlp_width=spec.mlp_width // ranks, vocab_size=spec.vocab_size // ranks
    )  # fmt: skip


MODELS = {"llama-3.1-8b": (1, 2048), "llama-3.1-70b": (8, 4096)}
"""Ranks that share the model, and pages."""


def main(target: str, *names: str) -> None:
    layers = "scan" if target in TPU_TOPOLOGIES else "unroll"
    for name in names:
        ranks, num_pages = MODELS[name]
        spec = local_spec(name, ranks)
        model = build_model(spec, dtype=jnp.dtype(jnp.bfloat16), layers=layers)
        shape = PoolShape(
            num_layers=spec.num_layers, num_pages=num_pages, page_size=16, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, dtype=jnp.bfloat16
        )  # fmt: skip
        for kind, bucket in BUCKETS.items():
            with device_of(target) as sharding:
                layout = make_layout(MeshShape(), ShardingConfig(), list(sharding.mesh.devices.flat))
                attention = choose_implementation("auto", attention_problem(model, bucket, shape, layout))
                step = make_step(model, bucket, shape=shape, attention=attention, layout=layout)
                packed = jax.ShapeDtypeStruct((1, bucket.packed_size), jnp.int32)
                carry = Carry(jax.ShapeDtypeStruct((64,), jnp.int32))
                arguments = place((model.abstract_params(), attention.init_pool(shape), carry, packed), sharding)
                begin_s = time.process_time()
                report = compile_report(step, arguments, arguments[1], donate=(1, 2))
                cpu_s = time.process_time() - begin_s
            result = {"model": name, "kind": kind, "attention": attention.name, "cpu_seconds": round(cpu_s, 2)} | dataclasses.asdict(report)
            result["in_place"] = report.in_place
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

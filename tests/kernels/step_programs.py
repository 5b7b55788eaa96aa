"""Compiles the programs of one small bucket of a tiny model for one target. Run as a process of its own: ``python -m tests.kernels.step_programs TARGET``."""

from __future__ import annotations

import dataclasses
import json
import re
import sys

from jaxserve.config import CacheConfig, Config, ModelConfig, SchedulerConfig, ShardingConfig
from jaxserve.engine.programs.memory import Memory
from jaxserve.engine.programs.plan import lower_bucket, make_model, plan_programs
from jaxserve.engine.step.execution import choose_execution
from jaxserve.engine.step.function import abstract_params
from jaxserve.mesh import make_layout
from jaxserve.mesh_shape import MeshShape
from jaxserve.models.attention_kind import GroupedQueryAttention
from jaxserve.models.mlp_kind import GatedMlp
from jaxserve.models.spec import LayerGroup, LayerSpec, ModelSpec, RopeSpec
from jaxserve.plan.compile_layout import topology_devices
from jaxserve.plan.topology import parse_topology

ATTENTION = GroupedQueryAttention(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125)
SPEC = ModelSpec(
    family="llama", vocab_size=4096, width=256, groups=(LayerGroup.uniform(ATTENTION, GatedMlp(width=256, activation="silu"), (LayerSpec(),)),),
    max_position=256, norm_eps=1e-5, ropes=(RopeSpec(inv_freq=tuple(10_000.0 ** (-2 * i / 64) for i in range(32))),), tied=True,
)  # fmt: skip
"""Its vocabulary, split in two, is larger than the candidates that a part sends."""


def main(name: str) -> None:
    """Prints a JSON object for each program of the smallest shapes, and for one that decides on the device: what it is, and its conditionals."""
    topology = parse_topology(name)
    config = Config(
        model=ModelConfig(dtype="bfloat16"), cache=CacheConfig(num_pages=64, page_size=16), scheduler=SchedulerConfig(max_num_seqs=8, max_tokens_per_step=32)
    )
    execution = choose_execution(config, topology.chip.platform)
    for mesh in (MeshShape(), MeshShape(1, topology.num_chips)):
        layout = make_layout(mesh, ShardingConfig(), topology_devices(topology))
        model = make_model(SPEC, config, execution, layout)
        plan, buckets = plan_programs(config, model, execution, layout, max_model_len=256, memory=Memory(2**34, 2**34))
        smallest = dataclasses.replace(buckets.all()[0], sampling="any")
        programs = [bucket for bucket in buckets.all() if dataclasses.replace(bucket, sampling="any") == smallest]
        for bucket in [*programs, smallest] if layout.is_single_device else programs:
            text = lower_bucket(model, abstract_params(model, layout), plan, bucket, max_num_seqs=8).compile().as_text()
            assert text is not None
            print(json.dumps({"mesh": str(mesh), "sampling": bucket.sampling, "conditionals": len(re.findall(r"\bconditional\(", text))}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

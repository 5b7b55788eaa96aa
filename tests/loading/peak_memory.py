"""Loads a synthetic checkpoint in a process of its own and prints parameter bytes and the peak of anonymous memory above the start, as JSON."""

from __future__ import annotations

import argparse
import json
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxserve.config import ModelConfig, ShardingConfig
from jaxserve.mesh import make_layout
from jaxserve.mesh_shape import MeshShape, parse_mesh
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.model import build_model
from jaxserve.models.sharding import fit_kv_heads


def anonymous_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


class PeakWatch:
    """Samples anonymous memory every millisecond."""

    def __init__(self) -> None:
        self.start = self.peak = anonymous_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.peak = max(self.peak, anonymous_bytes())
            time.sleep(0.001)

    def stop(self) -> int:
        self._stop.set()
        self._thread.join()
        return max(self.peak, anonymous_bytes()) - self.start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("source")
    parser.add_argument("--layers", default="scan")
    parser.add_argument("--mesh", default="data=1,model=1")
    args = parser.parse_args()
    jnp.zeros(8).block_until_ready()
    checkpoint = open_checkpoint(ModelConfig(source=args.source))
    layout = make_layout(MeshShape(**parse_mesh(args.mesh)), ShardingConfig())
    spec = fit_kv_heads(checkpoint.spec, layout.rules, replicate=True)
    watch = PeakWatch()
    params = checkpoint.load_params(build_model(spec, dtype="bfloat16", layers=args.layers), layout=layout)
    peak = watch.stop()
    print(json.dumps({"params": sum(leaf.nbytes for leaf in jax.tree.leaves(params)), "peak": peak}))


if __name__ == "__main__":
    main()

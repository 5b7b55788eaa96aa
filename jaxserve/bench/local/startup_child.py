"""One start of the engine, timed by phase. Runs as a process of its own: ``python -m jaxserve.bench.local.startup_child CONFIG_FILE SPAWNED_S``."""

# pyright: basic
# jax is not typed strictly.
from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from jaxserve.bench.local.stopwatch import Stopwatch
from jaxserve.config import load_config
from jaxserve.errors import JaxserveError
from jaxserve.platform import choose_platform

PROMPT_LEN = 16


def main(config_file: str, spawned_s: str) -> int:
    """Prints ``{"model", "device", "jax", "phases"}``, seconds by phase, or ``{"error"}``.

    Args:
        config_file: What to build.
        spawned_s: ``time.time()`` of whoever started this process.
    """
    interpreter_s = time.time() - float(spawned_s)
    try:
        row = start(Path(config_file), interpreter_s)
    except JaxserveError as error:
        row = {"error": str(error)}
    print(json.dumps(row), flush=True)
    return 0


def start(config_file: Path, interpreter_s: float) -> dict[str, Any]:
    """Builds an engine and takes one token from it."""
    stopwatch = Stopwatch()
    with stopwatch.phase("imports"):
        config = load_config([config_file])
        choose_platform(config.platform)

        import jax

        from jaxserve.engine import build
        from jaxserve.models.loading.checkpoint import Checkpoint
        from jaxserve.request import SamplingParams
    with stopwatch.phase("device"):
        device = jax.devices()[0]
    stopwatch.watch(build, "open_checkpoint", "open")
    stopwatch.watch(Checkpoint, "load_params", "weights")
    stopwatch.watch(build.DeviceRunner, "warmup", "compile")
    stopwatch.watch(build, "DeviceRunner", "pool")
    stopwatch.watch(build, "load_tokenizer", "tokenizer")
    engine = build.build_engine(config)
    with stopwatch.phase("first token"):
        sampling_params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        engine.add(engine.make_request(range(PROMPT_LEN), sampling_params))
        while engine.has_work:
            engine.step()
    phases = {"interpreter": interpreter_s} | stopwatch.read()
    return {"model": engine.model_name, "device": device.device_kind, "jax": jax.__version__, "phases": phases}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

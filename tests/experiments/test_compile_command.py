"""``jaxserve compile`` and ``--compiled``, as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxserve.kernels_pallas.proof.targets import missing
from tests.experiments.tiny_checkpoint import tiny_checkpoint
from tests.loading.builders import tiny_config

ROOT = Path(__file__).parents[2]
SETTINGS = [
    "model.dtype=float32", "scheduler.max_num_seqs=2", "scheduler.max_tokens_per_step=16", "engine.token_buckets=16", "engine.sequence_buckets=2",
    "cache.num_pages=16",
]  # fmt: skip
COUNTING = """
import collections, json, jax, sys
events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **facts: events.update([event.rpartition("/")[2]]))
from jaxserve.cli.app import app
try:
    app(prog_name="jaxserve")
finally:
    print(json.dumps(events))
"""


def run(*words: str, counting: bool = False) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    head = ["-c", COUNTING] if counting else ["-m", "jaxserve"]
    return subprocess.run([sys.executable, *head, *words], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)


def test_a_start_from_the_folder_compiles_nothing(tmp_path: Path) -> None:
    model, out = str(tiny_checkpoint(tmp_path / "tiny")), tmp_path / "out"
    made = run("compile", model, "--out", str(out), "--mesh", "data=2,model=2", *SETTINGS)
    assert made.returncode == 0, made.stderr
    assert f"jaxserve run --compiled {out}" in made.stdout
    words = ["generate", "--prompt", "ABC", "--prompt", "BA", "--temperature", "0", "--max-tokens", "6", "--json", "engine.compilation_cache=no"]
    warm = run(*words, "--compiled", str(out), "engine.warmup=yes", counting=True)
    assert warm.returncode == 0, warm.stderr
    *answers, counted = warm.stdout.splitlines()
    events: dict[str, int] = json.loads(counted)
    assert events["cache_hits"] == events["compile_requests_use_cache"] > 2
    assert "cache_misses" not in events
    assert ": 0 compiled here" not in warm.stderr
    assert ", 0 compiled here" in warm.stderr
    plain = run(*words, model, "--mesh", "data=2,model=2", *SETTINGS)
    assert plain.returncode == 0, plain.stderr
    assert tokens(plain.stdout.splitlines()) == tokens(answers)


def tokens(lines: list[str]) -> list[Any]:
    return [json.loads(line)["token_ids"] for line in lines]


def test_bad_input(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    assert "is not empty" in refused("compile", "smollm2-135m", "--out", str(tmp_path / "full"))
    assert "v6e does not come as '9x9'" in refused("compile", "smollm2-135m", "--on", "v6e:9x9", "--out", str(tmp_path / "new"))
    assert "cannot read its manifest.json" in refused("generate", "--prompt", "x", "--compiled", str(tmp_path / "full"))


def refused(*words: str) -> str:
    done = run(*words)
    assert done.returncode == 2
    assert done.stdout == ""
    return done.stderr


@pytest.mark.aot
@pytest.mark.parametrize(
    ("target", "kind", "variants"),
    [("v6e:2x2", "TPU v6 lite", [""]), ("h200:2", "NVIDIA H200", ["_filtered", "_plain", "_greedy"])],  # a GPU's programs have no conditional
)
def test_programs_for_chips_that_are_not_here(tmp_path: Path, target: str, kind: str, variants: list[str]) -> None:
    reason = missing(target.partition(":")[0])
    if reason is not None:
        pytest.skip(reason)
    out = tmp_path / "out"
    model = tmp_path / "config.json"  # bare, without weights
    model.write_text(json.dumps(tiny_config("llama", hidden_size=256, head_dim=64)))
    made = run("compile", str(model), "--on", target, "--mesh", "data=2,model=1", "--out", str(out), *SETTINGS, "model.dtype=bfloat16")
    assert made.returncode == 0, made.stderr
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["target"], manifest["facts"]["device_kind"], manifest["facts"]["num_devices"]) == (target, kind, 2)
    assert manifest["config"]["mesh"]["data"] == 2
    assert {program["name"] for program in manifest["programs"]} == {f"{shape}{variant}" for shape in ("decode_2", "mixed_16x2") for variant in variants}
    assert all((out / program["file"]).stat().st_size == program["num_bytes"] > 10_000 for program in manifest["programs"])

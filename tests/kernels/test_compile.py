"""Real compiles for chips that are not here. ``pytest -m aot`` with libtpu or jax's CUDA plugin installed."""

import json
import subprocess

import pytest

from jaxserve.kernels_pallas.proof import targets
from jaxserve.kernels_pallas.proof.check import compile_cells
from jaxserve.kernels_pallas.proof.compiling import large_copies
from jaxserve.kernels_pallas.ragged_paged_attention.proof.registration import PROOF


def needs(target):
    reason = targets.missing(target)
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.aot
@pytest.mark.parametrize("target", targets.TARGETS)
def test_the_op_compiles_in_place(target):
    needs(target)
    cells = list(compile_cells(PROOF, target, "quick"))
    assert len(cells) == 3
    assert all(cell.held for cell in cells), cells


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("target", targets.TARGETS)
def test_every_combination_compiles(target):
    needs(target)
    cells = list(compile_cells(PROOF, target, "all"))
    assert len(cells) == 30
    assert all(cell.held for cell in cells), [cell for cell in cells if not cell.held]


@pytest.mark.aot
@pytest.mark.parametrize("model", ["llama-3.1-8b", pytest.param("llama-3.1-70b", marks=pytest.mark.slow)])
@pytest.mark.parametrize("target", ["v6e", pytest.param("h200", marks=pytest.mark.slow)])
def test_whole_steps_of_large_models_compile(target, model):
    """Their pools stay in place. The reports tell what the compiles took; for GPU, where layers are unrolled, minutes."""
    needs(target)
    command = targets.command("tests.kernels.whole_step", target, model)
    done = subprocess.run(command, env=targets.environment(target), capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [report["kind"] for report in reports] == ["decode", "mixed"]
    assert all(report["in_place"] for report in reports), reports


@pytest.mark.aot
def test_no_program_of_a_gpu_has_a_conditional():
    """The host would wait for the device at each. On two chips the sampler is the one of a split vocabulary."""
    needs("h200")
    done = subprocess.run(
        targets.command("tests.kernels.step_programs", "h200:2"), env=targets.environment("h200"), capture_output=True, text=True, timeout=900, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    programs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [(program["mesh"], program["sampling"]) for program in programs] == [
        (mesh, sampling)
        for mesh in ("data=1,model=1", "data=1,model=2")
        for sampling in ("filtered", "greedy", "plain", "any")
        if (mesh, sampling) != ("data=1,model=2", "any")
    ]
    for program in programs:
        assert (program["conditionals"] > 0) == (program["sampling"] == "any"), program


def test_copies_of_the_pool_are_seen():
    program = """
  %copy.1 = bf16[64,8,16,256]{3,2,1,0:T(8,128)(2,1)} copy(%param.1)
  %fusion = bf16[64,8,16,256]{3,2,1,0} fusion(%param.1), kind=kLoop
  ROOT %transpose.3 = s8[128]{0} transpose(%x)
  %copy-start.2 = (bf16[4,4]{1,0}, bf16[4,4]{1,0}, u32[]) copy-start(%y)
"""
    assert large_copies(program, 64 * 8 * 16 * 256 * 2) == 1
    assert large_copies(program, 128) == 2
    assert large_copies(program, 32) == 3

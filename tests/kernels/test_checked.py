"""The checking interpreter: kernels are clean in it, and it finds seeded bugs. Each run is a process with a time limit, since a wrong semaphore hangs."""

import json
import os
import re
import subprocess
import sys

import pytest

from jaxserve.kernels_pallas.ragged_paged_attention.proof.registration import PROOF


def run(module, *arguments, time_limit_s):
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=time_limit_s, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr[-2000:]
    return lines


@pytest.mark.parametrize(
    ("bug", "found"),
    [("missing_wait", "wrong result|race|RACE"), ("page_out_of_range", "[Oo]ut-of-bounds"), ("wrong_row", "wrong result")],
)
def test_seeded_bugs_are_caught(bug, found):
    (result,) = run("tests.kernels.seeded_bugs", bug, time_limit_s=600)
    assert result["problem"] is not None
    assert re.search(found, result["problem"]), result


def test_kernels_are_clean():
    names = PROOF.quick_checked_cases[:3]
    results = run("jaxserve.kernels_pallas.proof.checked", PROOF.name, *names, time_limit_s=900)
    assert {result["name"] for result in results} == set(names)
    assert all(result["problem"] is None for result in results), results


@pytest.mark.slow
def test_kernels_are_clean_on_all_small_cases():
    results = run("jaxserve.kernels_pallas.proof.checked", PROOF.name, time_limit_s=1200)
    assert len(results) == len(PROOF.checked_cases) > 30
    assert all(result["problem"] is None for result in results), results

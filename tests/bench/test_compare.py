"""Servers started, run in turn, compared and ended; and the look at other processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxserve.bench.compare import parse_contender
from jaxserve.bench.processes import cpu_use, read_cpu, resident_mib, running
from jaxserve.errors import BenchmarkError, ConfigError
from tests.bench.test_cli import Command, command  # noqa: F401 - a fixture

PYTHON = sys.executable
FAKE = f"{PYTHON} -m tests.bench.fake_server --forever --port {{port}} --ttft"


@pytest.mark.parametrize("text", ["x", "=http://a", "a=", "a=python server.py", "a@x=python server.py"])
def test_bad_servers(text: str) -> None:
    with pytest.raises(ConfigError, match="--server"):
        parse_contender(text)


def test_servers() -> None:
    assert parse_contender("a=http://b:1/v1").url == "http://b:1"
    assert parse_contender("a@8001=./run.sh").url == "http://127.0.0.1:8001"
    free = parse_contender("a=run --port {port} x={port}")
    assert free.command == "run --port {0} x={0}".format(free.url.rpartition(":")[2])


def test_a_group_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    script = f"import subprocess; print(subprocess.Popen(['{PYTHON}', '-c', 'import time; time.sleep(60)']).pid, flush=True); import time; time.sleep(60)"
    with running("x", f'{PYTHON} -c "{script}"', tmp_path / "log") as process:
        deadline = time.monotonic() + 10
        while not (tmp_path / "log").read_text().strip() and time.monotonic() < deadline:
            time.sleep(0.02)
        child = int((tmp_path / "log").read_text())
        assert (resident_mib([process.pid]) or 0) > 5
    assert process.returncode is not None
    assert not Path(f"/proc/{child}/cmdline").exists() or not Path(f"/proc/{child}/cmdline").read_text()
    with pytest.raises(BenchmarkError, match="cannot start"), running("x", "/no/such/program", tmp_path / "log"):
        pass


def test_other_processes_are_told_from_ours() -> None:
    burn = "import time\nwhile time.process_time() < 0.4: pass"
    before = read_cpu([os.getpid()])
    subprocess.run([PYTHON, "-c", burn], check=True)
    after = read_cpu([os.getpid()])
    assert before is not None and after is not None
    spent_s = cpu_use(before, after).ours * (after.at_s - before.at_s)
    assert 0.3 < spent_s < 1.5  # a child's time is its parent's once it has ended


def test_two_servers_in_turn(command: Command, tmp_path: Path) -> None:  # noqa: F811
    files = tmp_path / "a.json", tmp_path / "a.html"
    load = ("--concurrency", "1,2", "--num-requests", "4", "--output-len", "3", "--warmup", "0", "--settle", "0")
    servers = ("--server", f"fast={FAKE} 0.02", "--server", f"slow={FAKE} 0.06")
    status, out, err = command(
        *servers, *load, "--rounds", "2", "--log-folder", str(tmp_path), "--json", str(files[0]), "--html", str(files[1]), verb="compare"
    )
    assert status == 0, err
    assert "x is against fast" in out
    found = json.loads(files[0].read_text())
    order = [(run["level"], run["round"], run["server_name"]) for run in found["runs"]]
    assert order == [(level, round_, name) for level in (0, 1) for round_ in (0, 1) for name in ("fast", "slow")]
    # The same prompts for both in a round, others in the next: no server finds the next round in its cache.
    seeds = {(run["round"], run["workload"]["seed"]) for run in found["runs"]}
    assert len(seeds) == 2
    assert found["levels"][0]["slow"]["median_ttft_ms"]["median_ratio"] == pytest.approx(3, rel=0.35)
    assert found["servers"][0]["ready_s"] > 0
    assert files[1].read_text().count("<svg") == 1


def test_a_server_that_does_not_come_up(command: Command, tmp_path: Path) -> None:  # noqa: F811
    words = ("--server", f"a={PYTHON} -c print({{port}})", "--server", "b=http://127.0.0.1:9", "--concurrency", "1", "--log-folder", str(tmp_path))
    status, _, err = command(*words, verb="compare")
    assert status == 1
    assert "a ended with status 0 before it was ready; see" in err
    status, _, err = command("--server", "a=http://127.0.0.1:9", "--concurrency", "1", verb="compare")
    assert (status, "at least two" in err) == (2, True)

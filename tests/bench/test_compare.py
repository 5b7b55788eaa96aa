"""Servers started, run in turn, compared and ended; and the look at other processes."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jaxserve.bench.load.compare import Comparison, Contender, Turn, _Runner, _StoppedError, compare, parse_contender
from jaxserve.bench.load.load import Record, Run
from jaxserve.bench.load.metrics import measure
from jaxserve.bench.load.processes import cpu_use, read_cpu, resident_mib, running
from jaxserve.bench.load.server_metrics import ServerFigures
from jaxserve.bench.load.session import Result, RunOptions, ServerInfo, ServerOptions
from jaxserve.bench.load.system_under_test import Outcome
from jaxserve.bench.report import compare_report
from jaxserve.bench.workload.plan import PlannedRequest
from jaxserve.bench.workload.workload import Workload
from jaxserve.errors import BenchmarkError, ConfigError
from tests.bench.fake_server import FakeModel, FakeServer
from tests.bench.test_cli import Background, Command, command  # noqa: F401 - a fixture
from tests.waiting import LIMIT_S, wait_until

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
    script = f"import subprocess; print(subprocess.Popen(['{PYTHON}', '-c', 'import time; time.sleep(600)']).pid, flush=True); import time; time.sleep(600)"
    with running("x", f'{PYTHON} -c "{script}"', tmp_path / "log") as process:
        wait_until(lambda: (tmp_path / "log").read_text().endswith("\n"))
        child = int((tmp_path / "log").read_text())
        assert (resident_mib([process.pid]) or 0) > 5
    assert process.returncode is not None
    assert not Path(f"/proc/{child}/cmdline").exists() or not Path(f"/proc/{child}/cmdline").read_text()
    with pytest.raises(BenchmarkError, match="cannot start"), running("x", "/no/such/program", tmp_path / "log"):
        pass


def test_other_processes_are_told_from_ours() -> None:
    burn = "import time\nwhile time.process_time() < 0.4: pass"
    before, began = read_cpu([os.getpid()]), os.times()
    subprocess.run([PYTHON, "-c", burn], check=True)
    after, ended = read_cpu([os.getpid()]), os.times()
    assert before is not None and after is not None
    spent_s = cpu_use(before, after).ours * (after.at_s - before.at_s)
    assert 0.3 < spent_s == pytest.approx(sum(ended[:4]) - sum(began[:4]), abs=0.1)  # a child's time is its parent's once it has ended


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
    first_s = {(run["round"], run["server_name"]): run["median_ttft_ms"] for run in found["runs"] if run["level"] == 0}
    assert min(first_s[round_, "fast"] for round_ in (0, 1)) >= 19 and min(first_s[round_, "slow"] for round_ in (0, 1)) >= 59  # no sleep is too short
    ratio = statistics.median(first_s[round_, "slow"] / first_s[round_, "fast"] for round_ in (0, 1))
    assert found["levels"][0]["slow"]["median_ttft_ms"]["median_ratio"] == pytest.approx(ratio)
    assert found["servers"][0]["ready_s"] > 0
    assert files[1].read_text().count("<svg") == 1


def turn(contender: str, round_: int, tokens_per_s: float, ttft_ms: float | None) -> Turn:
    """One run of 1 s with ``tokens_per_s`` tokens, or one in which nothing succeeded."""
    request = PlannedRequest(0, None, (), output_len=1, session=0)
    outcome: Outcome = "success" if ttft_ms is not None else "timed_out"
    times = (ttft_ms / 1e3,) if ttft_ms is not None else ()
    record = Record(request, outcome, 0.0, 0.0, 1.0, times, completion_tokens=int(tokens_per_s))
    run = Run((record,), 1.0, 0.0)
    work = Workload(arrival="closed", concurrency=1)
    return Turn(contender, 0, round_, Result(work, ServerInfo("u", "m", "openai", "ids", True, {}), measure(run), ServerFigures(), run), None)


def test_ratios_are_of_one_round() -> None:
    turns = [turn("a", 0, 10, None), turn("b", 0, 10, 30.0), turn("a", 1, 10, 20.0), turn("b", 1, 10, 40.0), turn("a", 2, 10, 10.0)]
    found = Comparison((Contender("a", "u"), Contender("b", "v")), (Workload(rate=1),), tuple(turns), {}, "b: gone")
    assert found.ratios("b", 0, "median_ttft_ms") == pytest.approx([2.0])
    assert found.ratios("a", 0, "median_ttft_ms") == pytest.approx([1.0, 1.0])


def test_a_page_of_servers_that_failed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    contenders = (Contender("a", "u"), Contender("$b$ <c>", "v"))
    for answers in ((None, None), (20.0, None)):
        turns = tuple(turn(contender.name, 0, 10, answer) for contender, answer in zip(contenders, answers, strict=True))
        compare_report.write_page(tmp_path / "a.html", Comparison(contenders, (Workload(rate=1),), turns, {}, None))
        page = (tmp_path / "a.html").read_text()
        assert page.count("<svg") == 1
        assert "$b$ &lt;c&gt;" in page


def test_a_server_that_dies_ends_a_comparison_with_what_there_was(command: Command, tmp_path: Path) -> None:  # noqa: F811
    with Background(dies_after=6) as mortal, Background() as other:  # one to see what it takes, one with ids, two rounds
        servers = ("--server", f"a={mortal.url}", "--server", f"b={other.url}", "--log-folder", str(tmp_path))
        load = ("--concurrency", "1", "--num-requests", "2", "--output-len", "3", "--warmup", "0", "--settle", "0", "--rounds", "5")
        status, out, _ = command(*servers, *load, "--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html"), verb="compare")
    assert status == 1
    assert "ended early (a: " in out
    found = json.loads((tmp_path / "a.json").read_text())
    assert [(run["round"], run["server_name"]) for run in found["runs"]] == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]
    assert found["interrupted"].startswith("a: ")


@pytest.mark.parametrize("one_at_a_time", [False, True])
def test_ctrl_c_ends_a_comparison_at_once(one_at_a_time: bool, tmp_path: Path) -> None:
    """No other server is started, nothing is waited for, and the turns until then are there."""

    class Stopping(FakeServer):
        """Ctrl-C comes with its first request."""

        async def _generate(self, given: dict[str, Any], chat: bool, writer: asyncio.StreamWriter) -> None:
            stop.set()
            await super()._generate(given, chat, writer)

    stop = asyncio.Event()

    async def main() -> Comparison:
        async with FakeServer(FakeModel(0.003, 0.001)) as first, Stopping(FakeModel(0.003, 0.001)) as second:
            contenders = (Contender("a", first.url), Contender("b", second.url))
            options = RunOptions(num_warmup=0)
            work = Workload(arrival="closed", concurrency=1, num_requests=2, output_len="2")
            server = ServerOptions(url="")
            return await asyncio.wait_for(
                compare(contenders, [work], options, server=server, rounds=50, log_folder=tmp_path, settle_s=0, one_at_a_time=one_at_a_time, stop=stop),
                LIMIT_S,
            )

    found = asyncio.run(main())
    assert found.interrupted == "stopped"
    assert [found_turn.contender for found_turn in found.turns] == (["a"] if one_at_a_time else [])


def test_waiting_for_quiet_ends_with_ctrl_c(tmp_path: Path) -> None:
    async def main() -> float:
        stop = asyncio.Event()
        runner = _Runner(RunOptions(), ServerOptions(url=""), tmp_path, 1.0, 60.0, stop)
        asyncio.get_running_loop().call_later(0.1, stop.set)
        started_s = time.monotonic()
        with pytest.raises(_StoppedError):
            await runner._wait_for_quiet(Contender("a", "u"))
        return time.monotonic() - started_s

    assert asyncio.run(main()) < 50


def test_what_idle_contenders_use_is_not_ours() -> None:
    burn = "import time\nwhile time.process_time() < 0.4: pass\nprint(flush=True)\ntime.sleep(600)"
    with subprocess.Popen([PYTHON, "-c", burn], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        ours, without = read_cpu([os.getpid()]), read_cpu([os.getpid()], without=[process.pid])
        process.kill()
    assert ours is not None and without is not None
    assert ours.ours_s - without.ours_s > 0.35


def test_a_server_that_does_not_come_up(command: Command, tmp_path: Path) -> None:  # noqa: F811
    words = ("--server", f"a={PYTHON} -c print({{port}})", "--server", "b=http://127.0.0.1:9", "--concurrency", "1", "--log-folder", str(tmp_path))
    status, _, err = command(*words, verb="compare")
    assert status == 1
    assert "a ended with status 0 before it was ready; see" in err
    status, _, err = command("--server", "a=http://127.0.0.1:9", "--concurrency", "1", verb="compare")
    assert (status, "at least two" in err) == (2, True)

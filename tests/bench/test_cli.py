"""``jaxserve bench serve`` as its user meets it: reports, files, exit codes, and clear words for everything that goes wrong."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.cli import main
from tests.bench.fake_server import FakeModel, FakeServer
from tests.waiting import LIMIT_S, longer_and_longer, wait_until

ROOT = Path(__file__).parents[2]
SMALL = ("--warmup", "0", "--num-requests", "4", "--output-len", "3", "--input-len", "20")

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """Runs ``jaxserve bench …`` in this process: (exit status, stdout, stderr)."""
    import logging

    root, own = logging.getLogger(), logging.getLogger("jaxserve")
    before = root.handlers[:], root.level, own.level
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def call(*words: str, verb: str = "serve") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["jaxserve", "bench", verb, *words])
        with pytest.raises(SystemExit) as exit_:
            main()
        return int(exit_.value.code or 0), *capsys.readouterr()

    yield call
    root.handlers[:], root.level = before[0], before[1]
    own.setLevel(before[2])


class Background:
    """A fake server in a thread of its own."""

    def __init__(self, **options: Any) -> None:
        self._options = options

    def __enter__(self) -> FakeServer:
        ready = threading.Event()

        async def serve() -> None:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            model = self._options.pop("model", None) or FakeModel(0.003, 0.001)
            async with FakeServer(model, **self._options) as self.server:
                ready.set()
                await self._stop.wait()

        self._thread = threading.Thread(target=lambda: asyncio.run(serve()))
        self._thread.start()
        assert ready.wait(LIMIT_S)
        return self.server

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(LIMIT_S)


def test_one_run_with_every_report(command: Command, tmp_path: Path) -> None:
    files = tmp_path / "run.json", tmp_path / "run.html"
    with Background() as server:
        reports = ("--json", str(files[0]), "--html", str(files[1]), "--save-requests", "--goodput", "ttft:100000,tpot:50000", "--price-per-hour", "3.6")
        status, out, err = command("--url", f"{server.url}/v1/", "--rate", "50", *SMALL, *reports)
    assert status == 0, err
    for word in ("TTFT", "TPOT leaves out the first token", "4 success", "goodput", "per million output tokens", "Queue is by the server"):
        assert word in out
    result = json.loads(files[0].read_text())
    assert (result["completed"], result["failed"], result["total_output_tokens"], result["total_input_tokens"]) == (4, 0, 12, 80)
    assert (result["model_id"], result["request_rate"], result["good_requests"]) == ("fake", 50.0, 4)
    for metric in ("ttft", "tpot", "itl", "e2el"):
        assert all(result[f"{statistic}_{metric}_ms"] >= 0 for statistic in ("mean", "median", "std", "p50", "p90", "p95", "p99"))
    assert {"request_throughput", "output_throughput", "total_token_throughput", "request_goodput", "workload", "environment", "server"} <= result.keys()
    assert result["usd_per_million_output_tokens"] == pytest.approx(3.6 / 3600 * result["duration"] / 12 * 1e6)
    assert len(result["requests"]) == 4
    page = files[1].read_text()
    assert page.count("<svg") == 2
    assert "http" not in page.replace(server.url, "").replace("http://www.w3.org", "").replace("http://purl.org", "").replace("http://creativecommons.org", "")


def test_a_sweep_and_a_chat(command: Command, tmp_path: Path) -> None:
    with Background(token_ids=False) as server:
        json_file, html_file = tmp_path / "a.json", tmp_path / "a.html"
        status, out, err = command("--url", server.url, "--chat", "--sweep-concurrency", "1,2", *SMALL, "--json", str(json_file), "--html", str(html_file))
    assert status == 0, err
    assert "1 at once" in out
    assert "2 at once" in out
    runs = json.loads(json_file.read_text())["runs"]
    assert [run["max_concurrency"] for run in runs] == [1, 2]
    assert runs[0]["input_length_mismatches"] == 0
    assert html_file.read_text().count("<svg") == 5


def test_the_highest_rate_and_an_impossible_slo(command: Command, tmp_path: Path) -> None:
    """That the search finds what it should is tested on a clock that no machine disturbs; here it is its report."""
    with Background(model=FakeModel(0.02, 0.01, slots=1)) as server:
        options = ("--url", server.url, "--find-max-rate", "--arrival", "steady", "--duration", "0.6", "--output-len", "4", "--warmup", "0")
        status, out, _ = command(*options, "--goodput", "ttft:60", "--tolerance", "0.5", "--json", str(tmp_path / "a.json"))
        found = json.loads((tmp_path / "a.json").read_text())
        assert status == (0 if found["max_request_rate"] else 4)
        assert (found["max_request_rate"] or 0) < 32  # one request takes 50 ms
        assert len(found["trials"]) >= 1
        assert "1 at a time" in out
        status, out, _ = command(*options, "--goodput", "ttft:1")
        assert status == 4
        assert "impossible: not even one request at a time keeps TTFT <= 1 ms" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rate", "1", "--concurrency", "2"), "rate is 1.0 but arrival is 'closed'"),
        ((), "needs rate"),
        (("--rate", "1", "--goodput", "ttft"), "goodput is 'ttft'"),
        (("--rate", "1", "--goodput", "ttft:-5"), "goodput is 'ttft:-5'"),
        (("--find-max-rate",), "--find-max-rate needs an SLO"),
        (("--find-max-rate", "--goodput", "ttft:5", "--concurrency", "3"), "a closed loop, which has no rate to vary"),
        (("--sweep-rate", "1", "--sweep-concurrency", "2"), "each is a kind of run of its own"),
        (("--sweep-rate", "1,x"), "--sweep-rate is '1,x'"),
        (("--rate", "1", "turns"), "'turns' sets nothing"),
        (("--rate", "1", "turn=3"), "did you mean 'turns'"),
        (("--rate", "1", "--extra-body", "[1]"), "must be a JSON object"),
        (("--rate", "1", "--prompts", "x"), "must be one of auto, ids, text"),
        (("--trace", "no-such-file.csv", "--warmup", "0"), "cannot read no-such-file.csv"),
        (("--workload", "no-such-file.yaml"), "no-such-file.yaml: cannot read"),
        (("--rate", "1", "--url", "http://host:80x"), "the URL is 'http://host:80x'"),
        (("--rate", "1", "--api-key", "a\nb"), "no HTTP header can carry it"),
        (("--rate", "1", "--api-key", "clé"), "no HTTP header can carry it"),
        (("--rate", "1", "--grpc", "--extra-body", '{"foo": 1}'), 'no "foo" field'),
        (("--rate", "1", "--grpc", "--extra-body", '{"text": "x"}'), "which the benchmark sets itself"),
        (("--rate", "1", "--sweep-rate", "1,2"), "--sweep-rate says which rates are run"),
        (("--concurrency", "1", "--sweep-concurrency", "1,2"), "says which closed loops are run"),
        (("--sweep-concurrency", "1.5"), "must be whole numbers"),
        (("--rate", "1", "--tolerance", "0.1"), "belongs to --find-max-rate"),
        (("--rate", "1", "--goodput", "ttft:5", "--slo-attainment", "0.9"), "belongs to --find-max-rate"),
        (("--rate", "1", "--save-requests"), "the file of --json, which was not given"),
        (("--find-max-rate", "--goodput", "ttft:5", "--save-requests", "--json", "a.json"), "--save-requests is not for --find-max-rate"),
        (("--rate", "1", "--json", "no/such/folder/a.json"), "there is no folder no/such/folder"),
        (("--rate", "1", "--html", "."), "which is a folder"),
    ],
)
def test_usage_errors_end_with_2(command: Command, words: tuple[str, ...], message: str) -> None:
    with Background() as server:
        status, _, err = command("--url", server.url, *words)
    assert (status, message in err) == (2, True), err
    assert not server.bodies or "no-such-file.csv" in words


def test_a_server_that_is_not_there_ends_with_1(command: Command) -> None:
    status, _, err = command("--url", "http://127.0.0.1:9", "--rate", "1")
    assert status == 1
    assert "http://127.0.0.1:9 cannot be reached" in err


@pytest.mark.parametrize(
    ("options", "words", "message"),
    [
        ({}, ("--model", "gpt-5"), "model 'gpt-5' is not served by"),
        ({"status": 429}, (), "status 429"),
    ],
)
def test_a_server_that_does_not_serve_ends_with_1(command: Command, options: dict[str, Any], words: tuple[str, ...], message: str) -> None:
    with Background(**options) as server:
        status, _, err = command("--url", server.url, "--rate", "1", *words)
    assert (status, message in err) == (1, True), err


def test_a_server_without_usage_is_told_of(command: Command) -> None:
    with Background(usage=False) as server:
        status, out, err = command("--url", server.url, "--rate", "50", *SMALL)
    assert status == 0, err
    assert "4 answers came without usage" in out


def test_a_server_that_dies_is_reported_with_what_there_was(command: Command, tmp_path: Path) -> None:
    with Background(dies_after=30) as server:
        words = ("--url", server.url, "--concurrency", "5", "--warmup", "0", "--num-requests", "100", "--output-len", "3", "--json", str(tmp_path / "a.json"))
        status, out, _ = command(*words)
    assert status == 1
    assert "ended early" in out
    assert "cannot connect" in out
    assert 20 < json.loads((tmp_path / "a.json").read_text())["completed"] < 31


def test_a_sweep_whose_server_dies_keeps_the_levels_before(command: Command, tmp_path: Path) -> None:
    with Background(dies_after=9) as server:  # one to see what it takes, one with ids, four, three
        files = ("--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html"))
        status, out, _ = command("--url", server.url, "--sweep-concurrency", "1,2,4", *SMALL, *files)
    assert status == 1
    assert "the sweep ended early" in out
    found = json.loads((tmp_path / "a.json").read_text())
    first, second = (run["completed"] for run in found["runs"])
    assert (first, 1 <= second <= 3) == (4, True)
    assert "the sweep ended early" in (tmp_path / "a.html").read_text()


def test_a_ramp_is_swept_as_a_ramp(command: Command, tmp_path: Path) -> None:
    ramp = tmp_path / "ramp.yaml"
    ramp.write_text("arrival: ramp\nrate: 25\nend_rate: 100\n")
    with Background() as server:
        status, _, err = command("--url", server.url, "--workload", str(ramp), "--sweep-rate", "50,100", *SMALL, "--json", str(tmp_path / "a.json"))
    assert status == 0, err
    runs = json.loads((tmp_path / "a.json").read_text())["runs"]
    assert [(run["workload"]["rate"], run["workload"]["end_rate"]) for run in runs] == [(50, 200), (100, 400)]


def test_texts_of_a_server_are_shown_as_they_are(command: Command, tmp_path: Path) -> None:
    """In rich's markup this name closes a style that was never opened, which is an error."""
    name = "[/red] a [b] $x^2$"
    for load in (("--concurrency", "2"), ("--sweep-concurrency", "2")):
        status, out, _ = timing_out(command, *load, "--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html"), name=name)
        assert status in (0, 3)
        assert name in " ".join(out.split())
        assert (tmp_path / "a.json").exists()


def test_nothing_is_lost_to_a_file_that_cannot_be_written(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, text: str, **_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with Background() as server:
        status, out, err = command("--url", server.url, "--rate", "50", *SMALL, "--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html"))
    assert (status, "No space left" in err, "4 success" in out) == (2, True, True)


def timing_out(command: Command, *words: str, **options: Any) -> tuple[int, str, float]:
    """Status, output and time limit of a benchmark on a server that answers one request within the limit, and not two at once."""
    found = 1, "", 0.0
    for limit_s in longer_and_longer(0.1):
        with Background(model=FakeModel(0.5 * limit_s, 0.1 * limit_s, slots=1), **options) as server:
            found = *command("--url", server.url, *words, *SMALL, "--timeout", str(limit_s))[:2], limit_s
        if found[0] != 1:  # with 1 this machine stood still before there was a benchmark
            break
    return found


def test_timeouts_end_with_3(command: Command) -> None:
    status, out, limit_s = timing_out(command, "--concurrency", "2")
    assert status == 3
    assert f"no complete answer within {limit_s:g} s" in out


def test_interrupt_prints_and_saves_what_there_is(tmp_path: Path) -> None:
    with Background(model=FakeModel(0.01, 0.001)) as server:
        words = ["--url", server.url, "--rate", "20", "--duration", "60", "--output-len", "3", "--json", str(tmp_path / "a.json")]
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxserve", "bench", "serve", *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        wait_until(lambda: server.model.served >= 15)
        num_sent = len(server.bodies)
        wait_until(lambda: len(server.bodies) > num_sent)  # by when the client has read of those
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, err
    assert "ended early" in out
    result = json.loads((tmp_path / "a.json").read_text())
    assert result["completed"] >= 5
    assert result["interrupted"] == "stopped"


def test_the_client_imports_neither_jax_nor_numpy() -> None:
    code = (
        "import sys\nfor name in ('jax', 'numpy', 'transformers', 'fastapi', 'grpc', 'torch', 'matplotlib'): sys.modules[name] = None\n"
        "sys.argv = ['jaxserve', 'bench', 'serve', '--url', 'http://127.0.0.1:9', '--rate', '1']\nfrom jaxserve.cli import main\nmain()"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, env=os.environ | {"COLUMNS": "100"})
    assert ran.returncode == 1
    assert "cannot be reached" in ran.stderr

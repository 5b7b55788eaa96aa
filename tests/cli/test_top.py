"""``jaxserve top``: what it makes of a page of metrics, and what it says where there is none."""

from __future__ import annotations

import contextlib
import http.server
import math
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from rich.console import Console

from jaxserve.bench.load.buckets import Buckets
from jaxserve.cli.scrape import ScrapeError, metrics_url, parse_page, read_page
from jaxserve.cli.top import frame
from jaxserve.errors import ConfigError
from tests.waiting import LIMIT_S

PAGE = """
# TYPE jaxserve_engine_state gauge
jaxserve_engine_state{{state="starting"}} 0
jaxserve_engine_state{{state="ready"}} 1
jaxserve_info{{model="tiny",version="1.2",revision=""}} 1
jaxserve_num_requests_running{{model="tiny"}} 3
jaxserve_max_requests_running{{model="tiny"}} 32
jaxserve_kv_pages{{model="tiny"}} 1000
jaxserve_kv_pages_used{{model="tiny"}} 250
jaxserve_kv_pages_cached{{model="tiny"}} 1
jaxserve_kv_pages_free{{model="tiny"}} 749
jaxserve_steps_total{{model="tiny"}} {steps}
jaxserve_generated_tokens_total{{model="tiny"}} {tokens}
jaxserve_requests_finished_total{{model="tiny",finish_reason="stop"}} 4
jaxserve_requests_finished_total{{model="tiny",finish_reason="abort"}} 2
# TYPE jaxserve_e2e_request_latency_seconds histogram
jaxserve_e2e_request_latency_seconds_bucket{{model="tiny",finish_reason="stop",le="1.0"}} 2
jaxserve_e2e_request_latency_seconds_bucket{{model="tiny",finish_reason="stop",le="2.0"}} {slow}
jaxserve_e2e_request_latency_seconds_bucket{{model="tiny",finish_reason="stop",le="+Inf"}} {slow}
jaxserve_e2e_request_latency_seconds_bucket{{model="tiny",finish_reason="abort",le="1.0"}} 2
jaxserve_e2e_request_latency_seconds_bucket{{model="tiny",finish_reason="abort",le="2.0"}} 2
jaxserve_e2e_request_latency_seconds_bucket{{model="tiny",finish_reason="abort",le="+Inf"}} 2
process_start_time_seconds {start}
"""


def page(steps: int = 10, tokens: int = 100, slow: int = 4, start: int = 5) -> str:
    return PAGE.format(steps=steps, tokens=tokens, slow=slow, start=start)


@contextlib.contextmanager
def serving(status: int, body: bytes) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/metrics" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def shown(earlier: str, now: str, seconds: float = 10.0, problem: str | None = None) -> str:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(frame("http://host/metrics", parse_page(earlier, 0.0), parse_page(now, seconds), problem))
    return capture.get()


def test_a_frame_says_what_is_and_what_happened_since() -> None:
    text = shown(page(), page(steps=60, tokens=350, slow=8), problem="no answer")
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "http://host  ready" in text and "tiny, jaxserve 1.2" in text and "no answer" in text
    assert "3 of 32" in text and "250 used, 1 cached, 749 free" in text and "6 requests ended" in text
    rates = dict(zip(["requests", "in", "out", "steps"], text.split("last 10 s")[1].split(), strict=False))
    assert (rates["out"], rates["steps"]) == ("25", "5.0")
    (e2e,) = (line.split() for line in text.splitlines() if line.startswith("E2E"))
    assert e2e == ["E2E", "1.5", "s", "1.9", "s", "1.99", "s", "4", "1.17", "s", "1.83", "s", "1.98", "s", "10"]


def test_a_server_that_starts_has_a_frame() -> None:
    text = shown("", 'jaxserve_engine_state{state="starting"} 1\n')
    assert "starting" in text and "no numbers" in text


def test_quantiles_are_interpolated_and_open_ends_are_not_made_up() -> None:
    buckets = Buckets((1.0, 2.0, 4.0, math.inf), (0, 10, 10, 0))
    assert [buckets.quantile(share) for share in (0.25, 0.5, 0.75, 1.0)] == [1.5, 2.0, 3.0, 4.0]
    assert Buckets((1.0, math.inf), (0, 5)).quantile(0.5) == 1.0
    assert Buckets().quantile(0.5) is None and Buckets((1.0, math.inf), (0, 0)).quantile(0.5) is None
    assert buckets.since(Buckets()) is buckets


def test_a_server_that_was_started_anew_is_noticed() -> None:
    now = parse_page(page(), 1.0)
    assert not now.is_older_run(parse_page(page(steps=11), 2.0))
    assert now.is_older_run(parse_page(page(steps=2), 2.0)) and now.is_older_run(parse_page(page(start=6), 2.0))


@pytest.mark.parametrize("url", ["host:8000", "http://host:8000", "http://host:8000/", "http://host:8000/v1", "http://host:8000/metrics"])
def test_a_server_may_be_named_in_several_ways(url: str) -> None:
    assert metrics_url(url) == "http://host:8000/metrics"


@pytest.mark.parametrize("url", ["", "http://", "ftp://host", "host:port", "http://[::1", "file:///etc/passwd", "http://host:99999"])
def test_what_is_no_server_is_a_usage_error(url: str) -> None:
    with pytest.raises(ConfigError, match="--url is"):
        metrics_url(url)


def test_what_does_not_answer_as_jaxserve_does_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.cli.scrape._TIMEOUT_S", LIMIT_S)
    with serving(200, page().encode()) as url:
        assert read_page(metrics_url(url)).value("jaxserve_kv_pages") == 1000
    with pytest.raises(ScrapeError, match="cannot be read: .*refused"):
        read_page(metrics_url(url))
    for status, body, message in (
        (404, b"", "answers 404"),
        (200, b"go_goroutines 5\n", "is not a jaxserve server's page"),
        (200, b"<html>{{{</html>", "is not a jaxserve server's page"),
        (200, bytes(range(256)), "is not a jaxserve server's page"),
    ):
        with serving(status, body) as url, pytest.raises(ScrapeError, match=message):
            read_page(metrics_url(url))
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def speak() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"\x00\x00\x12\x04 not HTTP\r\n")

        thread = threading.Thread(target=speak)
        thread.start()
        with pytest.raises(ScrapeError, match="does not answer in HTTP"):
            read_page(f"http://127.0.0.1:{listener.getsockname()[1]}/metrics")
        thread.join()


def test_the_command_needs_no_jax_and_its_failures_are_one_line() -> None:
    code = f"import sys; sys.modules['jax'] = None; from jaxserve.cli import main, scrape; scrape._TIMEOUT_S = {LIMIT_S}; main()"
    with serving(200, page().encode()) as url:
        command = [sys.executable, "-c", code, "top", "--once", "--url"]
        done = subprocess.run([*command, url], capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0 and "250 used" in done.stdout and not done.stderr
    done = subprocess.run([*command, url], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and not done.stdout

"""Checks the memory of a server on this machine: after start, and while it answers many short requests.

python scripts/check_memory.py [--model smollm2-135m] [--requests 1000] [section.key=value ...]

Starts `jaxserve run` on free ports and reads the process's resident memory (Linux). "limit" is weights + KV pool, as the server's log gives them, + 900 MB.
"faults" are page faults of the whole process a step. Exit 0 only if the start is below the limit and growth after the first tenth of requests is small.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import grpc
from rich.console import Console
from rich.table import Table

from jaxserve.serving.grpc_api import jaxserve_v1_pb2 as pb
from jaxserve.serving.grpc_api import jaxserve_v1_pb2_grpc as pb_grpc

START_ALLOWANCE_MB = 900
GROWTH_ALLOWANCE_MB = 20
NUM_ROUNDS = 10
NUM_CLIENTS = 8
START_TIMEOUT_S = 600


class Sample(NamedTuple):
    """What the kernel and the engine say at one moment."""

    resident_mb: float
    num_faults: int
    num_steps: float
    num_used_pages: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [sys.executable, "-m", "jaxserve", "run", options.model, "--port", "0", "--grpc-port", "0", *options.overrides]
        with log.open("w") as stream, subprocess.Popen(command, stderr=stream) as server:
            try:
                text = _wait_ready(server, log)
                return _measure(server.pid, text, options.requests)
            finally:
                server.terminate()


def _wait_ready(server: subprocess.Popen[bytes], log: Path) -> str:
    """The server's log up to its "ready" line."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while "\nready: " not in (text := log.read_text()):
        if server.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"the server did not start:\n{text}")
        time.sleep(0.5)
    return text


def _measure(pid: int, log: str, num_requests: int) -> int:
    port = _find(r"gRPC on port (\d+)", log)
    limit_mb = sum(float(_find(pattern, log)) for pattern in (r"weights ([\d.]+) GiB", r"KV pool ([\d.]+) GiB")) * 2**30 / 1e6 + START_ALLOWANCE_MB
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, ThreadPoolExecutor(NUM_CLIENTS) as clients:
        stub = pb_grpc.InferenceStub(channel)

        def sample() -> Sample:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # from the third field of proc(5) on
            stats = stub.GetServerInfo(pb.GetServerInfoRequest()).stats
            resident_kib = int(_find(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text()))
            return Sample(resident_kib * 1024 / 1e6, int(fields[7]), stats["num_steps"], stats["num_pages"] - stats["num_free_pages"])

        def ask(index: int) -> None:
            for _ in stub.Generate(pb.GenerateRequest(text=f"Question {index}: what is {index} + {index}?", max_tokens=4 + index % 13)):
                pass

        samples = [sample()]
        for index in range(NUM_ROUNDS):
            list(clients.map(ask, range(index * num_requests // NUM_ROUNDS, (index + 1) * num_requests // NUM_ROUNDS)))
            samples.append(sample())
    table = Table(title=f"resident memory; limit after start {limit_mb:.0f} MB")
    for column in ("requests", "MB", "MB more", "steps", "faults / step", "pages held"):
        table.add_column(column, justify="right")
    for index, (before, after) in enumerate(zip([samples[0], *samples], samples, strict=False)):
        steps = after.num_steps - before.num_steps
        faults = f"{(after.num_faults - before.num_faults) / steps:.1f}" if steps else ""
        more = f"{after.resident_mb - before.resident_mb:+.1f}"
        table.add_row(str(index * num_requests // NUM_ROUNDS), f"{after.resident_mb:.0f}", more, f"{steps:.0f}", faults, f"{after.num_used_pages:.0f}")
    Console().print(table)
    growth_mb = samples[-1].resident_mb - samples[1].resident_mb
    checks = {
        f"start {samples[0].resident_mb:.0f} <= {limit_mb:.0f} MB": samples[0].resident_mb <= limit_mb,
        f"growth {growth_mb:.1f} <= {GROWTH_ALLOWANCE_MB} MB": growth_mb <= GROWTH_ALLOWANCE_MB,
        "no page held at the end": samples[-1].num_used_pages == 0,
    }
    for text, holds in checks.items():
        print(f"{'ok  ' if holds else 'FAIL'} {text}")
    return 0 if all(checks.values()) else 1


def _find(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        sys.exit(f"no {pattern!r} in:\n{text}")
    return match[1]


if __name__ == "__main__":
    sys.exit(main())

"""Checks a server on this machine under four times the load that it can serve, and what a flooding tenant does to another.

python scripts/check_overload.py [--model smollm2-135m] [--seconds 60]

Starts `jaxserve run`, finds the rate that it serves and its peak goodput, then sends four times that rate: every request must end in an answer or in a
refusal with Retry-After, goodput must stay at 80% of its peak, memory flat, and queue times within the queue's timeout. Then one tenant sends little while
another uses its budget of requests at once, and again while it floods: the first one's p95 time to first token may grow by half. About seven minutes; wants a
quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from jaxserve.bench.load.metrics import Metrics, parse_slo
from jaxserve.bench.load.processes import free_port, resident_mib, running
from jaxserve.bench.load.session import RunOptions, ServerOptions, open_session
from jaxserve.bench.workload.workload import Workload, load_workload

QUEUE_TIMEOUT_S = 5.0
OTHER_MAX_REQUESTS = 4
SLO = parse_slo("ttft:4000,tpot:250")
CONFIG = f"""
scheduler: {{max_num_seqs: 8, max_tokens_per_step: 128, max_queued_requests: 16, queue_timeout_s: {QUEUE_TIMEOUT_S}, order: fair}}
engine: {{sequence_buckets: [8], token_buckets: [32, 128]}}
model.max_model_len: 512
cache.num_pages: 512
tenants: {{keys: [quiet=key-quiet, other=key-other], limits: [other.max_requests={OTHER_MAX_REQUESTS}]}}
"""
LENGTHS = {"input_len": "uniform:16:64", "output_len": "uniform:8:24"}
PROBE_S = 0.5
SETTLE_S = 10.0
GROWTH_ALLOWANCE_MIB = 30.0
START_TIMEOUT_S = 300.0


class Server:
    """A server that is up."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.process = process
        self.url = url
        self.log = log

    async def load(self, tenant: str, seed: int, **fields: object) -> Metrics:
        """Sends a workload as a tenant."""
        work: Workload = load_workload(None, LENGTHS | {"seed": seed} | fields)
        async with open_session(ServerOptions(url=self.url, api_key=f"key-{tenant}"), work) as session:
            return (await session.run(work, RunOptions(num_warmup=0, slo=SLO))).metrics

    def resident_mib(self) -> float:
        """Of its process."""
        return resident_mib([self.process.pid]) or 0.0

    def queue_times_s(self, from_byte: int) -> list[float]:
        """Of the requests that were answered since the log was that long."""
        lines = self.log.read_bytes()[from_byte:].decode(errors="replace").splitlines()
        found = (re.search(r"finish=length .*queue_ms=([\d.]+)", line) for line in lines)
        return [float(match[1]) / 1e3 for match in found if match]


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the overload, and of each half of the comparison of tenants")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config, log, port = Path(folder) / "config.yaml", Path(folder) / "log", free_port()
        config.write_text(CONFIG)
        command = f"{sys.executable} -m jaxserve run {options.model} --config {config} --port {port} --grpc-port 0"
        with running("jaxserve", command, log) as process:
            server = Server(process, f"http://127.0.0.1:{port}", log)
            await _until_ready(server)
            checks = {**await _overload(server, options.seconds), **await _tenants(server, options.seconds)}
    for text, holds in checks.items():
        print(f"{'ok  ' if holds else 'FAIL'} {text}")
    return 0 if all(checks.values()) else 1


async def _until_ready(server: Server) -> None:
    async with httpx.AsyncClient(base_url=server.url) as client:
        for _ in range(int(START_TIMEOUT_S / PROBE_S)):
            with contextlib.suppress(httpx.TransportError):
                if (await client.get("/ready")).status_code == 200:
                    return
            if server.process.poll() is not None:
                break
            await asyncio.sleep(PROBE_S)
    sys.exit(f"the server did not start:\n{server.log.read_text()[-2000:]}")


async def _overload(server: Server, seconds: float) -> dict[str, bool]:
    closed = await server.load("quiet", 1, concurrency=8, num_requests=80)
    capacity = closed.requests_per_s
    peak = 0.0
    table = Table(title=f"{capacity:.1f} requests/s is what eight at a time reach")
    for column in ("requests/s", "good/s", "answered", "refused", "TTFT p50 ms", "TTFT p99 ms"):
        table.add_column(column, justify="right")
    for index, share in enumerate((0.7, 0.9, 1.1)):
        at = await server.load("quiet", 2 + index, rate=share * capacity, duration_s=seconds / 3)
        peak = max(peak, at.goodput_per_s or 0.0)
        _row(table, f"{share * capacity:.1f}", at)
    log_size = server.log.stat().st_size
    loading = asyncio.ensure_future(server.load("quiet", 9, rate=4 * capacity, duration_s=seconds))
    await asyncio.sleep(min(SETTLE_S, seconds / 4))
    before_mib = server.resident_mib()
    probes = await _probe(server, loading)
    at, after_mib = await loading, server.resident_mib()
    _row(table, f"{4 * capacity:.1f}", at)
    Console().print(table)
    queue_s = server.queue_times_s(log_size)
    goodput = at.goodput_per_s or 0.0
    ended = at.outcomes["success"] + at.outcomes["refused"]
    return {
        f"all of {sum(at.outcomes.values())} requests end in an answer ({at.outcomes['success']}) or a refusal ({at.outcomes['refused']})": (
            ended == sum(at.outcomes.values()) and at.outcomes["refused"] > 0
        ),
        f"each of {probes['refused']} refusals looked at says when to retry": probes["refused"] > 0 and probes["refused"] == probes["with Retry-After"],
        f"goodput {goodput:.2f} >= 80% of its peak, {peak:.2f}": goodput >= 0.8 * peak,
        f"memory grows by {after_mib - before_mib:.1f} <= {GROWTH_ALLOWANCE_MIB:g} MiB": after_mib - before_mib <= GROWTH_ALLOWANCE_MIB,
        f"queue times of {len(queue_s)} answers, {max(queue_s):.2f} s at most, within {QUEUE_TIMEOUT_S:g} s": max(queue_s) <= QUEUE_TIMEOUT_S,
    }


async def _probe(server: Server, loading: asyncio.Future[Metrics]) -> Counter[str]:
    """Requests by hand beside the load, for what the load generator does not keep: the headers of refusals."""
    counts: Counter[str] = Counter()
    async with httpx.AsyncClient(base_url=server.url, headers={"authorization": "Bearer key-quiet"}, timeout=60) as client:
        body = {"model": (await client.get("/v1/models")).json()["data"][0]["id"], "prompt": "x", "max_tokens": 1}
        while not loading.done():
            response = await client.post("/v1/completions", json=body)
            if response.status_code != 200:
                counts["refused"] += 1
                counts["with Retry-After"] += response.status_code in (429, 503) and response.headers.get("retry-after", "").isdigit()
            await asyncio.sleep(PROBE_S)
    return counts


async def _tenants(server: Server, seconds: float) -> dict[str, bool]:
    capacity = (await server.load("quiet", 20, concurrency=8, num_requests=80)).requests_per_s
    table = Table(title="a tenant at 0.2 of what the server can do, and its neighbour")
    for column in ("neighbour", "good/s", "answered", "refused", "TTFT p50 ms", "TTFT p95 ms"):
        table.add_column(column, justify="right")
    neighbours: dict[str, dict[str, object]] = {
        "at half the server's rate": {"rate": 0.5 * capacity},
        "uses its budget, 4 at once": {"concurrency": OTHER_MAX_REQUESTS},
        "floods, at 4 times the server's rate": {"rate": 4 * capacity},
    }
    p95: list[float] = []
    for name, fields in neighbours.items():
        quiet = server.load("quiet", 21, rate=0.2 * capacity, duration_s=seconds)
        other = server.load("other", 22, duration_s=seconds, **fields)
        mine, _ = await asyncio.gather(quiet, other)
        p95.append(mine.latencies["ttft"].p95)
        _row(table, name, mine, "p95")
    Console().print(table)
    _, within, flooded = p95
    return {f"a flood raises the other tenant's p95 TTFT from {within:.0f} to {flooded:.0f} ms, by half at most": flooded <= 1.5 * within}


def _row(table: Table, load: str, at: Metrics, high: str = "p99") -> None:
    ttft = at.latencies["ttft"]
    counts = at.outcomes
    table.add_row(
        load, f"{at.goodput_per_s:.2f}", str(counts["success"]), str(counts["refused"]), f"{ttft.p50:.0f}", f"{getattr(ttft, high):.0f}"
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))

#!/usr/bin/env python3
"""Measures what a streamed token costs the engine's process and the front ends: the real server and scheduler, on a device that only takes its time.

python scripts/bench_front_ends.py [--streams 256] [--step-ms 10] [--processes 1 2 4] [--seconds 20]

For each number of front ends, starts the server as a process of its own, opens so many streams over HTTP from another, and prints the processor time of each
part for each token, and what the device was kept waiting. Wants a quiet machine; with too few cores fewer tokens come than the device could make, which the
figures per token say nothing of.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import signal
import time
import urllib.request
from typing import Any

import psutil
import tokenizers
from rich.console import Console
from rich.table import Table
from tokenizers import decoders, models, pre_tokenizers

from jaxserve.bench.load.processes import free_port
from jaxserve.bench.local.simulated_device import SimulatedDevice
from jaxserve.cli.scrape import Reading, parse_page
from jaxserve.config import CacheConfig, Config, ModelConfig, SchedulerConfig, ServerConfig
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.engine.engine import Engine
from jaxserve.engine.step.buckets import make_buckets
from jaxserve.models.attention_kind import GroupedQueryAttention
from jaxserve.models.mlp_kind import GatedMlp
from jaxserve.models.spec import LayerGroup, LayerSpec, ModelSpec, RopeSpec
from jaxserve.serving.front_end import run_event_loop
from jaxserve.serving.launch import serve
from jaxserve.tokenizer import Tokenizer

VOCAB_SIZE = 4096
MAX_LEN = 65_536
PAGE_SIZE = 256
START_S = 120.0


def make_tokenizer() -> Tokenizer:
    """One token a word."""
    backend = tokenizers.Tokenizer(models.WordLevel({f"▁word{index}": index for index in range(VOCAB_SIZE)}, unk_token="▁word0"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return Tokenizer(backend)


def make_spec() -> ModelSpec:
    attention = GroupedQueryAttention(num_heads=1, num_kv_heads=1, head_dim=2, scale=1.0)
    group = LayerGroup.uniform(attention, GatedMlp(width=2, activation="silu"), (LayerSpec(),))
    return ModelSpec(family="none", vocab_size=VOCAB_SIZE, width=2, groups=(group,), max_position=MAX_LEN, norm_eps=1e-5, ropes=(RopeSpec(inv_freq=(1.0,)),))


def run_server(port: int, num_streams: int, step_s: float, num_processes: int) -> None:
    config = Config(
        model=ModelConfig(source="none"),
        cache=CacheConfig(page_size=PAGE_SIZE, num_pages=num_streams * MAX_LEN // PAGE_SIZE),
        scheduler=SchedulerConfig(max_num_seqs=num_streams, max_tokens_per_step=4096),
        server=ServerConfig(port=port, grpc_port=None, processes=num_processes, drain_timeout_s=0.0),
    )

    def build() -> Engine:
        buckets = make_buckets((4096,), (num_streams,), max_tokens=4096, max_rows=num_streams, table_width=MAX_LEN // PAGE_SIZE)
        num_pages = num_streams * MAX_LEN // PAGE_SIZE
        device = SimulatedDevice(buckets, step_s=step_s, num_pages=num_pages, page_size=PAGE_SIZE, max_num_seqs=num_streams, token_id=7)
        return Engine(device, make_tokenizer(), make_spec(), config, model_name="none", overlap=True)

    run_event_loop(serve(config, AsyncEngine(build)))


def run_client(port: int, num_streams: int) -> None:
    """Reads streams as cheaply as it can, until it is killed."""

    async def read() -> None:
        body = json.dumps({"prompt": [5], "stream": True, "max_tokens": MAX_LEN - 2, "ignore_eos": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + body)
        while await reader.read(2**16):
            pass

    async def read_all() -> None:
        await asyncio.gather(*(read() for _ in range(num_streams)))

    asyncio.run(read_all())


def read_metrics(port: int) -> Reading:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=START_S) as page:
        return parse_page(page.read().decode(), 0.0)


def wait_for(condition: Any, what: str) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what} did not come within {START_S:g} s")
        time.sleep(0.2)


def is_ready(port: int) -> bool:
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/ready").status == 200
    except OSError:
        return False


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def measure(num_processes: int, num_streams: int, step_s: float, seconds: float) -> dict[str, float]:
    """Runs one server. Returns its figures by name."""
    spawn = multiprocessing.get_context("spawn")
    port = free_port()
    server = spawn.Process(target=run_server, args=(port, num_streams, step_s, num_processes))
    client = spawn.Process(target=run_client, args=(port, num_streams))
    server.start()
    try:
        wait_for(lambda: is_ready(port), "the server")
        client.start()
        wait_for(lambda: read_metrics(port).value("jaxserve_num_requests_running") == num_streams, "the last stream's first token")
        engine = psutil.Process(server.pid)
        front_ends = [child for child in engine.children() if "front_ends.process" in " ".join(child.cmdline())]
        parts = {"engine": [engine], "front ends": front_ends, "client": [psutil.Process(client.pid)]}

        def snapshot() -> tuple[float, Reading, dict[str, float]]:
            return time.monotonic(), read_metrics(port), {name: sum(map(cpu_s, processes)) for name, processes in parts.items()}

        start_s, before, cpu_before = snapshot()
        time.sleep(seconds)
        end_s, after, cpu_after = snapshot()
    finally:
        for process in (client, server):
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGKILL if process is client else signal.SIGTERM)
                process.join()
    num_tokens = after.value("jaxserve_generated_tokens_total") - before.value("jaxserve_generated_tokens_total")
    num_steps = after.value("jaxserve_steps_total") - before.value("jaxserve_steps_total")
    figures = {
        "front ends": float(len(front_ends)),
        "tokens/s": num_tokens / (end_s - start_s),
        "ms a step": 1e3 * (end_s - start_s) / num_steps,
        "engine, ms a step": 1e3 * (cpu_after["engine"] - cpu_before["engine"]) / num_steps,
    }
    return figures | {f"{name}, µs a token": 1e6 * (cpu_after[name] - cpu_before[name]) / num_tokens for name in parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    rows = [measure(number, options.streams, options.step_ms / 1e3, options.seconds) for number in options.processes]
    table = Table(*rows[0], title=f"{options.streams} streams, {options.step_ms:g} ms a step, {os.cpu_count()} processors")
    for row in rows:
        table.add_row(*(f"{value:.4g}" for value in row.values()))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()

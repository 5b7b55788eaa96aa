"""A thousand kills of front ends, slow readers and disconnects under load, with steps that overlap: nothing leaks, and nobody else's tokens change."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
from collections import Counter

import httpx
import psutil
import pytest

from jaxserve.config import EngineConfig
from tests.engine_host.fakes import LONG, SlowRunner
from tests.serving.front_ends import Served, alone, front_end_pids, front_ends, streaming
from tests.serving.servers import http_client
from tests.waiting import until

NUM_EVENTS = 1000
NUM_CLIENTS = 12
KILLS = 0.05
SLOW_READERS = 0.1
DISCONNECTS = 0.4


async def complete(served: Served, rng: random.Random, counts: Counter[str]) -> None:
    """A whole answer, by a connection that may go to any front end; what comes is held against what the request would get alone."""
    prompt, num_tokens, seed = f"p{rng.randrange(50)}", rng.randrange(1, 200), rng.randrange(100)
    async with http_client(served.port) as client:
        body = {"prompt": prompt, "max_tokens": num_tokens, "seed": seed, "ignore_eos": True}
        answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == alone(prompt, num_tokens, seed)
    counts["complete"] += 1


async def disconnect(served: Served, rng: random.Random, counts: Counter[str]) -> None:
    """A stream that is left after some events."""
    async with http_client(served.port) as client, streaming(client, "left", max_tokens=LONG, seed=1) as events:
        for _ in range(rng.randrange(1, 20)):
            await anext(events)
    counts["disconnect"] += 1


async def read_slowly(served: Served, rng: random.Random, counts: Counter[str]) -> None:
    """A stream of which nothing is read, until its request is paused."""
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(slow, ("127.0.0.1", served.port))
        body = json.dumps({"prompt": f"slow{rng.randrange(9)}", "stream": True, "max_tokens": LONG, "ignore_eos": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        await loop.sock_sendall(slow, head.encode() + body)
        with contextlib.suppress(TimeoutError):  # its front end may be killed meanwhile
            await asyncio.wait_for(until(lambda: served.engine.stats().num_paused > 0), 10)
            counts["paused"] += 1
    counts["slow reader"] += 1


async def kill(served: Served, rng: random.Random, counts: Counter[str]) -> None:
    """The end of a front end, once there are two."""
    await until(lambda: len(front_end_pids()) == served.config.server.processes)
    with contextlib.suppress(ProcessLookupError):
        os.kill(rng.choice(front_end_pids()), signal.SIGKILL)
    counts["kill"] += 1


@pytest.mark.slow
def test_nothing_leaks_and_nobody_notices() -> None:
    counts: Counter[str] = Counter()
    rng = random.Random(0)

    async def client(served: Served) -> None:
        while counts["events"] < NUM_EVENTS:
            counts["events"] += 1
            chance = rng.random()
            act = kill if chance < KILLS else read_slowly if chance < KILLS + SLOW_READERS else disconnect if chance < DISCONNECTS else complete
            try:
                await act(served, rng, counts)
            except (httpx.TransportError, ConnectionError, StopAsyncIteration):
                counts["lost with its front end"] += 1

    async def body() -> None:
        runner = SlowRunner(step_s=0.001, num_pages=4096, page_size=64, max_num_seqs=16)
        options = EngineConfig(overlap=True, reader_buffer=4)
        async with front_ends(runner, engine=options, server={"served_model_name": "x" * 8000}) as served:
            await asyncio.gather(*(client(served) for _ in range(NUM_CLIENTS)))
            await until(lambda: len(front_end_pids()) == served.config.server.processes)
            await served.all_free()
            await until(lambda: served.engine.stats().num_paused == 0)
            stats = served.engine.stats()
            assert stats.num_requests == sum(stats.finished.values())
            assert served.engine.thread.engine is not None
            served.engine.thread.engine.check_integrity()
            assert psutil.Process().num_fds() < 200, "sockets of front ends that are gone are closed"

    asyncio.run(asyncio.wait_for(body(), 3600))
    print(dict(counts))
    assert counts["kill"] >= 20 and counts["paused"] >= 20 and counts["disconnect"] >= 100 and counts["complete"] >= 200
    assert counts["lost with its front end"] <= NUM_CLIENTS * counts["kill"]

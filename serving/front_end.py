"""One front end, HTTP and gRPC, on ports that are bound: from its start to its drained end. In the engine's process or in one of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import time
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from jaxserve.serving.grpc_api.server import GrpcServer
from jaxserve.serving.service import InferenceService

logger = logging.getLogger(__name__)

STATE_POLL_S = 0.25
KEEP_ALIVE_S = 75
"""Longer than clients keep an idle connection in their pools: the side that closes first should be theirs."""
LEAST_CLOSING_S = 2.0
"""For answers that are finished but not yet read, where the drain has left no more time."""


async def run_front_end(
    app: ASGIApp,
    service: InferenceService,
    http_socket: socket.socket,
    grpc_server: GrpcServer | None,
    stop: asyncio.Event,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Starts the engine, answers until ``stop`` is set, then drains the engine and returns.

    Args:
        app: Of the service.
        service: Its engine is not started yet.
        http_socket: Listens.
        grpc_server: Bound; not started yet.
        stop: Ends it.
        on_ready: Called once the engine takes requests.

    Raises:
        Exception: What made the engine's start fail.
    """
    engine, drain_timeout_s = service.engine, service.config.server.drain_timeout_s
    http_server = _HttpServer(
        uvicorn.Config(app, log_config=None, access_log=False, server_header=False, lifespan="off", ws="none", timeout_keep_alive=KEEP_ALIVE_S)
    )
    closing_s = LEAST_CLOSING_S
    engine.start()
    if grpc_server is not None:
        await grpc_server.start()
    tasks = {
        "http": asyncio.create_task(http_server.serve(sockets=[http_socket])),
        "stop": asyncio.create_task(stop.wait()),
        "ready": asyncio.create_task(_follow_state(service, grpc_server, on_ready)),
    }
    try:
        pending = set(tasks.values())
        while not stop.is_set():
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises what ended it
            if tasks["http"] in done:
                return
        tasks["ready"].cancel()  # it would say SERVING again while the engine is not draining yet
        if grpc_server is not None:
            await grpc_server.set_serving(False)
        if engine.state == "ready":
            logger.info("draining: running requests have %g s; a second signal ends the process at once", drain_timeout_s)
            start_s = time.monotonic()
            await engine.drain(drain_timeout_s)
            closing_s = max(closing_s, drain_timeout_s - (time.monotonic() - start_s))  # what has ended may still be read
    finally:
        tasks["ready"].cancel()
        tasks["stop"].cancel()
        http_server.config.timeout_graceful_shutdown = math.ceil(closing_s)
        http_server.should_exit = True
        if grpc_server is not None:
            await grpc_server.stop(closing_s)
        await asyncio.gather(*tasks.values(), return_exceptions=True)


async def _follow_state(service: InferenceService, grpc_server: GrpcServer | None, on_ready: Callable[[], None]) -> None:
    """Waits for the engine, says so, then keeps gRPC's health equal to its state."""
    engine = service.engine
    await engine.wait_ready()
    on_ready()
    while grpc_server is not None:
        await grpc_server.set_serving(engine.state == "ready")
        await asyncio.sleep(STATE_POLL_S)


class _HttpServer(uvicorn.Server):
    """uvicorn that leaves the signals to its process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

"""A front end for HTTP and gRPC on bound ports, from its start until it is drained. It runs in the engine's process or in one of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import uvicorn
import uvloop
from starlette.types import ASGIApp

from jaxserve.errors import EngineDeadError
from jaxserve.serving.grpc_api.server import GrpcServer
from jaxserve.serving.service import InferenceService

logger = logging.getLogger(__name__)

T = TypeVar("T")

STATE_POLL_S = 0.25
KEEP_ALIVE_S = 75
"""Seconds for which an idle connection is kept. It is longer than clients keep one in their pools, since the client should be the one that closes it."""
LEAST_CLOSING_S = 2.0
"""Least time, in seconds, that clients get at the end to read answers that are finished."""


def run_event_loop(main: Coroutine[Any, Any, T]) -> T:
    """Runs ``main`` to its end on an event loop of uvloop. A streamed token took 80 µs of a front end's processor time on it, 113 on asyncio's own loop.

    Returns:
        What ``main`` returns.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


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
        app: The HTTP application of the service.
        service: The service, whose engine is not started yet.
        http_socket: The listening HTTP socket.
        grpc_server: The gRPC server, bound but not started; ``None`` for no gRPC.
        stop: Event that ends the front end when it is set.
        on_ready: Called once, when the engine accepts requests.

    Raises:
        EngineDeadError: The engine, which was ready, has stopped.
        Exception: What made the engine's start fail.
    """
    engine, drain_timeout_s = service.engine, service.config.server.drain_timeout_s
    http_server = _HttpServer(
        uvicorn.Config(  # httptools, which uvicorn prefers where it finds it, reads headers of any length
            app, http="h11", log_config=None, access_log=False, server_header=False, lifespan="off", ws="none", timeout_keep_alive=KEEP_ALIVE_S
        )
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
        while True:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():  # an engine in another process sets it as it dies
                break
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
    """Waits for the engine, calls ``on_ready``, then keeps gRPC's health equal to the engine's state.

    Raises:
        EngineDeadError: The engine has stopped.
    """
    engine = service.engine
    await engine.wait_ready()
    on_ready()
    while True:
        state = engine.state
        if grpc_server is not None:
            await grpc_server.set_serving(state == "ready")
        if state == "dead":
            raise EngineDeadError("the engine has stopped; the log says why")
        await asyncio.sleep(STATE_POLL_S)


class _HttpServer(uvicorn.Server):
    """A uvicorn server that leaves the signals to its process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

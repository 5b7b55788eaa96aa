"""Runs both front ends around an engine, from bound ports to a drained exit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from jaxserve.config import Config
from jaxserve.serving.contract import ServedEngine
from jaxserve.serving.grpc_api.server import GrpcServer
from jaxserve.serving.http_api.app import create_app
from jaxserve.serving.metrics import Responses
from jaxserve.serving.observers import Observers
from jaxserve.serving.ports import listen
from jaxserve.serving.service import InferenceService

logger = logging.getLogger(__name__)

STATE_POLL_S = 0.25
KEEP_ALIVE_S = 75
"""Longer than clients keep an idle connection in their pools: the side that closes first should be theirs."""
LEAST_CLOSING_S = 2.0
"""For answers that are finished but not yet read, where the drain has left no more time."""
SECOND_SIGNAL_STATUS = 130


async def serve(config: Config, engine: ServedEngine, on_end: Callable[[], None] = lambda: None) -> None:
    """Serves until SIGINT or SIGTERM, then drains and returns.

    Binds the ports before anything slow happens, answers probes while the engine starts, prints the "ready" line and a ``curl`` line on stderr once it takes
    requests. The first signal lets running requests go on for ``server.drain_timeout_s``; a second one ends the process at once, with status 130.
    While the engine starts there is nothing to drain: the first signal ends the process, with status 0.

    Args:
        config: ``server`` is read here.
        engine: Not started yet. Closed on every way out.
        on_end: Called at the end, once the engine is closed, unless an error is the end.

    Raises:
        ConfigError: A port is in use, or the host cannot be listened on; the message names the option. Or traces are wanted and cannot be made.
        Exception: What made the engine's start fail.
    """
    try:
        with (
            contextlib.closing(Observers(config, engine)) as observers,
            contextlib.closing(listen(config.server.host, config.server.port, key="server.port", flag="--port")) as http_socket,
        ):
            engine.on_end(observers)
            service, responses = InferenceService(engine, config), Responses()
            grpc_server = GrpcServer(service, responses) if config.server.grpc_port is not None else None
            with _stop_on_signal() as stop:
                await _serve_bound(create_app(service, responses), service, http_socket, grpc_server, stop)
        still_starting = engine.state == "starting"
    finally:
        engine.close()
    on_end()
    if still_starting:
        logger.info("stopped before the engine was ready")
        logging.shutdown()
        os._exit(0)  # a compilation cannot be interrupted, and its threads would hold the process for minutes


async def _serve_bound(app: ASGIApp, service: InferenceService, http_socket: socket.socket, grpc_server: GrpcServer | None, stop: asyncio.Event) -> None:
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
        "ready": asyncio.create_task(_announce(service, http_socket, grpc_server)),
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


async def _announce(service: InferenceService, http_socket: socket.socket, grpc_server: GrpcServer | None) -> None:
    """Waits for the engine, says so, then keeps gRPC's health equal to its state."""
    engine = service.engine
    await engine.wait_ready()
    port = http_socket.getsockname()[1]
    where = f"HTTP on {_url(service.config.server.host, port)}" + (f", gRPC on port {grpc_server.port}" if grpc_server is not None else "")
    print(f"ready: {service.model_name}, {where}", file=sys.stderr)
    print(curl_line(service, port, show_key=sys.stderr.isatty()), file=sys.stderr, flush=True)
    while grpc_server is not None:
        await grpc_server.set_serving(engine.state == "ready")
        await asyncio.sleep(STATE_POLL_S)


def curl_line(service: InferenceService, port: int, *, show_key: bool) -> str:
    """A shell command that asks the served model something: a chat where it has a template, else a completion.

    A key is written out only where ``show_key``, for a terminal; in what may be a log file the shell is to put in ``$JAXSERVE_API_KEY``.
    """
    body: dict[str, object] = {"model": service.model_name}
    if service.engine.tokenizer.chat_template is not None:
        path = "/v1/chat/completions"
        body |= {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
    else:
        path = "/v1/completions"
        body |= {"prompt": "The capital of France is", "max_tokens": 32, "temperature": 0}
    parts = ["curl", "-s", _url(service.config.server.host, port) + path, "-H", "Content-Type: application/json"]
    line = shlex.join(parts)
    if keys := [*service.tenants.by_key]:
        line += " -H " + (shlex.quote(f"Authorization: Bearer {keys[0]}") if show_key else '"Authorization: Bearer $JAXSERVE_API_KEY"')
    return f"{line} -d {shlex.quote(json.dumps(body, ensure_ascii=False))}"


def _url(host: str, port: int) -> str:
    name = "localhost" if host in ("0.0.0.0", "::", "") else f"[{host}]" if ":" in host else host  # noqa: S104
    return f"http://{name}:{port}"


@contextlib.contextmanager
def _stop_on_signal() -> Iterator[asyncio.Event]:
    """An event that the first SIGINT or SIGTERM sets; the second exits."""
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(SECOND_SIGNAL_STATUS)
        stop.set()

    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield stop
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


class _HttpServer(uvicorn.Server):
    """uvicorn that leaves the signals to ``serve``."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

"""Serves an engine, from bound ports to a drained exit: signals, and what is said on the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator

from jaxserve.config import Config
from jaxserve.serving.contract import HostedEngine, MeasuredEngine
from jaxserve.serving.front_end import run_front_end
from jaxserve.serving.front_ends.fleet import serve_in_processes
from jaxserve.serving.grpc_api.server import GrpcServer
from jaxserve.serving.http_api.app import create_app
from jaxserve.serving.metrics import MetricsPage, Responses
from jaxserve.serving.observers import Observers
from jaxserve.serving.ports import HTTP_PORT, listen
from jaxserve.serving.service import InferenceService

logger = logging.getLogger(__name__)

SECOND_SIGNAL_STATUS = 130


async def serve(config: Config, engine: HostedEngine, on_end: Callable[[], None] = lambda: None) -> None:
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
        EngineDeadError: The engine has stopped. Its streams have ended with that error, and a supervisor is to start the server again.
        Exception: What made the engine's start fail.
    """
    try:
        with _stop_on_signal() as stop:
            if config.server.processes == 1:
                await _serve_here(config, engine, stop)
            else:
                await serve_in_processes(config, engine, stop, announce)
        still_starting = engine.state == "starting"
    finally:
        engine.close()
    on_end()
    if still_starting:
        logger.info("stopped before the engine was ready")
        logging.shutdown()
        os._exit(0)  # a compilation cannot be interrupted, and its threads would hold the process for minutes


async def _serve_here(config: Config, engine: MeasuredEngine, stop: asyncio.Event) -> None:
    """Runs the one front end in this process."""
    with (
        contextlib.closing(Observers(config, engine)) as observers,
        contextlib.closing(listen(config.server.host, config.server.port, HTTP_PORT)) as http_socket,
    ):
        engine.on_end(observers)
        service, responses = InferenceService(engine, config), Responses()
        grpc_server = GrpcServer(service, responses) if config.server.grpc_port is not None else None
        app = create_app(service, responses, MetricsPage(engine, service, responses))
        port, grpc_port = http_socket.getsockname()[1], None if grpc_server is None else grpc_server.port
        await run_front_end(app, service, http_socket, grpc_server, stop, on_ready=lambda: announce(service, port, grpc_port))


def announce(service: InferenceService, port: int, grpc_port: int | None) -> None:
    """Says on stderr that requests are taken, and where."""
    where = f"HTTP on {_url(service.config.server.host, port)}" + (f", gRPC on port {grpc_port}" if grpc_port is not None else "")
    print(f"ready: {service.model_name}, {where}", file=sys.stderr)
    print(curl_line(service, port, show_key=sys.stderr.isatty()), file=sys.stderr, flush=True)


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

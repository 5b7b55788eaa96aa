"""The process of a front end: ``python -m jaxserve.serving.front_ends.process CHANNEL HTTP``, both numbers of inherited sockets. Started by ``fleet.py``."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys

import msgspec
import yaml

from jaxserve.config import Config, from_mapping
from jaxserve.errors import EngineDeadError, to_data
from jaxserve.log import set_up_logging
from jaxserve.serving.front_end import run_event_loop, run_front_end
from jaxserve.serving.front_ends.channel import Channel
from jaxserve.serving.front_ends.messages import Ended, Listening, Setup, ToFrontEnd
from jaxserve.serving.front_ends.remote_engine import RemoteEngine
from jaxserve.serving.grpc_api.server import GrpcServer
from jaxserve.serving.http_api.app import create_app
from jaxserve.serving.observers import Observers
from jaxserve.serving.service import InferenceService


async def serve_front_end(channel_socket: socket.socket, http_socket: socket.socket) -> None:
    """Serves until the engine's process tells this one to end, or is gone.

    Args:
        channel_socket: Socket connected to the engine's process.
        http_socket: The listening HTTP socket.
    """
    loop = asyncio.get_running_loop()
    stop, decoder = asyncio.Event(), msgspec.msgpack.Decoder(ToFrontEnd)
    setup: asyncio.Future[Setup] = loop.create_future()

    def on_frame(frame: bytes) -> None:
        message = decoder.decode(frame)
        if setup.done():
            engine.take(message)
        else:
            assert isinstance(message, Setup)
            setup.set_result(message)

    def on_lost() -> None:
        engine.take(Ended("error", to_data(EngineDeadError("the engine's process has ended"))))
        if not setup.done():
            setup.cancel()

    channel = Channel(channel_socket, on_frame, on_lost, loop)
    engine = RemoteEngine(channel.send, stop)
    with contextlib.suppress(asyncio.CancelledError):
        await _serve(await setup, engine, http_socket, stop)
    channel.close()


async def _serve(setup: Setup, engine: RemoteEngine, http_socket: socket.socket, stop: asyncio.Event) -> None:
    set_up_logging(setup.log_level)
    config: Config = from_mapping(yaml.safe_load(setup.config))
    with contextlib.closing(Observers(config, engine)) as observers:
        engine.on_end(observers)
        service = InferenceService(engine, config, setup.started_s)
        grpc_server = None if setup.grpc_port is None else GrpcServer(service, engine, shared_port=setup.grpc_port)
        app = create_app(service, engine, engine)
        engine.send(Listening())
        await run_front_end(app, service, http_socket, grpc_server, stop)


def main() -> None:
    """Runs the process. It ignores SIGINT and SIGTERM, because the engine's process handles them and tells this one to drain."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    channel_socket, http_socket = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    run_event_loop(serve_front_end(channel_socket, http_socket))


if __name__ == "__main__":
    main()

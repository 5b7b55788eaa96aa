"""Binding ports, for one process or several, with an error that names the option to change."""

from __future__ import annotations

import contextlib
import dataclasses
import socket

from jaxserve.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class PortName:
    """What a port is called.

    Args:
        key: In the configuration.
        flag: On the command line.
    """

    key: str
    flag: str


HTTP_PORT = PortName("server.port", "--port")
GRPC_PORT = PortName("server.grpc_port", "--grpc-port")

_BACKLOG = 2048


def listen(host: str, port: int, name: PortName) -> socket.socket:
    """A listening TCP socket.

    Args:
        host: Name or address; of several addresses the first is taken.
        port: 0 takes a free one.
        name: Of the port, for messages.

    Raises:
        ConfigError: The port is in use, or the address is not this machine's.
    """
    return _bind(host, port, name, shares=False)


def listen_together(host: str, port: int, name: PortName, num_sockets: int) -> list[socket.socket]:
    """So many listening TCP sockets of one port, among which the kernel spreads connections; for the rest as :func:`listen`."""
    first = reserve(host, port, name)
    listeners = [first, *(_bind(host, first.getsockname()[1], name, shares=True) for _ in range(num_sockets - 1))]
    for listener in listeners:
        listener.listen(_BACKLOG)
    return listeners


def reserve(host: str, port: int, name: PortName) -> socket.socket:
    """A bound TCP socket that listens to nothing, and lets other sockets of this user listen on its port. Nobody may listen there yet: another server would
    share the port's connections in silence. For the rest as :func:`listen`.
    """
    with contextlib.closing(listen(host, port, name)) as probe:
        port = probe.getsockname()[1]
    return _bind(host, port, name, shares=True)


def _bind(host: str, port: int, name: PortName, *, shares: bool) -> socket.socket:
    """A socket that lets others share its port, or listens and lets none."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise ConfigError(f"server.host: {host!r} is no address to listen on: {error.strerror}") from error
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shares:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
        if not shares:
            bound.listen(_BACKLOG)  # two sockets may share a port until one of them listens
    except OSError as error:
        bound.close()
        raise ConfigError(f"{name.key}: cannot listen on {host}:{port}: {error.strerror}; choose another port with {name.flag} (or another --host)") from error
    return bound

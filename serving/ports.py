"""Binding ports, for one process or several, with an error that names the option to change."""

from __future__ import annotations

import contextlib
import socket

from jaxserve.errors import ConfigError

HTTP_PORT = {"key": "server.port", "flag": "--port"}
GRPC_PORT = {"key": "server.grpc_port", "flag": "--grpc-port"}
"""What the ports are called, for messages."""

_BACKLOG = 2048


def listen(host: str, port: int, *, key: str, flag: str) -> socket.socket:
    """A listening TCP socket.

    Args:
        host: Name or address; of several addresses the first is taken.
        port: 0 takes a free one.
        key: The configuration's key of the port, for messages.
        flag: Its option on the command line.

    Raises:
        ConfigError: The port is in use, or the address is not this machine's.
    """
    return _bind(host, port, shares=False, key=key, flag=flag)


def listen_together(host: str, port: int, num_sockets: int, *, key: str, flag: str) -> list[socket.socket]:
    """Listening TCP sockets of one port, among which the kernel spreads connections; the arguments are those of :func:`listen`."""
    listeners: list[socket.socket] = []
    for _ in range(num_sockets):
        listeners.append(reserve(host, listeners[0].getsockname()[1] if listeners else port, key=key, flag=flag, is_first=not listeners))
    for listener in listeners:
        listener.listen(_BACKLOG)
    return listeners


def reserve(host: str, port: int, *, key: str, flag: str, is_first: bool = True) -> socket.socket:
    """A bound TCP socket that listens to nothing and lets other sockets of this user listen on its port.

    Args:
        host: As for :func:`listen`.
        port: As for :func:`listen`.
        key: As for :func:`listen`.
        flag: As for :func:`listen`.
        is_first: Whether nobody may listen there yet: another server would share the port's connections in silence.

    Raises:
        ConfigError: As for :func:`listen`.
    """
    if is_first:
        with contextlib.closing(listen(host, port, key=key, flag=flag)) as probe:
            port = probe.getsockname()[1]
    return _bind(host, port, shares=True, key=key, flag=flag)


def _bind(host: str, port: int, *, shares: bool, key: str, flag: str) -> socket.socket:
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
        raise ConfigError(f"{key}: cannot listen on {host}:{port}: {error.strerror}; choose another port with {flag} (or another --host)") from error
    return bound

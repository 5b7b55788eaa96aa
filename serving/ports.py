"""Binding a port, with an error that names the option to change."""

from __future__ import annotations

import socket

from jaxserve.errors import ConfigError

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
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise ConfigError(f"server.host: {host!r} is no address to listen on: {error.strerror}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)  # two sockets may share a port until one of them listens
    except OSError as error:
        listener.close()
        raise ConfigError(f"{key}: cannot listen on {host}:{port}: {error.strerror}; choose another port with {flag} (or another --host)") from error
    return listener

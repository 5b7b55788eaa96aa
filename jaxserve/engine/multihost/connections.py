"""The TCP connections between the hosts of an engine: listening, calling, and admitting only those who show the password. Imports no jax."""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import socket
import struct
import threading
import time

from jaxserve.errors import ConfigError, HostLostError

logger = logging.getLogger(__name__)

SHAKE_S = 5.0
"""Time in which a new connection must show the password, in seconds."""
_PUBLIC = b"jaxserve hosts 1"
"""Password of the hosts before they share a secret. It only keeps out connections that came to this port by mistake."""
_GO = b"!"
_INDEX = struct.Struct("<I")
_POLL_S = 0.1


def listen(address: str, port: int, key: str) -> socket.socket:
    """A listening TCP socket.

    Args:
        address: Address of this host to listen on; empty for all addresses.
        port: TCP port.
        key: Name of the port's key in the configuration, for the message.

    Raises:
        ConfigError: The port cannot be listened on.
    """
    try:
        return socket.create_server((address, port))
    except OSError as error:
        told = os.strerror(error.errno or 0)
        raise ConfigError(f"{key} is {port} and cannot be listened on: {told}; choose another distributed.port on all hosts") from error


def admit(listener: socket.socket, num_others: int, password: bytes, timeout_s: float, shake_s: float = SHAKE_S) -> dict[int, socket.socket]:
    """The connections of hosts 1 to ``num_others`` by host index, once all have come.

    Connections that do not show the password are closed and hold up nobody. If a host connects more than once, its latest connection counts.

    Args:
        listener: The listening socket, which stays open.
        num_others: Number of the other hosts.
        password: Password that they must show.
        timeout_s: Longest wait for all of them, in seconds.
        shake_s: Longest time that a connection may take to show the password, in seconds.

    Raises:
        HostLostError: Not all came in time. The message names those that did not.
    """
    admitted: dict[int, socket.socket] = {}
    lock, is_over = threading.Lock(), threading.Event()

    def greet(connection: socket.socket, address: str) -> None:
        connection.settimeout(shake_s)
        try:
            shown, index = receive(connection, len(password)), _INDEX.unpack(receive(connection, _INDEX.size))[0]
        except OSError:
            shown, index = b"", 0
        with lock:
            if hmac.compare_digest(shown, password) and 0 < index <= num_others and not is_over.is_set():
                if index in admitted:
                    admitted[index].close()
                admitted[index] = connection
                return
        logger.warning("turned away a connection from %s to the step port: it is none of the hosts", address)
        connection.close()

    deadline = time.monotonic() + timeout_s
    listener.settimeout(_POLL_S)
    while missing := {*range(1, num_others + 1)} - admitted.keys():
        if time.monotonic() > deadline:
            with lock:
                is_over.set()
            for connection in admitted.values():
                connection.close()
            hosts = f"host {missing.pop()}" if len(missing) == 1 else f"hosts {', '.join(map(str, sorted(missing)))}"
            raise HostLostError(f"{hosts} of {num_others + 1} did not come within {timeout_s:g} s")
        with contextlib.suppress(OSError):
            connection, address = listener.accept()
            threading.Thread(target=greet, args=(connection, address[0]), name="greeting", daemon=True).start()
    with lock:
        is_over.set()
    return admitted


def call(host: str, port: int, index: int, password: bytes, timeout_s: float) -> socket.socket:
    """A connection to the leader, which may not be listening yet.

    Args:
        host: Name or address of the leader.
        port: The leader's port.
        index: Index of this host.
        password: Password to show.
        timeout_s: Longest time to try, in seconds.

    Raises:
        HostLostError: The leader cannot be reached in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=SHAKE_S)
            connection.sendall(password + _INDEX.pack(index))
        except OSError as error:
            if time.monotonic() > deadline:
                raise HostLostError(f"the leader at {host}:{port} could not be reached within {timeout_s:g} s: {error.strerror or error}") from error
            time.sleep(_POLL_S)
        else:
            return connection


def await_all(listener: socket.socket, num_others: int, timeout_s: float) -> None:
    """Waits until all hosts have started. This comes before jax's own meeting, because jax aborts a process whose peers do not come.

    Raises:
        HostLostError: Not all came in time.
    """
    for connection in admit(listener, num_others, _PUBLIC, timeout_s).values():
        with connection, contextlib.suppress(OSError):
            connection.sendall(_GO)


def await_leader(host: str, port: int, index: int, timeout_s: float) -> None:
    """Waits until the leader says that all hosts have started; the other hosts' side of :func:`await_all`.

    Raises:
        HostLostError: The leader, or another host, did not come in time.
    """
    with call(host, port, index, _PUBLIC, timeout_s) as connection:
        connection.settimeout(timeout_s)
        try:
            receive(connection, len(_GO))
        except OSError as error:
            raise HostLostError(f"the leader at {host} went before all hosts had come, or another process came as host {index}") from error


def receive(connection: socket.socket, size: int) -> bytes:
    """The next ``size`` bytes of a connection.

    Raises:
        OSError: The connection ended, or nothing came within its time limit.
    """
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise ConnectionResetError("it closed the connection")
        parts += part
    return bytes(parts)

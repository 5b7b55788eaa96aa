"""How the leading process tells the others which steps to run: framed bytes over TCP, and a heartbeat both ways, so that a lost host is noticed. No jax."""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jaxserve.engine.schedule import PageMoves
from jaxserve.errors import ConfigError, HostLostError

logger = logging.getLogger(__name__)

SECRET_BYTES = 32
HEARTBEAT_S = 2.0
SILENCE_S = 20.0
"""A host that says nothing for this long is lost."""
CONNECT_TIMEOUT_S = 60.0

_HEADER = struct.Struct("<BIII")
"""Kind, bucket, bytes of the page copies, bytes of the packed batch."""
_STEP, _HEARTBEAT, _STOP = 1, 2, 3
_MAX_BYTES = 2**28
"""No packed batch comes near it."""


@dataclasses.dataclass(frozen=True)
class StepMessage:
    """A step as every process runs it.

    Args:
        bucket: Index of its bucket among all, smallest first.
        packed: ``[ranks, X]`` The packed batch of every data rank.
        moves: Of each data rank; nothing is swapped where there are several processes.
    """

    bucket: int
    packed: np.ndarray
    moves: Sequence[PageMoves]


class StepSender:
    """The leader's end: waits for all followers, then sends them every step.

    Args:
        port: TCP port to listen on, on all addresses.
        num_followers: How many there are.
        on_loss: Called once, from another thread, with what happened when a follower is lost. It should end the process: a collective may be waiting.
    """

    def __init__(self, port: int, num_followers: int, on_loss: Callable[[str], None]) -> None:
        try:
            self._listener = socket.create_server(("", port), backlog=num_followers)
        except OSError as error:
            raise ConfigError(f"distributed.port + 1 is {port} and cannot be listened on: {error.strerror}") from error
        self._num_followers = num_followers
        self._on_loss = on_loss
        self._followers: dict[str, socket.socket] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def accept(self, secret: bytes) -> None:
        """Waits until every follower has come and shown the secret; others are turned away.

        Raises:
            HostLostError: Not all came within ``CONNECT_TIMEOUT_S``.
        """
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while len(self._followers) < self._num_followers:
            self._listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, address = self._listener.accept()
                connection.settimeout(5.0)
                shown = _receive(connection, SECRET_BYTES)
            except TimeoutError:
                if time.monotonic() < deadline:
                    continue
                raise HostLostError(f"{len(self._followers)} of {self._num_followers} followers connected within {CONNECT_TIMEOUT_S:.0f} s") from None
            except OSError:
                continue
            if hmac.compare_digest(shown, secret):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.settimeout(SILENCE_S)
                self._followers[f"{address[0]}:{address[1]}"] = connection
            else:
                logger.warning("turned away a connection from %s that is none of the followers", address[0])
                connection.close()
        self._listener.close()
        for name, connection in self._followers.items():
            threading.Thread(target=self._watch, args=(name, connection), name=f"follower {name}", daemon=True).start()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def send(self, message: StepMessage) -> None:
        """Sends a step to every follower."""
        copies = np.array([(rank, *pair) for rank, moves in enumerate(message.moves) for pair in moves.copies], np.int32).tobytes()
        packed = message.packed.tobytes()
        self._send_all(_HEADER.pack(_STEP, message.bucket, len(copies), len(packed)) + copies + packed)

    def close(self) -> None:
        """Tells the followers to end."""
        if not self._is_closed:
            self._send_all(_HEADER.pack(_STOP, 0, 0, 0))
            self._is_closed = True
        for connection in self._followers.values():
            connection.close()

    def _send_all(self, data: bytes) -> None:
        with self._lock:
            for name, connection in self._followers.items():
                try:
                    connection.sendall(data)
                except OSError as error:
                    self._lose(name, error)

    def _watch(self, name: str, connection: socket.socket) -> None:
        try:
            while _receive(connection, 1):
                pass
        except OSError as error:
            self._lose(name, error)

    def _beat(self) -> None:
        while not self._is_closed:
            self._send_all(_HEADER.pack(_HEARTBEAT, 0, 0, 0))
            time.sleep(HEARTBEAT_S)

    def _lose(self, name: str, error: OSError) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._on_loss(f"the follower at {name} is lost: {_reason(error)}")


class StepReceiver:
    """A follower's end.

    Args:
        host: Where the leader is.
        port: The leader's port.
        secret: What the leader gave to all processes.

    Raises:
        HostLostError: The leader cannot be reached within ``CONNECT_TIMEOUT_S``.
    """

    def __init__(self, host: str, port: int, secret: bytes) -> None:
        self._name = f"{host}:{port}"
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while True:
            try:
                self._connection = socket.create_connection((host, port), timeout=5.0)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise HostLostError(f"the leader at {self._name} cannot be reached: {_reason(error)}") from error
                time.sleep(0.2)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection.settimeout(SILENCE_S)
        self._connection.sendall(secret)
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def messages(self, num_ranks: int) -> Iterator[StepMessage]:
        """The steps, in order, until the leader ends.

        Raises:
            HostLostError: The leader is lost.
        """
        try:
            while True:
                kind, bucket, copies_size, packed_size = _HEADER.unpack(_receive(self._connection, _HEADER.size))
                if kind == _STOP:
                    return
                if kind == _HEARTBEAT:
                    continue
                if kind != _STEP or max(copies_size, packed_size) > _MAX_BYTES:
                    raise HostLostError(f"the leader at {self._name} sends what is no step (kind {kind}); do all hosts run the same version?")
                copies = np.frombuffer(_receive(self._connection, copies_size), np.int32).reshape(-1, 3).tolist()
                packed = np.frombuffer(_receive(self._connection, packed_size), np.int32).reshape(num_ranks, -1)
                moves = [PageMoves(copies=tuple((source, to) for owner, source, to in copies if owner == rank)) for rank in range(num_ranks)]
                yield StepMessage(bucket, packed, moves)
        except OSError as error:
            raise HostLostError(f"the leader at {self._name} is lost: {_reason(error)}") from error
        finally:
            self._connection.close()

    def _beat(self) -> None:
        with contextlib.suppress(OSError):  # The reading side says so.
            while True:
                self._connection.sendall(b"\0")
                time.sleep(HEARTBEAT_S)


def _receive(connection: socket.socket, size: int) -> bytes:
    """Exactly ``size`` bytes.

    Raises:
        OSError: The connection ended, or nothing came for its time limit.
    """
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise ConnectionResetError("it closed the connection")
        parts += part
    return bytes(parts)


def _reason(error: OSError) -> str:
    return f"nothing heard for {SILENCE_S:.0f} s" if isinstance(error, TimeoutError) else error.strerror or str(error)

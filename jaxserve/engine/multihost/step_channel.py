"""The channel between the leading process and the followers: frames over TCP with steps and small values, and heartbeats both ways. Imports no jax."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxserve.engine.multihost.connections import SHAKE_S, admit, call, receive
from jaxserve.engine.scheduling.schedule import PageMoves
from jaxserve.engine.step.batch import FILL_TOKENS, StepMessage
from jaxserve.errors import HostLostError

SECRET_BYTES = 32

_FRAME = struct.Struct("<BI")
"""Header of a frame: its kind, and the number of bytes that follow."""
_STEP, _VALUE, _HEARTBEAT, _STOP, _FAILED, _LOST = range(1, 7)
"""Kinds of frames: a step, a JSON value, a heartbeat, the clean end, and the reason of a failure. ``_LOST`` is never sent; the thread that reads a
connection passes it to those who wait for a frame.
"""
_STEP_HEADER = struct.Struct("<III")
"""Header of a step: the bucket's index, the bytes of the page copies, and the bytes of the fills. The packed batch is the rest."""
_MAX_BYTES = 2**28
"""Largest size of a frame that is accepted, in bytes; real ones are far smaller."""


@dataclasses.dataclass(frozen=True)
class Times:
    """The time limits of the channel, in seconds.

    Args:
        heartbeat_s: Time between two heartbeats.
        silence_s: Time without any frame after which a process counts as lost, because it is stopped or stuck. It is long, as a host short of CPU time is
            late: compiling on a machine with eight times the work that it could do kept one silent for 20 s.
        unheard_s: Time without any answer from a host's network after which the host counts as lost. Its kernel answers however busy the host is.
        connect_s: Longest wait for all followers to come, or for the leader to be reached.
        shake_s: Longest time for a new connection to show the secret.
        close_s: Longest wait for the other side to receive the end of this one.
        stop_s: Longest time for a follower to end after the leader has.
    """

    heartbeat_s: float = 2.0
    silence_s: float = 60.0
    unheard_s: float = 20.0
    connect_s: float = 60.0
    shake_s: float = SHAKE_S
    close_s: float = 5.0
    stop_s: float = 20.0


TIMES = Times()


class StepSender:
    """The leader's end of the step channel.

    Args:
        listener: Listening socket of the step port; closed once all followers have come.
        num_followers: Number of followers.
        on_loss: Called once, from another thread, with the reason, when a follower is lost or has failed. It should end the process, since a collective may
            wait
            for that follower for ever.
        times: The time limits.
    """

    def __init__(self, listener: socket.socket, num_followers: int, on_loss: Callable[[str], None], times: Times = TIMES) -> None:
        self._listener = listener
        self._num_followers = num_followers
        self._on_loss = on_loss
        self._times = times
        self._peers: dict[int, _Peer] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def accept(self, secret: bytes) -> None:
        """Waits until every follower has come and shown the secret. Other connections are closed and hold up nobody.

        Raises:
            HostLostError: Not all came in time.
        """
        with self._listener:
            connections = admit(self._listener, self._num_followers, secret, self._times.connect_s, self._times.shake_s)
        self._peers = {index: _Peer(f"host {index} ({connection.getpeername()[0]})", connection, self._times) for index, connection in connections.items()}
        for peer in self._peers.values():
            peer.start(self._lose)
        threading.Thread(target=_beat, args=([*self._peers.values()], self._ended, self._times), name="heartbeat", daemon=True).start()

    def send(self, message: StepMessage) -> None:
        """Sends a step to every follower."""
        copies = np.array([(rank, *pair) for rank, moves in enumerate(message.moves) for pair in moves.copies], np.int32).tobytes()
        fills = message.fills.tobytes()
        self._send_all(_STEP, _STEP_HEADER.pack(message.bucket, len(copies), len(fills)) + copies + fills + message.packed.tobytes())

    def gather(self, value: Any) -> list[Any]:
        """The values that the processes gave, in the order of the hosts. Every process must call it, and it waits for all.

        Raises:
            HostLostError: A follower is lost.
        """
        values = [value] + [json.loads(self._peers[index].receive(_VALUE)[1]) for index in sorted(self._peers)]
        self._send_all(_VALUE, json.dumps(values).encode())
        return values

    def fail(self, reason: str) -> None:
        """Tells the followers why the engine ends."""
        self._end(_FAILED, reason.encode())

    def close(self) -> None:
        """Tells the followers to end, and waits until they have received it, for ``close_s`` at most."""
        self._end(_STOP, b"")

    def _send_all(self, kind: int, data: bytes) -> None:
        for peer in self._peers.values():
            peer.send(kind, data)

    def _end(self, kind: int, data: bytes) -> None:
        with self._lock:
            is_told = self._ended.is_set()
            self._ended.set()
        self._listener.close()
        if not is_told:
            self._send_all(kind, data)
        deadline = time.monotonic() + self._times.close_s
        for peer in self._peers.values():
            peer.close(max(0.0, deadline - time.monotonic()))

    def _lose(self, reason: str) -> None:
        with self._lock:
            if self._ended.is_set():
                return
            self._ended.set()
        self._send_all(_FAILED, reason.encode())
        self._on_loss(reason)


class StepReceiver:
    """A follower's end of the step channel.

    Args:
        host: Name or address of the leader.
        port: The leader's step port.
        index: Index of this host, ``>= 1``.
        secret: The secret that the leader gave to all processes.
        on_loss: Called once, from another thread, with the reason, when the leader is lost, has failed, or has ended while a step is still running here. It
            should end the process, since a collective may wait for the leader for ever.
        on_early_stop: Called once, from another thread, when the leader ends cleanly before this process has called :meth:`messages`, while it still loads or
            compiles.
        times: The time limits.

    Raises:
        HostLostError: The leader cannot be reached in time.
    """

    def __init__(
        self, host: str, port: int, index: int, secret: bytes, on_loss: Callable[[str], None], on_early_stop: Callable[[], None], times: Times = TIMES
    ) -> None:
        self._on_loss = on_loss
        self._on_early_stop = on_early_stop
        self._times = times
        self._is_following = False
        self._ended = threading.Event()
        self._peer = _Peer(f"the leader ({host})", call(host, port, index, secret, times.connect_s), times)
        self._peer.start(self._lose, self._stop)
        threading.Thread(target=_beat, args=([self._peer], self._ended, times), name="heartbeat", daemon=True).start()

    def gather(self, value: Any) -> list[Any]:
        """See :meth:`StepSender.gather`."""
        self._peer.send(_VALUE, json.dumps(value).encode())
        return json.loads(self._peer.receive(_VALUE)[1])

    def messages(self, num_ranks: int) -> Iterator[StepMessage]:
        """The leader's steps, in order, until the leader ends.

        Args:
            num_ranks: Number of data ranks.

        Raises:
            HostLostError: The leader is lost.
        """
        self._is_following = True
        while True:
            kind, data = self._peer.receive(_STEP, _STOP)
            if kind == _STOP:
                break
            bucket, copies_size, fills_size = _STEP_HEADER.unpack_from(data)
            copies_end = _STEP_HEADER.size + copies_size
            fills_end = copies_end + fills_size
            copies = np.frombuffer(data[_STEP_HEADER.size : copies_end], np.int32).reshape(-1, 3).tolist()
            fills = np.frombuffer(data[copies_end:fills_end], np.int32).reshape(-1, num_ranks, 2 + FILL_TOKENS)
            packed = np.frombuffer(data[fills_end:], np.int32).reshape(num_ranks, -1)
            moves = [PageMoves(copies=tuple((source, to) for owner, source, to in copies if owner == rank)) for rank in range(num_ranks)]
            yield StepMessage(bucket, packed, moves, fills)
        self.close()

    def fail(self, reason: str) -> None:
        """Tells the leader why this process is about to end, without waiting. The leader then ends too, and jax aborts the other processes."""
        if not self._ended.is_set():
            self._ended.set()
            self._peer.send(_FAILED, reason.encode())

    def close(self) -> None:
        """Ends the connection."""
        self._ended.set()
        self._peer.close(0.0)

    def _stop(self) -> None:
        if not self._is_following:
            self._on_early_stop()
        elif not self._ended.wait(self._times.stop_s):
            self._lose("the leader has ended, and a step is still under way here")

    def _lose(self, reason: str) -> None:
        if not self._ended.is_set():
            self._ended.set()
            self._on_loss(reason)


class _Peer:
    """The process at the other end of a connection.

    Args:
        name: Name of the process, for messages.
        connection: The connected socket.
        times: The time limits.
    """

    def __init__(self, name: str, connection: socket.socket, times: Times) -> None:
        _set_options(connection, times)
        connection.settimeout(times.silence_s)
        self._name = name
        self._connection = connection
        self._times = times
        self._frames: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._reader: threading.Thread | None = None

    def start(self, on_loss: Callable[[str], None], on_stop: Callable[[], None] = lambda: None) -> None:
        """Starts a thread that reads the connection.

        Args:
            on_loss: Called with the reason when the peer is lost or failed.
            on_stop: Called when it ends cleanly.
        """
        self._reader = threading.Thread(target=self._read, args=(on_loss, on_stop), name=f"reads {self._name}", daemon=True)
        self._reader.start()

    def send(self, kind: int, data: bytes = b"") -> None:
        """Sends a frame. If the peer is lost, the reading thread reports it, since it has the peer's last frames."""
        with self._lock:
            try:
                self._connection.sendall(_FRAME.pack(kind, len(data)) + data)
            except OSError:
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)

    def receive(self, *kinds: int) -> tuple[int, bytes]:
        """Waits for the next frame, which must be of one of these kinds. Returns its kind and content.

        Raises:
            HostLostError: The peer is lost, or has sent a frame of another kind.
        """
        kind, data = self._frames.get()
        if kind == _LOST:
            raise HostLostError(data.decode())
        if kind not in kinds:
            raise HostLostError(f"{self._name} sent a frame of kind {kind}, not {' or '.join(map(str, kinds))}; do all hosts run the same version?")
        return kind, data

    def close(self, timeout_s: float) -> None:
        """Ends the connection, when the peer has received everything and ended it too, or after ``timeout_s`` seconds."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join(timeout_s)
        self._connection.close()

    def _read(self, on_loss: Callable[[str], None], on_stop: Callable[[], None]) -> None:
        try:
            while True:
                kind, size = _FRAME.unpack(receive(self._connection, _FRAME.size))
                if size > _MAX_BYTES:
                    raise ConnectionError(f"it sent a frame of {size} bytes; do all hosts run the same version?")
                data = receive(self._connection, size)
                if kind == _FAILED:
                    self._end(on_loss, f"{self._name} has failed: {data.decode(errors='replace')}")
                    return
                if kind != _HEARTBEAT:
                    self._frames.put((kind, data))
                if kind == _STOP:
                    on_stop()
                    return
        except OSError as error:
            self._end(on_loss, f"{self._name} is lost: {_reason(error, self._times)}")

    def _end(self, on_loss: Callable[[str], None], reason: str) -> None:
        on_loss(reason)
        self._frames.put((_LOST, reason.encode()))


def _beat(peers: Sequence[_Peer], ended: threading.Event, times: Times) -> None:
    while not ended.wait(times.heartbeat_s):
        for peer in peers:
            peer.send(_HEARTBEAT)


def _set_options(connection: socket.socket, times: Times) -> None:
    unheard_s, probe_s = round(times.unheard_s), max(1, round(times.unheard_s / 4))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {"TCP_KEEPIDLE": probe_s, "TCP_KEEPINTVL": probe_s, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": unheard_s * 1000}.items():
        if hasattr(socket, name):  # Linux has all of them.
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _reason(error: OSError, times: Times) -> str:
    return f"nothing heard for {times.silence_s:g} s" if isinstance(error, TimeoutError) else error.strerror or str(error)

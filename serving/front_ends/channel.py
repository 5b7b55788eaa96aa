"""A channel that carries frames of bytes over a connected socket, both ways, for an event loop."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable

logger = logging.getLogger(__name__)

MAX_BACKLOG_BYTES = 256 * 2**20
"""Largest number of bytes that may wait for a peer that does not read; with more, the channel is given up."""

_LENGTH = struct.Struct("<I")
_READ_BYTES = 2**20


class Channel:
    """One end of a channel. Frames arrive whole and in order, or the channel is lost.

    Args:
        sock: The connected socket, which belongs to the channel from now on.
        on_frame: Called with each frame, on the event loop. If it raises, the channel is lost.
        on_lost: Called once, on the event loop, when the channel is lost because the other end is gone, does not read, or sends frames that make no sense.
        loop: The event loop that runs both.
    """

    def __init__(self, sock: socket.socket, on_frame: Callable[[bytes], None], on_lost: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._loop = loop
        self._received = bytearray()
        self._lock = threading.Lock()
        self._backlog: deque[memoryview] = deque()
        self._backlog_bytes = 0
        self._is_open = True
        loop.add_reader(sock, self._read)

    def send(self, frame: bytes) -> None:
        """Sends a frame, from any thread, without waiting: bytes that cannot be sent yet are kept. Does nothing once the channel is lost or closed."""
        data = memoryview(_LENGTH.pack(len(frame)) + frame)
        with self._lock:
            if not self._is_open:
                return
            if not self._backlog:
                data = data[self._send_some(data) :]
                if not data:
                    return
                self._loop.call_soon_threadsafe(self._watch)
            self._backlog.append(data)
            self._backlog_bytes += len(data)
            is_stuck = self._backlog_bytes > MAX_BACKLOG_BYTES
        if is_stuck:
            self._loop.call_soon_threadsafe(self._lose)

    def close(self) -> None:
        """Ends the channel without calling ``on_lost``. Must be called on the event loop. Does nothing the second time."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            self._backlog.clear()
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()

    def _send_some(self, data: memoryview) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:  # the reader will see the end
            return len(data)

    def _watch(self) -> None:
        if self._is_open:
            self._loop.add_writer(self._socket, self._write)

    def _write(self) -> None:
        with self._lock:
            while self._backlog:
                data = self._backlog[0]
                num_sent = self._send_some(data)
                self._backlog_bytes -= num_sent
                if num_sent < len(data):
                    self._backlog[0] = data[num_sent:]
                    return
                self._backlog.popleft()
            self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose()
            return
        received = self._received
        received += data
        start = 0
        try:
            while self._is_open and len(received) - start >= _LENGTH.size:
                begin = start + _LENGTH.size
                end = begin + _LENGTH.unpack_from(received, start)[0]
                if end > len(received):
                    break
                self._on_frame(bytes(received[begin:end]))
                start = end
        except Exception:
            logger.exception("a message from another process of the server could not be handled")
            self._lose()
        del received[:start]

    def _lose(self) -> None:
        if self._is_open:
            self.close()
            self._on_lost()

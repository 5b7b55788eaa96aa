"""Server-sent events, as far as OpenAI's streams use them: one line of data an event."""

from __future__ import annotations


class EventReader:
    """Cuts a byte stream into the data of its events. Comments (pings) and other fields are skipped; a line may come in any number of parts."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that ``data`` completes, in order."""
        if b"\n" not in data:
            self._rest += data
            return []
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]

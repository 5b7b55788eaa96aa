"""A run as it goes, on stderr: one line that changes on a terminal, a log line now and then elsewhere."""

from __future__ import annotations

import collections
import contextlib
import logging
import statistics
import sys
import time
from collections.abc import Callable, Generator

from rich.live import Live
from rich.text import Text

from jaxserve.bench.load.load import Record
from jaxserve.bench.load.metrics import output_tokens, ttft_s
from jaxserve.bench.load.system_under_test import Stream
from jaxserve.bench.workload.plan import PlannedRequest
from jaxserve.log import stderr_console

REFRESH_S = 0.25
LOG_INTERVAL_S = 10.0

logger = logging.getLogger(__name__)


class Progress:
    """Watches a run.

    Args:
        total: Requests in all; ``None``: not known.
        show: Called with a line of text when there is something new, at most every ``interval_s``.
        interval_s: See ``show``.
    """

    def __init__(self, total: int | None, show: Callable[[str], None], interval_s: float) -> None:
        self._total = total
        self._show = show
        self._interval_s = interval_s
        self._started_s = self._shown_s = time.monotonic()
        self._running: dict[int, Stream] = {}
        self._outcomes: collections.Counter[str] = collections.Counter()
        self._tokens = 0
        self._ttft_s: collections.deque[float] = collections.deque(maxlen=100)

    def sent(self, request: PlannedRequest, stream: Stream) -> None:
        self._running[request.index] = stream
        self._tell()

    def ended(self, record: Record) -> None:
        self._running.pop(record.request.index, None)
        self._outcomes[record.outcome] += 1
        self._tokens += output_tokens(record)
        if (ttft := ttft_s(record)) is not None:
            self._ttft_s.append(ttft)
        self._tell()

    def line(self) -> str:
        """How the run stands."""
        done = sum(self._outcomes.values())
        waiting = sum(not stream.piece_times_s for stream in self._running.values())
        tokens = self._tokens + sum(len(stream.piece_times_s) for stream in self._running.values())
        elapsed_s = max(time.monotonic() - self._started_s, 1e-9)
        failed = "".join(f", {count} {name.replace('_', ' ')}" for name, count in self._outcomes.items() if name != "success")
        ttft = f", median TTFT {statistics.median(self._ttft_s) * 1e3:.0f} ms" if self._ttft_s else ""
        of = "" if self._total is None else f" of {self._total}"
        return f"{elapsed_s:.0f} s: {done}{of} done{failed}, {len(self._running)} running ({waiting} without a token), {tokens / elapsed_s:.0f} tokens/s{ttft}"

    def _tell(self) -> None:
        now_s = time.monotonic()
        if now_s - self._shown_s >= self._interval_s:
            self._shown_s = now_s
            self._show(self.line())


@contextlib.contextmanager
def show_progress() -> Generator[Callable[[int | None], Progress]]:
    """Yields what makes the observer of one run."""
    if not sys.stderr.isatty():
        yield lambda total: Progress(total, lambda line: logger.info("%s", line), LOG_INTERVAL_S)
        return
    with Live(Text(), console=stderr_console(), refresh_per_second=1 / REFRESH_S, transient=True) as live:
        yield lambda total: Progress(total, lambda line: live.update(Text(line)), REFRESH_S)

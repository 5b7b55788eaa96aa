"""Runs a module of ours as a process of its own that prints one JSON object a line. Lines that are none are passed over."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def rows_of(module: str, arguments: Sequence[str], environment: Mapping[str, str], *, time_limit_s: float) -> Iterator[tuple[dict[str, Any] | None, str]]:
    """The rows of a module that runs as a process, as they come; one that dies or hangs ends with ``None`` and the reason.

    Args:
        module: Of ours, run with ``python -m``. It exits with 0, or with 1 where its rows tell of failures.
        arguments: Of the command line.
        environment: Of the process.
        time_limit_s: After this the process is killed.
    """
    count = 0
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen([sys.executable, "-m", module, *arguments], env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)  # noqa: S603
        assert process.stdout is not None
        hangs = threading.Event()
        timer = threading.Timer(time_limit_s, lambda: (hangs.set(), process.kill()))
        timer.start()
        try:
            for line in process.stdout:
                if line.startswith("{"):
                    count += 1
                    yield json.loads(line), ""
            code = process.wait()
        finally:
            timer.cancel()
            process.kill()
            process.stdout.close()
            process.wait()
        if hangs.is_set():
            yield None, f"{module} was killed after {time_limit_s:.0f} s"
        elif code not in (0, 1) or not count:
            errors.seek(0)
            last = errors.read().strip().splitlines()[-1:] or ["no output"]
            yield None, f"{module} ended with {code}: {last[0][:400]}"

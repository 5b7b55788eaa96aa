"""Server processes under benchmark, and how busy this machine is with anything else. Linux only, as ``/proc`` is."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path

from jaxserve.errors import BenchmarkError

STOP_TIMEOUT_S = 20.0

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def running(name: str, command: str, log: Path) -> Generator[subprocess.Popen[bytes]]:
    """A server as a process group of its own, which is ended as a whole: by SIGTERM, and by SIGKILL when that takes too long.

    Args:
        name: For messages.
        command: Split as a shell would, but run without one.
        log: Takes its output.

    Raises:
        BenchmarkError: The command cannot be started.
    """
    with log.open("wb") as output:
        try:
            words = shlex.split(command)
            process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True)  # noqa: S603 - the user's own
        except (OSError, ValueError, IndexError) as error:
            raise BenchmarkError(f"{name}: cannot start {command!r}: {error}") from None
    try:
        yield process
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)  # also when its leader is gone: what it started may live on
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if process.poll() is not None and not _group_lives(process.pid):
                return
            time.sleep(0.05)


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def free_port() -> int:
    """A port that nothing listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclasses.dataclass(frozen=True, slots=True)
class CpuTimes:
    """Processor seconds so far.

    Args:
        busy_s: Of the whole machine.
        stolen_s: That the hypervisor gave to others.
        ours_s: Of the processes asked for.
        at_s: When this was read.
    """

    busy_s: float
    stolen_s: float
    ours_s: float
    at_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class CpuUse:
    """Cores used on average over a span: by the processes asked for, by all others, and stolen by the hypervisor."""

    ours: float
    others: float
    stolen: float


def read_cpu(roots: Iterable[int], *, without: Iterable[int] = ()) -> CpuTimes | None:
    """Reads the machine's processor times; ``None`` where ``/proc`` does not tell.

    Args:
        roots: Processes whose whole trees are ours.
        without: Processes whose trees are not, although they may be part of those.
    """
    try:
        user, nice, system, _, _, irq, soft_irq, stolen = (int(field) / _TICKS_PER_S for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
        processes = _processes()
    except (OSError, ValueError):
        return None
    ours = _trees(roots, processes) - _trees(without, processes)
    return CpuTimes(user + nice + system + irq + soft_irq, stolen, sum(processes[pid][1] for pid in ours), time.monotonic())


def cpu_use(before: CpuTimes, after: CpuTimes) -> CpuUse:
    """What happened between two readings. Processes that ended in between count with the others."""
    span_s = max(after.at_s - before.at_s, 1e-9)
    ours = max(0.0, after.ours_s - before.ours_s) / span_s
    return CpuUse(ours, max(0.0, (after.busy_s - before.busy_s) / span_s - ours), (after.stolen_s - before.stolen_s) / span_s)


def resident_mib(roots: Iterable[int]) -> float | None:
    """Resident memory of whole trees of processes, shared pages counted in each."""
    try:
        processes = _processes()
    except OSError:
        return None
    total = 0
    for pid in _trees(roots, processes):
        with contextlib.suppress(OSError, ValueError, IndexError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return total / 2**20 if total else None


def _trees(roots: Iterable[int], processes: Mapping[int, tuple[int, float]]) -> set[int]:
    """The roots that live, and all that descends from them."""
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in processes.items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    stack = [pid for pid in roots if pid in processes]
    while stack:
        pid = stack.pop()
        if pid not in found:
            found.add(pid)
            stack += children.get(pid, ())
    return found


def _processes() -> dict[int, tuple[int, float]]:
    """Process -> (its parent, processor seconds, those of its finished children included)."""
    found: dict[int, tuple[int, float]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()  # a name may hold anything
                found[int(folder.name)] = (int(fields[1]), sum(map(int, fields[11:15])) / _TICKS_PER_S)
    return found

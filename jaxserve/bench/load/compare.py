"""The same workloads on several servers in turn, A B A B, so that a machine that changes its speed changes it for all of them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from jaxserve.bench.load.http_client import HttpClient
from jaxserve.bench.load.metrics import Metrics
from jaxserve.bench.load.processes import CpuTimes, CpuUse, cpu_use, free_port, read_cpu, resident_mib, running
from jaxserve.bench.load.session import Result, RunOptions, ServerOptions, Session, normalize_url, open_session
from jaxserve.bench.load.system_under_test import RequestFailedError
from jaxserve.bench.workload.workload import Workload
from jaxserve.errors import BenchmarkError, ConfigError

READY_POLL_S = 0.2
NOISY_CORES = 0.3
"""Of other processes: beyond that a run measures them as well."""

QUIET_CORES = 0.15
QUIET_WINDOW_S = 2.0

FIGURES: Mapping[str, tuple[str, Callable[[Metrics], float | None]]] = MappingProxyType(
    {
        "output_throughput": ("output tokens/s", lambda metrics: metrics.output_tokens_per_s),
        "request_throughput": ("requests/s", lambda metrics: metrics.requests_per_s),
        "median_ttft_ms": ("TTFT ms", lambda metrics: _median(metrics, "ttft")),
        "median_tpot_ms": ("TPOT ms", lambda metrics: _median(metrics, "tpot")),
        "median_e2el_ms": ("E2E ms", lambda metrics: _median(metrics, "e2el")),
    }
)
"""Key -> (name, where it is in a run's figures)."""

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Contender:
    """One server to compare.

    Args:
        name: In the report.
        url: Where it is, or will be once its command runs.
        command: Starts it; ``None``: it runs already.
    """

    name: str
    url: str
    command: str | None = None


@dataclasses.dataclass(frozen=True)
class Turn:
    """One run of one workload on one server.

    Args:
        level: Which of the workloads.
        round: Which repetition, from 0.
        cpu: Of this machine meanwhile: the server of this turn, where it was started here, and this client are "ours". What the other contenders use while it
            is not their turn disturbs it as anything else does. ``None`` where the machine does not tell.
    """

    contender: str
    level: int
    round: int
    result: Result
    cpu: CpuUse | None

    @property
    def noisy(self) -> bool:
        """Whether other processes took part."""
        return self.cpu is not None and self.cpu.others > NOISY_CORES


@dataclasses.dataclass(frozen=True)
class Start:
    """How a server came up.

    Args:
        ready_s: From its command to its first answer; ``None`` where it ran already.
        resident_mib: Memory of its processes after the last run, likewise.
    """

    ready_s: float | None
    resident_mib: float | None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All turns. Ratios are to the first contender's run of the same level and round.

    Args:
        interrupted: Why there are no more turns; ``None`` when all were run.
    """

    contenders: tuple[Contender, ...]
    workloads: tuple[Workload, ...]
    turns: tuple[Turn, ...]
    starts: Mapping[str, Start]
    interrupted: str | None

    def values(self, contender: str, level: int, figure: str) -> list[float]:
        """A figure of each round, in order."""
        return list(self._by_round(contender, level, figure).values())

    def ratios(self, contender: str, level: int, figure: str) -> list[float]:
        """A figure over the first contender's, round by round."""
        references = self._by_round(self.contenders[0].name, level, figure)
        own = self._by_round(contender, level, figure)
        return [value / reference for round_, value in own.items() if (reference := references.get(round_))]

    def _by_round(self, contender: str, level: int, figure: str) -> dict[int, float]:
        """Round -> the figure, without the rounds that have none."""
        turns = (turn for turn in self.turns if (turn.contender, turn.level) == (contender, level))
        found = {turn.round: FIGURES[figure][1](turn.result.metrics) for turn in turns}
        return {round_: value for round_, value in found.items() if value is not None}


def parse_contender(text: str) -> Contender:
    """Reads ``NAME=URL`` or ``NAME=COMMAND``; ``{port}`` in a command becomes a free port, which must otherwise be told by ``@PORT`` after the name.

    Raises:
        ConfigError: Not of this form.
    """
    name, separator, rest = text.partition("=")
    name, _, port = name.strip().partition("@")
    rest = rest.strip()
    if not separator or not name or not rest:
        raise ConfigError(f"--server is {text!r}; must be NAME=URL, NAME=COMMAND with {{port}} in it, or NAME@PORT=COMMAND")
    if rest.startswith(("http://", "https://")):
        return Contender(name, normalize_url(rest))
    if port and not port.isdigit():
        raise ConfigError(f"--server {name}: the port is {port!r}; must be a number")
    if not port and "{port}" not in rest:
        raise ConfigError(f"--server {name}: {rest!r} does not say on which port it answers; put {{port}} into it, or write {name}@PORT={rest}")
    number = int(port) if port else free_port()
    return Contender(name, f"http://127.0.0.1:{number}", rest.replace("{port}", str(number)))


async def compare(
    contenders: Sequence[Contender],
    workloads: Sequence[Workload],
    options: RunOptions,
    *,
    server: ServerOptions,
    rounds: int,
    log_folder: Path,
    start_timeout_s: float = 600.0,
    settle_s: float = 30.0,
    one_at_a_time: bool = False,
    stop: asyncio.Event | None = None,
) -> Comparison:
    """Runs every workload on every server, round by round, each round with another seed that is the same for all servers.

    Args:
        contenders: At least two, with different names.
        workloads: Levels of load, in order.
        options: How each is run.
        server: How each server is asked; its ``url`` plays no part.
        rounds: How often.
        log_folder: Takes the output of the servers started here.
        start_timeout_s: For a server to answer.
        settle_s: How long to wait, before each turn, for other processes to be quiet.
        one_at_a_time: Start a server for its turn and end it after; else all run all the time.
        stop: Setting it ends the comparison.

    Returns:
        Also when ``stop`` is set or a server fails after the first turn, with the turns until then.

    Raises:
        BenchmarkError: A server that does not come up, or that answers nothing, before there is a single turn.
    """
    stop = stop or asyncio.Event()
    runner = _Runner(options, server, log_folder, start_timeout_s, settle_s, stop)
    interrupted = None
    try:
        if one_at_a_time:
            for round_ in range(rounds):
                for contender in contenders:
                    async with contextlib.AsyncExitStack() as stack:
                        session = await runner.open(contender, workloads[0], stack)
                        for level, workload in enumerate(workloads):
                            await runner.turn(session, contender, level, workload, round_)
        else:
            async with contextlib.AsyncExitStack() as stack:
                sessions = [await runner.open(contender, workloads[0], stack) for contender in contenders]
                for level, workload in enumerate(workloads):
                    for round_ in range(rounds):
                        for contender, session in zip(contenders, sessions, strict=True):
                            await runner.turn(session, contender, level, workload, round_)
    except _StoppedError:
        interrupted = "stopped"
    except BenchmarkError as error:
        if not runner.turns:
            raise
        interrupted = str(error)
    return Comparison(tuple(contenders), tuple(workloads), tuple(runner.turns), runner.starts, interrupted)


class _StoppedError(Exception):
    """The user wants no more turns."""


class _Runner:
    """A comparison in progress. Its methods raise ``_StoppedError`` once ``stop`` is set."""

    def __init__(self, options: RunOptions, server: ServerOptions, log_folder: Path, start_timeout_s: float, settle_s: float, stop: asyncio.Event) -> None:
        self._options = options
        self._server = server
        self._log_folder = log_folder
        self._start_timeout_s = start_timeout_s
        self._settle_s = settle_s
        self._stop = stop
        self._pids: dict[str, int] = {}
        self.turns: list[Turn] = []
        self.starts: dict[str, Start] = {}

    async def open(self, contender: Contender, workload: Workload, stack: contextlib.AsyncExitStack) -> Session:
        self._check_stop()
        ready_s = None
        if contender.command is not None:
            await _refuse_busy_port(contender)
            log = self._log_folder / f"{contender.name}.log"
            logger.info("starting %s (output: %s)", contender.name, log)
            process = stack.enter_context(running(contender.name, contender.command, log))
            started_s = time.monotonic()
            while not await _is_ready(contender.url):
                if process.poll() is not None:
                    raise BenchmarkError(f"{contender.name} ended with status {process.returncode} before it was ready; see {log}")
                if time.monotonic() - started_s > self._start_timeout_s:
                    raise BenchmarkError(f"{contender.name} was not ready after {self._start_timeout_s:g} s; see {log}")
                self._check_stop()
                await asyncio.sleep(READY_POLL_S)
            ready_s = time.monotonic() - started_s
            self._pids[contender.name] = process.pid
            stack.callback(self._pids.pop, contender.name)
            logger.info("%s is ready after %.1f s", contender.name, ready_s)
        self.starts[contender.name] = Start(ready_s, None)
        with _named(contender):
            return await stack.enter_async_context(open_session(dataclasses.replace(self._server, url=contender.url), workload))

    async def turn(self, session: Session, contender: Contender, level: int, workload: Workload, round_: int) -> None:
        await self._wait_for_quiet(contender)
        before = self._read_cpu(contender)
        with _named(contender):
            result = await session.run(dataclasses.replace(workload, seed=workload.seed + 1000 * round_), self._options, stop=self._stop)
        after = self._read_cpu(contender)
        self._check_stop()  # half a turn is no turn
        if result.metrics.interrupted is not None:
            raise BenchmarkError(f"{contender.name}: {result.metrics.interrupted}")
        cpu = cpu_use(before, after) if before and after else None
        self.turns.append(Turn(contender.name, level, round_, result, cpu))
        if contender.name in self._pids:
            self.starts[contender.name] = dataclasses.replace(self.starts[contender.name], resident_mib=resident_mib([self._pids[contender.name]]))
        others = "" if cpu is None else f", others used {cpu.others:.2f} cores"
        logger.info("%s, round %d: %.1f output tokens/s%s", contender.name, round_ + 1, result.metrics.output_tokens_per_s, others)

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise _StoppedError

    def _read_cpu(self, contender: Contender) -> CpuTimes | None:
        """Ours are this process and what descends from it, but for the servers whose turn it is not."""
        return read_cpu([os.getpid()], without=[pid for name, pid in self._pids.items() if name != contender.name])

    async def _wait_for_quiet(self, contender: Contender) -> None:
        """Returns once other processes leave the machine alone, or after the longest wait for that."""
        deadline_s = time.monotonic() + self._settle_s
        self._check_stop()
        while time.monotonic() < deadline_s:
            before = self._read_cpu(contender)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), min(QUIET_WINDOW_S, self._settle_s))
            self._check_stop()
            after = self._read_cpu(contender)
            if before is None or after is None or cpu_use(before, after).others < QUIET_CORES:
                return


@contextlib.contextmanager
def _named(contender: Contender) -> Generator[None]:
    """Says in an error whose it is."""
    try:
        yield
    except BenchmarkError as error:
        raise BenchmarkError(f"{contender.name}: {error}") from None


async def _is_ready(url: str) -> bool:
    client = HttpClient(url)
    try:
        return (await asyncio.wait_for(client.request("GET", "/v1/models"), 2)).status in (200, 401)
    except (RequestFailedError, TimeoutError):
        return False
    finally:
        await client.close()


async def _refuse_busy_port(contender: Contender) -> None:
    client = HttpClient(contender.url)
    try:
        await asyncio.wait_for(client.request("GET", "/"), 2)
    except RequestFailedError as error:
        if error.unreachable:
            return
    except TimeoutError:
        pass
    finally:
        await client.close()
    raise BenchmarkError(f"{contender.name}: something answers at {contender.url} already, and would be measured in its place")


def _median(metrics: Metrics, name: str) -> float | None:
    return metrics.latencies[name].median if name in metrics.latencies else None

"""The load generator: sends a plan to a system under test, in an open or a closed loop, and records what came when. All times are the event loop's."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from jaxserve.bench.load.system_under_test import Outcome, RequestFailedError, Stream, SystemUnderTest
from jaxserve.bench.workload.plan import PlannedRequest

MAX_UNREACHABLE = 5
"""Failed connections in a row after which the server counts as gone, and nothing more is sent."""


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """One request as it went. Times are seconds from the start of the run.

    Args:
        request: As planned.
        sent_s: When it was sent.
        late_s: How long after its planned moment; 0 where it had none.
        end_s: When its last token came, else when it failed or was cancelled.
        piece_times_s: When each piece of text came.
        text: The answer, where texts are kept.
        prompt_tokens: As the server counted; also the next two. ``None``: it did not say.
        own_tokens: Tokens of the text by our own tokenizer; ``None`` without one.
        error: Why it did not succeed.
    """

    request: PlannedRequest
    outcome: Outcome
    sent_s: float
    late_s: float
    end_s: float
    piece_times_s: tuple[float, ...] = ()
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    own_tokens: int | None = None
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run gave.

    Args:
        records: By time of sending.
        duration_s: From the start to the end of the last request.
        cpu_s: Processor time of this process meanwhile: the client's own cost. What was prepared before the start is not in it.
        unfinished: Requests that were under way when an interrupted run ended; nothing else counts them.
        interrupted: Why it ended before its plan did; ``None`` when it did not.
    """

    records: tuple[Record, ...]
    duration_s: float
    cpu_s: float
    unfinished: int = 0
    interrupted: str | None = None


class Observer(Protocol):
    """Told of every request as it starts and ends, for progress."""

    def sent(self, request: PlannedRequest, stream: Stream) -> None: ...

    def ended(self, record: Record) -> None: ...


class Silent:
    """Watches nothing."""

    def sent(self, request: PlannedRequest, stream: Stream) -> None: ...

    def ended(self, record: Record) -> None: ...


async def run_load(
    sessions: Iterable[list[PlannedRequest]],
    system: SystemUnderTest,
    *,
    concurrency: int | None = None,
    duration_s: float | None = None,
    timeout_s: float = 3600.0,
    keep_text: bool = False,
    observer: Observer | None = None,
    stop: asyncio.Event | None = None,
) -> Run:
    """Sends every session, and waits for every answer.

    Args:
        sessions: Requests that run one after the other. In an open loop in order of arrival.
        system: Where to.
        concurrency: Closed loop of so many sessions at any time; ``None``: open loop, each session at its ``arrival_s``.
        duration_s: Of a closed loop: no session starts later. (An open loop's plan ends by itself.) A session that has started runs to its end.
        timeout_s: Of one request.
        keep_text: Keep the answers' texts.
        observer: Told of each request.
        stop: Setting it ends the run: what has not finished is cancelled and not recorded.

    Returns:
        Also when the server goes away or ``stop`` is set, with what there was until then.
    """
    generator = _Generator(system, timeout_s=timeout_s, keep_text=keep_text, observer=observer or Silent())
    if concurrency is None:
        driving = generator.open_loop(sessions)
    else:
        driving = generator.closed_loop(iter(sessions), concurrency, duration_s)
    driver = asyncio.ensure_future(driving)
    watchers = [asyncio.ensure_future(event.wait()) for event in (stop, generator.server_gone) if event is not None]
    try:
        await asyncio.wait((driver, *watchers), return_when=asyncio.FIRST_COMPLETED)
        finished = driver.done()
    finally:
        for task in (driver, *watchers):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await driver
        await asyncio.gather(*watchers, return_exceptions=True)
    interrupted = None
    if not finished:
        interrupted = generator.last_error if generator.server_gone.is_set() else "stopped"
    return Run(
        records=tuple(sorted(generator.records, key=lambda record: record.sent_s)),
        duration_s=generator.elapsed_s() if interrupted else max((record.end_s for record in generator.records), default=generator.elapsed_s()),
        cpu_s=generator.cpu_s(),
        unfinished=generator.under_way,
        interrupted=interrupted,
    )


class _Generator:
    """One run in progress."""

    def __init__(self, system: SystemUnderTest, *, timeout_s: float, keep_text: bool, observer: Observer) -> None:
        self._system = system
        self._timeout_s = timeout_s
        self._keep_text = keep_text
        self._observer = observer
        self._loop = asyncio.get_running_loop()
        self._start()
        self._unreachable = 0
        self.under_way = 0
        self.records: list[Record] = []
        self.server_gone = asyncio.Event()
        self.last_error = ""

    def elapsed_s(self) -> float:
        return self._loop.time() - self._start_s

    def cpu_s(self) -> float:
        return time.process_time() - self._start_cpu_s

    async def open_loop(self, sessions: Iterable[list[PlannedRequest]]) -> None:
        # Bodies are made before the clock starts: a long one takes milliseconds, in which nothing else would be read or sent.
        prepared = [[(request, self._system.prepare(request)) for request in session] for session in sessions]
        self._start()
        async with asyncio.TaskGroup() as tasks:
            for session in prepared:
                await sleep_until(self._start_s + (session[0][0].arrival_s or 0.0))
                tasks.create_task(self._run_session(session))

    async def closed_loop(self, sessions: Iterator[list[PlannedRequest]], concurrency: int, duration_s: float | None) -> None:
        self._start()

        async def keep_running() -> None:
            while duration_s is None or self.elapsed_s() < duration_s:
                if (session := next(sessions, None)) is None:
                    return
                await self._run_session([(request, self._system.prepare(request)) for request in session])

        async with asyncio.TaskGroup() as tasks:
            for _ in range(concurrency):
                tasks.create_task(keep_running())

    def _start(self) -> None:
        self._start_s, self._start_cpu_s = self._loop.time(), time.process_time()

    async def _run_session(self, session: list[tuple[PlannedRequest, Any]]) -> None:
        for request, prepared in session:
            if request.think_s:
                await sleep_until(self._loop.time() + request.think_s)
            self.under_way += 1  # and stays so when the run is cut off here
            record = await self._run_request(request, prepared)
            self.under_way -= 1
            self.records.append(record)
            self._observer.ended(record)
            if record.outcome in ("refused", "timed_out", "error"):
                return  # a conversation does not go on from an answer that never came

    async def _run_request(self, request: PlannedRequest, prepared: Any) -> Record:
        stream = Stream(keep_text=self._keep_text)
        self._observer.sent(request, stream)
        sent_s = self.elapsed_s()
        outcome, error = await self._outcome(request, prepared, stream)
        end_s = stream.end_s - self._start_s if outcome == "success" and stream.end_s is not None else self.elapsed_s()
        return Record(
            request=request,
            outcome=outcome,
            sent_s=sent_s,
            late_s=0.0 if request.arrival_s is None else max(0.0, sent_s - request.arrival_s),
            end_s=end_s,
            piece_times_s=tuple(time_s - self._start_s for time_s in stream.piece_times_s),
            text="".join(stream.texts),
            finish_reason=stream.finish_reason,
            prompt_tokens=stream.prompt_tokens,
            completion_tokens=stream.completion_tokens,
            cached_tokens=stream.cached_tokens,
            error=error,
        )

    async def _outcome(self, request: PlannedRequest, prepared: Any, stream: Stream) -> tuple[Outcome, str | None]:
        leaves_first = request.cancel_after_s is not None and request.cancel_after_s < self._timeout_s
        limit_s = request.cancel_after_s if leaves_first else self._timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self._system.run(prepared, stream)
        except TimeoutError:
            return ("cancelled", None) if leaves_first else ("timed_out", f"no complete answer within {self._timeout_s:g} s")
        except RequestFailedError as error:
            self.last_error = str(error)
            self._unreachable = self._unreachable + 1 if error.unreachable else 0
            if self._unreachable >= MAX_UNREACHABLE:
                self.server_gone.set()
            return error.outcome, str(error)
        self._unreachable = 0
        return "success", None


async def sleep_until(time_s: float) -> None:
    """Waits for a moment of the event loop's clock. ``asyncio.sleep`` counts from when it is called, which adds up over a schedule."""
    loop = asyncio.get_running_loop()
    due: asyncio.Future[None] = loop.create_future()
    timer = loop.call_at(time_s, due.set_result, None)
    try:
        await due
    finally:
        timer.cancel()

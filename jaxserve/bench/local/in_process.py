"""Drives planned requests through an engine in this process, in a closed or an open loop, and records what came when. No server, no threads."""

from __future__ import annotations

import dataclasses
import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from jaxserve.bench.load.load import Observer, Record, Run, Silent
from jaxserve.bench.load.system_under_test import Outcome, Stream
from jaxserve.bench.workload.plan import PlannedRequest
from jaxserve.bench.workload.prompts import IdPrompts
from jaxserve.engine.engine import Engine
from jaxserve.errors import OverloadedError, QuotaExceededError
from jaxserve.request import Request, RequestOptions, RequestOutput, SamplingParams

_Prepared = tuple[PlannedRequest, list[int]]

_REFUSALS = (OverloadedError, QuotaExceededError)


def run_in_process(
    engine: Engine,
    sessions: Iterable[Sequence[PlannedRequest]],
    *,
    concurrency: int | None = None,
    start_s: float = 0.0,
    observer: Observer | None = None,
    step_ended: Callable[[float, bool], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Run:
    """Runs all sessions to their end. Ctrl-C ends it early; the run says so.

    A token is there when the step that sampled it has ended. Every token counts as a piece, also one that completes no character.

    Args:
        engine: Idle and warm.
        sessions: Requests that run one after the other. In an open loop in order of arrival. Prompts are token ids, answers have exactly the planned length.
        concurrency: Closed loop of so many sessions at any time, which no bound of the engine's queue refuses. ``None``: open loop, each session at its
            ``arrival_s``, through the engine's door.
            A request counts as sent when it was due, and a client as gone when it meant to go: a server would have noticed in the middle of a step.
        start_s: Where the times of the records begin.
        observer: Told of each request.
        step_ended: Told of each step: its seconds, and whether every request under way had its first token before it.
        clock: Gives seconds.
        sleep: Waits for that many seconds.

    Raises:
        InvalidRequestError: A request is longer than the engine can ever hold; nothing has run then.
        EngineDeadError: The engine cannot go on.
    """
    prompts = IdPrompts.within(engine.spec.vocab_size)
    waiting = deque(deque((request, prompts.prompt(request.segments)) for request in session) for session in sessions)
    for session in waiting:
        for planned, prompt in session:
            _request(engine, planned, prompt)  # would be refused: say so before anything runs
    began_s = clock()
    driver = _Driver(engine, waiting, concurrency, observer or Silent(), lambda: start_s + clock() - began_s)
    interrupted = None
    try:
        while driver.start_what_is_due():
            if pause_s := driver.pause_s():
                sleep(pause_s)
                continue
            if not driver.under_way:
                continue  # what was waited for is due by now
            if step_ended is None:
                driver.take(engine.step())
                continue
            only_decodes, before_s = driver.only_decodes, clock()
            outputs = engine.step()
            step_ended(clock() - before_s, only_decodes)
            driver.take(outputs)
    except KeyboardInterrupt:
        interrupted = "stopped"
    finally:
        for request_id in list(driver.under_way):
            engine.abort(request_id)
    return Run(
        records=tuple(sorted(driver.records, key=lambda record: record.sent_s)),
        duration_s=clock() - began_s,
        cpu_s=0.0,  # this client is the engine: it has no cost of its own
        unfinished=len(driver.under_way),
        interrupted=interrupted,
    )


@dataclasses.dataclass(slots=True)
class _UnderWay:
    planned: PlannedRequest
    session: deque[_Prepared]
    sent_s: float
    stream: Stream


class _Driver:
    """Sessions that wait, requests under way, and what has come of those that ended."""

    def __init__(self, engine: Engine, waiting: deque[deque[_Prepared]], concurrency: int | None, observer: Observer, elapsed_s: Callable[[], float]) -> None:
        self._engine = engine
        self._waiting = waiting
        self._concurrency = concurrency
        self._observer = observer
        self._elapsed_s = elapsed_s
        self._thinking: list[tuple[float, int, deque[_Prepared]]] = []  # a heap: when the next turn is due, and its index
        self._leaving: list[tuple[float, str]] = []  # a heap: when a client goes away, if it is still there
        self.under_way: dict[str, _UnderWay] = {}
        self.records: list[Record] = []

    @property
    def only_decodes(self) -> bool:
        """Whether every request under way has its first token."""
        return all(one.stream.piece_times_s for one in self.under_way.values())

    def start_what_is_due(self) -> bool:
        """Starts requests whose time has come, or that have a free place. Returns whether anything is left to do."""
        self._cancel_who_left()
        while self._thinking and self._thinking[0][0] <= self._elapsed_s():
            due_s, _, session = heapq.heappop(self._thinking)
            self._send(session, due_s)
        while self._waiting and self._is_due():
            due_s = self._elapsed_s() if self._is_closed_loop else self._next_arrival_s
            self._send(self._waiting.popleft(), due_s)
        return bool(self._waiting or self._thinking or self.under_way)

    def pause_s(self) -> float:
        """How long nothing can be done; 0 where a step is to be made."""
        idle_s = self._engine.idle_s if self.under_way else float("inf")
        if not idle_s:
            return 0.0
        moments_s = [heap[0][0] for heap in (self._thinking, self._leaving) if heap]
        if self._waiting and not self._is_closed_loop:
            moments_s.append(self._next_arrival_s)
        return max(0.0, min([idle_s, *(moment_s - self._elapsed_s() for moment_s in moments_s)]))

    def take(self, outputs: Iterable[RequestOutput]) -> None:
        """Outputs of a step that has ended just now."""
        self._cancel_who_left()
        now_s = self._elapsed_s()
        for output in outputs:
            one = self.under_way.get(output.request_id)
            if one is None:  # its client went away during the step
                continue
            one.stream.piece_times_s += [now_s] * len(output.token_ids)
            if output.finish_reason is None:
                continue
            del self.under_way[output.request_id]
            outcome: Outcome = "success" if output.error is None else "refused" if issubclass(output.error.error_class, _REFUSALS) else "error"
            self._end(one, outcome, now_s, None if output.error is None else output.error.message, output)
            if outcome == "success":  # a conversation does not go on from an answer that never came
                self._go_on(one.session, now_s)

    @property
    def _next_arrival_s(self) -> float:
        return self._waiting[0][0][0].arrival_s or 0.0

    @property
    def _is_closed_loop(self) -> bool:
        return self._concurrency is not None

    def _is_due(self) -> bool:
        return self._next_arrival_s <= self._elapsed_s() if self._concurrency is None else len(self.under_way) + len(self._thinking) < self._concurrency

    def _cancel_who_left(self) -> None:
        """Ends the requests whose clients have gone away by now, as a server does: nothing reaches them any more."""
        while self._leaving and self._leaving[0][0] <= self._elapsed_s():
            left_s, request_id = heapq.heappop(self._leaving)
            if (one := self.under_way.pop(request_id, None)) is not None:
                self._engine.abort(request_id)
                self._end(one, "cancelled", left_s, None, None)
                self._go_on(one.session, left_s)

    def _go_on(self, session: deque[_Prepared], from_s: float) -> None:
        """The session's next turn, if there is one, after its pause."""
        if session:
            heapq.heappush(self._thinking, (from_s + session[0][0].think_s, session[0][0].index, session))

    def _send(self, session: deque[_Prepared], sent_s: float) -> None:
        planned, prompt = session.popleft()
        request = _request(self._engine, planned, prompt)
        one = _UnderWay(planned, session, sent_s, Stream())
        self._observer.sent(planned, one.stream)
        shed: list[RequestOutput] = []
        try:
            if self._concurrency is None:
                shed = self._engine.submit(request)
            else:
                self._engine.add(request)
        except _REFUSALS as error:
            self._end(one, "refused", self._elapsed_s(), str(error), None)
            return
        self.under_way[request.request_id] = one
        if planned.cancel_after_s is not None:
            heapq.heappush(self._leaving, (sent_s + planned.cancel_after_s, request.request_id))
            self.take(shed)

    def _end(self, one: _UnderWay, outcome: Outcome, end_s: float, error: str | None, last: RequestOutput | None) -> None:
        record = Record(
            request=one.planned,
            outcome=outcome,
            sent_s=one.sent_s,
            late_s=0.0,
            end_s=end_s,
            piece_times_s=tuple(one.stream.piece_times_s),
            finish_reason=last and last.finish_reason,
            prompt_tokens=last and last.usage.prompt_tokens,
            completion_tokens=last and last.usage.completion_tokens,
            cached_tokens=last and last.usage.cached_tokens,
            error=error,
        )
        self.records.append(record)
        self._observer.ended(record)


def _request(engine: Engine, planned: PlannedRequest, prompt: list[int]) -> Request:
    """A planned request as the engine takes it: greedy, and of exactly its planned length.

    Raises:
        InvalidRequestError: It is longer than the engine can ever hold.
    """
    sampling_params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=planned.output_len)
    tenant = "" if planned.tenant is None else f"tenant-{planned.tenant}"
    return engine.make_request(prompt, sampling_params, options=RequestOptions(tenant=tenant, priority=planned.priority or 0))

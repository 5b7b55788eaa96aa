"""The engine's loop with overlap and without: how long a simulated device stands idle and what the host does; on the real one, the tokens per second."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from jaxserve.bench.local.simulated_device import SimulatedDevice
from jaxserve.bench.report.report import environment, make_table
from jaxserve.config import Config
from jaxserve.dims import ceil_div
from jaxserve.engine.engine import Engine
from jaxserve.engine.garbage import FullCollections
from jaxserve.engine.step.buckets import make_buckets, table_width
from jaxserve.models.spec import ModelSpec
from jaxserve.request import RequestOptions, SamplingParams
from jaxserve.tokenizer import Tokenizer

_PROMPT_TOKENS = 20
_WARMUP_STEPS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopRun:
    """One run of the loop.

    Args:
        overlap: Whether each step was launched while the one before it ran.
        num_streams: Requests that decoded in every step.
        num_waiting: Requests that waited in the queue all the time.
        idle: Share of the time in which the device stood idle, in [0, 1]; ``None`` for a real device, which does not tell.
        host_s: Processor time of the engine's thread in a step: scheduling, batch, dispatch, update and outputs, in seconds. On a CPU the thread may run
            parts of the step itself.
        tokens_per_s: Tokens of all streams.
    """

    overlap: bool
    num_streams: int
    num_waiting: int
    idle: float | None
    host_s: float
    tokens_per_s: float


class Loop:
    """Runs the loop on a device.

    Args:
        make_engine: Makes an engine that is used for one run: with overlap or without, for so many streams and steps.
    """

    def __init__(self, make_engine: Callable[[bool, int, int], Engine]) -> None:
        self._make_engine = make_engine

    def run(self, *, overlap: bool, num_streams: int, num_steps: int, num_waiting: int = 0) -> LoopRun:
        """Serves requests that decode, and reads their outputs in this process. The text of outputs is not made: that is the work of the readers.

        Args:
            overlap: See ``engine.overlap``.
            num_streams: Sequences of every step.
            num_steps: Steps that are measured.
            num_waiting: Requests that find no slot and wait; 0 where the engine has more slots than streams.
        """
        engine = self._make_engine(overlap, num_streams, num_steps)
        device = engine.runner if isinstance(engine.runner, SimulatedDevice) else None
        sampling_params = SamplingParams(max_tokens=num_steps + 2 * _WARMUP_STEPS, temperature=0.0, ignore_eos=True)
        requests: list[str] = []
        for number in range(num_streams + num_waiting):
            prompt = [(number + place) % engine.spec.vocab_size for place in range(_PROMPT_TOKENS)]
            request = engine.make_request(prompt, sampling_params, options=RequestOptions(detokenize=False))
            engine.add(request)
            requests.append(request.request_id)
        with FullCollections():
            for _ in range(_WARMUP_STEPS):
                _step(engine)
            if device is not None:
                device.forget()
            began_s, began_cpu_s = time.perf_counter(), time.thread_time()
            num_tokens = sum(_step(engine) for _ in range(num_steps))
            wall_s, cpu_s = time.perf_counter() - began_s, time.thread_time() - began_cpu_s
        idle = None if device is None else device.idle_s / (device.idle_s + device.busy_s)
        for request_id in requests:
            engine.abort(request_id)
        while engine.has_work:
            engine.step()
        return LoopRun(overlap=overlap, num_streams=num_streams, num_waiting=num_waiting, idle=idle, host_s=cpu_s / num_steps, tokens_per_s=num_tokens / wall_s)


def simulated_loop(config: Config, spec: ModelSpec, tokenizer: Tokenizer, *, step_s: float) -> Loop:
    """The loop on a simulated device.

    Args:
        config: For the page size and the prefix cache.
        spec: The specification of the model that the device stands for.
        tokenizer: The tokenizer of the same model.
        step_s: Time of the device for a step, in seconds.
    """

    def make_engine(overlap: bool, num_streams: int, num_steps: int) -> Engine:
        page_size, num_tokens = config.cache.page_size, num_streams * _PROMPT_TOKENS
        pages_a_stream = ceil_div(_PROMPT_TOKENS + num_steps + 2 * _WARMUP_STEPS, page_size)
        buckets = make_buckets(
            (num_tokens,), (num_streams,), max_tokens=num_tokens, max_rows=num_streams, table_width=table_width(spec.max_position, page_size)
        )
        device = SimulatedDevice(
            buckets, step_s=step_s, num_pages=2 * num_streams * pages_a_stream, page_size=page_size, max_num_seqs=num_streams,
            token_id=tokenizer.encode(" word", add_special_tokens=False)[0],
        )  # fmt: skip
        limits = dataclasses.replace(config.scheduler, max_num_seqs=num_streams, max_tokens_per_step=num_tokens)
        return Engine(device, tokenizer, spec, dataclasses.replace(config, scheduler=limits), overlap=overlap)

    return Loop(make_engine)


def real_loop(config: Config, engine: Engine) -> Loop:
    """The loop on the device of an engine that is warm and idle, and of no other use from then on.

    Args:
        config: The configuration of the engine.
        engine: Its runner serves both kinds of loop in turn.
    """
    return Loop(lambda overlap, _streams, _steps: Engine(engine.runner, engine.tokenizer, engine.spec, config, overlap=overlap))


def _step(engine: Engine) -> int:
    """One step as the engine's thread runs it. Returns its tokens."""
    if slack_s := engine.slack_s:
        time.sleep(slack_s)
        engine.note_sleep(slack_s)
    return sum(len(output.token_ids) for output in engine.step())


def print_loop(runs: Sequence[LoopRun], console: Console, *, device: str) -> None:
    """A table of medians over the runs of each kind."""
    table = make_table(f"The engine's loop on {device}, outputs read in process: medians")
    for column in ("streams", "overlap", "waiting", "device idle", "host ms a step", "tokens/s"):
        table.add_column(column, justify="right")
    for num_streams, num_waiting, overlap in sorted({(run.num_streams, run.num_waiting, run.overlap) for run in runs}):
        alike = [run for run in runs if (run.num_streams, run.num_waiting, run.overlap) == (num_streams, num_waiting, overlap)]
        idle = [run.idle for run in alike if run.idle is not None]
        host_s, tokens_per_s = statistics.median(run.host_s for run in alike), statistics.median(run.tokens_per_s for run in alike)
        table.add_row(
            str(num_streams), "on" if overlap else "off", f"{num_waiting:,}", f"{statistics.median(idle):.1%}" if idle else "–", f"{host_s * 1e3:.2f}",
            f"{tokens_per_s:,.0f}" if tokens_per_s >= 100 else f"{tokens_per_s:.1f}",
        )  # fmt: skip
    console.print(table)


def to_json(runs: Sequence[LoopRun], *, device: str) -> dict[str, Any]:
    """The runs as a JSON object."""
    return {"environment": environment(), "device": device, "runs": [dataclasses.asdict(run) for run in runs]}

"""The engine's loop beside a simulated device: how long the device stands idle between steps, and what the host does in a step."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
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
from jaxserve.request import SamplingParams
from jaxserve.tokenizer import Tokenizer

_PROMPT_TOKENS = 20
_WARMUP_STEPS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopRun:
    """One run of the loop.

    Args:
        overlap: Whether each step was launched while the one before it ran.
        num_waiting: Requests that waited in the queue all the time.
        idle: Share of the time in which the device stood idle, in [0, 1].
        host_s: Processor time of the engine's thread in a step: scheduling, batch, dispatch, update and outputs, in seconds.
        tokens_per_s: Tokens of all streams.
    """

    overlap: bool
    num_waiting: int
    idle: float
    host_s: float
    tokens_per_s: float


def run_loop(
    config: Config, spec: ModelSpec, tokenizer: Tokenizer, *, num_streams: int, step_s: float, num_steps: int, num_waiting: int, overlap: bool
) -> LoopRun:
    """Serves ``num_streams`` requests that decode, and reads their outputs in this process.

    Args:
        config: For the page size and the prefix cache.
        spec: Of the model that the device stands for.
        tokenizer: Of the same model.
        num_streams: Sequences of every step.
        step_s: Time of the device for a step, in seconds.
        num_steps: Steps that are measured.
        num_waiting: Requests that find no slot and wait.
        overlap: See ``engine.overlap``.
    """
    page_size, length = config.cache.page_size, _PROMPT_TOKENS + num_steps + 2 * _WARMUP_STEPS
    device = SimulatedDevice(
        make_buckets((num_streams * _PROMPT_TOKENS,), (num_streams,), max_tokens=num_streams * _PROMPT_TOKENS, max_rows=num_streams,
                     table_width=table_width(spec.max_position, page_size)),
        step_s=step_s, num_pages=2 * num_streams * ceil_div(length, page_size), page_size=page_size, max_num_seqs=num_streams,
        token_id=tokenizer.encode(" word", add_special_tokens=False)[0],
    )  # fmt: skip
    limits = dataclasses.replace(
        config.scheduler, max_num_seqs=num_streams, max_tokens_per_step=num_streams * _PROMPT_TOKENS, max_queued_requests=None, max_queued_tokens=None
    )
    engine = Engine(device, tokenizer, spec, dataclasses.replace(config, scheduler=limits), overlap=overlap)
    params = SamplingParams(max_tokens=num_steps + 2 * _WARMUP_STEPS, temperature=0.0, ignore_eos=True)
    for number in range(num_streams + num_waiting):
        prompt = [(number + place) % spec.vocab_size for place in range(_PROMPT_TOKENS)]
        engine.submit(engine.make_request(prompt, params))
    with FullCollections():
        for _ in range(_WARMUP_STEPS):
            _step(engine)
        device.forget()
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        num_tokens = sum(_step(engine) for _ in range(num_steps))
        wall_s, cpu_s = time.perf_counter() - began_s, time.thread_time() - began_cpu_s
    idle = device.idle_s / (device.idle_s + device.busy_s)
    return LoopRun(overlap=overlap, num_waiting=num_waiting, idle=idle, host_s=cpu_s / num_steps, tokens_per_s=num_tokens / wall_s)


def _step(engine: Engine) -> int:
    """One step as the engine's thread runs it. Returns its tokens."""
    if slack_s := engine.slack_s:
        time.sleep(slack_s)
        engine.note_sleep(slack_s)
    return sum(len(output.token_ids) for output in engine.step())


def print_loop(runs: Sequence[LoopRun], console: Console, *, num_streams: int, step_s: float) -> None:
    """A table of medians over the runs of each kind."""
    table = make_table(f"{num_streams} streams beside a device of {step_s * 1e3:g} ms a step, outputs read in process")
    for column in ("overlap", "waiting", "device idle", "host ms a step", "tokens/s"):
        table.add_column(column, justify="right")
    for overlap, num_waiting in dict.fromkeys((run.overlap, run.num_waiting) for run in runs):
        alike = [run for run in runs if (run.overlap, run.num_waiting) == (overlap, num_waiting)]
        idle, host_s, tokens_per_s = (statistics.median(getattr(run, name) for run in alike) for name in ("idle", "host_s", "tokens_per_s"))
        table.add_row("on" if overlap else "off", f"{num_waiting:,}", f"{idle:.1%}", f"{host_s * 1e3:.2f}", f"{tokens_per_s:,.0f}")
    console.print(table)


def to_json(runs: Sequence[LoopRun], *, num_streams: int, step_s: float) -> dict[str, Any]:
    """The runs as a JSON object."""
    return {"environment": environment(), "num_streams": num_streams, "step_ms": step_s * 1e3, "runs": [dataclasses.asdict(run) for run in runs]}

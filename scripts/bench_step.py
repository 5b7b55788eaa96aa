"""Times whole steps of a model on this machine, host and device together, beside the prototype's figures for SmolLM2-135M on two CPU cores.

python scripts/bench_step.py [--model smollm2-135m] [--repeats 20]

Each row is one bucket: a batch of decodes at the given context, a prefill chunk, or both; a step is packed, dispatched and fetched as the engine does it.
"host" is packing and dispatching alone, "faults" the page faults of a step. The prototype had no scheduler, sampler or tokenizer; its figures are minima.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time

from jaxserve.config import Config, EngineConfig, ModelConfig, SchedulerConfig
from jaxserve.platform import choose_platform

CONTEXT_LEN = 200
PROTOTYPE_MS = {(1, 0): 21, (8, 0): 29, (32, 0): 67, (0, 128): 104, (0, 512): 435, (31, 128): 162}
"""(decodes, prefill tokens) -> ms a step: minimum of 20, JAX 0.12, bf16, greedy, page 16, both cores free."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    choose_platform()

    import jax
    from rich.console import Console
    from rich.table import Table

    from jaxserve.engine.build import build_engine
    from jaxserve.engine.schedule import RankSchedule, Schedule, ScheduledSequence
    from jaxserve.engine.sequence import Sequence
    from jaxserve.request import Request, SamplingParams

    config = Config(
        model=ModelConfig(source=options.model, max_model_len=1024),
        scheduler=SchedulerConfig(max_num_seqs=32, max_tokens_per_step=512),
        engine=EngineConfig(warmup=False),
    )
    runner = build_engine(config)._runner
    page_ids = iter(range(runner.num_pages))

    def sequence(slot: int, length: int) -> Sequence:
        prompt = [(slot * 7919 + index * 104729) % 40_000 for index in range(length)]
        request = Request(request_id=str(slot), prompt_token_ids=prompt, params=SamplingParams(temperature=0.0))
        return Sequence(request, 0, prompt, length, 64, page_ids=[next(page_ids) for _ in range(-(-length // runner.page_size))], slot=slot)

    decoding = [sequence(slot, CONTEXT_LEN) for slot in range(32)]
    table = Table(title=f"{options.model}, {jax.devices()[0].device_kind}, jax {jax.__version__}: ms a step, context {CONTEXT_LEN}")
    for column in ("decodes", "prefill", "min", "median", "prototype", "min / prototype", "host µs", "faults"):
        table.add_column(column, justify="right")
    for num_decodes, num_prefill in PROTOTYPE_MS:
        items = [ScheduledSequence(owner, CONTEXT_LEN - 1, 1, True) for owner in decoding[:num_decodes]]
        if num_prefill:
            page_ids = iter(range(CONTEXT_LEN * 2, runner.num_pages))
            items.append(ScheduledSequence(sequence(31, num_prefill), 0, num_prefill, True))
        schedule = Schedule((RankSchedule(tuple(items), num_decodes, num_decodes + num_prefill),))
        runner.dispatch(schedule).fetch()
        steps: list[float] = []
        hosts: list[float] = []
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(options.repeats):
            started = time.perf_counter()
            pending = runner.dispatch(schedule)
            hosts.append(time.perf_counter() - started)
            pending.fetch()
            steps.append(time.perf_counter() - started)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        prototype = PROTOTYPE_MS[num_decodes, num_prefill]
        least = min(steps) * 1e3
        cells = (f"{least:.1f}", f"{statistics.median(steps) * 1e3:.1f}", str(prototype), f"{least / prototype:.2f}")
        table.add_row(str(num_decodes), str(num_prefill), *cells, f"{statistics.median(hosts) * 1e6:.0f}", f"{faults / options.repeats:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()

"""``jaxserve bench loop``: the engine's loop beside a simulated device."""

from __future__ import annotations

from typing import Annotated

import typer

from jaxserve.cli import bench_options
from jaxserve.cli.options import ConfigFiles, Debug, Words, resolve_config
from jaxserve.cli.output import tables_console
from jaxserve.platform import choose_platform


def loop(
    words: Words = None,
    streams: Annotated[int, typer.Option(min=1, metavar="N", help="Sequences that decode in every step.")] = 256,
    step_ms: Annotated[float, typer.Option(min=0.01, metavar="MS", help="Time of the device for a step.")] = 10.0,
    steps: Annotated[int, typer.Option(min=10, metavar="N", help="Steps of each run.")] = 300,
    waiting: Annotated[int, typer.Option(min=0, metavar="N", help="Measure also with as many requests that wait in the queue.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Runs of each kind, in turn.")] = 5,
    json_file: bench_options.JsonFile = None,
    config: ConfigFiles = None,
    debug: Debug = False,
) -> None:
    """Run the engine's own loop beside a device that takes a fixed time a step: how long it stands idle, and what the host does, with overlap and without.

    Scheduling, batches and outputs are the real ones; no model is loaded but its tokenizer.

    Examples:

        jaxserve bench loop

        jaxserve bench loop --streams 64 --step-ms 5 --waiting 100000
    """
    bench_options.check_outputs(json_file)
    resolved = resolve_config(words, config, debug=debug)
    choose_platform("cpu")

    from jaxserve.bench.local.loop import print_loop, run_loop, to_json
    from jaxserve.models.loading.checkpoint import open_checkpoint
    from jaxserve.tokenizer import load_tokenizer

    checkpoint = open_checkpoint(resolved.model)
    tokenizer = load_tokenizer(checkpoint)
    runs = [
        run_loop(
            resolved, checkpoint.spec, tokenizer, num_streams=streams, step_s=step_ms / 1e3, num_steps=steps, num_waiting=count, overlap=overlap
        )
        for _ in range(repeats) for count in dict.fromkeys((0, waiting)) for overlap in (False, True)
    ]  # fmt: skip
    bench_options.all_of(
        lambda: print_loop(runs, tables_console(), num_streams=streams, step_s=step_ms / 1e3),
        lambda: bench_options.write_json(json_file, to_json(runs, num_streams=streams, step_s=step_ms / 1e3)),
    )

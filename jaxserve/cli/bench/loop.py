"""``jaxserve bench loop``: the engine's loop with overlap and without."""

from __future__ import annotations

from typing import Annotated

import typer

from jaxserve.cli.bench import options
from jaxserve.cli.bench.engine import open_engine
from jaxserve.cli.options import ConfigFiles, Debug, Words, resolve_config
from jaxserve.cli.output import tables_console
from jaxserve.platform import choose_platform


def loop(
    words: Words = None,
    streams: Annotated[str, typer.Option(metavar="N,N", help="Sequences that decode in every step.")] = "256",
    step_ms: Annotated[float, typer.Option(min=0.01, metavar="MS", help="Time of the simulated device for a step.")] = 10.0,
    real: Annotated[bool, typer.Option("--real", help="Run the model on the device that is here, instead of a simulated one.")] = False,
    steps: Annotated[int, typer.Option(min=10, metavar="N", help="Steps of each run.")] = 300,
    waiting: Annotated[int, typer.Option(min=0, metavar="N", help="Measure also with as many requests that wait in the queue.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Runs of each kind, in turn.")] = 5,
    json_file: options.JsonFile = None,
    config: ConfigFiles = None,
    debug: Debug = False,
) -> None:
    """Run the engine's own loop with overlap and without, in turn: how long a simulated device stands idle, what the host does in a step, tokens/s.

    Scheduling, batches and outputs are the real ones. For a simulated device no model is loaded but its tokenizer.

    Examples:

        jaxserve bench loop --waiting 100000

        jaxserve bench loop smollm2-135m --real --streams 1,8,32 --steps 50
    """
    options.check_outputs(json_file)
    counts = options.whole_numbers(streams, "--streams")
    resolved = resolve_config(words, config, debug=debug, defaults={"scheduler.max_queued_requests": None, "engine.warmup": False})
    choose_platform(resolved.platform if real else "cpu")

    from jaxserve.bench.local.loop import print_loop, real_loop, simulated_loop, to_json

    if real:
        measured, device = real_loop(resolved, open_engine(resolved)), "the device"
    else:
        from jaxserve.models.loading.checkpoint import open_checkpoint
        from jaxserve.tokenizer import load_tokenizer

        checkpoint = open_checkpoint(resolved.model)
        measured, device = simulated_loop(resolved, checkpoint.spec, load_tokenizer(checkpoint), step_s=step_ms / 1e3), f"a device of {step_ms:g} ms a step"
    runs = [
        measured.run(overlap=overlap, num_streams=count, num_steps=steps, num_waiting=num_waiting)
        for _ in range(repeats) for count in counts for num_waiting in ((0,) if real else dict.fromkeys((0, waiting))) for overlap in (False, True)
    ]  # fmt: skip
    options.all_of(lambda: print_loop(runs, tables_console(), device=device), lambda: options.write_json(json_file, to_json(runs, device=device)))

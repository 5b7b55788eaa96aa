"""``jaxserve bench throughput`` and ``jaxserve bench latency``: the engine in this process, without a server."""

from __future__ import annotations

import itertools
from typing import Annotated, Any

import typer

from jaxserve.cli.bench import options
from jaxserve.cli.bench.engine import open_engine
from jaxserve.cli.options import CompiledOption, ConfigFiles, Debug, MeshOption, PlatformOption, Words, resolve_config
from jaxserve.cli.output import tables_console
from jaxserve.config import SchedulerConfig
from jaxserve.errors import ConfigError
from jaxserve.platform import choose_platform


def throughput(
    words: Words = None,
    workload: options.WorkloadFile = None,
    num_requests: options.NumRequests = None,
    seed: options.WorkloadSeed = None,
    input_len: options.InputLen = None,
    output_len: options.OutputLen = None,
    lengths: options.LengthFile = None,
    trace: options.TraceFile = None,
    prefix_len: options.PrefixLen = None,
    price_per_hour: options.PricePerHour = None,
    json_file: options.JsonFile = None,
    config: ConfigFiles = None,
    platform: PlatformOption = None,
    mesh: MeshOption = None,
    compiled: CompiledOption = None,
    debug: Debug = False,
) -> None:
    """Give all requests to the engine at once and report what it gets through, without a server and without arrivals.

    Of a workload everything about time is left out: arrivals, pauses, cancelled requests. Exit status as for bench serve.

    Examples:

        jaxserve bench throughput --num-requests 64 --input-len 512 --output-len normal:128:32

        jaxserve bench throughput gemma3-270m --workload configs/workloads/agent.yaml scheduler.max_num_seqs=64
    """
    options.check_outputs(json_file)
    resolved = resolve_config(words, config, platform=platform, mesh=mesh, compiled=compiled, debug=debug)
    from jaxserve.bench.local.offline import offline_workload

    given = {
        "num_requests": num_requests, "seed": seed, "input_len": input_len, "output_len": output_len, "lengths": lengths, "trace": trace,
        "prefix_len": prefix_len,
    }  # fmt: skip
    planned = offline_workload(workload, {key: value for key, value in given.items() if value is not None})
    choose_platform(resolved.platform)

    from jaxserve.bench.load.progress import show_progress
    from jaxserve.bench.local.offline import run_workload
    from jaxserve.bench.report import report
    from jaxserve.bench.report.surroundings import Watch, device_name, surroundings

    engine = open_engine(resolved)
    watch = Watch()
    with show_progress() as observer:
        result = run_workload(engine, planned, device=device_name(), price_per_hour=price_per_hour, observer=observer)
    around, console = surroundings(watch), tables_console()
    compiles = [] if resolved.engine.warmup else ["engine.warmup is false: these figures hold the compiling too"]
    options.all_of(
        lambda: report.print_result(result, console),
        lambda: report.print_notes(console, compiles + around.notes()),
        lambda: options.write_json(json_file, report.to_json(result) | around.to_json()),
    )
    raise typer.Exit(options.INTERRUPTED_STATUS if result.metrics.interrupted else options.status_of([result]))


def latency(
    words: Words = None,
    batch: Annotated[str, typer.Option(metavar="N,M,…", help="Requests that start together; several are runs of their own.", rich_help_panel="Load")] = "1",
    input_len: Annotated[int, typer.Option(min=1, metavar="N", help="Prompt tokens.", rich_help_panel="Load")] = 128,
    output_len: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens to generate.", rich_help_panel="Load")] = 128,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="How often each batch is run, after one time that does not count.")] = 5,
    seed: options.WorkloadSeed = None,
    json_file: options.JsonFile = None,
    config: ConfigFiles = None,
    platform: PlatformOption = None,
    mesh: MeshOption = None,
    compiled: CompiledOption = None,
    debug: Debug = False,
) -> None:
    """Run one fixed batch several times and report TTFT, TPOT and E2E, without a server. Exit status as for bench serve.

    Examples:

        jaxserve bench latency --batch 1,8 --input-len 512 --output-len 32
    """
    options.check_outputs(json_file)
    sizes = options.whole_numbers(batch, "--batch")
    usual = SchedulerConfig()
    slots = max(*sizes, usual.max_num_seqs)
    defaults: dict[str, Any] = {"engine.warmup": False}  # each batch runs once before it counts
    if compiled is None:  # those programs have their own limits
        defaults |= {"scheduler.max_num_seqs": slots, "scheduler.max_tokens_per_step": max(slots, usual.max_tokens_per_step)}
    resolved = resolve_config(words, config, platform=platform, mesh=mesh, compiled=compiled, debug=debug, defaults=defaults)
    choose_platform(resolved.platform)

    from jaxserve.bench.local.batches import BatchResult, print_batches, run_batches, to_json
    from jaxserve.bench.local.offline import offline_workload
    from jaxserve.bench.report.surroundings import Watch, device_name, surroundings

    engine = open_engine(resolved)
    if max(sizes) > engine.stats().max_num_seqs:
        raise ConfigError(f"--batch is {batch}; it must be at most {engine.stats().max_num_seqs}, the sequences that run at once (scheduler.max_num_seqs)")
    watch = Watch()
    found: list[BatchResult] = []
    numbers = itertools.count()
    for size in sizes:
        fields = {"num_requests": size, "input_len": str(input_len), "output_len": str(output_len), "seed": seed or 0}
        found.append(run_batches(engine, offline_workload(None, fields), repeats=repeats, device=device_name(), numbers=numbers))
        if found[-1].result.metrics.interrupted:
            break
    around = surroundings(watch)
    options.all_of(lambda: print_batches(found, around, tables_console()), lambda: options.write_json(json_file, to_json(found, around)))
    if found[-1].result.metrics.interrupted:
        raise typer.Exit(options.INTERRUPTED_STATUS)
    raise typer.Exit(options.status_of([one.result for one in found]))

"""``jaxserve bench compare``: the same load on several servers in turn."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxserve.cli.bench import options
from jaxserve.cli.output import tables_console
from jaxserve.errors import ConfigError
from jaxserve.log import set_up_logging

if TYPE_CHECKING:
    from jaxserve.bench.load.compare import Contender
    from jaxserve.bench.load.session import RunOptions, ServerOptions
    from jaxserve.bench.workload.workload import Workload

_SERVERS = "Servers"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What one call of the command does; see :func:`jaxserve.bench.load.compare.compare`."""

    contenders: Sequence[Contender]
    workloads: Sequence[Workload]
    run: RunOptions
    server: ServerOptions
    rounds: int
    log_folder: Path
    start_timeout_s: float
    settle_s: float
    one_at_a_time: bool
    json_file: Path | None
    html_file: Path | None


def compare(
    fields: options.Fields = None,
    server: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=URL|COMMAND",
            help="A running server, or the command that starts one: {port} in it becomes a free port, else write NAME@PORT=COMMAND. Repeat it.",
            rich_help_panel=_SERVERS,
            show_default=False,
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(metavar="N", help="How often each runs in turn.", rich_help_panel=_SERVERS)] = 5,
    one_at_a_time: Annotated[
        bool, typer.Option("--one-at-a-time", metavar="", help="Start each for its turn and end it after.", rich_help_panel=_SERVERS)
    ] = False,
    start_timeout: Annotated[float, typer.Option(metavar="S", help="For a server to answer.", rich_help_panel=_SERVERS)] = 600.0,
    settle: Annotated[
        float, typer.Option(metavar="S", help="Longest wait for other processes to be quiet, before each turn.", rich_help_panel=_SERVERS)
    ] = 30.0,
    log_folder: Annotated[Path, typer.Option(metavar="FOLDER", help="Takes the output of the servers.", rich_help_panel=_SERVERS)] = Path(),
    model: options.ModelName = None,
    api_key: options.ApiKey = None,
    chat: options.Chat = False,
    prompts: options.PromptKind = "auto",
    tokenizer: options.TokenizerPath = None,
    no_ignore_eos: options.NoIgnoreEos = False,
    extra_body: options.ExtraBody = None,
    timeout: options.Timeout = 600.0,
    workload: options.WorkloadFile = None,
    rate: Annotated[
        str | None, typer.Option(metavar="X,Y,…", help="Requests per second; several are levels.", rich_help_panel="Load", show_default=False)
    ] = None,
    concurrency: Annotated[
        str | None, typer.Option(metavar="N,M,…", help="Closed loop of so many requests; several are levels.", rich_help_panel="Load", show_default=False)
    ] = None,
    arrival: options.ArrivalKind = None,
    burstiness: options.Burstiness = None,
    trace: options.TraceFile = None,
    num_requests: options.NumRequests = None,
    duration: options.Duration = None,
    seed: options.WorkloadSeed = None,
    warmup: options.Warmup = 2,
    input_len: options.InputLen = None,
    output_len: options.OutputLen = None,
    lengths: options.LengthFile = None,
    prefix_len: options.PrefixLen = None,
    goodput: options.Goodput = None,
    json_file: options.JsonFile = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with plots.", rich_help_panel="Report", show_default=False)] = None,
    debug: Annotated[bool, typer.Option("--debug", metavar="", help="Log everything, and print tracebacks.")] = False,
) -> None:
    """Run the same load on two or more servers in turn, A B A B, and print ratios with their spread and how busy the machine was with other things.

    Exit status as for bench serve.

    Examples:

        jaxserve bench compare --server "ours=jaxserve run --port {port} --grpc-port 0" --server other=http://127.0.0.1:8080 --concurrency 1,8 --duration 20
    """
    set_up_logging("debug" if debug else None)
    from jaxserve.bench.load.compare import parse_contender
    from jaxserve.bench.load.sweep import at_concurrency, at_rate

    contenders = [parse_contender(text) for text in server or ()]
    names = [contender.name for contender in contenders]
    if len(names) < 2 or len(set(names)) < len(names):
        raise ConfigError(f"--server names {', '.join(names) or 'nothing'}; at least two different names are needed")
    if rate is not None and concurrency is not None:
        raise ConfigError("--rate and --concurrency were given; levels are either rates or closed loops")
    if rounds < 1:
        raise ConfigError(f"--rounds is {rounds}; must be at least 1")
    if not log_folder.is_dir():
        raise ConfigError(f"--log-folder is {log_folder}; must be a folder that exists")
    options.check_outputs(json_file, html)
    rates, sizes = options.numbers(rate, "--rate"), options.whole_numbers(concurrency, "--concurrency")
    given = {
        "arrival": arrival,
        "burstiness": burstiness,
        "trace": trace,
        "num_requests": num_requests,
        "duration_s": duration,
        "seed": seed,
        "input_len": input_len,
        "output_len": output_len,
        "lengths": lengths,
        "prefix_len": prefix_len,
        "endpoint": "chat" if chat else None,
    }
    varied = {"rate": rates[0] if rates else None, "concurrency": sizes[0] if sizes else None}
    own = options.own_rate_workload(workload, fields, given) if rates else None
    base = own or options.workload_of(workload, fields, given | varied)
    levels = [at_rate(base, value) for value in rates] + [at_concurrency(base, size) for size in sizes]
    job = Job(
        contenders=contenders,
        workloads=levels or [base],
        run=options.run_options(warmup=warmup, timeout=timeout, goodput=goodput, price_per_hour=None),
        server=options.server_options(
            "", timeout=timeout, model=model, api_key=api_key, prompts=prompts, tokenizer=tokenizer, no_ignore_eos=no_ignore_eos, extra_body=extra_body
        ),
        rounds=rounds,
        log_folder=log_folder,
        start_timeout_s=start_timeout,
        settle_s=settle,
        one_at_a_time=one_at_a_time,
        json_file=json_file,
        html_file=html,
    )
    raise typer.Exit(asyncio.run(_run(job)))


async def _run(job: Job) -> int:

    from jaxserve.bench.load import compare
    from jaxserve.bench.report import compare_report

    with options.stop_on_interrupt() as stop:
        found = await compare.compare(
            job.contenders,
            job.workloads,
            job.run,
            server=job.server,
            rounds=job.rounds,
            log_folder=job.log_folder,
            start_timeout_s=job.start_timeout_s,
            settle_s=job.settle_s,
            one_at_a_time=job.one_at_a_time,
            stop=stop,
        )
    html_file = job.html_file if found.turns else None
    options.all_of(
        lambda: compare_report.print_comparison(found, tables_console()),
        lambda: options.write_json(job.json_file, compare_report.to_json(found)),
        *([lambda: compare_report.write_page(html_file, found)] if html_file is not None else []),
    )
    if found.interrupted is not None:
        return options.INTERRUPTED_STATUS if stop.is_set() else options.FAILED_STATUS
    return options.status_of([turn.result for turn in found.turns])

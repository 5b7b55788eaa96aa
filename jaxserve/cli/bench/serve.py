"""``jaxserve bench serve``: load against a running server."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxserve.cli.bench import options
from jaxserve.cli.output import tables_console
from jaxserve.errors import ConfigError
from jaxserve.log import set_up_logging

if TYPE_CHECKING:
    from jaxserve.bench.load.session import Result, RunOptions, ServerOptions
    from jaxserve.bench.load.sweep import MaxRate, Sweep
    from jaxserve.bench.workload.workload import Workload

_SEVERAL = "Several runs"
DEFAULT_TOLERANCE = 0.05
DEFAULT_ATTAINMENT = 0.99


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What one call of the command does.

    Args:
        rates: Rates to sweep; ``concurrencies`` sweeps closed loops.
        find_max_rate: Search instead, from ``start_rate``, to within ``tolerance``.
    """

    server: ServerOptions
    run: RunOptions
    workload: Workload
    grpc: bool = False
    rates: Sequence[float] = ()
    concurrencies: Sequence[int] = ()
    find_max_rate: bool = False
    start_rate: float | None = None
    tolerance: float = DEFAULT_TOLERANCE
    json_file: Path | None = None
    save_requests: bool = False
    html_file: Path | None = None


def serve(
    fields: options.Fields = None,
    url: Annotated[str, typer.Option(metavar="URL", help="The server, with or without /v1.", rich_help_panel="Server")] = "http://127.0.0.1:8000",
    model: options.ModelName = None,
    api_key: options.ApiKey = None,
    chat: options.Chat = False,
    grpc: Annotated[bool, typer.Option("--grpc", metavar="", help="jaxserve's gRPC API; URL is its host:port.", rich_help_panel="Server")] = False,
    prompts: options.PromptKind = "auto",
    tokenizer: options.TokenizerPath = None,
    no_ignore_eos: options.NoIgnoreEos = False,
    extra_body: options.ExtraBody = None,
    timeout: options.Timeout = 600.0,
    workload: options.WorkloadFile = None,
    rate: options.Rate = None,
    concurrency: options.Concurrency = None,
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
    sweep_rate: Annotated[str | None, typer.Option(metavar="X,Y,…", help="One run at each rate.", rich_help_panel=_SEVERAL, show_default=False)] = None,
    sweep_concurrency: Annotated[
        str | None, typer.Option(metavar="N,M,…", help="One closed loop of each size.", rich_help_panel=_SEVERAL, show_default=False)
    ] = None,
    find_max_rate: Annotated[
        bool, typer.Option("--find-max-rate", metavar="", help="Search the highest rate that keeps --goodput.", rich_help_panel=_SEVERAL)
    ] = False,
    tolerance: Annotated[
        float | None, typer.Option(metavar="X", help="Relative error of --find-max-rate.", rich_help_panel=_SEVERAL, show_default=str(DEFAULT_TOLERANCE))
    ] = None,
    goodput: options.Goodput = None,
    slo_attainment: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Share of requests that must be good for --find-max-rate.", rich_help_panel=_SEVERAL, show_default=str(DEFAULT_ATTAINMENT)
        ),
    ] = None,
    price_per_hour: options.PricePerHour = None,
    json_file: options.JsonFile = None,
    save_requests: Annotated[bool, typer.Option("--save-requests", metavar="", help="Every request in the JSON file too.", rich_help_panel="Report")] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with plots.", rich_help_panel="Report", show_default=False)] = None,
    debug: Annotated[bool, typer.Option("--debug", metavar="", help="Log everything, and print tracebacks.")] = False,
) -> None:
    """Put load on a server that speaks OpenAI's API (or jaxserve's gRPC) and report latencies, throughput and goodput.

    Exit status: 0, all requests succeeded (or were cancelled on plan); 1, no server, or nothing to report; 2, usage; 3, some requests failed; 4, no rate
    keeps the SLO of --find-max-rate; 130, Ctrl-C (what there was until then is reported and saved).

    Examples:

        jaxserve bench serve --rate 2 --num-requests 100

        jaxserve bench serve --url http://host:8000 --concurrency 8 --input-len 512 --output-len normal:128:32 --json run.json --html run.html

        jaxserve bench serve --workload configs/workloads/chat.yaml --sweep-rate 1,2,4,8 --goodput ttft:500,tpot:50

        jaxserve bench serve --find-max-rate --goodput ttft:500 --duration 30
    """
    set_up_logging("debug" if debug else None)
    several = {"--sweep-rate": sweep_rate is not None, "--sweep-concurrency": sweep_concurrency is not None, "--find-max-rate": find_max_rate}
    if sum(several.values()) > 1:
        raise ConfigError(f"{' and '.join(name for name, given in several.items() if given)} were given; each is a kind of run of its own")
    if find_max_rate and goodput is None:
        raise ConfigError("--find-max-rate needs an SLO to keep: --goodput ttft:500 or the like")
    if (sweep_rate or find_max_rate) and concurrency is not None:
        raise ConfigError(f"--concurrency is {concurrency}, a closed loop, which has no rate to vary; leave it out")
    if sweep_rate and rate is not None:
        raise ConfigError(f"--rate is {rate:g}, but --sweep-rate says which rates are run; leave it out")
    if sweep_concurrency and (rate is not None or concurrency is not None or arrival not in (None, "closed")):
        raise ConfigError("--sweep-concurrency says which closed loops are run, and they have no rate; leave --concurrency, --rate and --arrival out")
    for name, value in (("--tolerance", tolerance), ("--slo-attainment", slo_attainment)):
        if value is not None and not find_max_rate:
            raise ConfigError(f"{name} is {value:g}, but it belongs to --find-max-rate, which was not given")
    if save_requests and (find_max_rate or json_file is None):
        raise ConfigError(
            "--save-requests adds to the file of --json, which was not given"
            if json_file is None
            else "--save-requests is not for --find-max-rate; leave it out"
        )
    options.check_outputs(json_file, html)
    rates, concurrencies = options.numbers(sweep_rate, "--sweep-rate"), options.whole_numbers(sweep_concurrency, "--sweep-concurrency")
    given = {
        "rate": rate,
        "concurrency": concurrency,
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
    own, varied = None, dict[str, Any]()
    if rates or find_max_rate:
        own, varied = options.own_rate_workload(workload, fields, given), {"rate": rates[0] if rates else 1.0}
    elif concurrencies:
        varied = {"concurrency": concurrencies[0]}
    planned = own or options.workload_of(workload, fields, given | varied)
    job = Job(
        server=options.server_options(
            url, timeout=timeout, model=model, api_key=api_key, prompts=prompts, tokenizer=tokenizer, no_ignore_eos=no_ignore_eos, extra_body=extra_body
        ),
        run=options.run_options(
            warmup=warmup,
            timeout=timeout,
            goodput=goodput,
            price_per_hour=price_per_hour,
            slo_attainment=DEFAULT_ATTAINMENT if slo_attainment is None else slo_attainment,
        ),
        workload=planned,
        grpc=grpc,
        rates=rates,
        concurrencies=concurrencies,
        find_max_rate=find_max_rate,
        start_rate=own and own.rate,
        tolerance=DEFAULT_TOLERANCE if tolerance is None else tolerance,
        json_file=json_file,
        save_requests=save_requests,
        html_file=html,
    )
    raise typer.Exit(asyncio.run(_run(job)))


async def _run(job: Job) -> int:

    from jaxserve.bench.load import sweep
    from jaxserve.bench.load.progress import show_progress
    from jaxserve.bench.report import report

    if job.grpc:
        from jaxserve.serving.grpc_api.bench_system import open_grpc_session as open_server
    else:
        from jaxserve.bench.load.session import open_session as open_server
    console = tables_console()
    async with open_server(job.server, job.workload) as session:
        with options.stop_on_interrupt() as stop, show_progress() as observer:

            async def run(workload: Workload) -> Result:
                return await session.run(workload, job.run, observer=observer, stop=stop)

            levels = [sweep.at_rate(job.workload, rate) for rate in job.rates] + [sweep.at_concurrency(job.workload, size) for size in job.concurrencies]
            if job.find_max_rate:
                assert job.run.slo is not None
                found = await sweep.find_max_rate(job.workload, job.run.slo, run, start_rate=job.start_rate, tolerance=job.tolerance)
            else:
                found = await sweep.run_levels(levels or [job.workload], run)
            stopped = stop.is_set()
    if isinstance(found, sweep.MaxRate):
        show, value = partial(report.print_max_rate, found), partial(report.max_rate_json, found)
    elif levels:
        show, value = partial(report.print_sweep, found), partial(report.sweep_json, found, requests=job.save_requests)
    else:
        show, value = partial(report.print_result, found.results[0]), partial(report.to_json, found.results[0], requests=job.save_requests)
    options.all_of(lambda: show(console), lambda: options.write_json(job.json_file, value()), lambda: _write_page(job.html_file, found))
    if stopped:
        return options.INTERRUPTED_STATUS
    if found.interrupted is not None:
        return options.FAILED_STATUS
    if isinstance(found, sweep.MaxRate):
        return 0 if found.rate else options.SLO_MISSED_STATUS
    return options.status_of(found.results)


def _write_page(file: Path | None, found: MaxRate | Sweep) -> None:
    if file is not None:
        from jaxserve.bench.report.html import write_page

        write_page(file, found)

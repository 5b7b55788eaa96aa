"""Options that the load benchmarks share, and how they become a workload and the ways to run it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from jaxserve.errors import ConfigError
from jaxserve.output_files import require_folder

if TYPE_CHECKING:
    from jaxserve.bench.load.session import Result, RunOptions, ServerOptions
    from jaxserve.bench.workload.workload import Workload

FAILED_STATUS = 1
SOME_FAILED_STATUS = 3
SLO_MISSED_STATUS = 4
INTERRUPTED_STATUS = 130

_LOAD, _LENGTHS, _REPORT, _SERVER = "Load", "Lengths", "Report", "Server"

Fields = Annotated[
    list[str] | None,
    typer.Argument(metavar="FIELD=VALUE", help="Further fields of the workload, such as turns=3 (docs/benchmarking.md lists them).", show_default=False),
]
WorkloadFile = Annotated[
    Path | None,
    typer.Option("--workload", metavar="FILE", help="YAML file of the workload; options win over it.", rich_help_panel=_LOAD, show_default=False),
]
Rate = Annotated[
    float | None,
    typer.Option(
        metavar="X", help="Requests per second, on average. Poisson arrivals unless --arrival says otherwise.", rich_help_panel=_LOAD, show_default=False
    ),
]
Concurrency = Annotated[int | None, typer.Option(metavar="N", help="Closed loop: N requests at any time.", rich_help_panel=_LOAD, show_default=False)]
ArrivalKind = Annotated[
    str | None,
    typer.Option(
        "--arrival", metavar="KIND", help="closed, steady, poisson, gamma, burst, diurnal, ramp or trace.", rich_help_panel=_LOAD, show_default="implied"
    ),
]
Burstiness = Annotated[
    float | None,
    typer.Option(metavar="X", help="Shape of gamma-distributed gaps: 1 is Poisson, less is burstier.", rich_help_panel=_LOAD, show_default=False),
]
TraceFile = Annotated[
    str | None, typer.Option("--trace", metavar="FILE", help="Replay these times (CSV or JSON lines).", rich_help_panel=_LOAD, show_default=False)
]
NumRequests = Annotated[
    int | None, typer.Option("--num-requests", "-n", metavar="N", help="How many requests.", rich_help_panel=_LOAD, show_default="100 without --duration")
]
Duration = Annotated[float | None, typer.Option(metavar="S", help="Send nothing after that many seconds.", rich_help_panel=_LOAD, show_default=False)]
WorkloadSeed = Annotated[
    int | None, typer.Option("--seed", metavar="N", help="The same seed gives the same requests.", rich_help_panel=_LOAD, show_default="0")
]
InputLen = Annotated[
    str | None,
    typer.Option(metavar="L", help="Prompt tokens: 128, uniform:64:256 or normal:MEAN:STD.", rich_help_panel=_LENGTHS, show_default="128"),
]
OutputLen = Annotated[str | None, typer.Option(metavar="L", help="Tokens to generate, likewise.", rich_help_panel=_LENGTHS, show_default="128")]
LengthFile = Annotated[
    str | None,
    typer.Option(
        "--lengths",
        metavar="FILE|trace",
        help="Both together: a joint histogram, ShareGPT's JSON, or the trace's.",
        rich_help_panel=_LENGTHS,
        show_default=False,
    ),
]
PrefixLen = Annotated[
    int | None, typer.Option(metavar="N", help="Tokens that all prompts share, before their own.", rich_help_panel=_LENGTHS, show_default="0")
]
Chat = Annotated[bool, typer.Option("--chat", metavar="", help="Use /v1/chat/completions instead of /v1/completions.", rich_help_panel=_SERVER)]
ModelName = Annotated[
    str | None, typer.Option("--model", metavar="NAME", help="The model to ask for.", rich_help_panel=_SERVER, show_default="the only one served")
]
ApiKey = Annotated[str | None, typer.Option(metavar="KEY", help="Sent as a bearer token.", rich_help_panel=_SERVER, show_default="OPENAI_API_KEY")]
PromptKind = Annotated[
    str, typer.Option("--prompts", metavar="KIND", help="ids sends token ids, text words; auto takes ids where the server does.", rich_help_panel=_SERVER)
]
TokenizerPath = Annotated[
    str | None,
    typer.Option("--tokenizer", metavar="PATH|MODEL", help="Counts tokens of text instead of asking the server.", rich_help_panel=_SERVER, show_default=False),
]
NoIgnoreEos = Annotated[bool, typer.Option("--no-ignore-eos", metavar="", help="Let answers end where the model ends them.", rich_help_panel=_SERVER)]
ExtraBody = Annotated[
    str | None, typer.Option(metavar="JSON", help="Further fields of every body, such as '{\"top_p\": 0.9}'.", rich_help_panel=_SERVER, show_default=False)
]
Warmup = Annotated[int, typer.Option(metavar="N", help="Requests sent before, all at once; in no figure.", rich_help_panel=_LOAD)]
Timeout = Annotated[float, typer.Option(metavar="S", help="Of one request.", rich_help_panel=_SERVER)]
Goodput = Annotated[
    str | None,
    typer.Option(metavar="SLO", help="Milliseconds that good requests keep: ttft:500,tpot:50,e2el:9000.", rich_help_panel=_REPORT, show_default=False),
]
PricePerHour = Annotated[
    float | None, typer.Option(metavar="X", help="Of the server, for the cost of a million tokens.", rich_help_panel=_REPORT, show_default=False)
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write all figures as one JSON object.", rich_help_panel=_REPORT, show_default=False)
]


def workload_of(file: Path | None, fields: Sequence[str] | None, options: Mapping[str, Any]) -> Workload:
    """Merges file, ``FIELD=VALUE`` words and options; later ones win.

    Args:
        file: As given with ``--workload``.
        fields: The words.
        options: Field -> value; ``None`` where an option was not given.

    Raises:
        ConfigError: As :func:`~jaxserve.bench.workload.workload.load_workload`, or a word that sets nothing.
    """
    from jaxserve.bench.workload.workload import load_workload

    values: dict[str, Any] = {}
    for word in fields or ():
        key, separator, text = word.partition("=")
        if not separator:
            raise ConfigError(f"{word!r} sets nothing; must be FIELD=VALUE")
        values[key.strip()] = text.strip()
    return load_workload(file, values | {key: value for key, value in options.items() if value is not None})


def own_rate_workload(file: Path | None, fields: Sequence[str] | None, options: Mapping[str, Any]) -> Workload | None:
    """What :func:`workload_of` gives; ``None`` where that has no rate of its own.

    Rates are varied from there: a ramp has two, and a level keeps their ratio.
    """
    try:
        workload = workload_of(file, fields, options)
    except ConfigError:  # is raised again once it has a rate, unless that was all it wanted
        return None
    return None if workload.rate is None else workload


def server_options(
    url: str,
    *,
    timeout: float,
    model: str | None,
    api_key: str | None,
    prompts: str,
    tokenizer: str | None,
    no_ignore_eos: bool,
    extra_body: str | None,
) -> ServerOptions:
    """How to reach a server, from options.

    Raises:
        ConfigError: A kind of prompt that does not exist, a body that is no JSON object, or a key that no header can carry.
        JaxserveError: A tokenizer that cannot be loaded.
    """
    from jaxserve.bench.load.session import ServerOptions

    kinds: dict[str, Literal["auto", "ids", "text"]] = {"auto": "auto", "ids": "ids", "text": "text"}
    if prompts not in kinds:
        raise ConfigError(f"--prompts is {prompts!r}; must be one of {', '.join(kinds)}")
    key = api_key or os.environ.get("OPENAI_API_KEY")
    if key is not None and not all("!" <= character <= "~" for character in key):
        raise ConfigError("the API key (--api-key or OPENAI_API_KEY) holds a blank, a line break or a character beyond ASCII; no HTTP header can carry it")
    try:
        extra: Any = json.loads(extra_body or "{}")
    except ValueError as error:
        raise ConfigError(f"--extra-body is no JSON: {error}") from None
    if not isinstance(extra, dict):
        raise ConfigError(f"--extra-body is {extra_body}; must be a JSON object")
    count_tokens = None
    if tokenizer is not None:
        from jaxserve.bench.local.local_tokenizer import load_count

        count_tokens = load_count(tokenizer)
    return ServerOptions(
        url=url,
        model=model,
        api_key=key,
        prompts=kinds[prompts],
        count_tokens=count_tokens,
        ignore_eos=not no_ignore_eos,
        fields={"temperature": 0.0, **extra},
        timeout_s=timeout,
    )


def run_options(*, warmup: int, timeout: float, goodput: str | None, price_per_hour: float | None, slo_attainment: float = 0.99) -> RunOptions:
    """How to run and measure, from options.

    Raises:
        ConfigError: A value out of range.
    """
    from jaxserve.bench.load.metrics import parse_slo
    from jaxserve.bench.load.session import RunOptions

    for name, value, low in (("--warmup", warmup, 0), ("--timeout", timeout, 1e-3), ("--price-per-hour", price_per_hour or 0, 0)):
        if not low <= value < float("inf"):
            raise ConfigError(f"{name} is {value}; must be at least {low}")
    slo = None if goodput is None else parse_slo(goodput, slo_attainment)
    return RunOptions(num_warmup=warmup, timeout_s=timeout, slo=slo, price_per_hour=price_per_hour)


def numbers(text: str | None, option: str) -> list[float]:
    """Reads ``1,2,4``; none for an option that was not given.

    Raises:
        ConfigError: Not numbers above 0.
    """
    if text is None:
        return []
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 < value < float("inf") for value in values):
        raise ConfigError(f"{option} is {text!r}; must be numbers above 0 separated by commas")
    return values


def whole_numbers(text: str | None, option: str) -> list[int]:
    """Reads ``1,8,32``; none for an option that was not given.

    Raises:
        ConfigError: Not whole numbers of at least 1.
    """
    values = numbers(text, option)
    if not all(value.is_integer() for value in values):
        raise ConfigError(f"{option} is {text!r}; must be whole numbers of at least 1 separated by commas")
    return [int(value) for value in values]


def check_outputs(json_file: Path | None, html_file: Path | None = None) -> None:
    """To be called before the work: that what comes of it can be written.

    Raises:
        ConfigError: A file whose folder does not exist, or a page without matplotlib.
    """
    require_folder("--json", json_file)
    require_folder("--html", html_file)
    if html_file is not None:
        from jaxserve.plots import require_matplotlib

        require_matplotlib()


def write_json(file: Path | None, value: Mapping[str, Any]) -> None:
    """Writes an object to the file of ``--json``, where that was given.

    Raises:
        ConfigError: It cannot be written.
    """
    if file is not None:
        from jaxserve.bench.report.report import write_json

        write_json(file, value)


def all_of(*outputs: Callable[[], None]) -> None:
    """Calls each in order, also when one before it fails: a full disk or a closed pipe costs only its own report. Then raises what was raised last."""
    with contextlib.ExitStack() as stack:
        for output in reversed(outputs):
            stack.callback(output)


@contextlib.contextmanager
def stop_on_interrupt() -> Generator[asyncio.Event]:
    """Yields an event that Ctrl-C sets; a second Ctrl-C ends the program as ever."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        stop.set()

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        yield stop
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def status_of(results: Sequence[Result]) -> int:
    """Exit status of a call that ran to its end."""
    if any(result.metrics.interrupted for result in results) or not any(result.metrics.completed for result in results):
        return FAILED_STATUS
    return SOME_FAILED_STATUS if any(result.metrics.failed for result in results) else 0

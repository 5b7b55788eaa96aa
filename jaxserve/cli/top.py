"""``jaxserve top``: a server's queues, pages, rates and latencies in the terminal, read from its ``/metrics``."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from typing import TYPE_CHECKING, Annotated

import typer

from jaxserve.log import set_up_logging

if TYPE_CHECKING:
    from rich.console import RenderableType

    from jaxserve.bench.load.buckets import Buckets
    from jaxserve.cli.scrape import Reading

_LATENCIES = (
    ("queue", "jaxserve_queue_seconds"),
    ("TTFT", "jaxserve_time_to_first_token_seconds"),
    ("ITL", "jaxserve_inter_token_latency_seconds"),
    ("TPOT", "jaxserve_time_per_output_token_seconds"),
    ("E2E", "jaxserve_e2e_request_latency_seconds"),
    ("step", "jaxserve_step_seconds"),
    ("step, host", "jaxserve_step_host_seconds"),
)
_SHARES = (0.5, 0.9, 0.99)
_BAR_WIDTH = 24
_ONCE_S = 1.0
"""Rates need two readings; of ``--once`` they are this far apart."""


def top(
    url: Annotated[str, typer.Option(metavar="URL", help="The server.")] = "http://127.0.0.1:8000",
    interval: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, max=3600, help="Time between two looks.")] = 2.0,
    window: Annotated[float, typer.Option(metavar="SECONDS", min=1, max=3600, help="Rates and recent latencies are of this time.")] = 30.0,
    once: Annotated[bool, typer.Option("--once", metavar="", help="Print one frame and exit; so it does where stdout is no terminal.")] = False,
) -> None:
    """Watch a server: queues, pages, rates, latencies. Ctrl-C ends it.

    Examples:

        jaxserve top

        jaxserve top --url http://host:8000 --once
    """
    set_up_logging()
    from rich.console import Console

    from jaxserve.cli.scrape import metrics_url, read_page

    page = metrics_url(url)
    console = Console()
    first = read_page(page)
    with contextlib.suppress(KeyboardInterrupt):
        if once or not console.is_terminal:
            time.sleep(_ONCE_S)
            console.print(frame(page, first, read_page(page)))
        else:
            _watch(page, first, interval=interval, window=window)


def _watch(page: str, first: Reading, *, interval: float, window: float) -> None:
    from rich.live import Live

    from jaxserve.cli.scrape import ScrapeError, read_page

    readings = deque([first])
    with Live(frame(page, first, first), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            problem = None
            try:
                reading = read_page(page)
            except ScrapeError as error:
                problem = str(error)
            else:
                if readings[-1].is_older_run(reading):
                    readings.clear()
                readings.append(reading)
                while len(readings) > 2 and readings[1].time_s <= reading.time_s - window:
                    readings.popleft()
            live.update(frame(page, readings[0], readings[-1], problem), refresh=True)


def frame(page: str, earlier: Reading, now: Reading, problem: str | None = None) -> RenderableType:
    """One frame.

    Args:
        page: Where the readings come from.
        earlier: The beginning of the time that rates and recent latencies are of.
        now: Its end.
        problem: Why there is no newer reading.
    """
    from rich.console import Group
    from rich.text import Text

    state = now.label("jaxserve_engine_state", "state") or "unknown"
    model = now.label("jaxserve_info", "model")
    title = Text.assemble(("jaxserve top", "bold"), f"  {page.removesuffix('/metrics')}  ", (state, "green" if state == "ready" else "yellow"))
    lines: list[RenderableType] = [title]
    if problem is not None:
        lines.append(Text(problem, "red"))
    if model is None:
        return Group(*lines, Text("The engine is not there yet and has no numbers.", "dim"))
    up_s = time.time() - now.value("process_start_time_seconds")
    lines.append(Text(f"{model}, jaxserve {now.label('jaxserve_info', 'version')}, up {_duration(up_s)}", "dim"))
    return Group(*lines, "", _state(now), "", _rates(earlier, now), _totals(now), "", _latencies(earlier, now))


def _state(now: Reading) -> RenderableType:
    from rich.table import Table

    running, slots = now.value("jaxserve_num_requests_running"), now.value("jaxserve_max_requests_running")
    pages = now.value("jaxserve_kv_pages")
    used, cached, free = (now.value(f"jaxserve_kv_pages_{kind}") for kind in ("used", "cached", "free"))
    waiting = ", ".join(f"{now.value(f'jaxserve_num_requests_{name}'):,.0f} {name}" for name in ("waiting", "swapped", "paused"))
    table = Table.grid(padding=(0, 2))
    table.add_row("running", _bar([(running, "green")], slots), f"{running:.0f} of {slots:.0f}")
    table.add_row("waiting", f"{now.value('jaxserve_queued_prompt_tokens'):,.0f} prompt tokens", waiting)
    table.add_row("KV pages", _bar([(used, "green"), (cached, "blue")], pages), f"{used:,.0f} used, {cached:,.0f} cached, {free:,.0f} free")
    return table


def _rates(earlier: Reading, now: Reading) -> RenderableType:
    from rich.table import Table

    seconds = now.time_s - earlier.time_s

    def grown(name: str) -> float:
        return now.value(f"jaxserve_{name}") - earlier.value(f"jaxserve_{name}")

    def ratio(part: float, whole: float, form: str) -> str:
        return format(part / whole, form) if whole else "–"

    steps, tokens, computed = grown("step_sequences_count"), grown("step_tokens_sum"), grown("step_bucket_tokens_sum")
    hits, misses = grown("prefix_cache_hit_tokens_total"), grown("prefix_cache_miss_tokens_total")
    columns = {
        "requests/s": ratio(grown("requests_total"), seconds, ",.1f"),
        "tokens/s in": ratio(grown("prompt_tokens_total"), seconds, ",.0f"),
        "out": ratio(grown("generated_tokens_total"), seconds, ",.0f"),
        "steps/s": ratio(grown("steps_total"), seconds, ",.1f"),
        "batch": ratio(grown("step_sequences_sum"), steps, ".1f"),
        "padding": ratio(computed - tokens, computed, ".0%"),
        "cache hits": ratio(hits, hits + misses, ".0%"),
    }
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("", *columns):
        table.add_column(name, justify="right" if name else "left")
    table.add_row(_last(earlier, now), *columns.values())
    return table


def _totals(now: Reading) -> RenderableType:
    from rich.text import Text

    def count(name: str) -> str:
        return f"{now.value(f'jaxserve_{name}_total'):,.0f}"

    late = now.value("jaxserve_late_compiles_total")
    return Text(
        f"since start: {count('requests_finished')} requests ended, {count('num_requests_aborted')} aborted; {count('requests_refused')} refused; "
        f"{count('num_requests_preempted')} preemptions" + (f"; {late:.0f} late compiles" if late else "")
    )


def _latencies(earlier: Reading, now: Reading) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for when in (_last(earlier, now), "in all"):
        for index, name in enumerate((*(f"p{share * 100:.0f}" for share in _SHARES), "count")):
            table.add_column(f"{'' if index else when}\n{name}", justify="right")
    for name, family in _LATENCIES:
        everything = now.buckets(family)
        table.add_row(name, *_quantiles(everything.since(earlier.buckets(family))), *_quantiles(everything))
    return table


def _last(earlier: Reading, now: Reading) -> str:
    return f"last {now.time_s - earlier.time_s:.0f} s"


def _quantiles(buckets: Buckets) -> list[str]:
    return [*("–" if (value := buckets.quantile(share)) is None else _time(value) for share in _SHARES), f"{buckets.num_values:,.0f}"]


def _bar(parts: list[tuple[float, str]], whole: float) -> RenderableType:
    from rich.text import Text

    bar, used = Text(), 0
    for value, style in parts:
        width = min(_BAR_WIDTH - used, round(value / whole * _BAR_WIDTH) or (value > 0)) if whole else 0
        bar.append("█" * width, style)
        used += width
    bar.append("░" * (_BAR_WIDTH - used), "dim")
    return bar


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _duration(seconds: float) -> str:
    minutes, hours = divmod(round(seconds / 60), 60)[::-1]
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"

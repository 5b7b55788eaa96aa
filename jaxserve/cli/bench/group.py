"""``jaxserve bench``: benchmarks of servers and of the engine."""

from __future__ import annotations

import typer

from jaxserve.cli.bench.compare import compare
from jaxserve.cli.bench.loop import loop
from jaxserve.cli.bench.offline import latency, throughput
from jaxserve.cli.bench.serve import serve
from jaxserve.cli.bench.startup import startup
from jaxserve.cli.bench.step import step

bench = typer.Typer(help="Benchmark servers and the engine.", no_args_is_help=True, rich_markup_mode="rich")


@bench.callback()
def _group() -> None:
    """Benchmark servers and the engine. docs/benchmarking.md defines every figure."""


bench.command()(serve)
bench.command()(compare)
bench.command()(throughput)
bench.command()(latency)
bench.command()(startup)
bench.command()(step)
bench.command()(loop)

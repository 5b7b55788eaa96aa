"""``jaxserve run``: serve a model over HTTP and gRPC."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated

import typer

from jaxserve.cli.options import CompiledOption, ConfigFiles, Debug, MeshOption, PlatformOption, Words, resolve_config
from jaxserve.cli.progress import progress_bars
from jaxserve.config import summarize
from jaxserve.platform import choose_platform

if TYPE_CHECKING:
    from jaxserve.engine.engine import Engine

logger = logging.getLogger(__name__)

_PANEL = "Server"
_HOSTS = "Several hosts"


def run(
    words: Words = None,
    host: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Address to listen on.", rich_help_panel=_PANEL, show_default="127.0.0.1")] = None,
    port: Annotated[int | None, typer.Option(metavar="N", help="HTTP port; 0 takes a free one.", rich_help_panel=_PANEL, show_default="8000")] = None,
    grpc_port: Annotated[int | None, typer.Option(metavar="N", help="gRPC port; 0 takes a free one.", rich_help_panel=_PANEL, show_default="8001")] = None,
    served_model_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model's name in the API.", rich_help_panel=_PANEL, show_default="last part of MODEL")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(metavar="N", help="Most tokens of prompt and answer together.", rich_help_panel=_PANEL, show_default="the model's limit")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY", envvar="JAXSERVE_API_KEY", help="Clients must show one of these. Repeatable.", rich_help_panel=_PANEL, show_default="open to all"
        ),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(metavar="HOST,HOST…", help="Several hosts as one engine, the leader first.", rich_help_panel=_HOSTS, show_default=False),
    ] = None,
    host_index: Annotated[
        int | None, typer.Option(metavar="N", help="Which of the hosts this is, from 0.", rich_help_panel=_HOSTS, show_default="found by name")
    ] = None,
    config: ConfigFiles = None,
    platform: PlatformOption = None,
    mesh: MeshOption = None,
    compiled: CompiledOption = None,
    debug: Debug = False,
) -> None:
    """Serve MODEL (default: smollm2-135m) over an OpenAI-compatible HTTP API and gRPC. Ctrl-C finishes running requests, then ends.

    Examples:

        jaxserve run

        jaxserve run gemma3-270m --port 9000 --api-key secret

        jaxserve run ./model.gguf --max-model-len 4096 cache.memory_fraction=0.8
    """
    resolved = resolve_config(
        words,
        config,
        platform=platform,
        mesh=mesh,
        compiled=compiled,
        debug=debug,
        flags={
            "server.host": host,
            "server.port": port,
            "server.grpc_port": grpc_port,
            "server.served_model_name": served_model_name,
            "server.api_keys": api_key or None,
            "model.max_model_len": max_model_len,
            "distributed.hosts": hosts,
            "distributed.host_index": host_index,
        },
    )
    for line in summarize(resolved):
        logger.info("%s", line)
    choose_platform(resolved.platform)

    from jaxserve.engine.async_engine import AsyncEngine
    from jaxserve.engine.build import build_engine, build_runner
    from jaxserve.engine.multihost.hosts import find_hosts
    from jaxserve.engine.multihost.processes import follow, join, leaving_the_end_to_the_leader
    from jaxserve.serving.front_end import run_event_loop
    from jaxserve.serving.launch import serve

    def build() -> Engine:
        with progress_bars() as progress:
            return build_engine(resolved, processes, progress=progress)

    engine = AsyncEngine(build)
    processes = join(resolved, *find_hosts(resolved.distributed), before_end=engine.fail)
    with processes.ending_together():
        if processes.is_leader:
            run_event_loop(serve(resolved, engine, on_end=processes.close))
            return
        with leaving_the_end_to_the_leader(processes) as is_ready:
            runner = build_runner(resolved, processes).runner
            is_ready.set()
            logger.info("host %d follows", processes.index)
            follow(processes, runner)
            logger.info("the leader has ended")

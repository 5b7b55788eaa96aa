"""``jaxserve config``: what the settings amount to."""

from __future__ import annotations

from typing import Annotated

import typer

from jaxserve.cli.options import ConfigFiles, Debug, MeshOption, PlatformOption, Words, resolve_config
from jaxserve.cli.output import emit
from jaxserve.config import to_yaml


def show_config(
    words: Words = None,
    config: ConfigFiles = None,
    platform: PlatformOption = None,
    mesh: MeshOption = None,
    show_secrets: Annotated[bool, typer.Option("--show-secrets", metavar="", help="Print API keys instead of ***.")] = False,
    debug: Debug = False,
) -> None:
    """Print the resolved configuration as YAML, ready for --config.

    Examples:

        jaxserve config

        jaxserve config --config mine.yaml server.port=9000 > resolved.yaml
    """
    emit(to_yaml(resolve_config(words, config, platform=platform, mesh=mesh, debug=debug), show_secrets=show_secrets), end="")

"""``jaxserve convert``: a model in any format as one self-contained Orbax checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jaxserve.cli.options import ConfigFiles, Debug, resolve_config
from jaxserve.cli.output import emit
from jaxserve.cli.progress import progress_bars
from jaxserve.errors import ConfigError
from jaxserve.platform import choose_platform


def convert_model(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A folder, a .gguf file, a hub id or an alias.", show_default=False)],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write; must not exist yet.", show_default=False)],
    words: Annotated[list[str] | None, typer.Argument(metavar="SECTION.KEY=VALUE", help="Settings, such as model.dtype=float32.", show_default=False)] = None,
    config: ConfigFiles = None,
    debug: Debug = False,
) -> None:
    """Write the model SRC as an Orbax checkpoint into the folder DST, which is then a MODEL like any other.

    Examples:

        jaxserve convert smollm2-135m ./smollm2-orbax

        jaxserve convert ./model.gguf ./model-orbax model.dtype=float32
    """
    resolved = resolve_config([source, *(words or [])], config, debug=debug)
    if destination.exists():
        raise ConfigError(f"DST is {destination}, which exists already; must be a new folder")  # now, rather than after a download
    choose_platform("cpu")  # converting needs memory, not speed

    from jaxserve.models.loading.convert import convert

    with progress_bars() as progress:
        written = convert(resolved.model, destination, progress=progress)
    emit(str(written))

"""``jaxserve models``: what can be served."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from jaxserve.cli.options import Debug
from jaxserve.cli.output import emit
from jaxserve.log import set_up_logging


@dataclasses.dataclass(frozen=True)
class AliasRow:
    """What is shown of an alias; ``cached`` says that its file is on this machine."""

    name: str
    title: str
    licence: str
    num_bytes: int
    chat: bool
    cached: bool


@dataclasses.dataclass(frozen=True)
class CachedModel:
    """A hub model whose files are on this machine."""

    name: str
    num_bytes: int


def models(
    fetch: Annotated[list[str] | None, typer.Option(metavar="MODEL", help="First fetch this alias or hub model, unless it is here. Repeatable.")] = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="One JSON object.")] = False,
    debug: Debug = False,
) -> None:
    """List the models with a short name, what is in the cache, and the supported architectures."""
    set_up_logging("debug" if debug else None)
    for source in fetch or ():
        from jaxserve.cli.progress import progress_bars
        from jaxserve.models.loading.resolve import resolve

        with progress_bars() as progress:
            resolve(source, progress=progress)

    from jaxserve.models.loading.aliases import list_aliases
    from jaxserve.models.loading.cache_folder import models_folder
    from jaxserve.models.registry import ARCHITECTURES

    aliases = [AliasRow(a.name, a.title, a.licence, a.num_bytes, a.chat, (models_folder() / a.name / a.file_name).is_file()) for a in list_aliases()]
    from_hub = cached_hub_models()
    architectures = sorted(ARCHITECTURES)
    if as_json:
        rows = {"aliases": [dataclasses.asdict(row) for row in aliases], "hub_cache": [dataclasses.asdict(row) for row in from_hub]}
        emit(json.dumps({**rows, "architectures": architectures}))
        return
    emit(f"{'ALIAS':<14} {'SIZE':>8}  {'CACHED':<7} {'CHAT':<5} MODEL, LICENCE")
    for row in aliases:
        emit(f"{row.name:<14} {_megabytes(row.num_bytes):>8}  {_yes_no(row.cached):<7} {_yes_no(row.chat):<5} {row.title}, {row.licence}")
    if from_hub:
        emit("\nHUB MODELS IN THE CACHE")
        for model in from_hub:
            emit(f"{model.name} ({_megabytes(model.num_bytes)})")
    emit(f"\nARCHITECTURES (safetensors, Orbax or GGUF)\n{', '.join(architectures)}\n\nFiles of aliases are kept in {models_folder()}.")


def cached_hub_models(folder: Path | None = None) -> list[CachedModel]:
    """Models in huggingface_hub's cache, by name; none if there is no cache yet.

    Args:
        folder: Of the cache; ``None`` takes huggingface_hub's own.
    """
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir(folder).repos
    except CacheNotFound:
        return []
    return sorted((CachedModel(repo.repo_id, repo.size_on_disk) for repo in repositories if repo.repo_type == "model"), key=lambda model: model.name)


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.0f} MB"


def _yes_no(value: bool) -> str:
    return "yes" if value else "no"

"""Options that several commands share, and how command line, bare words and files become one configuration."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer

from jaxserve.config import Config, load_config
from jaxserve.engine.programs.manifest import read_manifest
from jaxserve.log import set_up_logging
from jaxserve.mesh_axes import MESH_AXES
from jaxserve.mesh_shape import parse_mesh

ONE_SHOT_DEFAULTS: Mapping[str, Any] = MappingProxyType({"engine.warmup": False})
"""Of commands that serve one user: a few programs, compiled when they are needed, are ready long before all of them."""

_OVERRIDE = re.compile(r"[A-Za-z_][\w.-]*=")

_CONFIG_PANEL = "Configuration"
_SAMPLING_PANEL = "Sampling (omitted: the model's generation_config, else as shown)"


class PlatformName(enum.StrEnum):
    auto = "auto"
    cpu = "cpu"
    gpu = "gpu"
    tpu = "tpu"


Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL|SECTION.KEY=VALUE",
        help="MODEL is a folder, a .gguf file, a hub id (organisation/name) or an alias. A word with = sets one key of the configuration.",
        show_default=False,
    ),
]
ConfigFiles = Annotated[
    list[Path] | None,
    typer.Option("--config", metavar="FILE", help="YAML file of settings. Repeatable; a later one wins.", rich_help_panel=_CONFIG_PANEL, show_default=False),
]
PlatformOption = Annotated[
    PlatformName | None,
    typer.Option(help="Where to run. auto looks for a chip and falls back to the CPU.", rich_help_panel=_CONFIG_PANEL, show_default="auto"),
]
MeshOption = Annotated[
    str | None,
    typer.Option(
        "--mesh", metavar=",".join(f"{axis.name}=N" for axis in MESH_AXES),
        help=f"How many ranks each axis of the mesh has: {'; '.join(f'each {axis.name} rank has {axis.meaning}' for axis in MESH_AXES)}.",
        rich_help_panel=_CONFIG_PANEL, show_default="one device on CPU, else all on model",
    ),
]  # fmt: skip
CompiledOption = Annotated[
    Path | None,
    typer.Option(
        "--compiled", metavar="DIR", help="Take programs from a folder that jaxserve compile made, and settings that nothing else sets. Trusted as code.",
        rich_help_panel=_CONFIG_PANEL, show_default=False,
    ),
]  # fmt: skip
Debug = Annotated[bool, typer.Option("--debug", metavar="", help="Log everything, and print tracebacks.", rich_help_panel=_CONFIG_PANEL)]

MaxTokens = Annotated[
    int | None, typer.Option(metavar="N", help="Most tokens to generate.", rich_help_panel=_SAMPLING_PANEL, show_default="up to the context length")
]
Temperature = Annotated[
    float | None, typer.Option(metavar="X", help="Divides the logits; 0 always takes the likeliest token.", rich_help_panel=_SAMPLING_PANEL, show_default="1")
]
TopK = Annotated[int | None, typer.Option(metavar="N", help="Keep the N likeliest tokens; 0 keeps all.", rich_help_panel=_SAMPLING_PANEL, show_default="0")]
TopP = Annotated[
    float | None,
    typer.Option(metavar="X", help="Keep the likeliest tokens up to this total probability.", rich_help_panel=_SAMPLING_PANEL, show_default="1"),
]
MinP = Annotated[
    float | None,
    typer.Option(metavar="X", help="Drop tokens less likely than X times the likeliest.", rich_help_panel=_SAMPLING_PANEL, show_default="0"),
]
Seed = Annotated[int | None, typer.Option(metavar="N", help="The same seed gives the same text.", rich_help_panel=_SAMPLING_PANEL, show_default="random")]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="End before this text. Repeatable.", rich_help_panel=_SAMPLING_PANEL, show_default=False),
]


def resolve_config(
    words: Sequence[str] | None,
    files: Sequence[Path] | None = None,
    *,
    platform: PlatformName | None = None,
    mesh: str | None = None,
    compiled: Path | None = None,
    debug: bool = False,
    flags: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> Config:
    """Sets up logging, then merges: files, then ``section.key=value`` words, then MODEL and flags.

    Args:
        words: MODEL, at most one, and overrides, in any order.
        files: As given with ``--config``.
        platform: As given with ``--platform``.
        mesh: As given with ``--mesh``.
        compiled: As given with ``--compiled``: what its programs were compiled for is the default.
        debug: Whether ``--debug`` was given.
        flags: Full key -> value of the options that stand for a key; ``None`` where one was not given.
        defaults: Full key -> value where the command's own default is another than the configuration's.

    Raises:
        ConfigError: As :func:`jaxserve.config.load_config`.
        typer.BadParameter: More than one MODEL.
    """
    set_up_logging("debug" if debug else None)
    model, overrides = split_words(words or ())
    axes = {} if mesh is None else {f"mesh.{axis}": size for axis, size in parse_mesh(mesh).items()}
    if compiled is not None:
        defaults = read_manifest(compiled).settings() | dict(defaults) | {"engine.compiled": str(compiled)}
    values = {"model.source": model, "platform": platform and platform.value, **axes, **(flags or {})}
    return load_config(files or (), overrides, {key: value for key, value in values.items() if value is not None}, defaults=defaults)


def split_words(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Tells MODEL from overrides: an override starts with a dotted name and an equals sign. A path of that form is written ``./a=b``.

    Raises:
        typer.BadParameter: More than one MODEL.
    """
    overrides = [word for word in words if _OVERRIDE.match(word)]
    models = [word for word in words if not _OVERRIDE.match(word)]
    if len(models) > 1:
        raise typer.BadParameter(f"one MODEL at most, got {len(models)}: {', '.join(models)} (settings are written section.key=value)")
    return (models[0] if models else None), overrides


def sampling_fields(
    *,
    max_tokens: int | None,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    seed: int | None,
    stop: Sequence[str] | None,
    ignore_eos: bool = False,
) -> dict[str, Any]:
    """The sampling fields as the engine's ``resolve_sampling`` takes them: ``None`` where an option was not given."""
    return {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "stop": list(stop) if stop else None,
        "ignore_eos": ignore_eos,
    }

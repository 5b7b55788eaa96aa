"""The manifest of a folder of compiled programs, ``manifest.json``: reading, checking, and comparing it with a live engine. Imports no jax."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from jaxserve.config import Config, ShardingConfig, load_config, to_yaml
from jaxserve.errors import ConfigError
from jaxserve.mesh_axes import MESH_AXES, axis_names

MANIFEST = "manifest.json"
PROGRAMS = "programs"
FORMAT = 1

COMPILED_KEYS = (
    "model.dtype", "model.max_model_len", *(f"mesh.{axis}" for axis in axis_names(MESH_AXES)), "mesh.replicate_kv_heads",
    *(f"sharding.{field.name}" for field in dataclasses.fields(ShardingConfig)), "cache.page_size", "cache.num_pages", "cache.dtype",
    "scheduler.max_num_seqs", "scheduler.max_tokens_per_step", "engine.attention", "engine.layers", "engine.token_buckets", "engine.sequence_buckets",
)  # fmt: skip
"""Keys of the configuration that compiled programs depend on."""

_ENGINE_SECTIONS = ("platform", "model", "mesh", "sharding", "cache", "scheduler", "engine")
_MAX_MANIFEST_BYTES = 16 * 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts that compiled programs depend on, apart from their own text.

    Args:
        jax: Version of jax.
        jaxlib: Version of jaxlib.
        runtime: Version of the runtime that compiled and will run the programs, in its own words.
        platform: Name of the platform: ``cpu``, ``gpu`` or ``tpu``.
        device_kind: Kind of the devices, in jax's words.
        coords: Coordinates of the mesh's devices, in the mesh's order; ``None`` if they have none.
        num_devices: Number of devices of the mesh.
        flags: Flags in ``XLA_FLAGS`` and ``LIBTPU_INIT_ARGS``, without those that change no program.
    """

    jax: str
    jaxlib: str
    runtime: str
    platform: str
    device_kind: str
    coords: tuple[tuple[int, ...], ...] | None
    num_devices: int
    flags: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """One compiled program.

    Args:
        name: Name of its bucket, such as ``decode_8`` or ``mixed_128x8``. A program that is no step has jax's name for it and a part of its key.
        file: Path of its file, relative to the folder.
        num_bytes: Size of the file.
        sha256: SHA-256 of the file.
        key: Key under which jax's compilation cache looks for it.
        program_sha256: SHA-256 of the StableHLO text that was compiled; empty for programs that are no step.
        compile_s: Seconds that compiling took.
        temp_bytes: Bytes of device memory beyond arguments and results; ``None`` for programs that are no step, or if it is not known.
    """

    name: str
    file: str
    num_bytes: int
    sha256: str
    key: str
    program_sha256: str = ""
    compile_s: float = 0.0
    temp_bytes: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """The manifest of a folder of compiled programs.

    Args:
        jaxserve: Version of jaxserve.
        made: Time at which the folder was made, as ISO 8601.
        target: Name of the absent chips that it was made for, such as ``v6e:2x4``; empty for the devices of the machine that it was made on.
        facts: Facts about the machine and the devices.
        config: The resolved configuration, in sections, without the server's.
        spec_sha256: SHA-256 of the model's specification.
        programs: All programs of the folder.
    """

    jaxserve: str
    made: str
    target: str
    facts: Facts
    config: Mapping[str, Any]
    spec_sha256: str
    programs: tuple[Program, ...]

    @property
    def is_for_absent_chips(self) -> bool:
        """Whether the programs were compiled for chips that were not present, so that the runtime that will run them was not known."""
        return bool(self.target)

    def settings(self) -> dict[str, Any]:
        """The configuration, as full key -> value, with which an engine needs exactly these programs."""
        flat = flatten(self.config)
        return {key: flat[key] for key in ("model.source", "model.revision", *COMPILED_KEYS)}


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder, read and checked.

    Raises:
        ConfigError: The folder has no manifest, or its content is not a valid one.
    """
    file = folder / MANIFEST
    try:
        with file.open("rb") as stream:
            data = stream.read(_MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{folder} is no folder of compiled programs: cannot read its {MANIFEST}: {error.strerror}") from None
    try:
        tree: Any = json.loads(data)
        if tree["format"] != FORMAT:
            raise ConfigError(f"{file} has format {tree['format']!r}; this version of jaxserve reads {FORMAT}: compile anew")
        facts, programs = tree["facts"], tree["programs"]
        coords = facts["coords"]
        manifest = Manifest(
            jaxserve=str(tree["jaxserve"]),
            made=str(tree["made"]),
            target=str(tree["target"]),
            facts=Facts(**facts | {"coords": coords and tuple(tuple(place) for place in coords), "flags": tuple(facts["flags"])}),
            config=dict(tree["config"]),
            spec_sha256=str(tree["spec_sha256"]),
            programs=tuple(Program(**program) for program in programs),
        )
        load_config(values=manifest.settings())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{file} is no manifest of compiled programs: {type(error).__name__}: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    for program in manifest.programs:
        if Path(program.file).parts != (PROGRAMS, Path(program.file).name):
            raise ConfigError(f"{file}: a program lies at {program.file!r}; must be a file in {PROGRAMS}/")
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes a folder's manifest. Call it when all program files are there."""
    tree = {"format": FORMAT, **dataclasses.asdict(manifest)}
    (folder / MANIFEST).write_text(json.dumps(tree, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def sections(config: Config) -> dict[str, Any]:
    """The engine's sections of a configuration as plain data. The server's are left out: they change no program, and they hold secrets."""
    tree: dict[str, Any] = yaml.safe_load(to_yaml(config))
    return {name: tree[name] for name in _ENGINE_SECTIONS}


def flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The values of all sections by full key, such as ``model.dtype``."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= {f"{name}.{key}": inner for key, inner in cast(Mapping[str, Any], value).items()} if isinstance(value, Mapping) else {name: value}
    return flat


def sha256(data: bytes | str) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def differences(manifest: Manifest, facts: Facts, config: Config, spec_sha256: str) -> list[str]:
    """The differences between this engine and the one that the folder was made for, in words; empty if there are none."""
    found: list[str] = []
    here, there = dataclasses.asdict(facts), dataclasses.asdict(manifest.facts)
    unknown = {"runtime"} if manifest.is_for_absent_chips and facts.platform == "gpu" else set[str]()  # a compiler alone does not know CUDA's version
    found += [f"{name} is {_short(here[name])}, was {_short(there[name])}" for name in here if name not in unknown and here[name] != there[name]]
    if spec_sha256 != manifest.spec_sha256:
        found.append("the model is another")
    mine, made = flatten(sections(config)), manifest.settings()
    found += [f"{key} is {_short(mine[key])}, was {_short(made[key])}" for key in COMPILED_KEYS if mine[key] is not None and mine[key] != made[key]]
    return found


def _short(value: object) -> str:
    text = " ".join(map(str, cast(Sequence[object], value))) if isinstance(value, list | tuple) else str(value)
    first = text.strip().splitlines()[0] if text.strip() else "none"
    return first if len(first) <= 60 else f"{first[:57]}..."

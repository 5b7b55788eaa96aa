"""Reads an experiment file into cells: what is tried, each with everything that it needs. Imports no jax."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from jaxserve.bench.load.metrics import Slo, parse_slo
from jaxserve.bench.workload.workload import Workload, load_workload
from jaxserve.config import Config, load_config
from jaxserve.config_fields import coerce
from jaxserve.config_yaml import read_yaml
from jaxserve.engine.programs.manifest import flatten, sections
from jaxserve.errors import ConfigError
from jaxserve.mesh_shape import MeshShape, parse_mesh
from jaxserve.plan.request import Load
from jaxserve.plan.topology import Topology, parse_topology

Mode = Literal["live", "plan", "both"]

_TOP_KEYS = ("title", "settings", "grid", "cells", "time_limit_s")
_LOAD_KEYS: Mapping[str, int] = {"load.batch": 64, "load.context": 4096, "load.chunk": 2048}
_MAX_CELLS = 10_000
_DEFAULT_TIME_LIMIT_S = 1800.0
_CONTENT = "workload_sha256"
"""Setting that stands for what is in the files that a workload names."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One thing that is tried.

    Args:
        settings: All that the file says about it, typed: its identity, and how it is shown.
        mode: ``live`` runs the workload in this process, ``plan`` compiles for a target and predicts, ``both`` does both.
        config: Of the engine, and of what is planned.
        mesh: Axis -> size, where it is given.
        devices: Fake CPU devices to run on; ``None`` takes the machine's.
        target: What is planned for.
        load: What is planned with.
        workload: What is run.
        files: SHA-256 of each file that the workload reads, by the field that names it.
        slo: What a good request keeps.
        repeats: How often the workload runs; the run of median goodput counts, or of median throughput without ``slo``.
        problem: Why it cannot be tried, where that is known beforehand.
    """

    settings: Mapping[str, Any]
    mode: Mode = "live"
    config: Config = dataclasses.field(default_factory=Config)
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])
    devices: int | None = None
    target: Topology | None = None
    load: Load | None = None
    workload: Workload | None = None
    files: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    slo: Slo | None = None
    repeats: int = 1
    problem: str = ""

    @property
    def id(self) -> str:
        """The same for the same settings, on any machine and in any order."""
        return _digest(self.settings)

    def mesh_on_target(self) -> MeshShape:
        """The mesh that is planned.

        Raises:
            ConfigError: It needs more devices than the target has.
        """
        assert self.target is not None
        return self.target.mesh(self.mesh)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """A whole file.

    Args:
        name: Of the file, without its ending.
        title: A line for people.
        axes: Keys whose values differ between cells, in the order of the file.
        cells: Each once.
        time_limit_s: Of one cell.
    """

    name: str
    title: str
    axes: tuple[str, ...]
    cells: tuple[Cell, ...]
    time_limit_s: float

    def label(self, cell: Cell) -> str:
        """A cell by what tells it from the others."""
        return label_of(cell.settings, self.axes)


def label_of(settings: Mapping[str, Any], axes: Sequence[str]) -> str:
    """``page_size=16 max_tokens_per_step=512``: the values of some keys, each under the last part of its name; a mesh names its own axes."""
    named = (show(settings[axis]) if axis == "mesh" else f"{axis.rpartition('.')[2]}={show(settings[axis])}" for axis in axes if axis in settings)
    return " ".join(named) or "all"


def show(value: object, separator: str = "+") -> str:
    """A setting as text, without blanks."""
    return separator.join(str(item) for item in cast(Sequence[object], value)) if isinstance(value, list | tuple) else str(value)


def read_experiment(file: Path) -> Experiment:
    """Reads an experiment file (docs/experiments.md).

    ``settings`` hold for every cell. ``grid`` gives lists whose combinations are the cells, the first key slowest; ``cells`` gives them one by one. Keys are
    those of the configuration, and ``model``, ``mesh``, ``target``, ``mode``, ``devices``, ``repeats``, ``goodput``, ``workload``, ``workload.FIELD``,
    ``load.FIELD``.

    Raises:
        ConfigError: No readable file, an unknown key, or not one cell that could be tried.
    """
    try:
        return _read(file)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def _read(file: Path) -> Experiment:
    tree = read_yaml(file)
    for key in tree:
        if key not in _TOP_KEYS:
            raise ConfigError(f"unknown key {key!r} of an experiment; known: {', '.join(_TOP_KEYS)}")
    if ("grid" in tree) == ("cells" in tree):
        raise ConfigError("an experiment has either grid (lists of values that are combined) or cells (a list of single ones)")
    common = _flat(_mapping(tree.get("settings", {}), "settings"))
    rows = list(itertools.islice(_grid(tree["grid"]) if "grid" in tree else _list(tree["cells"]), _MAX_CELLS + 1))
    if not rows or len(rows) > _MAX_CELLS:
        raise ConfigError(f"an experiment of {'no cells' if not rows else f'more than {_MAX_CELLS} cells'}; must have 1 to {_MAX_CELLS}")
    for row in rows:
        for key in row.keys() & common.keys():
            raise ConfigError(f"{key} is given for every cell under settings, and again for one")
    made = {cell.id: cell for cell in (_cell(common | row, file.parent) for row in rows)}
    cells = tuple(made.values())
    if all(cell.problem for cell in cells):
        raise ConfigError(cells[0].problem)
    keys = dict.fromkeys(key for row in rows for key in row)
    axes = tuple(key for key in keys if len({json.dumps(cell.settings.get(key)) for cell in cells}) > 1)
    limit = coerce(tree.get("time_limit_s", str(_DEFAULT_TIME_LIMIT_S)), float, "time_limit_s")
    if not 0 < limit <= 7 * 86_400:
        raise ConfigError(f"time_limit_s is {limit:g}; must be in (0, {7 * 86_400}]")
    return Experiment(name=file.stem, title=str(tree.get("title", file.stem)), axes=axes, cells=cells, time_limit_s=limit)


def _mapping(value: object, what: str) -> Mapping[str, Any]:
    if value == "":
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what} is {str(value)[:80]!r}; must be a mapping of keys to values")
    return cast(Mapping[str, Any], value)


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Sections or dotted keys -> dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        leaves = {f"{key}.{name}": inner for name, inner in _mapping(cast(object, value), key).items()} if isinstance(value, Mapping) else {key: value}
        for path, leaf in leaves.items():
            if path in flat:
                raise ConfigError(f"{path} is given twice")
            flat[path] = leaf
    return flat


def _grid(value: object) -> Iterator[dict[str, Any]]:
    axes = _flat(_mapping(value, "grid"))
    for key, values in axes.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"grid: {key} is {str(cast(object, values))[:80]!r}; must be a list of values")
    for combination in itertools.product(*axes.values()):
        yield dict(zip(axes, combination, strict=True))


def _list(value: object) -> Iterator[dict[str, Any]]:
    if not isinstance(value, list):
        raise ConfigError(f"cells is {str(value)[:80]!r}; must be a list of mappings")
    for index, item in enumerate(cast(list[object], value)):
        yield _flat(_mapping(item, f"cells[{index}]"))


def _cell(given: Mapping[str, Any], folder: Path) -> Cell:
    """A cell; one that cannot be tried has its text as settings, and the reason."""
    try:
        return _checked_cell(given, folder)
    except ConfigError as error:
        return Cell(settings=dict(given), problem=str(error))


def _checked_cell(given: Mapping[str, Any], folder: Path) -> Cell:
    settings: dict[str, Any] = {}
    own = dict(given)

    def take(key: str, annotation: Any, default: Any = None) -> Any:
        if key not in own:
            return default
        settings[key] = coerce(own.pop(key), annotation, key)
        return settings[key]

    mode: Mode = take("mode", Literal["live", "plan", "both"]) or ("plan" if "target" in own else "live")
    settings["mode"] = mode
    devices, repeats = take("devices", int), take("repeats", int, 1)
    if not 1 <= repeats <= 100 or not (devices is None or 1 <= devices <= 1024):
        raise ConfigError(f"repeats is {repeats} and devices {devices}; must be in [1, 100] and [1, 1024]")
    values: dict[str, Any] = {}
    if "model" in own:
        values["model.source"] = take("model", str)
    mesh: dict[str, int] = {}
    if "mesh" in own:
        mesh = parse_mesh(own.pop("mesh"))
        settings["mesh"] = ",".join(f"{axis}={size}" for axis, size in mesh.items())
        values |= {f"mesh.{axis}": size for axis, size in mesh.items()}
    target = load = workload = slo = None
    files: Mapping[str, str] = {}
    if mode != "live":
        target, load = _target(own, settings, mode), Load(**{key.partition(".")[2]: take(key, int, default) for key, default in _LOAD_KEYS.items()})
        if min(dataclasses.astuple(load)) < 1:
            raise ConfigError(f"load is {dataclasses.asdict(load)}; must be at least 1 each")
    if mode != "plan":
        workload, files = _workload(own, settings, folder)
        slo = parse_slo(take("goodput", str)) if "goodput" in own else None
    for key in own:
        if key in values:
            raise ConfigError(f"{key} is given twice")
        if key.startswith(("load.", "workload")) or key in ("target", "goodput"):
            raise ConfigError(f"{key} has no meaning where mode is {mode}")
    config = load_config(values=own | values)
    typed = flatten(sections(config))
    for key in own:
        if key not in typed:
            raise ConfigError(f"{key} is no setting of an engine")
    settings |= {key: typed[key] for key in own}
    if values.get("model.source"):
        settings["model"] = config.model.source
    return Cell(
        settings=settings, mode=mode, config=config, mesh=mesh, devices=devices, target=target, load=load, workload=workload, files=files, slo=slo,
        repeats=repeats,
    )  # fmt: skip


def _target(own: dict[str, Any], settings: dict[str, Any], mode: Mode) -> Topology:
    if "target" not in own:
        raise ConfigError(f"mode is {mode}, which needs a target, such as v6e:2x4")
    target = parse_topology(own.pop("target"))
    settings["target"] = str(target)
    return target


def _workload(own: dict[str, Any], settings: dict[str, Any], folder: Path) -> tuple[Workload, Mapping[str, str]]:
    """A file, single fields, or both; and the hashes of what it reads. Settings hold a hash of all files: a cell with other contents is another cell."""
    fields = {key.partition(".")[2]: own.pop(key) for key in [key for key in own if key.startswith("workload.")]}
    file = None
    if "workload" in own:
        settings["workload"] = own.pop("workload")
        file = folder / settings["workload"]
    try:
        workload = load_workload(file, fields)
    except ConfigError as error:
        raise ConfigError(f"workload: {error}") from None
    settings |= {f"workload.{name}": getattr(workload, name) for name in fields}
    if workload.arrival == "closed" and workload.duration_s is not None:
        raise ConfigError(f"workload.duration_s is {workload.duration_s:g}; in a cell a closed loop ends after workload.num_requests")
    paths = {"trace": workload.trace, "lengths": None if workload.lengths == "trace" else workload.lengths}
    files = {name: _file_sha256(name, Path(path)) for name, path in paths.items() if path is not None}
    contents = files if file is None else {**files, "workload": read_yaml(file)}
    if contents:
        settings[_CONTENT] = _digest(contents)
    return workload, files


def _digest(plain: Mapping[str, Any]) -> str:
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _file_sha256(name: str, file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"workload.{name}: cannot read {file}: {error.strerror}") from None

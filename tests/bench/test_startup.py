"""``bench startup``: starts in processes of their own, cold and warm."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.bench.local import startup
from jaxserve.bench.local.startup import BEFORE_READY, FIRST_TOKEN, measure_startup
from jaxserve.config import Config, load_config
from jaxserve.errors import BenchmarkError
from tests.bench.test_cli import Command, command  # noqa: F401
from tests.bench.test_offline import TINY
from tests.experiments.tiny_checkpoint import tiny_checkpoint


def test_cold_then_warm(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "cache"))
    model, file = str(tiny_checkpoint(tmp_path / "tiny")), tmp_path / "a.json"
    found: dict[str, Any] = {}
    for _ in range(3):  # should this machine have stood still in the second start
        status, out, err = command(model, "--platform", "cpu", "model.dtype=float32", *TINY, "--repeats", "1", "--json", str(file), verb="startup")
        assert status == 0, err
        assert "medians (range) of 1 cold and 1 warm starts" in " ".join(out.split())
        found = json.loads(file.read_text())
        if found["warm"]["median_compile_s"] < found["cold"]["median_compile_s"]:
            break
    for kind in ("cold", "warm"):
        phases = {phase: values[0] for phase, values in found[kind]["phases_s"].items()}
        assert phases.keys() == {"ready", FIRST_TOKEN, *BEFORE_READY}
        assert min(phases.values()) > 0
        assert phases["ready"] == pytest.approx(sum(phases[phase] for phase in BEFORE_READY))
    assert found["warm"]["median_compile_s"] < found["cold"]["median_compile_s"]  # it found what the cold start compiled


class Children:
    """Stands for the processes: what each is given and what it says."""

    def __init__(self, *rows: dict[str, Any] | type[BaseException]) -> None:
        self._rows = iter(rows)
        self.configs: list[Config] = []
        self.caches: list[tuple[str, bool]] = []

    def __call__(self, module: str, arguments: list[str], environment: dict[str, str], *, time_limit_s: float) -> Iterator[tuple[dict[str, Any], str]]:
        self.configs.append(load_config([Path(arguments[0])]))
        cache = Path(environment["JAXSERVE_CACHE"])
        self.caches.append((cache.name, (cache / "models" / "marker").exists()))
        row = next(self._rows)
        if isinstance(row, type):
            raise row
        yield row, ""


def row(seconds: float) -> dict[str, Any]:
    return {"model": "m", "device": "cpu", "jax": "1", "phases": {"imports": seconds, "compile": 2 * seconds, FIRST_TOKEN: 7.0}}


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "real"))
    (tmp_path / "real" / "models").mkdir(parents=True)
    (tmp_path / "real" / "models" / "marker").touch()


@pytest.mark.usefixtures("models")
def test_each_pair_has_an_empty_cache_and_the_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    children = Children(row(9), row(1), row(2), row(3), row(4))
    monkeypatch.setattr(startup, "rows_of", children)
    config = load_config((), ["server.api_keys=secret"])
    found = measure_startup(config, repeats=2)
    assert children.caches == [("real", True), ("cache-0", True), ("cache-0", True), ("cache-1", True), ("cache-1", True)]
    assert [one.engine.warmup for one in children.configs] == [False, True, True, True, True]
    assert children.configs[1] == config
    assert (found.values("cold", "ready"), found.values("warm", "ready"), found.values("warm", FIRST_TOKEN)) == ([3, 9], [6, 12], [7, 7])
    assert (tmp_path / "real" / "models" / "marker").exists()  # only links to it were thrown away


@pytest.mark.usefixtures("models")
def test_ctrl_c_keeps_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "rows_of", Children(row(9), row(1), KeyboardInterrupt))
    found = measure_startup(Config(), repeats=2)
    assert (found.interrupted, found.values("cold", "ready"), found.values("warm", "ready")) == (True, [3], [])
    assert "warm" not in startup.to_json(found)


@pytest.mark.usefixtures("models")
def test_an_engine_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "rows_of", Children({"error": "no model 'x'"}))
    with pytest.raises(BenchmarkError, match="the engine did not start: no model 'x'"):
        measure_startup(Config(), repeats=1)

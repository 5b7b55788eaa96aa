"""Experiment files: what they become, and what is refused."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from jaxserve.errors import ConfigError
from jaxserve.experiments.file import Experiment, read_experiment

ROOT = Path(__file__).parents[2]

GRID = """
title: Pages and budgets
settings:
  model: smollm2-135m
  workload: {input_len: 32, output_len: uniform:4:8, num_requests: 10, concurrency: 4}
  engine: {token_buckets: [64], sequence_buckets: [4]}
grid:
  cache.page_size: [16, 32]
  scheduler.max_tokens_per_step: [64, 128]
"""


def read(tmp_path: Path, text: str) -> Experiment:
    file = tmp_path / "some.yaml"
    file.write_text(text)
    return read_experiment(file)


def test_a_grid_is_every_combination_the_first_key_slowest(tmp_path: Path) -> None:
    experiment = read(tmp_path, GRID)
    assert experiment.name == "some"
    assert experiment.title == "Pages and budgets"
    assert experiment.axes == ("cache.page_size", "scheduler.max_tokens_per_step")
    assert [experiment.label(cell) for cell in experiment.cells] == [
        f"page_size={page} max_tokens_per_step={budget}" for page in (16, 32) for budget in (64, 128)
    ]
    cell = experiment.cells[2]
    assert cell.mode == "live"
    assert (cell.config.cache.page_size, cell.config.scheduler.max_tokens_per_step, cell.config.engine.token_buckets) == (32, 64, (64,))
    assert cell.config.model.source == "smollm2-135m"
    assert cell.workload is not None
    assert (cell.workload.arrival, cell.workload.concurrency, cell.workload.output_len) == ("closed", 4, "uniform:4:8")
    assert cell.settings["cache.page_size"] == 32
    assert len({cell.id for cell in experiment.cells}) == 4


def test_an_id_hangs_on_settings_alone(tmp_path: Path) -> None:
    other = GRID.replace("[16, 32]", '["32", 16]').replace("Pages", "Other")
    assert {cell.id for cell in read(tmp_path, GRID).cells} == {cell.id for cell in read(tmp_path, other).cells}
    changed = GRID.replace("concurrency: 4", "concurrency: 5")
    assert not {cell.id for cell in read(tmp_path, GRID).cells} & {cell.id for cell in read(tmp_path, changed).cells}


def test_what_is_in_a_workloads_files_makes_another_cell(tmp_path: Path) -> None:
    text = "settings: {workload: load.yaml}\ngrid: {cache.page_size: [16]}"
    load, lengths = tmp_path / "load.yaml", tmp_path / "lengths.jsonl"
    ids = []
    for content in ("arrival: closed\nconcurrency: 1\n", "# the same\nconcurrency: '1'\narrival: closed\n", "arrival: closed\nconcurrency: 2\n"):
        load.write_text(content)
        ids.append(read(tmp_path, text).cells[0].id)
    assert ids[0] == ids[1] != ids[2]
    inline = "settings: {workload: {concurrency: 1, lengths: 'LENGTHS'}}\ngrid: {cache.page_size: [16]}".replace("LENGTHS", str(lengths))
    for content in ("one", "two"):
        lengths.write_text(content)
        (cell,) = read(tmp_path, inline).cells
        assert cell.files == {"lengths": hashlib.sha256(content.encode()).hexdigest()}
        ids.append(cell.id)
    assert ids[3] != ids[4]


def test_a_cell_without_files_keeps_the_id_of_its_settings(tmp_path: Path) -> None:
    """Results of earlier sweeps stay in place."""
    (cell,) = read(tmp_path, "settings: {workload.concurrency: 1}\ngrid: {cache.page_size: [16]}").cells
    assert dict(cell.settings) == {"mode": "live", "workload.concurrency": 1, "cache.page_size": 16} and cell.id == "20ef65300a89"


@pytest.mark.parametrize("file", sorted((ROOT / "configs/workloads").glob("*.yaml")), ids=lambda file: file.stem)
def test_shipped_workloads_run_in_a_cell(tmp_path: Path, file: Path) -> None:
    (cell,) = read(tmp_path, f"settings: {{workload: {file}}}\ngrid: {{cache.page_size: [16]}}").cells
    assert not cell.problem


def test_a_target_makes_a_plan(tmp_path: Path) -> None:
    text = "settings: {model: llama-3.1-70b, load.batch: 8}\ncells: [{target: 'v6e:8', mesh: 'data=2'}, {target: 'h200:8', mesh: 'data=1,model=8'}]"
    first, second = read(tmp_path, text).cells
    assert (first.mode, str(first.target), first.load and first.load.batch) == ("plan", "v6e:2x4", 8)
    assert str(first.mesh_on_target()) == "data=2,model=4"
    assert str(second.mesh_on_target()) == "data=1,model=8"
    assert first.workload is None


def test_the_same_cell_twice_is_one(tmp_path: Path) -> None:
    assert len(read(tmp_path, "cells: [{cache.page_size: 16}, {cache.page_size: '16'}, {cache.page_size: 32}]\nsettings: {workload.concurrency: 1}").cells) == 2


def test_a_cell_that_contradicts_itself_is_kept_with_its_reason(tmp_path: Path) -> None:
    experiment = read(tmp_path, "settings: {workload.concurrency: 1}\ngrid: {scheduler.max_tokens_per_step: [8, 64]}")
    assert [bool(cell.problem) for cell in experiment.cells] == [True, False]
    assert "must be at least scheduler.max_num_seqs" in experiment.cells[0].problem


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grid: {cache.page_sise: [1]}\nsettings: {workload.concurrency: 1}", "did you mean 'cache.page_size'"),
        ("grid: {cache.page_size: [3]}\nsettings: {workload.concurrency: 1}", "power of two"),
        ("grid: {cache.page_size: 16}", "must be a list of values"),
        ("grid: {cache.page_size: []}", "must be a list of values"),
        ("grids: {}", "unknown key 'grids'"),
        ("title: x", "either grid"),
        ("cells: []", "no cells"),
        ("cells: [3]", "must be a mapping"),
        ("grid: {mesh: ['data=2,modle=1']}\nsettings: {workload.concurrency: 1}", "axis 'modle'"),
        ("grid: {target: ['v7x:4']}", "unknown chip 'v7x'"),
        ("grid: {mode: [plan]}", "needs a target"),
        ("grid: {server.port: [1]}\nsettings: {workload.concurrency: 1}", "no setting of an engine"),
        ("grid: {load.batch: [1]}\nsettings: {workload.concurrency: 1}", "no meaning where mode is live"),
        ("grid: {workload.concurency: [1]}", "did you mean 'concurrency'"),
        ("grid: {cache.page_size: [16]}", "concurrency"),
        ("settings: {workload.concurrency: 1, workload.duration_s: 3}\ngrid: {cache.page_size: [16]}", "ends after workload.num_requests"),
        ("settings: {workload.concurrency: 1}\ngrid: {goodput: ['ttft']}", "metric:milliseconds"),
        ("settings: {target: 'v6e:1', goodput: 'ttft:1', model: llama-3.1-8b}\ngrid: {load.batch: [1]}", "goodput has no meaning"),
        ("grid: {workload.burst_size: [3]}", "concurrency"),
        ("grid: {workload.trace: [nowhere.csv]}", "workload.trace: cannot read nowhere.csv"),
        ("grid: {cache.page_size: [16]}\nsettings: {cache.page_size: 16, workload.concurrency: 1}", "again for one"),
        ("grid: {model: [a], model.source: [b]}\nsettings: {workload.concurrency: 1}", "given twice"),
        ("grid: {repeats: [0]}\nsettings: {workload.concurrency: 1}", "repeats is 0"),
        ("grid: {cache.page_size: [16]}\nsettings: {workload.concurrency: 1}\ntime_limit_s: 0", "time_limit_s"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"some\.yaml: ") as caught:
        read(tmp_path, text)
    assert message in str(caught.value)


@pytest.mark.parametrize("file", sorted((ROOT / "configs/experiments").glob("*.yaml")), ids=lambda file: file.stem)
def test_shipped_files_can_be_read_and_say_what_they_are(file: Path) -> None:
    experiment = read_experiment(file)
    assert not [cell.problem for cell in experiment.cells if cell.problem]
    header = [line for line in file.read_text().splitlines() if line.startswith("#")]
    for word in ("Question:", "Command:", "Result"):
        assert any(word in line for line in header), f"the header has no {word}"

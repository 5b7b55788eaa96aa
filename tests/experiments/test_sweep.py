"""Sweeps: resuming, failing cells, what is written, comparing. Cells are fakes, but for those of the command line's own test."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from jaxserve import plots
from jaxserve.errors import ConfigError
from jaxserve.experiments.cell import run_cell
from jaxserve.experiments.compare import compare
from jaxserve.experiments.file import Cell, Experiment, read_experiment
from jaxserve.experiments.results import Result, Results, held, read_results
from jaxserve.experiments.summary import summary, write_summary
from jaxserve.experiments.sweep import CellFailedError, process_runner, run_sweep
from jaxserve.kernels_pallas.proof.targets import missing
from tests.experiments.tiny_checkpoint import tiny_checkpoint
from tests.loading.builders import tiny_config
from tests.waiting import LIMIT_S, wait_until

ROOT = Path(__file__).parents[2]

TEXT = """
settings: {model: m, workload.concurrency: 1}
grid:
  cache.page_size: [8, 16, 32]
  scheduler.max_tokens_per_step: [64, 128]
"""


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    file = tmp_path / "pages.yaml"
    file.write_text(TEXT)
    return read_experiment(file)


class Fake:
    """Runs cells by formula; fails or dies where it is told to."""

    def __init__(self, *, fails: int = 0, dies_at: int = 0, factor: float = 1.0) -> None:
        self.ran: list[str] = []
        self.fails, self.dies_at, self.factor = fails, dies_at, factor

    def __call__(self, cell: Cell, folder: Path) -> dict[str, Any]:
        assert folder.is_dir()
        self.ran.append(cell.id)
        if len(self.ran) == self.dies_at:
            raise KeyboardInterrupt
        if cell.config.cache.page_size == self.fails:
            raise CellFailedError("out of pages")
        return {"metrics": {"output_tokens_per_s": self.factor * cell.config.cache.page_size * 10.0}, "times": {"start_s": 1.0}, "record": {"mesh": "1x1"}}


def test_a_sweep_killed_half_way_goes_on_without_repeating(tmp_path: Path, experiment: Experiment) -> None:
    first, second, third = Fake(dies_at=4), Fake(), Fake()
    with pytest.raises(KeyboardInterrupt):
        run_sweep(experiment, Results(tmp_path / "out"), first)
    run_sweep(experiment, Results(tmp_path / "out"), second)
    run_sweep(experiment, Results(tmp_path / "out"), third)
    assert first.ran[:3] + second.ran == [cell.id for cell in experiment.cells]
    assert third.ran == []
    assert [result.status for result in read_results(tmp_path / "out")] == ["done"] * 6


def test_a_line_torn_by_a_kill_is_run_again(tmp_path: Path, experiment: Experiment) -> None:
    run_sweep(experiment, Results(tmp_path), Fake())
    file = tmp_path / "results.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    again = Fake()
    run_sweep(experiment, Results(tmp_path), again)
    assert again.ran == [experiment.cells[-1].id]
    assert len(read_results(tmp_path)) == 6


def test_a_failing_cell_does_not_stop_the_others(tmp_path: Path, experiment: Experiment) -> None:
    run_sweep(experiment, Results(tmp_path), Fake(fails=16))
    results = read_results(tmp_path)
    assert [result.status for result in results] == ["done", "done", "failed", "failed", "done", "done"]
    assert results[2].reason == "out of pages"
    patient, retried = Fake(), Fake()
    run_sweep(experiment, Results(tmp_path), patient)
    run_sweep(experiment, Results(tmp_path), retried, retry_failed=True)
    assert (len(patient.ran), len(retried.ran)) == (0, 2)
    assert {result.status for result in read_results(tmp_path)} == {"done"}


def test_what_is_written(tmp_path: Path, experiment: Experiment) -> None:
    results = Results(tmp_path)
    run_sweep(experiment, results, Fake(fails=16))
    lines = write_summary(experiment, results.of([cell.id for cell in experiment.cells]), tmp_path)
    assert lines[0] == "page_size=16 max_tokens_per_step=64 failed: out of pages"
    assert lines[-1] == f"4 of 6 cells have figures: {tmp_path / 'summary.md'}"
    written = (tmp_path / "summary.md").read_text()
    assert "| 32 | 128 | 320 |" in written
    assert "- page_size=16 max_tokens_per_step=64: failed: out of pages" in written
    assert "![output_tokens_per_s.png](output_tokens_per_s.png)" in written
    for name in ("output_tokens_per_s.png", "output_tokens_per_s.svg"):
        assert (tmp_path / name).stat().st_size > 1000
    record = json.loads((tmp_path / "cells" / experiment.cells[0].id / "record.json").read_text())
    assert record["config"]["cache"]["page_size"] == 8
    assert record["metrics"] == {"output_tokens_per_s": 80.0}
    assert {"revision", "settings", "started", "status", "mesh"} <= record.keys()
    assert record["workload"]["concurrency"] == 1 and record["workload"]["input_len"] == "128", "fields that nobody set are there too"
    assert record["files_sha256"] == {} and record["load"] is None


def test_what_differs_between_cells_is_not_said_of_every_cell(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"{number}.yaml").write_text(f"arrival: closed\nconcurrency: {number}\n")
    (tmp_path / "files.yaml").write_text("settings: {model: m}\ngrid: {workload: [1.yaml, 2.yaml]}")
    experiment, results = read_experiment(tmp_path / "files.yaml"), Results(tmp_path)
    run_sweep(experiment, results, Fake())
    assert "Every cell: `mode=live`, `model=m`\n" in summary(experiment, read_results(tmp_path))


def test_a_plot_leaves_a_gap_where_a_cell_has_no_figure(tmp_path: Path, experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    run_sweep(experiment, Results(tmp_path), Fake(fails=16))
    drawn: list[float] = []
    monkeypatch.setattr(plots, "bars", lambda axes, places, series, **_: drawn.extend(series[0].y))
    results = read_results(tmp_path)
    write_summary(experiment, [*results[:4], dataclasses.replace(results[4], metrics={}), *results[5:]], tmp_path)
    assert drawn[0] == 80.0 and math.isnan(drawn[1]) and len(drawn) == 2


def test_predicted_stands_beside_measured(experiment: Experiment) -> None:
    metrics = {"decode_step_ms_p50": 12.0, "predicted_decode_step_ms": 10.0}
    text = summary(experiment, [Result(cell="a", settings=experiment.cells[0].settings, status="done", metrics=metrics)])
    assert "- page_size=8 max_tokens_per_step=64: decode step 12 ms, 1.20 times the predicted 10 ms" in text


def test_two_folders_side_by_side(tmp_path: Path, experiment: Experiment) -> None:
    run_sweep(experiment, Results(tmp_path / "a"), Fake())
    run_sweep(experiment, Results(tmp_path / "b"), Fake(factor=1.5, fails=32))
    table = compare(tmp_path / "a", tmp_path / "b")
    assert "| page_size=8 max_tokens_per_step=64 | output tokens/s | 80 | 120 | 1.500 |" in table
    assert "only in the first: 2 cells" in table
    with pytest.raises(ConfigError, match="no folder of a sweep"):
        compare(tmp_path / "a", tmp_path)


def test_a_plan_and_a_run_side_by_side(tmp_path: Path) -> None:
    plan, live = {"mode": "plan", "target": "v6e:1"}, {"mode": "live"}
    for name, more, metrics in (("plan", plan, {"predicted_decode_step_ms": 10.0}), ("live", live, {"decode_step_ms_p50": 15.0})):
        for mesh in ("data=1", "data=2"):
            Results(tmp_path / name).add(Result(cell=mesh, settings={"mesh": mesh, **more}, status="done", metrics=metrics), {})
    table = compare(tmp_path / "plan", tmp_path / "live")
    assert "mode: plan in the first, live in the second" in table
    assert "| data=2 | decode step ms, measured and predicted | 10 | 15 | 1.500 |" in table


def test_a_folder_serves_one_sweep_at_a_time(tmp_path: Path) -> None:
    with held(tmp_path / "out"), pytest.raises(ConfigError, match="another sweep"), held(tmp_path / "out"):
        pass


def test_a_broken_results_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text('{"cell": 1}\n')
    with pytest.raises(ConfigError, match="line 1 is no result"):
        read_results(tmp_path)


def test_a_cell_that_takes_too_long_is_killed(tmp_path: Path, experiment: Experiment) -> None:
    with pytest.raises(CellFailedError, match=r"killed after 0\.1 s") as caught:
        process_runner(tmp_path / "pages.yaml", 0.1)(experiment.cells[0], tmp_path)
    assert caught.value.timed_out


def test_a_cell_that_cannot_run_says_why(tmp_path: Path, experiment: Experiment) -> None:
    with pytest.raises(CellFailedError, match="'m'"):
        process_runner(tmp_path / "pages.yaml", 100)(experiment.cells[0], tmp_path)
    (tmp_path / "pages.yaml").write_text(TEXT.replace("[8, 16, 32]", "[16, 32]"))
    with pytest.raises(CellFailedError, match=f"has changed since the sweep began: it has no cell {experiment.cells[0].id}"):
        process_runner(tmp_path / "pages.yaml", 100)(experiment.cells[0], tmp_path)


def test_a_cell_that_dies_says_how(tmp_path: Path, experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(CellFailedError, match="ended with 1: it said nothing"):
        process_runner(tmp_path / "pages.yaml", 100)(experiment.cells[0], tmp_path)


def test_a_prediction_stands_beside_no_other_chip(tmp_path: Path) -> None:
    file = tmp_path / "both.yaml"
    file.write_text("settings: {model: smollm2-135m, workload.concurrency: 1}\ncells: [{mode: both, target: 'v6e:1'}]")
    with pytest.raises(ConfigError, match="the devices of this machine are cpu"):
        run_cell(read_experiment(file).cells[0])


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "jaxserve", "sweep", *words]


def test_the_command_on_a_real_model_killed_and_gone_on_with(tmp_path: Path) -> None:
    file, out = tmp_path / "tiny.yaml", tmp_path / "out"
    file.write_text(f"""
settings:
  model: {tiny_checkpoint(tmp_path / "tiny")}
  model.dtype: float32
  devices: 4
  scheduler: {{max_num_seqs: 2, max_tokens_per_step: 16}}
  engine: {{token_buckets: [16], sequence_buckets: [2]}}
  cache.num_pages: 32
  workload: {{input_len: 8, output_len: 4, num_requests: 4, concurrency: 3}}
grid:
  mesh: ["data=1,model=1", "data=1,model=3", "data=2,model=2"]
""")
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command(str(file), "--out", str(out)), env=environment, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until((out / "results.jsonl").exists, "the first result", limit_s=2 * LIMIT_S)
    cells = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not psutil.wait_procs(cells, timeout=LIMIT_S)[1], "a cell goes on without its sweep"
    first = read_results(out)
    assert 1 <= len(first) < 3
    done = subprocess.run(command(str(file), "--out", str(out)), env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1, done.stderr
    results = read_results(out)
    assert results[: len(first)] == first
    assert [result.status for result in results] == ["done", "failed", "done"]
    assert "KV heads" in results[1].reason
    record = json.loads((out / "cells" / results[2].cell / "record.json").read_text())
    assert record["mesh"] == {"data": 2, "model": 2}
    assert len(record["devices"]) == 4
    assert len(record["programs_sha256"]) == 64
    assert record["metrics"]["requests"] == 4
    assert record["metrics"]["output_tokens"] == 16
    assert record["metrics"]["decode_step_ms_p50"] > 0


@pytest.mark.aot
def test_two_runs_of_a_plan_give_the_same_but_for_times(tmp_path: Path) -> None:
    reason = missing("v6e")
    if reason is not None:
        pytest.skip(reason)
    file, model = tmp_path / "plan.yaml", tmp_path / "config.json"
    model.write_text(json.dumps(tiny_config("llama", hidden_size=256, head_dim=64)))
    file.write_text(f"settings: {{model: {model}, load: {{batch: 4, context: 64, chunk: 16}}}}\ncells: [{{target: 'v6e:4', mesh: 'data=2,model=1'}}]")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    results = []
    for name in ("a", "b"):
        done = subprocess.run(
            command(str(file), "--out", str(tmp_path / name)), env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stderr
        (line,) = (tmp_path / name / "results.jsonl").read_text().splitlines()
        result = json.loads(line)
        record = json.loads((tmp_path / name / "cells" / result["cell"] / "record.json").read_text())
        results.append({key: value for key, value in result.items() if key != "times"} | {"programs": record["planned_programs_sha256"]})
    assert results[0] == results[1]
    assert results[0]["metrics"]["fits"] is True
    assert results[0]["programs"].keys() == {"decode", "mixed"}
    assert results[0]["metrics"]["predicted_decode_step_ms"] > 0

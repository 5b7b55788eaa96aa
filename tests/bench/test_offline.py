"""``bench throughput`` and ``bench latency``: requests through an engine in this process, and what is told of them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxserve.bench.load.metrics import measure
from jaxserve.bench.local.batches import run_batches
from jaxserve.bench.local.offline import joined, offline_workload, plan_offline, run_offline
from jaxserve.bench.workload.workload import load_workload
from jaxserve.engine.engine import Engine
from jaxserve.errors import ConfigError
from jaxserve.experiments.measure import measure_workload
from jaxserve.request import Request, RequestOutput
from tests.bench.test_cli import Command, command  # noqa: F401
from tests.engine_host.fakes import fake_engine
from tests.experiments.tiny_checkpoint import tiny_checkpoint

TINY = ("scheduler.max_num_seqs=4", "scheduler.max_tokens_per_step=32", "engine.token_buckets=32", "engine.sequence_buckets=4", "cache.num_pages=64")
HERE = ("engine.compilation_cache=no", "model.dtype=float32", "--platform", "cpu", *TINY)


def ticking() -> Callable[[], float]:
    """A clock that is a second later each time it is read."""
    return itertools.count().__next__


def test_every_time_and_count_is_exact() -> None:
    engine = fake_engine()
    planned, broken = plan_offline(offline_workload(None, {"num_requests": 3, "input_len": "5", "output_len": "4"}), len)
    assert broken == 0
    run = run_offline(engine, planned, start_s=100.0, clock=ticking())
    # Read at the start, as each request is added, after each of four steps, and at the end.
    assert [record.sent_s for record in run.records] == [101, 102, 103]
    assert [record.piece_times_s for record in run.records] == [(104, 105, 106, 107)] * 3
    assert run.duration_s == 8
    metrics = measure(run)
    assert (metrics.completed, metrics.input_tokens, metrics.output_tokens, metrics.output_mismatches, metrics.peak_concurrency) == (3, 15, 12, 0, 3)
    assert (metrics.latencies["ttft"].median, metrics.latencies["tpot"].median, metrics.latencies["e2el"].max) == (2000, 1000, 6000)
    assert not engine.has_work


def test_runs_one_after_the_other_are_one() -> None:
    engine = fake_engine()
    planned, _ = plan_offline(offline_workload(None, {"num_requests": 2, "input_len": "5", "output_len": "2"}), len)
    first = run_offline(engine, planned, clock=ticking())
    both = joined([first, run_offline(engine, planned, start_s=first.duration_s, clock=ticking())])
    assert both.duration_s == 2 * first.duration_s
    assert measure(both).peak_concurrency == 2


def test_ctrl_c_keeps_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_engine()
    planned, _ = plan_offline(offline_workload(None, {"num_requests": 2, "lengths": None, "input_len": "5", "output_len": "uniform:2:9"}), len)
    assert planned[0].output_len != planned[1].output_len
    step, left = engine.step, itertools.count(min(request.output_len for request in planned), -1)

    def interrupted() -> list[RequestOutput]:
        if not next(left):
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine, "step", interrupted)
    run = run_offline(engine, planned)
    assert (len(run.records), run.unfinished, run.interrupted) == (1, 1, "stopped")
    assert not engine.has_work


def test_a_workload_loses_what_is_about_time(tmp_path: Path) -> None:
    file = tmp_path / "chat.yaml"
    file.write_text("arrival: burst\nrate: 2\nburst_size: 3\nnum_requests: 8\nturns: 4\nthink_s: 5\ncancel_share: 0.5\ntenants: 2\npriorities: 0, 1\n")
    workload = offline_workload(file, {"input_len": "7", "output_len": "4"})
    assert (workload.arrival, workload.concurrency, workload.think_s, workload.cancel_share, workload.input_len) == ("closed", 8, 0, 0, "7")
    planned, _ = plan_offline(workload, len)
    assert [(request.session, request.turn) for request in planned] == [(session, turn) for session in range(2) for turn in range(4)]
    assert {request.tenant for request in planned} <= {0, 1}
    records = run_offline(fake_engine(), planned).records
    assert sorted(record.prompt_tokens or 0 for record in records) == [7, 7, 18, 18, 29, 29, 40, 40]
    assert offline_workload(None, {}).num_requests == 100
    with pytest.raises(ConfigError, match="unknown field 'turn'"):
        offline_workload(None, {"turn": 1})


def test_throughput(command: Command, tmp_path: Path) -> None:  # noqa: F811
    model, file = str(tiny_checkpoint(tmp_path / "tiny")), tmp_path / "a.json"
    words = ("-n", "6", "--input-len", "uniform:4:9", "--output-len", "5", "--price-per-hour", "2", "engine.warmup=no")
    status, out, err = command(model, *HERE, *words, "--json", str(file), verb="throughput")
    assert status == 0, err
    for word in ("6 success", "in this process: closed, 6 at once", "per million output tokens", "these figures hold the compiling too"):
        assert word in " ".join(out.split())
    found = json.loads(file.read_text())
    assert (found["completed"], found["total_output_tokens"], found["output_length_mismatches"], found["endpoint_type"]) == (6, 30, 0, "engine")
    assert found["environment"]["jax"]


def test_latency(command: Command, tmp_path: Path) -> None:  # noqa: F811
    model, file = str(tiny_checkpoint(tmp_path / "tiny")), tmp_path / "a.json"
    words = ("--batch", "1,3", "--input-len", "6", "--output-len", "4", "--repeats", "2")
    status, out, err = command(model, *HERE, *words, "--json", str(file), verb="latency")
    assert status == 0, err
    assert "whole batch ms" in out
    runs = json.loads(file.read_text())["runs"]
    assert [(run["max_concurrency"], run["completed"], len(run["batch_ms"])) for run in runs] == [(1, 2, 2), (3, 6, 2)]
    assert all(run["median_ttft_ms"] <= run["median_e2el_ms"] <= max(run["batch_ms"]) for run in runs)
    status, _, err = command(model, *HERE, "--batch", "5", verb="latency")
    assert (status, "--batch is 5; it must be at most 4" in err) == (2, True)
    status, _, err = command(model, "--batch", "1.5", verb="latency")
    assert (status, "must be whole numbers" in err) == (2, True)


def watched_engine() -> tuple[Engine, list[tuple[int, ...]]]:
    """An engine, and the prompts that it is given."""
    prompts: list[tuple[int, ...]] = []
    engine: Engine = fake_engine()
    add = engine.add

    def watched(request: Request) -> None:
        prompts.append(tuple(request.prompt_token_ids))
        add(request)

    engine.add = watched  # type: ignore[method-assign]
    return engine, prompts


def test_no_batch_has_the_prompts_of_another() -> None:
    engine, prompts = watched_engine()
    numbers = itertools.count()
    for size in (1, 3):
        run_batches(engine, offline_workload(None, {"num_requests": size, "input_len": "9", "output_len": "2"}), repeats=2, device="x", numbers=numbers)
    assert len(prompts) == len(set(prompts)) == 3 * (1 + 3)


def test_no_repeat_of_a_cell_has_the_prompts_of_another() -> None:
    engine, prompts = watched_engine()
    measure_workload(engine, load_workload(None, {"concurrency": 2, "num_requests": 2, "input_len": "9", "output_len": "2"}), repeats=3)
    assert len(prompts) == len(set(prompts)) == 1 + 3 * 2


def test_an_engine_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Engine = fake_engine()
    planned, _ = plan_offline(offline_workload(None, {"num_requests": 2, "input_len": "5", "output_len": "4"}), len)

    def dispatch(_: object) -> None:
        raise RuntimeError("no device")

    monkeypatch.setattr(engine._runner, "dispatch", dispatch)
    metrics = measure(run_offline(engine, planned))
    assert (metrics.completed, metrics.failed) == (0, 2)

"""The loop beside a simulated device: the real engine, and figures that belong together."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rich.console import Console

from jaxserve.bench.local.loop import LoopRun, print_loop, real_loop, simulated_loop, to_json
from jaxserve.config import CacheConfig, Config
from tests.engine_host.fakes import FakeRunner, FakeTokenizer, fake_engine, fake_spec


@pytest.mark.parametrize("overlap", [False, True])
def test_a_simulated_device_serves_every_stream_in_every_step(overlap: bool) -> None:
    tokenizer: Any = FakeTokenizer()
    loop = simulated_loop(Config(cache=CacheConfig(page_size=16)), fake_spec(4096), tokenizer, step_s=0.001)
    run = loop.run(overlap=overlap, num_streams=3, num_steps=20, num_waiting=4)
    assert (run.overlap, run.num_streams, run.num_waiting) == (overlap, 3, 4)
    assert run.idle is not None and 0 <= run.idle < 1 and run.host_s > 0
    assert 0 < run.tokens_per_s <= 3 / 0.001 * 1.2, "the device takes its time"


def test_a_real_runner_is_left_empty_for_the_next_run() -> None:
    engine = fake_engine(FakeRunner(num_pages=400), max_position=512)
    loop = real_loop(engine._config, engine)
    runs = [loop.run(overlap=overlap, num_streams=2, num_steps=10) for overlap in (False, True, False)]
    assert all(run.idle is None and run.tokens_per_s > 0 for run in runs)


def test_a_report_has_medians_of_what_is_alike() -> None:
    figures = [(False, 0.3, 500), (True, 0.01, 900), (False, 0.1, 700), (True, 0.02, 1000), (False, 0.2, 600), (True, 0.03, 800)]
    runs = [LoopRun(overlap=overlap, num_streams=8, num_waiting=0, idle=idle, host_s=0.001, tokens_per_s=rate) for overlap, idle, rate in figures]
    console = Console(record=True, width=120)
    print_loop(runs, console, device="a device of 10 ms a step")
    text = console.export_text()
    assert "20.0%" in text and "600" in text and "2.0%" in text and "900" in text
    assert json.loads(json.dumps(to_json(runs, device="x")))["runs"][1]["idle"] == 0.01

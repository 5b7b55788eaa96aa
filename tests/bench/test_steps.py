"""``bench step``: phases that leave nothing out, work by hand, and what cannot run as one step."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.bench.local import step_run
from jaxserve.bench.local.ceilings import Ceilings, measure_ceilings
from jaxserve.bench.local.step_report import ENOUGH_ACCOUNTED, StepResult
from jaxserve.bench.local.steps import PHASES, StepBench, StepShape, StepTimes, check_shapes, step_work
from jaxserve.bench.local.stopwatch import OTHER, Stopwatch
from jaxserve.config import ShardingConfig
from jaxserve.engine.engine import Engine
from jaxserve.errors import BenchmarkError, ConfigError
from jaxserve.mesh_shape import MeshShape
from jaxserve.plan.roofline import Split
from tests.bench.test_cli import Command, command  # noqa: F401
from tests.bench.test_offline import HERE
from tests.engine.tiny import tiny_engine, tiny_spec
from tests.experiments.tiny_checkpoint import tiny_checkpoint

SHAPES = (StepShape(decodes=1), StepShape(decodes=4), StepShape(prompt=16), StepShape(decodes=2, prompt=8))


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_phase_inside_another_is_not_counted_twice() -> None:
    clock = Clock()
    stopwatch = Stopwatch(clock)

    class Piece:
        def inner(self) -> str:
            clock.now_s += 2
            return "x"

        def outer(self) -> str:
            clock.now_s += 1
            found = self.inner()
            clock.now_s += 4
            return found

        def fails(self) -> None:
            clock.now_s += 16
            raise ValueError("as planned")

    piece = Piece()
    for name in ("inner", "outer", "fails"):
        stopwatch.watch(piece, name, name)
    stopwatch.start()
    clock.now_s += 8
    assert piece.outer() == "x"
    with pytest.raises(ValueError, match="as planned"):
        piece.fails()
    assert stopwatch.read() == {OTHER: 8, "inner": 2, "outer": 5, "fails": 16}
    stopwatch.start()
    with stopwatch.phase("block"):
        clock.now_s += 32
    assert stopwatch.read() == {"block": 32, OTHER: 0}
    assert Piece().inner() == "x"  # the class is as it was
    assert stopwatch.read()[OTHER] == 2


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    # Wide enough that a step takes milliseconds, as real ones do: what is outside of the phases is a twentieth of a millisecond.
    spec = tiny_spec(width=512, mlp_width=4096)
    engine = tiny_engine(spec=spec, max_num_seqs=5, max_tokens_per_step=40, token_buckets=(40,), num_pages=40)
    yield engine
    assert not engine.has_work
    engine.check_integrity()


@pytest.fixture(scope="module")
def bench(engine: Engine) -> StepBench:
    return StepBench(engine, repeats=15, context=40)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_phases_account_for_the_step(bench: StepBench, shape: StepShape) -> None:
    measured = [bench.measure(shape)]
    while measured[-1].accounted < ENOUGH_ACCOUNTED and len(measured) < 12:  # this machine may be busy
        measured.append(bench.measure(shape))
    times = measured[-1]
    assert times.accounted >= ENOUGH_ACCOUNTED, [times.accounted for times in measured]
    assert len(times.steps) == 15
    assert all(step.keys() == PHASES.keys() and min(step.values()) > 0 for step in times.steps)
    assert times.context == pytest.approx(40 if shape.decodes else 0, abs=2)


def test_too_long_and_too_much(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="together they must be at most 96"):
        StepBench(engine, repeats=20, context=90)
    with pytest.raises(BenchmarkError, match="the 40 pages do not hold 5 sequences at once"):
        StepBench(engine, repeats=2, context=80).measure(StepShape(decodes=5))


def test_work_is_that_of_a_hand_calculation() -> None:
    spec = tiny_spec()
    split = Split(spec=spec, mesh=MeshShape(), rules=ShardingConfig(), weight_bytes=2, kv_bytes=4)

    def work(shape: StepShape, context: float = 0) -> tuple[float, float]:
        found = step_work(split, StepTimes(shape=shape, context=context, steps=[]))
        return found.kv_bytes, found.flops

    layer = 48 * (6 + 2 * 2) * 16 + 6 * 16 * 48 + 3 * 48 * 80  # qkv, o, gate, up and down
    token_bytes, token, row, attention = 2 * 2 * 16 * 4, 2 * 3 * layer, 2 * 48 * 300, 4 * 6 * 16
    # Two layers see all 40 tokens, one only 10.
    assert work(StepShape(decodes=4), 40) == (4 * (90 + 3) * token_bytes, 4 * (token + row + 90 * attention))
    # The tokens of a prompt see half of it on average, 8, and its keys and values are read once: 16, 10 and 16 tokens.
    assert work(StepShape(prompt=16)) == ((42 + 16 * 3) * token_bytes, 16 * token + row + 16 * 24 * attention)
    split_in_two = Split(spec=spec, mesh=MeshShape(data=2), rules=ShardingConfig(), weight_bytes=2, kv_bytes=4)
    assert step_work(split_in_two, StepTimes(shape=StepShape(decodes=7), context=40, steps=[])).kv_bytes == 4 * 93 * token_bytes


def test_shares_of_the_ceilings() -> None:
    split = Split(spec=tiny_spec(), mesh=MeshShape(), rules=ShardingConfig(), weight_bytes=2, kv_bytes=2)
    times = StepTimes(shape=StepShape(decodes=1), context=9, steps=[{"device": 3.0, OTHER: 1.0}, {"device": 3.5, OTHER: 0.5}])
    work = step_work(split, times)
    result = StepResult(times=times, work=work, ceilings=Ceilings(bytes_per_s=(work.weight_bytes + work.kv_bytes) / 2, flops_per_s=work.flops))
    assert (times.median_s, times.phase_s("device"), times.phase_s("fetch"), times.accounted) == (4, 3.25, 0, 1 - 1.5 / 8)
    assert (result.mbu, result.mfu, result.bound_s) == (0.5, 0.25, 2)


def test_ceilings_are_measured() -> None:
    small, larger = (measure_ceilings("float32", num_bytes=2**16, matrix_size=size) for size in (16, 512))
    assert min(small.bytes_per_s, small.flops_per_s) > 0
    assert larger.flops_per_s > small.flops_per_s


def test_what_is_no_single_step_is_refused() -> None:
    limits = {"max_num_seqs": 8, "max_tokens_per_step": 64}
    check_shapes([StepShape(decodes=8), StepShape(decodes=7, prompt=57), StepShape(prompt=64)], **limits)
    check_shapes([StepShape(decodes=16)], num_ranks=2, **limits)
    for shape, message in ((StepShape(decodes=8, prompt=2), "has 9 sequences"), (StepShape(decodes=7, prompt=58), "has 65 tokens")):
        with pytest.raises(ConfigError, match=message):
            check_shapes([shape], **limits)


def test_the_command(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(step_run, "measure_ceilings", functools.partial(measure_ceilings, num_bytes=2**16, matrix_size=16))
    model, file = str(tiny_checkpoint(tmp_path / "tiny")), tmp_path / "a.json"
    words = ("--batch", "1,4", "--prefill", "16", "--mixed", "3+8", "--context", "30", "--repeats", "4", "--json", str(file))
    status, out, err = command(model, *HERE, *words, verb="step")
    assert status == 0, err
    for word in ("decode 4", "prefill 16", "in a phase", "MBU", "MFU", "ceilings, measured just before"):
        assert word in out
    found = json.loads(file.read_text())
    assert [(step["decodes"], step["prompt_tokens"]) for step in found["steps"]] == [(1, 0), (4, 0), (0, 16), (3, 8)]
    for step in found["steps"]:
        assert step["phases_ms"].keys() == PHASES.keys()
        assert len(step["step_ms"]) == step["num_steps"] == 4
    wrong = (("--mixed", "3", "must be DECODES+TOKENS"), ("--batch", "0", "must be numbers above 0"), ("--batch", "5", "has 5 sequences"))
    for option, value, message in wrong:
        status, _, err = command(model, *HERE, option, value, verb="step")
        assert (status, message in err) == (2, True), err

"""The runner on the real step: what is compiled and when, what memory it takes, and what it does when a step fails."""

from __future__ import annotations

import random

import jax
import numpy as np
import pytest

from jaxserve.engine.device.runner import DeviceRunner
from jaxserve.engine.engine import Engine
from jaxserve.models.spec import LayerSpec
from jaxserve.request import SamplingParams
from tests.engine.tiny import MAX_POSITION, run, tiny_engine, tiny_spec


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine(warmup=True, num_pages=200, max_num_seqs=8)


def runner_of(engine: Engine) -> DeviceRunner:
    runner = engine._runner
    assert isinstance(runner, DeviceRunner)
    return runner


def test_no_compile_after_warmup(engine: Engine) -> None:
    compiles: list[str] = []

    def listen(event: str, _seconds: float, **_facts: object) -> None:
        if "compile" in event:
            compiles.append(event)

    rng = random.Random(0)
    requests = []
    for index in range(500):
        prompt = [rng.randrange(300) for _ in range(rng.choice([1, 2, 7, 8, 9, 31, 33, 60]))]
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.7]), top_k=rng.choice([0, 3]), top_p=rng.choice([1.0, 0.8]), min_p=rng.choice([0.0, 0.1]),
            seed=index, max_tokens=rng.randint(1, min(12, MAX_POSITION - len(prompt))),
        )  # fmt: skip
        requests.append((prompt, params))
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        run(engine, requests, arrivals=[rng.randrange(200) for _ in requests])
    finally:
        jax.monitoring.clear_event_listeners()
    assert compiles == []
    assert runner_of(engine).num_late_compiles == 0


def test_temporaries_stay_small_beside_the_pool() -> None:
    """A second copy of the pool in any bucket would be a temporary as large as the pool."""
    engine = tiny_engine(warmup=True, num_pages=40_000, max_num_seqs=8)
    runner = runner_of(engine)
    pool_bytes = sum(array.nbytes for array in runner._pool)
    temp_bytes = runner.temp_bytes()
    assert set(temp_bytes) == set(runner.buckets.all())
    assert max(temp_bytes.values()) < pool_bytes / 10, {bucket: size / pool_bytes for bucket, size in temp_bytes.items()}


def test_the_program_of_a_bucket_does_not_grow_with_layers() -> None:
    """Scanned layers: the compiled step of 4, 32 and 80 layers has the same instructions, so it takes the same time to compile."""

    def num_instructions(num_layers: int) -> int:
        engine = tiny_engine(spec=tiny_spec(layers=(LayerSpec(),) * num_layers), layers="scan")
        runner = runner_of(engine)
        return runner._compile(runner.buckets.all()[-1]).as_text().count(" = ")

    counts = [num_instructions(num_layers) for num_layers in (4, 32, 80)]
    assert max(counts) <= min(counts) * 1.02, counts


def test_nan_logits_draw_an_id_of_the_vocabulary(engine: Engine) -> None:
    runner = runner_of(engine)
    healthy, runner._params = runner._params, jax.tree.map(lambda array: array * np.nan, runner._params)
    try:
        params = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=4, ignore_eos=True)
        (tokens,) = run(engine, [([1, 2, 3], params)])
    finally:
        runner._params = healthy
    assert all(0 <= token < tiny_spec().vocab_size for token in tokens)


def test_the_pool_is_updated_in_place(engine: Engine) -> None:
    runner = runner_of(engine)
    before = [array.unsafe_buffer_pointer() for array in runner._pool]
    run(engine, [([1, 2, 3], SamplingParams(max_tokens=4))])
    assert [array.unsafe_buffer_pointer() for array in runner._pool] == before


def test_a_failed_step_costs_its_requests_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(engine)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    want = run(engine, [([5, 6, 7], params)])
    engine.add(engine.make_request([1, 2], params, "broken"))
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_compiled", dict.fromkeys(runner._compiled, _explode))
        outputs = engine.step()
    assert [(output.request_id, output.finish_reason) for output in outputs] == [("broken", "error")]
    assert outputs[0].error is not None and "device lost" in outputs[0].error.message
    assert run(engine, [([5, 6, 7], params)]) == want


def test_padding_writes_to_no_page(engine: Engine) -> None:
    runner = runner_of(engine)
    runner._reset()
    run(engine, [([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))])
    keys = np.asarray(runner._pool.k, np.float32).reshape(tiny_spec().num_layers, runner.num_pages, runner.page_size, -1)
    written = np.abs(keys).sum((0, 3)) > 0
    assert written.sum() == 4, "three prompt tokens and the first generated one have keys; nothing else does"


def test_one_requests_nan_does_not_reach_the_next_owner_of_its_pages() -> None:
    """A page is reused with the old owner's keys and values in it; their weight is 0, but 0 times NaN is NaN."""
    engine = tiny_engine(num_pages=12, max_num_seqs=2)
    runner = runner_of(engine)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    want = run(engine, [([5, 6, 7], params)])
    healthy, runner._params = runner._params, jax.tree.map(lambda array: array * np.nan, runner._params)
    run(engine, [(list(range(80)), params), (list(range(7)), params)])
    runner._params = healthy
    assert run(engine, [([5, 6, 7], params)]) == want


def _explode(*_arguments: object) -> None:
    raise RuntimeError("device lost")

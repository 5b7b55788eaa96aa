"""What the op refuses, before anything is launched: the message names the value and what is allowed."""

import dataclasses
import json
import re

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels_pallas.chips import CHIPS
from jaxserve.kernels_pallas.ragged_paged_attention import api, gpu_tiles, tuned
from jaxserve.kernels_pallas.ragged_paged_attention.contract import KERNEL_PAGE_SIZES
from jaxserve.kernels_pallas.ragged_paged_attention.proof.refusals import REFUSALS
from jaxserve.kernels_pallas.ragged_paged_attention.shapes import Case, make_inputs
from jaxserve.kernels_pallas.ragged_paged_attention.tpu_tiles import Tiles, choose_tiles, decode_bytes, prefill_bytes, vmem_limit
from jaxserve.kernels_pallas.target import Target, find_chip

CASE = Case(name="bad_input", queries=(1, 5), contexts=(20, 30), padding=(2, 1))


def call(*, case=CASE, shape=None, batch=None, implementation="reference", **changes):
    inputs = make_inputs(case)
    shape = shape or case.pool_shape()
    pool = api.IMPLEMENTATIONS["reference"].pack(inputs.k_PZKH, inputs.v_PZKH, shape)
    arguments = {"q_TNH": inputs.q_TNH, "k_TKH": inputs.k_TKH, "v_TKH": inputs.v_TKH, "pool": pool, "batch": inputs.batch._replace(**(batch or {}))} | {
        "shape": shape, "layer": 0, "scale": 0.1, "implementation": implementation
    }  # fmt: skip
    return api.ragged_paged_attention(**(arguments | changes))


def changed(field, index, value):
    array = np.array(getattr(make_inputs(CASE).batch, field))
    array[index] = value
    return {field: array}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": changed("page_table_BM", (0, 1), 99)}, r"row 0 names page 99; allowed are 0 to 6"),
        ({"batch": changed("page_table_BM", (1, 0), -1)}, r"row 1 names page -1"),
        ({"batch": changed("context_lens_B", 1, 33)}, r"row 1 has context length 33; the page table holds at most 32"),
        ({"batch": changed("context_lens_B", 1, 4)}, r"row 1 has 5 new tokens and context length 4"),
        ({"batch": changed("counts_2", 0, 2)}, r"row 1 is a decode and has 5 new tokens"),
        ({"batch": changed("counts_2", 1, 9)}, r"counts_2 is \[1, 9\]"),
        ({"batch": changed("query_starts_B1", 3, 99)}, r"query_starts_B1 is .*99.*at most 8"),
        ({"batch": changed("entries_T", 0, -1)}, r"entries_T is -1 for new token 0 of row 0; its context length and page table imply \d+"),
        ({"batch": changed("entries_T", 5, 3)}, r"entries_T is 3 for new token 4 of row 1"),
        ({"batch": changed("entries_T", 6, 3)}, r"entries_T is 3 for a token that no row has; allowed are 112 and up"),
        ({"batch": changed("positions_T", 2, 27)}, r"positions_T is 27 for new token 1 of row 1; its context length and page table imply 26"),
        ({"implementation": "pallas_npu"}, r"'pallas_npu' is unknown; allowed are auto, reference, xla, pallas_tpu, pallas_gpu"),
        ({"layer": 2}, r"layer is 2; allowed are 0 to 1"),
        ({"window": 0}, r"window is 0"),
        ({"soft_cap": -1.0}, r"soft_cap is -1.0"),
        ({"k_TKH": np.zeros((8, 2, 32), np.float32)}, r"k_TKH is float32\[8, 2, 32\]; expected float32\[8, 2, 64\]"),
        ({"sinks_N": np.zeros(3, np.float32)}, r"sinks_N is float32\[3\]; expected float32\[4\]"),
        ({"kv_scales": api.KVScales(np.ones(2, np.float32), np.ones(2, np.float32))}, r"kv_scales are for pools of int8 or float8_e4m3fn"),
        ({"implementation": "pallas_tpu"}, r"pool.k is float32.*expected float32|pool.v is given"),
    ],
)  # fmt: skip
def test_callers_faults(arguments, message):
    with pytest.raises(ValueError, match=message):
        call(**arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": 24}, "page_size is 24; allowed are powers of two"),
        ({"head_dim": 100}, "head_dim is 100"),
        ({"head_dim": 264}, "head_dim is 264"),
        ({"num_kv_heads": 3}, "4 query heads are not a whole multiple of 3"),
        ({"dtype": jnp.float16}, "the pool's dtype is float16; allowed are bfloat16"),
        ({"num_pages": 0}, "num_pages is 0"),
    ],
)
def test_impossible_shapes(changes, message):
    shape = {"num_layers": 1, "num_pages": 4, "page_size": 16, "num_kv_heads": 2, "head_dim": 64, "dtype": jnp.float32} | changes
    with pytest.raises(ValueError, match=message):
        api.make_problem(num_tokens=4, num_rows=2, table_width=2, num_heads=4, shape=api.PoolShape(**shape), q_dtype=jnp.float32)


def test_queries_of_a_dtype_that_nobody_takes():
    shape = api.PoolShape(num_layers=1, num_pages=4, page_size=16, num_kv_heads=2, head_dim=64, dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="the queries' dtype is float16; allowed are bfloat16, float32"):
        api.make_problem(num_tokens=4, num_rows=2, table_width=2, num_heads=4, shape=shape, q_dtype=jnp.float16)


def problem(*, target=Target("cpu", "cpu"), num_rows=32, table_width=256, **shape):
    fields = {"num_layers": 1, "num_pages": 4, "page_size": 16, "num_kv_heads": 8, "head_dim": 128, "dtype": jnp.bfloat16} | shape
    return api.make_problem(
        num_tokens=512, num_rows=num_rows, table_width=table_width, num_heads=32, shape=api.PoolShape(**fields), q_dtype=jnp.bfloat16, target=target
    )  # fmt: skip


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: f"{refusal.implementation}-{refusal.name}")
def test_a_named_implementation_that_cannot_says_why(refusal):
    with pytest.raises(NotImplementedError, match=re.escape(refusal.reason)):
        api.choose_implementation(refusal.implementation, refusal.problem)


def test_auto_takes_the_platforms_kernel_and_falls_back():
    names = {"cpu": "xla", "tpu": "pallas_tpu", "gpu": "pallas_gpu"}
    for platform, name in names.items():
        assert api.choose_implementation("auto", problem(target=Target(platform, ""))).name == name
        assert api.choose_implementation("auto", problem(target=Target(platform, ""), page_size=4)).name == "xla"


def test_auto_takes_one_implementation_that_serves_all_buckets(caplog):
    target = Target("tpu", "TPU v6 lite")
    small, large = problem(target=target), problem(target=target, table_width=100_000)
    assert api.choose_implementation("auto", small, small).name == "pallas_tpu"
    for problems in ((small, large), (large, small)):
        caplog.clear()
        assert api.choose_implementation("auto", *problems).name == "xla"
        assert "pallas_tpu: its tables" in caplog.text
        with pytest.raises(NotImplementedError, match="pallas_tpu: its tables"):
            api.choose_implementation("pallas_tpu", *problems)


def test_chips_are_told_apart():
    kinds = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e", "TPU7x": "tpu7x"}
    assert {kind: find_chip(Target("tpu", kind), "tpu").name for kind in kinds} == kinds
    kinds = {"NVIDIA A100-SXM4-80GB": "a100", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200", "NVIDIA B200": "b200"}
    assert {kind: find_chip(Target("gpu", kind), "gpu").name for kind in kinds} == kinds
    assert find_chip(Target("cpu", "cpu"), "gpu").name == "a100"


def test_tiles_fit_every_chip():
    for chip in CHIPS:
        if chip.platform == "tpu":
            for head_dim in (64, 128, 256):
                for kv_heads in (1, 8, 32):
                    for page_size in KERNEL_PAGE_SIZES:
                        what = problem(target=Target("tpu", chip.kind), head_dim=head_dim, num_kv_heads=kv_heads, page_size=page_size)
                        tiles = choose_tiles(what)
                        assert max(decode_bytes(what, tiles), prefill_bytes(what, tiles)) <= vmem_limit(what), (chip.name, what, tiles)


def test_gpu_programs_fill_half_a_multiprocessor():
    """Two of them run at once, and no larger step of keys would do."""
    for chip in CHIPS:
        for head_dim in (64, 80, 128) if chip.platform == "gpu" else ():
            for dtype in (jnp.bfloat16, jnp.float8_e4m3fn):
                what = problem(target=Target("gpu", chip.kind), head_dim=head_dim, dtype=dtype)
                tiles, budget = gpu_tiles.choose_tiles(what), chip.fast_memory_bytes // 2
                assert gpu_tiles.decode_bytes(what, tiles) <= budget
                assert gpu_tiles.prefill_bytes(what, tiles) <= budget
                larger = dataclasses.replace(tiles, prefill_keys=2 * tiles.prefill_keys)
                assert tiles.prefill_keys == 64 or gpu_tiles.prefill_bytes(what, larger) > budget


def test_tuned_tiles_override(monkeypatch):
    what = problem(target=Target("tpu", "TPU v6 lite"))
    found = {tuned.key(what, prefill=False): {"block_pages": 3}, tuned.key(what, prefill=True): {"block_pages": 5, "query_block": 48}}
    monkeypatch.setattr(tuned, "_load", lambda name: json.loads(json.dumps(found)) if name == "tuned_pallas_tpu_v6e.json" else {})
    assert choose_tiles(what) == Tiles(block_pages=5, query_block=48, write_buffers=8)
    assert choose_tiles(dataclasses.replace(what, num_tokens=256)).block_pages == 3, "prefill is tuned for each bucket"
    assert choose_tiles(dataclasses.replace(what, decode_only=True)).block_pages == 3
    assert choose_tiles(problem(target=Target("tpu", "TPU v4"))).block_pages not in (3, 5)


def test_tuned_tiles_leave_the_other_kernel_and_the_splits_alone(monkeypatch):
    what = problem(target=Target("gpu", "NVIDIA H200"))
    untuned = gpu_tiles.choose_tiles(what)
    monkeypatch.setattr(tuned, "_load", lambda name: {tuned.key(what, prefill=True): {"prefill_keys": 128}} if name == "tuned_pallas_gpu_h200.json" else {})
    assert gpu_tiles.choose_tiles(what) == dataclasses.replace(untuned, prefill_keys=128)
    fewer_rows = dataclasses.replace(what, num_rows=2)
    assert gpu_tiles.choose_tiles(fewer_rows).num_splits > untuned.num_splits
    assert gpu_tiles.choose_tiles(fewer_rows).prefill_keys == 128

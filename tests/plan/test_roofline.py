"""Predictions against figures worked out by hand: known models on known chips."""

import dataclasses
import math

import pytest

from jaxserve.config import ShardingConfig
from jaxserve.kernels_pallas.chips import CHIPS, CHIPS_BY_NAME
from jaxserve.mesh_shape import MeshShape
from jaxserve.models.loading.specs import open_spec
from jaxserve.plan.request import Load
from jaxserve.plan.roofline import Split, collective_seconds, predict, step_work, with_batch
from jaxserve.plan.traffic import Collective

V6E = CHIPS_BY_NAME["v6e"]
H200 = CHIPS_BY_NAME["h200"]
LOAD = Load(batch=64, context=4096, chunk=2048)


def split(mesh, name="llama-3.1-70b", **changes):
    fields = {"weight_bytes": 2, "kv_bytes": 2, "rules": ShardingConfig()} | changes
    return Split(spec=open_spec(name)[1], mesh=mesh, **fields)


def all_reduces(count, num_bytes, group):
    return Collective(kind="all-reduce", axis="model", count=count, bytes=num_bytes, group_size=group)


def test_the_weights_of_llama_70b():
    assert sum(split(MeshShape()).parameter_bytes().values()) == pytest.approx(141.1e9, rel=0.001)
    assert sum(split(MeshShape(2, 4)).parameter_bytes().values()) == pytest.approx(35.3e9, rel=0.002)
    assert split(MeshShape(1, 8)).kv_token_bytes() == 2 * 80 * 1 * 128 * 2


def test_the_floor_of_a_decode_step_on_eight_v6e():
    """All weights of a device at 1,638 GB/s take 10.8 ms; without the embedding table, of which a step reads one row a token, 10.6."""
    weights = sum(split(MeshShape(1, 8)).parameter_bytes().values())
    assert 1e3 * weights / V6E.bytes_per_s == pytest.approx(10.8, abs=0.05)
    predicted = predict(step_work(split(MeshShape(1, 8)), LOAD, "decode"), V6E, num_chips=8, dtype="bfloat16")
    assert predicted.weights_ms == pytest.approx(10.6, abs=0.05)
    # 64 x 4,096 tokens of 40 KiB.
    assert predicted.kv_ms == pytest.approx(1e3 * 64 * 4097 * 40_960 / 1.638e12, rel=0.001)
    assert predicted.binds == "weights"
    assert predicted.step_ms == pytest.approx(predicted.weights_ms + predicted.kv_ms + predicted.activations_ms)
    assert predicted.tokens_per_s == pytest.approx(64 / predicted.step_ms * 1e3)
    assert predicted.tokens_per_s_per_chip == pytest.approx(predicted.tokens_per_s / 8)
    assert 0.9 < predicted.mbu < 1 and predicted.mfu < 0.1


def test_flops_are_two_a_weight_and_token():
    work = step_work(split(MeshShape(1, 1)), Load(batch=64, context=4096, chunk=2048), "mixed")
    weights = 70.55e9 - 2 * 128256 * 8192
    attention = 4 * 64 * 128 * 80 * (63 * 4096 + (2048 - 63) * 2048)
    assert work.flops == pytest.approx(2 * weights * 2048 + 2 * 128256 * 8192 * 64 + attention, rel=0.002)
    assert predict(work, V6E, num_chips=1, dtype="bfloat16").binds == "arithmetic"
    halves = step_work(split(MeshShape(1, 2)), Load(batch=64, context=4096, chunk=2048), "mixed")
    assert halves.flops == pytest.approx(work.flops / 2, rel=0.001)


def test_padding_rows_are_no_sequences() -> None:
    """One sequence runs in a bucket of two rows, and holds, reads and yields the tokens of one."""
    one = Load(batch=1, context=4096, chunk=2048)
    work = step_work(split(MeshShape(1, 8)), one, "decode")
    assert (one.rows(1), one.tokens("decode", 1)) == (2, 2)
    assert work.kv_bytes == 4097 * 40_960
    weights = 70.55e9 - 128256 * 8192  # all but the embedding table
    assert work.flops == pytest.approx((2 * weights + 4 * 64 * 128 * 80 * 4096) / 8, rel=0.002)
    predicted = predict(work, V6E, num_chips=8, dtype="bfloat16")
    assert predicted.tokens_per_s == pytest.approx(1e3 / predicted.step_ms)
    mixed = step_work(split(MeshShape(1, 8)), one, "mixed")
    assert (mixed.tokens, mixed.kv_bytes) == (2048, (4096 + 2048) * 40_960)


def test_ranks_that_do_not_share_evenly() -> None:
    """Ten sequences on four ranks: the fullest has three, and a step yields ten tokens."""
    ten = Load(batch=10, context=4096, chunk=2048)
    work = step_work(split(MeshShape(4, 2)), ten, "decode")
    assert work.kv_bytes == 3 * 4097 * 4 * 40_960
    assert (work.tokens, work.sequences) == (10, 10)
    mixed = step_work(split(MeshShape(4, 2)), ten, "mixed")
    assert mixed.tokens == 2048 and mixed.kv_bytes == (2 * 4096 + 4096 + 512) * 4 * 40_960


def test_windows_bound_what_is_read():
    spec = open_spec("llama-3.1-8b")[1]
    windowed = split(MeshShape(), "llama-3.1-8b")
    assert windowed.attended(4096) == 32 * 4096
    (group,) = spec.groups
    layers = tuple(dataclasses.replace(layer, window=1024) for layer in group.layers)
    spec = dataclasses.replace(spec, groups=(dataclasses.replace(group, layers=layers),))
    assert dataclasses.replace(windowed, spec=spec).attended(4096) == 32 * 1024


def test_rings():
    # 7/4 of 1 MiB at 200 GB/s take 9.2 us, longer than eight hops of a microsecond, which overlap.
    assert collective_seconds(all_reduces(10, 10 * 2**20, 8), V6E.links) == pytest.approx(10 * 1.75 * 2**20 / 200e9)
    assert collective_seconds(all_reduces(10, 10 * 1024, 8), V6E.links) == pytest.approx(10 * 8e-6)
    # Start, 14 hops and the bytes one after the other.
    assert collective_seconds(all_reduces(1, 2**20, 8), H200.links) == pytest.approx(6.6e-6 + 14 * 0.6e-6 + 1.75 * 2**20 / 450e9)
    gather = Collective(kind="all-gather", axis="model", count=1, bytes=2**30, group_size=4)
    assert collective_seconds(gather, V6E.links) == pytest.approx(0.75 * 2**30 / 200e9)
    assert with_batch([all_reduces(3, 30, 8)], 2.0)[0].bytes == 60


def test_copies_of_weights_cost_a_read_and_a_write():
    plain = predict(step_work(split(MeshShape(1, 8)), LOAD, "decode"), H200, num_chips=8, dtype="bfloat16")
    copied = predict(step_work(split(MeshShape(1, 8)), LOAD, "decode", weight_copy_bytes=17e9), H200, num_chips=8, dtype="bfloat16")
    assert copied.weight_copies_ms == pytest.approx(1e3 * 2 * 17e9 / 4.8e12)
    assert copied.step_ms == pytest.approx(plain.step_ms + copied.weight_copies_ms)
    assert copied.binds == "weight copies"


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_every_chip_is_complete_and_plausible(chip):
    assert chip.source and chip.links.num_links and chip.topologies
    assert 0.7 * chip.memory_bytes < chip.usable_bytes < chip.memory_bytes
    assert 1e11 < chip.bytes_per_s < 1e13
    assert 50 < chip.flops_per_s / chip.bytes_per_s < 700
    assert chip.peak_flops_per_s("bfloat16") == chip.flops_per_s and chip.peak_flops_per_s("float64") == chip.flops_per_s
    assert math.isfinite(chip.links.ring_bytes_per_s)
    assert (chip.gpu is not None) == (chip.platform == "gpu")


def test_two_devices_of_a_chip_share_it():
    for name in ("v4", "tpu7x"):
        assert CHIPS_BY_NAME[name].devices_per_chip == 2
    assert CHIPS_BY_NAME["tpu7x"].flops_per_s == pytest.approx(2307e12 / 2)

"""The engine's own steps, compiled for eight fake CPU devices: collectives against a hand count, bytes against the arrays of a real engine."""

import jax
import pytest

from jaxserve.config import ShardingConfig, load_config
from jaxserve.kernels_pallas.chips import CHIPS_BY_NAME
from jaxserve.mesh_shape import MeshShape
from jaxserve.models.loading.specs import open_spec
from jaxserve.plan.compile_layout import compile_step, compiler_words
from jaxserve.plan.planner import Question
from jaxserve.plan.request import LayoutRequest, Load
from jaxserve.plan.roofline import Split
from jaxserve.plan.topology import Topology
from tests.engine.tiny import tiny_engine, tiny_spec
from tests.plan.tiny import D, L, write_config

LOAD = Load(batch=16, context=32, chunk=64)
SETTINGS = ("model.dtype=float32", "engine.layers=scan")


def compiled(source, mesh, step, *settings):
    request = LayoutRequest(source=source, settings=(*SETTINGS, *settings), target="v6e:2x4", mesh=mesh, load=LOAD, step=step)
    arrays, result = compile_step(LayoutRequest.from_json(request.to_json()), jax.devices(), platform="cpu")
    return arrays["arrays"], result


def counted(traffic):
    return {(item["kind"], item["axis"]): (item["count"], item["bytes"]) for item in traffic["collectives"]}


@pytest.mark.parametrize(("mesh", "step"), [(MeshShape(1, 8), "decode"), (MeshShape(2, 4), "mixed"), (MeshShape(8, 1), "decode")])
def test_collectives_agree_with_a_hand_count(tmp_path, mesh, step):
    arrays, result = compiled(write_config(tmp_path), mesh, step)
    # One reduction of the embeddings' rows, two a layer, each of the rank's tokens x D in float32; data ranks alone exchange nothing.
    tokens = {"decode": 16 // mesh.data, "mixed": 64 // mesh.data}[step]
    expected = {} if mesh.model == 1 else {("all-reduce", "model"): (2 * L + 1, (2 * L + 1) * tokens * D * 4)}
    assert counted(result["traffic"]) == expected
    assert result["traffic"]["num_unknown_loops"] == 0
    assert result["total"] >= arrays["weights"] + arrays["kv"]


def test_a_rule_that_gathers_weights_shows(tmp_path):
    """What a wrong rule costs: the width split over data ranks gathers the weights in every step."""
    _, result = compiled(write_config(tmp_path), MeshShape(8, 1), "decode", "sharding.width=[data]")
    assert any(kind != "all-reduce" or "data" in axis for kind, axis in counted(result["traffic"]))


@pytest.mark.parametrize("mesh", [MeshShape(2, 4), MeshShape(4, 1), MeshShape(1, 2)])
def test_bytes_agree_with_the_arrays_of_a_real_engine(mesh):
    spec = tiny_spec(num_heads=8, num_kv_heads=4, vocab_size=320)
    engine = tiny_engine(mesh=mesh, spec=spec, num_pages=24, page_size=8)
    runner = engine._runner
    split = Split(spec=spec, mesh=mesh, rules=ShardingConfig(), weight_bytes=4, kv_bytes=4)

    def on_one_device(tree):
        return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))

    assert sum(split.parameter_bytes().values()) == pytest.approx(on_one_device(runner._params), rel=0.02)
    assert 24 * 8 * split.kv_token_bytes() == pytest.approx(on_one_device(runner._pool), rel=0.02)


def test_the_planner_and_the_compiled_program_agree_on_bytes(tmp_path):
    source = write_config(tmp_path)
    question = Question(source=source, name="tiny", spec=open_spec(source)[1], config=load_config(overrides=SETTINGS), settings=SETTINGS, load=LOAD)
    mesh = MeshShape(2, 4)
    split = question.split(Topology(CHIPS_BY_NAME["v6e"], "2x4"), mesh)
    arrays, _ = compiled(source, mesh, "decode")
    assert arrays == {"weights": sum(split.parameter_bytes().values()), "kv": question.pool_bytes(split)}


def test_the_compilers_words_are_kept_short():
    message = "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total (42.86G) exceeds available HBM (31.24G).\nSee https://x"
    assert compiler_words(message).startswith("RESOURCE_EXHAUSTED: E1000") and "31.24G" in compiler_words(message)
    assert "See" not in compiler_words(message)
    assert compiler_words("INTERNAL: something\nelse") == "INTERNAL: something"

"""Llama 3.1 70B on chips that are not here, by real compiles: what is known of it must come out."""

import pytest

from jaxserve.config import load_config
from jaxserve.kernels_pallas.proof import targets
from jaxserve.mesh_shape import MeshShape
from jaxserve.models.loading.specs import open_spec
from jaxserve.plan.planner import Question, plan_layouts
from jaxserve.plan.request import Load
from jaxserve.plan.topology import parse_topology

pytestmark = pytest.mark.aot


def plans(target, *meshes, chunk=2048):
    reason = targets.missing(target.split(":")[0])
    if reason is not None:
        pytest.skip(reason)
    chosen = parse_topology(target)
    load = Load(batch=64, context=4096, chunk=chunk)
    question = Question(source="llama-3.1-70b", name="llama-3.1-70b", spec=open_spec("llama-3.1-70b")[1], config=load_config(), settings=(), load=load)
    return plan_layouts(question, [(chosen, mesh) for mesh in meshes or chosen.all_meshes()])


def check_reductions(plan):
    """Two a layer and one for the embedding, over the model axis, in the model's dtype; none over data; no weight and no logits gathered."""
    for kind, step in plan.steps.items():
        (reduces,) = step.traffic.collectives
        assert (reduces.kind, reduces.axis, reduces.count) == ("all-reduce", "model", 161)
        assert reduces.bytes == 161 * Load(batch=64, context=4096, chunk=2048).tokens(kind, plan.mesh.data) * 8192 * 2
        assert sum(item.bytes for item in step.traffic.sometimes) < 1e6
        assert step.traffic.num_unknown_loops == 0


@pytest.mark.slow
def test_v6e_takes_it_on_eight_model_ranks_only():
    whole, *others = plans("v6e:2x4")
    assert whole.fits and set(whole.steps) == {"decode", "mixed"}
    check_reductions(whole)
    assert whole.weight_bytes == pytest.approx(17.64e9, rel=0.001)
    assert whole.steps["decode"].predicted.weights_ms == pytest.approx(10.6, abs=0.05)
    assert all(step.traffic.weight_copy_bytes == 0 for step in whole.steps.values())
    assert [plan.status for plan in others] == ["too large"] * 3
    assert others[0].weight_bytes == pytest.approx(35.3e9, rel=0.002)
    assert "31.24G" in others[0].reason


def test_v6e_by_its_compiler_two_data_ranks_do_not_fit():
    (plan,) = plans("v6e:2x4", MeshShape(2, 4))
    assert plan.status == "too large" and "exceeds available HBM (31.24G)" in plan.reason
    assert plan.missing_bytes > 10e9


@pytest.mark.slow
def test_tpu7x_reduces_on_its_sparse_cores_and_holds_weights_once():
    (plan,) = plans("tpu7x:2x2x2", MeshShape(2, 8))
    for step in plan.steps.values():
        reduces = step.traffic.collectives[0]
        assert (reduces.kind, reduces.axis, reduces.count) == ("all-reduce", "model", 161)
        assert sum(item.bytes for item in step.traffic.collectives[1:]) < 1e6
        assert step.temp_bytes < 0.02 * plan.weight_bytes
        assert step.traffic.weight_copy_bytes < 0.1 * plan.weight_bytes, "the output projections' copies alone"


@pytest.mark.slow
def test_h200_takes_it_on_three_layouts():
    found = plans("h200:8")
    assert [plan.fits for plan in found] == [True, True, True, False]
    for plan in found[:3]:
        check_reductions(plan)
        assert all(step.traffic.weight_copy_bytes == 0 for step in plan.steps.values())

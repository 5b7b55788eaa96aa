"""The table of mesh axes: what a third row changes (nothing for those who know ``data`` and ``model``), and that the configuration follows it."""

from __future__ import annotations

import dataclasses
import re

import pytest

from jaxserve.config import MeshConfig, ShardingConfig, load_config
from jaxserve.errors import ConfigError
from jaxserve.mesh_axes import MESH_AXES, MeshAxis, axis_names
from jaxserve.mesh_shape import MeshShape, choose_mesh_shape, complete_mesh, configured_sizes, parse_mesh
from jaxserve.models.loading.specs import open_spec
from jaxserve.models.sharding import check_layout, fit_kv_heads
from jaxserve.sharding_rules import ShardingRules

THREE = (*MESH_AXES, MeshAxis(name="expert", meaning="some of the experts"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThreeAxes(MeshConfig):
    expert: int | None = None


def test_every_axis_has_its_size_in_the_configuration() -> None:
    assert {field.name for field in dataclasses.fields(MeshConfig)} == {*axis_names(MESH_AXES), "replicate_kv_heads"}
    assert axis_names(MESH_AXES)[:2] == ("data", "model")


def test_a_rule_names_axes_of_the_table() -> None:
    assert load_config(overrides=["sharding.mlp=[data,model]"]).sharding.mlp == ("data", "model")
    with pytest.raises(ConfigError, match=re.escape("sharding.mlp[1] is 'expert'; must be one of data, model")):
        load_config(overrides=["sharding.mlp=[data,expert]"])


def test_a_third_axis_has_one_rank_until_it_is_named() -> None:
    assert dict(MeshShape(2, 4, axes=THREE)) == {"data": 2, "model": 4, "expert": 1}
    assert str(MeshShape(2, 4, axes=THREE)) == str(MeshShape(2, 4)) == "data=2,model=4"
    shape = MeshShape(2, 4, expert=3, axes=THREE)
    assert (str(shape), shape.size, shape.data, shape.model) == ("data=2,model=4,expert=3", 24, 2, 4)
    assert shape.resized("model", 1) == MeshShape(2, expert=3, axes=THREE) != MeshShape(2, axes=THREE)
    assert len({shape, shape.resized("model", 4)}) == 1
    with pytest.raises(TypeError, match="a mesh has no axis expert"):
        MeshShape(expert=2)


def test_meshes_of_three_axes_are_read_and_filled_up() -> None:
    assert parse_mesh("data=2,model=4", THREE) == parse_mesh("data=2,model=4")
    assert parse_mesh("expert=4,data=2", THREE) == {"expert": 4, "data": 2}
    with pytest.raises(ConfigError, match=re.escape("has an axis 'stage'; allowed are data, model and expert, as in data=2,model=4")):
        parse_mesh("stage=2", THREE)
    assert complete_mesh({"expert": 2}, 16, THREE) == MeshShape(1, 8, expert=2, axes=THREE)
    assert configured_sizes(ThreeAxes(expert=2), THREE) == {"expert": 2}
    for config, num_devices, is_cpu in ((MeshConfig(), 8, False), (MeshConfig(data=2), 8, True), (MeshConfig(data=3), 8, False)):
        three = ThreeAxes(data=config.data, model=config.model)
        assert str(choose_mesh_shape(three, num_devices, is_cpu=is_cpu, axes=THREE)) == str(choose_mesh_shape(config, num_devices, is_cpu=is_cpu))
    assert choose_mesh_shape(ThreeAxes(data=2, expert=2), 16, is_cpu=False, axes=THREE) == MeshShape(2, 4, expert=2, axes=THREE)
    with pytest.raises(ConfigError, match=r"^the mesh data=1,model=1,expert=9 needs 9 devices; there are 8$"):
        choose_mesh_shape(ThreeAxes(expert=9), 8, is_cpu=False, axes=THREE)


@pytest.mark.parametrize("axes", [MESH_AXES, THREE])
def test_rules_over_data_and_model_say_the_same_of_both_tables(axes: tuple[MeshAxis, ...]) -> None:
    spec = open_spec("smollm2-135m")[1]
    assert fit_kv_heads(spec, ShardingRules(ShardingConfig(), MeshShape(2, 3, axes=axes)), replicate=False) == spec
    expected = "mesh data=1,model=2: the number of KV heads is 3 and does not divide over model=2 (sharding.kv_heads splits layers.qkv); "
    with pytest.raises(ConfigError, match=f"^{re.escape(expected)}the nearest that fit: model=1 or model=3$"):
        check_layout(spec, ShardingRules(ShardingConfig(), MeshShape(1, 2, axes=axes)))


def test_rules_may_name_a_third_axis() -> None:
    spec = open_spec("smollm2-135m")[1]
    rules = ShardingRules(ShardingConfig(mlp=("expert", "model")), MeshShape(1, 3, expert=2, axes=THREE))
    assert (rules.num_parts("mlp"), rules.parts_over("mlp", "model"), rules.parts_over("vocab", "expert"), rules.num_parts(None)) == (6, 3, 1, 1)
    check_layout(spec, rules)
    expected = "mesh data=1,model=1,expert=5: the MLP width is 1536 and does not divide over expert=5 (sharding.mlp splits layers.gate_up); "
    with pytest.raises(ConfigError, match=f"^{re.escape(expected)}the nearest that fit: expert=4 or expert=6$"):
        check_layout(spec, ShardingRules(ShardingConfig(mlp=("expert",)), MeshShape(expert=5, axes=THREE)))
    with pytest.raises(ConfigError, match="sharding.mlp and sharding.width both split layers.gate_up .* over the mesh axis 'expert'"):
        check_layout(spec, ShardingRules(ShardingConfig(mlp=("expert",), width=("expert",)), MeshShape(axes=THREE)))

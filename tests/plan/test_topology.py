"""Topologies and meshes as users write them, and what is said of wrong ones."""

import pytest

from jaxserve.errors import ConfigError
from jaxserve.kernels_pallas.chips import CHIPS
from jaxserve.mesh_shape import MeshShape
from jaxserve.plan.topology import parse_topology


@pytest.mark.parametrize(
    ("text", "name", "chips", "devices"),
    [
        ("v6e:2x4", "v6e:2x4", 8, 8),
        ("V6E:8", "v6e:2x4", 8, 8),
        ("v6e", "v6e:1x1", 1, 1),
        ("v5p:4x4x4", "v5p:4x4x4", 64, 64),
        ("v4:2x2x1", "v4:2x2x1", 4, 8),
        ("tpu7x", "tpu7x:2x2x1", 4, 8),
        ("h200:8", "h200:8", 8, 8),
        ("h200", "h200:1", 1, 1),
    ],
)
def test_topologies(text, name, chips, devices):
    target = parse_topology(text)
    assert (str(target), target.num_chips, target.num_devices) == (name, chips, devices)


def test_unknown_ones_are_listed():
    with pytest.raises(ConfigError, match="did you mean 'h200'.*v4, v5e, v5p, v6e, tpu7x, a100, h100, h200, b200"):
        parse_topology("h20:8")
    with pytest.raises(ConfigError, match="v6e does not come as '3x3'; grids 1x1, 2x2, 2x4"):
        parse_topology("v6e:3x3")
    with pytest.raises(ConfigError, match="h200 does not come as '16'; GPUs joined by NVLink: 1, 2"):
        parse_topology("h200:16")
    with pytest.raises(ConfigError, match="does not come as ''"):
        parse_topology("h200:")


def test_meshes():
    target = parse_topology("v6e:2x4")
    assert target.all_meshes() == [MeshShape(1, 8), MeshShape(2, 4), MeshShape(4, 2), MeshShape(8, 1)]
    assert target.mesh({}) == MeshShape(1, 8) and target.mesh({"data": 2}) == MeshShape(2, 4) and target.mesh({"model": 2}) == MeshShape(1, 2)
    with pytest.raises(ConfigError, match="data=2,model=8 needs 16 devices; v6e:2x4 has 8"):
        target.mesh({"data": 2, "model": 8})
    with pytest.raises(ConfigError, match=r"tpu7x:2x2x1 has 8 \(4 chips of 2 devices\)"):
        parse_topology("tpu7x").mesh({"data": 16, "model": 1})
    assert parse_topology("tpu7x").chips_of(MeshShape(1, 3)) == 2


def test_every_topology_of_every_chip_can_be_written():
    for chip in CHIPS:
        for topology in chip.topologies:
            assert parse_topology(f"{chip.name}:{topology}").grid == topology

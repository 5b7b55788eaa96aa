"""How a mesh is written, and which one a configuration asks for."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from jaxserve.config import MeshConfig
from jaxserve.errors import ConfigError
from jaxserve.mesh_shape import MeshShape, choose_mesh_shape, parse_mesh


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("data=2,model=4", {"data": 2, "model": 4}), ("model=8", {"model": 8}), (" model = 3 , data=1", {"model": 3, "data": 1}), ("data=16", {"data": 16})],
)
def test_meshes_are_read(text: str, sizes: dict[str, int]) -> None:
    assert parse_mesh(text) == sizes


def test_a_shape_is_written_as_it_is_read() -> None:
    assert MeshShape(**parse_mesh(str(MeshShape(2, 4)))) == MeshShape(2, 4)
    assert MeshShape(2, 4).size == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("expert=2", "mesh 'expert=2' has an axis 'expert'; allowed are data and model, as in data=2,model=4"),
        ("", "mesh '' has an axis ''; allowed"),
        ("2x4", "mesh '2x4' has an axis '2x4'; allowed"),
        ("data=2,data=4", "mesh 'data=2,data=4' has the axis 'data' twice"),
        ("data=2,", "mesh 'data=2,' has an axis ''; allowed"),
        ("model", "mesh 'model': model is ''; must be a whole number, at least 1"),
        ("model=0", "mesh 'model=0': model is '0'; must"),
        ("model=-1", "model is '-1'; must"),
        ("model=2.0", "model is '2.0'; must"),
        ("model=٣", "model is '٣'; must"),
        ("model=2=3", "model is '2=3'; must"),
    ],
)
def test_what_is_no_mesh(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_mesh(text)


@pytest.mark.parametrize(
    ("config", "num_devices", "is_cpu", "shape"),
    [
        (MeshConfig(), 8, True, (1, 1)),
        (MeshConfig(), 8, False, (1, 8)),
        (MeshConfig(), 1, False, (1, 1)),
        (MeshConfig(data=2), 8, False, (2, 4)),
        (MeshConfig(data=2), 8, True, (2, 1)),
        (MeshConfig(data=3), 8, False, (3, 2)),
        (MeshConfig(model=2), 8, False, (1, 2)),
        (MeshConfig(data=2, model=3), 8, True, (2, 3)),
    ],
)
def test_the_mesh_that_a_configuration_asks_for(config: MeshConfig, num_devices: int, is_cpu: bool, shape: tuple[int, int]) -> None:
    assert choose_mesh_shape(config, num_devices, is_cpu=is_cpu) == MeshShape(*shape)


def test_a_mesh_larger_than_the_machine() -> None:
    with pytest.raises(ConfigError, match=r"^the mesh data=2,model=4 needs 8 devices; there are 4$"):
        choose_mesh_shape(MeshConfig(data=2, model=4), 4, is_cpu=False)
    with pytest.raises(ConfigError, match=r"needs 3 devices; there is 1; XLA_FLAGS=--xla_force_host_platform_device_count=N makes"):
        choose_mesh_shape(MeshConfig(data=3), 1, is_cpu=True)
    with pytest.raises(ConfigError, match=r"the mesh data=9,model=1 needs 9 devices; there are 8"):
        choose_mesh_shape(MeshConfig(data=9), 8, is_cpu=False)


def test_shapes_need_no_jax() -> None:
    code = "import sys; sys.modules['jax'] = sys.modules['numpy'] = None; import jaxserve.mesh_shape"
    subprocess.run([sys.executable, "-c", code], check=True)

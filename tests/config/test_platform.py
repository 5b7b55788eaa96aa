"""The platform is chosen from device files and plugins, before jax is imported."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxserve import platform
from jaxserve.errors import ConfigError


def touch(file: Path, text: str = "") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The plugins that seem to be installed, and a process that has not imported jax."""
    installed: set[str] = set()
    monkeypatch.setattr(platform, "_has_plugin", lambda name: name == "cpu" or name in installed)
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    return installed


def test_no_device_file_is_cpu(tmp_path: Path, plugins: set[str]) -> None:
    plugins |= {"gpu", "tpu"}
    assert platform.detect_platform(tmp_path) == "cpu"


def test_a_gpu_with_its_plugin(tmp_path: Path, plugins: set[str]) -> None:
    plugins.add("gpu")
    touch(tmp_path / "dev/nvidiactl")
    assert platform.detect_platform(tmp_path) == "cpu", "the driver alone is no GPU"
    touch(tmp_path / "dev/nvidia0")
    assert platform.detect_platform(tmp_path) == "gpu"


def test_a_gpu_without_its_plugin_is_a_warning(tmp_path: Path, plugins: set[str], caplog: pytest.LogCaptureFixture) -> None:
    touch(tmp_path / "dev/nvidiactl")
    touch(tmp_path / "dev/nvidia0")
    assert platform.detect_platform(tmp_path) == "cpu"
    assert "jaxserve[cuda]" in caplog.text


@pytest.mark.parametrize(("vendor", "expected"), [("0x1ae0\n", "tpu"), ("0x8086\n", "cpu")])
def test_vfio_is_a_tpu_only_with_a_google_device(tmp_path: Path, plugins: set[str], vendor: str, expected: str) -> None:
    plugins.add("tpu")
    touch(tmp_path / "dev/vfio/0")
    touch(tmp_path / "sys/bus/pci/devices/0000:00:04.0/vendor", vendor)
    assert platform.detect_platform(tmp_path) == expected


def test_accel_files_are_a_tpu(tmp_path: Path, plugins: set[str]) -> None:
    plugins.add("tpu")
    touch(tmp_path / "dev/accel0")
    assert platform.detect_platform(tmp_path) == "tpu"


def test_a_request_wins_over_the_environment_and_auto_does_not(plugins: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "mine")
    assert platform.choose_platform("auto") == "mine"
    assert platform.choose_platform("cpu") == "cpu"
    plugins.add("gpu")
    assert platform.choose_platform("gpu") == "cuda,cpu"


def test_a_requested_chip_without_plugin_names_the_extra(plugins: set[str]) -> None:
    with pytest.raises(ConfigError, match=r"platform is 'tpu'.*jaxserve\[tpu\]"):
        platform.choose_platform("tpu")


def test_after_jax_is_imported_only_a_match_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(config=SimpleNamespace(jax_platforms="cuda,cpu")))
    assert platform.choose_platform("auto") == platform.choose_platform("gpu") == "cuda,cpu"
    with pytest.raises(ConfigError, match="imported already with JAX_PLATFORMS=cuda,cpu"):
        platform.choose_platform("cpu")

"""The shape of the repository: what packaging, imports and layers rely on."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.waiting import LIMIT_S

ROOT = Path(__file__).parents[2]
LINKED = ("kernels_pallas", "models", "serving")
DATA_ONLY = {"jaxserve.models.configs": "configs/models"}
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Runs ``code`` in a fresh interpreter at the root of the repository."""
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)


@pytest.mark.parametrize("name", LINKED)
def test_the_links_are_relative_links(name: str) -> None:
    link = ROOT / "jaxserve" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert SETUPTOOLS["package-dir"][f"jaxserve.{name}"] == name


@pytest.mark.parametrize(("package", "folder"), DATA_ONLY.items())
def test_data_is_linked_to_where_wheels_have_it(package: str, folder: str) -> None:
    link = ROOT.joinpath(*package.split("."))
    assert link.is_symlink() and not os.readlink(link).startswith("/")
    assert link.samefile(ROOT / folder)
    assert SETUPTOOLS["package-dir"][package] == folder


def test_the_package_list_is_complete() -> None:
    found = set(DATA_ONLY) | {".".join(file.parent.relative_to(ROOT).parts) for file in (ROOT / "jaxserve").rglob("__init__.py")}
    for name in LINKED:
        found |= {"jaxserve." + ".".join(file.parent.relative_to(ROOT).parts) for file in (ROOT / name).rglob("__init__.py")}
    assert sorted(found) == SETUPTOOLS["packages"]


def test_every_folder_with_code_is_a_package() -> None:
    for top in ("jaxserve", *LINKED):
        for file in (ROOT / top).rglob("*.py"):
            assert (file.parent / "__init__.py").exists(), f"{file.parent} has no __init__.py, so wheels leave it out"


def test_data_files_reach_the_wheel() -> None:
    patterns = SETUPTOOLS["package-data"]["*"]
    for top in ("jaxserve", *LINKED, *DATA_ONLY.values()):
        for file in (ROOT / top).rglob("*"):
            if file.is_file() and file.suffix not in (".py", ".pyc"):
                assert any(file.match(pattern) for pattern in patterns), f"{file} matches no package-data pattern"


def test_no_module_shadows_the_standard_library() -> None:
    """A script run from its own folder would import it instead. ``platform`` and the like inside ``jaxserve`` itself are no scripts."""
    for top in LINKED:
        for file in (ROOT / top).rglob("*.py"):
            assert file.stem not in ("types", "logging", "http", "grpc", "queue", "enum"), file


@pytest.mark.parametrize(
    "modules",
    [
        "jaxserve.engine.scheduling.scheduler, jaxserve.engine.pages.pool, jaxserve.engine.scheduling.sequence, jaxserve.engine.scheduling.schedule",
        "jaxserve.config, jaxserve.platform, jaxserve.log",
    ],
)
def test_host_policy_runs_without_jax(modules: str) -> None:
    ran = python(f"import sys\nsys.modules['jax'] = sys.modules['numpy'] = None\nimport {modules}")
    assert ran.returncode == 0, ran.stderr


def test_engine_and_kernels_run_without_the_web_libraries() -> None:
    blocked = "fastapi", "starlette", "uvicorn", "pydantic", "grpc"
    ran = python(
        f"import os, sys\nos.environ['JAX_PLATFORMS'] = 'cpu'\nfor name in {blocked}: sys.modules[name] = None\n"
        "import jaxserve.engine.engine, jaxserve.engine.async_engine, jaxserve.engine.build, jaxserve.llm\n"
        "import jaxserve.kernels_pallas.ragged_paged_attention.api"
    )
    assert ran.returncode == 0, ran.stderr


def test_nothing_names_this_machine() -> None:
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    needles = [str(Path.home()) + "/", "index-" + "url", "--find-" + "links"]
    for name in filter(None, tracked.stdout.split("\0")):
        file = ROOT / name
        if file.is_file() and not file.is_symlink() and file.stat().st_size < 1 << 20:
            text = file.read_text(errors="replace")
            assert not [needle for needle in needles if needle in text], name

"""A cache folder that cannot be used costs compile time, never the engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.waiting import LIMIT_S

COMPILE = """
import jax
from jaxserve.engine.build import _enable_compilation_cache
_enable_compilation_cache()
print(jax.jit(lambda x: x + 1)(1))
"""


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAXSERVE_CACHE": str(file)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    assert done.stdout == "2\n"
    assert "persistent compilation cache" in done.stderr
    assert "Not a directory" in done.stderr

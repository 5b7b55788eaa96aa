"""Real models, for tests: those whose files are in the cache already, for tests never reach for the network. ``scripts/test`` fetches the default one first."""

from __future__ import annotations

import os

import pytest

from jaxserve.models.loading.aliases import ALIASES
from jaxserve.models.loading.cache_folder import models_folder


def require_model(alias: str) -> None:
    """Skips the test where the model is not in the cache; fails it where ``$JAXSERVE_REQUIRE_MODEL`` says that this model is there."""
    if (models_folder() / alias / ALIASES[alias].file_name).is_file():
        return
    if os.environ.get("JAXSERVE_REQUIRE_MODEL") == alias:
        pytest.fail(f"{alias} was fetched for these tests and is not in {models_folder()}")
    pytest.skip(f"{alias} is not in the cache folder; `jaxserve models --fetch {alias}` brings it")

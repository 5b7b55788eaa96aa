"""The one way from a seed to random numbers."""

from __future__ import annotations

import random


def seeded(*names: object) -> random.Random:
    """A generator that depends on its names alone: streams with different names are independent, so that drawing from one does not move another."""
    return random.Random("/".join(str(name) for name in names))  # noqa: S311 - reproducible, not secret

"""How long work tells its caller where it stands."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is (0 where that is not known). Units are the stage's own."""

"""What every checkpoint format offers the assembler: named tensors, read by rows and columns."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import numpy as np


class TensorSource(Protocol):
    """Tensors of one checkpoint under their Hugging Face names, in Hugging Face layout. Opening one reads headers only."""

    def keys(self) -> Collection[str]:
        """Names of all tensors. A tensor whose name is unknown to the format's mapping appears under its own name, so that it is reported as extra."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, as its header states it."""
        ...

    def read(self, name: str, rows: slice, columns: slice | None = None) -> np.ndarray:
        """A block of a tensor, as float32, float16 or bfloat16.

        Args:
            name: One of :meth:`keys`.
            rows: A slice with step 1 inside axis 0.
            columns: The same of axis 1, for a tensor that has one; ``None`` reads whole rows.

        Raises:
            CheckpointError: The data cannot be read.
        """
        ...

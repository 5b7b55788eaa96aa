"""What a plan asks of each layout, as plain data that travels to a process of its own."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Literal

from jaxserve.dims import ceil_div
from jaxserve.mesh_shape import MeshShape

StepKind = Literal["decode", "mixed"]
STEPS: tuple[StepKind, ...] = ("decode", "mixed")
"""The two kinds of step: every sequence takes one token, or all but one do and the rest of the tokens are a chunk of that one's prompt."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """What runs at once, over all data ranks together.

    Args:
        batch: Sequences that decode together.
        context: Tokens that each of them holds.
        chunk: Token budget of a mixed step.
    """

    batch: int
    context: int
    chunk: int

    def sequences(self, num_ranks: int) -> int:
        """Sequences of the data rank that has most: what is stored, read and computed is theirs."""
        return ceil_div(self.batch, num_ranks)

    def rows(self, num_ranks: int) -> int:
        """Rows of a data rank's bucket: its sequences, and the least that an engine compiles for."""
        return max(2, self.sequences(num_ranks))

    def tokens(self, step: StepKind, num_ranks: int) -> int:
        """Packed tokens of a data rank's bucket."""
        rows = self.rows(num_ranks)
        return rows if step == "decode" else max(rows + 1, ceil_div(self.chunk, num_ranks))

    def prompt_tokens(self, step: StepKind, num_ranks: int) -> int:
        """Tokens of the prompt's chunk in a data rank's step, 0 for none: what the other sequences leave of the budget, at least 2."""
        return 0 if step == "decode" else max(2, ceil_div(self.chunk, num_ranks) - (self.sequences(num_ranks) - 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutRequest:
    """One step of one layout on one topology.

    Args:
        source: MODEL, as the user wrote it.
        settings: ``section.key=value`` words: dtypes, page size, sharding rules.
        target: The topology to compile for, as ``topology.parse_topology`` reads it.
        mesh: The layout.
        load: What runs at once.
        step: Which step to compile.
    """

    source: str
    settings: tuple[str, ...]
    target: str
    mesh: MeshShape
    load: Load
    step: StepKind

    def to_json(self) -> str:
        return json.dumps(vars(self) | {"mesh": dict(self.mesh), "load": vars(self.load)})

    @classmethod
    def from_json(cls, text: str) -> LayoutRequest:
        fields: dict[str, Any] = json.loads(text)
        parsed: dict[str, Any] = {"settings": tuple(fields["settings"]), "mesh": MeshShape(**fields["mesh"]), "load": Load(**fields["load"])}
        return cls(**(fields | parsed))

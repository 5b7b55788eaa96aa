"""Measured steps to set beside predicted ones: JSON lines, one a step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from jaxserve.errors import ConfigError
from jaxserve.mesh_shape import MeshShape
from jaxserve.plan.planner import LayoutPlan
from jaxserve.plan.request import STEPS, StepKind
from jaxserve.plan.topology import parse_topology

Measured = Mapping[tuple[str, MeshShape, StepKind], float]
"""Milliseconds a step by target, mesh and kind."""


def read_measured(file: Path) -> Measured:
    """Reads lines of ``{"target": "h200:1", "mesh": {"data": 1, "model": 1}, "step": "decode", "step_ms": 12.3}``. Other keys are the writer's own business.

    Raises:
        ConfigError: The file cannot be read, or a line is not of this form.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    found: dict[tuple[str, MeshShape, StepKind], float] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row: dict[str, Any] = json.loads(line)
            mesh, step, milliseconds = MeshShape(**row["mesh"]), row["step"], float(row["step_ms"])
            key = str(parse_topology(row["target"])), mesh, cast(StepKind, step)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{file}, line {number} must hold target, mesh, step and step_ms: {error}") from None
        if step not in STEPS or milliseconds <= 0:
            raise ConfigError(f"{file}, line {number}: step is {step!r} and step_ms {milliseconds:g}; must be one of {', '.join(STEPS)}, and above 0")
        found[key] = milliseconds
    return found


def comparisons(plans: list[LayoutPlan], measured: Measured) -> list[str]:
    """A line for each planned step that was measured."""
    lines: list[str] = []
    for plan in plans:
        for kind, step in plan.steps.items():
            seen = measured.get((str(plan.target), plan.mesh, kind))
            if seen is not None:
                predicted = step.predicted.step_ms
                lines.append(f"measured, {plan.target} {plan.mesh} {kind}: {seen:.2f} ms, {seen / predicted:.2f} times the predicted {predicted:.2f} ms")
    return lines

"""Which layouts are best and why, and what would fit where none does. Words for people; the figures are the planner's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxserve.errors import ConfigError
from jaxserve.mesh_shape import MeshShape
from jaxserve.plan.planner import LayoutPlan, Question
from jaxserve.plan.roofline import Split
from jaxserve.plan.topology import Topology
from jaxserve.plan.units import format_bytes

_SPARE = 0.97
"""Share of the memory that weights and pool may take when a size is only calculated: temporaries need the rest."""


@dataclasses.dataclass(frozen=True)
class Best:
    """The best layout of a target for one purpose.

    Args:
        purpose: ``latency`` or ``throughput``.
        plan: The layout.
        reason: Why, with the next best.
    """

    purpose: str
    plan: LayoutPlan
    reason: str


def best_layouts(plans: Sequence[LayoutPlan]) -> list[Best]:
    """For each target the layout with the fastest decode step, and the one that yields most tokens a second and chip with its memory full."""
    found: list[Best] = []
    for target in dict.fromkeys(plan.target for plan in plans):
        fitting = [plan for plan in plans if plan.target == target and plan.fits and "decode" in plan.steps]
        if not fitting:
            continue
        ranked = sorted(fitting, key=lambda plan: plan.steps["decode"].predicted.step_ms)
        predicted = ranked[0].steps["decode"].predicted
        reason = f"a decode step takes {predicted.step_ms:.1f} ms, bound by {predicted.binds}"
        if len(ranked) > 1:
            reason += f"; {ranked[1].mesh} takes {ranked[1].steps['decode'].predicted.step_ms:.1f} ms"
        found.append(Best("latency", ranked[0], reason))
        ranked = sorted((plan for plan in fitting if plan.full_rate), key=lambda plan: -plan.full_rate)
        if ranked:
            room = ranked[0].room
            assert room is not None
            reason = f"{ranked[0].full_rate:,.0f} tokens/s a chip with its memory full: {room.sequences:,} sequences"
            if len(ranked) > 1 and (other := ranked[1].room) is not None:
                reason += f"; {ranked[1].mesh} holds {other.sequences:,} and yields {ranked[1].full_rate:,.0f}"
            found.append(Best("throughput", ranked[0], reason))
    return found


def what_would_fit(question: Question, plans: Sequence[LayoutPlan]) -> list[str]:
    """For each target on which no layout fits: by how much the nearest misses, and what would fit. By calculation, not compiled."""
    lines: list[str] = []
    for target in dict.fromkeys(plan.target for plan in plans):
        mine = [plan for plan in plans if plan.target == target]
        large = [plan for plan in mine if plan.status == "too large"]
        if any(plan.fits for plan in mine) or not large:
            continue
        nearest = min(large, key=lambda plan: plan.weight_bytes + plan.kv_bytes)
        needs, usable, load = nearest.weight_bytes + nearest.kv_bytes, target.chip.usable_bytes, question.load
        lines.append(
            f"{question.name} fits on no layout of {target}: {nearest.mesh} comes nearest and needs {format_bytes(needs)} a device for weights and "
            f"{load.batch} x {load.context} tokens, {format_bytes(max(needs - usable, nearest.missing_bytes))} more than there is ({format_bytes(usable)})"
        )
        options = _options(question, nearest)
        lines.append(f"  what would fit (calculated, not compiled): {'; '.join(options) if options else 'nothing that jaxserve knows of'}")
    return lines


def _options(question: Question, nearest: LayoutPlan) -> list[str]:
    target, limit = nearest.target, _SPARE * nearest.target.chip.usable_bytes
    options: list[str] = []
    larger = _smallest_topology(question, target)
    if larger is not None:
        options.append(f"more chips: {larger}")
    split = question.split(target, nearest.mesh)
    weights = sum(split.parameter_bytes().values())
    sequences_bytes = question.load.sequences(nearest.mesh.data) * split.kv_token_bytes()
    context = int((limit - weights) / sequences_bytes) if limit > weights else 0
    if context >= 256:
        options.append(f"less context: {context // 256 * 256:,} tokens for each of {question.load.batch} sequences")
    if question.config.cache.dtype == "auto" and weights + nearest.kv_bytes / split.kv_bytes <= limit:
        options.append("cache.dtype=fp8")
    if split.weight_bytes > 1 and weights / split.weight_bytes + nearest.kv_bytes <= limit:
        options.append("weights of 8 bits")
    return options


def _smallest_topology(question: Question, target: Topology) -> Topology | None:
    sizes = sorted((Topology(target.chip, topology) for topology in target.chip.topologies), key=lambda other: other.num_chips)
    for larger in (other for other in sizes if other.num_chips > target.num_chips):
        for mesh in larger.all_meshes():
            split = _try_split(question, larger, mesh)
            if split and sum(split.parameter_bytes().values()) + question.pool_bytes(split) <= _SPARE * target.chip.usable_bytes:
                return larger
    return None


def _try_split(question: Question, target: Topology, mesh: MeshShape) -> Split | None:
    try:
        return question.split(target, mesh)
    except ConfigError:
        return None

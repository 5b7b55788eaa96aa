"""Plans a cell: real compiles for its target, through ``jaxserve.plan``, as flat figures."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxserve.errors import CompileError, ConfigError
from jaxserve.experiments.file import Cell, show
from jaxserve.experiments.measure import Metrics
from jaxserve.models.context_length import check_context_length
from jaxserve.models.loading.specs import open_spec
from jaxserve.plan.planner import LayoutPlan, Question, plan_layouts
from jaxserve.plan.roofline import Prediction

GIB = 2**30

_PLAN_KEYS = ("model.dtype", "mesh.replicate_kv_heads", "cache.page_size", "cache.dtype", "engine.attention", "engine.layers")


def plan_cell(cell: Cell) -> tuple[Metrics, dict[str, float], dict[str, Any]]:
    """Compiles the cell's layout and predicts its steps.

    Returns:
        Figures, the same in every run; the seconds that compiling took; and what else the cell's record holds.

    Raises:
        ConfigError: The model cannot be split so, or the target's compiler is not here.
        CompileError: The compiler gave up, for another reason than memory.
    """
    assert cell.load is not None and cell.target is not None
    source = cell.config.model.source
    name, spec = open_spec(source)
    check_context_length(cell.load.context, spec, key="load.context", model=name)
    question = Question(source=source, name=name, spec=spec, config=cell.config, settings=_words(cell), load=cell.load)
    (plan,) = plan_layouts(question, [(cell.target, cell.mesh_on_target())])
    if plan.status == "refused":
        raise ConfigError(plan.reason)
    if plan.status == "failed":
        raise CompileError(plan.reason)
    times = {f"compile_{step}_s": one.compile_s for step, one in plan.steps.items()}
    return _figures(plan), times, {
        "target": str(plan.target), "planned_mesh": dict(plan.mesh), "planned_attention": plan.attention,
        "planned_programs_sha256": {step: one.program_sha256 for step, one in plan.steps.items()},
    }  # fmt: skip


def _words(cell: Cell) -> tuple[str, ...]:
    """What of the cell's settings a plan hangs on, as words of a command line."""
    words: list[str] = []
    for key, value in cell.settings.items():
        if key in _PLAN_KEYS or key.startswith("sharding."):
            words.append(f"{key}={'null' if value is None else show(value, ',')}")
    return tuple(words)


def _figures(plan: LayoutPlan) -> Metrics:
    metrics: Metrics = {
        "fits": plan.fits,
        "reason": plan.reason,
        "weights_gib": round(plan.weight_bytes / GIB, 3),
        "kv_gib": round(plan.kv_bytes / GIB, 3),
        "temp_gib": None if plan.temp_bytes is None else round(plan.temp_bytes / GIB, 3),
        "usable_gib": round(plan.target.chip.usable_bytes / GIB, 3),
        "room_tokens": plan.room and plan.room.tokens,
        "room_sequences": plan.room and plan.room.sequences,
        "predicted_full_tokens_per_s_per_chip": _short(plan.full_rate) if plan.room else None,
    }
    for step, one in plan.steps.items():
        metrics |= _predicted(step, one.predicted)
        for item in one.traffic.collectives:
            metrics[f"{step}_{item.axis}_{item.kind}_count"] = item.count
            metrics[f"{step}_{item.axis}_{item.kind}_bytes"] = item.bytes
    return metrics


def _predicted(step: str, predicted: Prediction) -> Metrics:
    fields: dict[str, Any] = dataclasses.asdict(predicted)
    return {f"predicted_{step}_{name}": _short(value) if isinstance(value, float) else value for name, value in fields.items()}


def _short(value: float) -> float:
    return float(f"{value:.5g}")

"""Shows plans: as one table, and as one JSON object. The page with plots is in ``html.py``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from jaxserve.plan.advice import Best
from jaxserve.plan.measured import Measured
from jaxserve.plan.planner import LayoutPlan, StepPlan
from jaxserve.plan.request import STEPS, Load
from jaxserve.plan.traffic import Collective
from jaxserve.plan.units import format_bytes

GIB = 2**30
LEFT_COLUMNS = (0, 1, 4, 8)
"""Columns of words."""


def _decode_ms(plan: LayoutPlan) -> float:
    step = plan.steps.get("decode")
    return step.predicted.step_ms if step is not None and plan.fits else float("inf")


SORTS: Mapping[str, Callable[[LayoutPlan], float]] = {
    "given": lambda _plan: 0.0,
    "latency": _decode_ms,
    "throughput": lambda plan: -plan.full_rate,
    "room": lambda plan: -(plan.room.tokens if plan.room is not None else 0),
    "memory": lambda plan: plan.weight_bytes + plan.kv_bytes + (plan.temp_bytes or 0),
}
"""What ``--sort`` takes. Equal ones stay in the order given."""

NOTE = (
    "Times are predictions: a roofline over the data sheets' figures (docs/plan.md), not measurements; real steps take longer. "
    "Bytes, fits and collectives are the compilers'."
)


def as_json(plans: Sequence[LayoutPlan], best: Sequence[Best], measured: Measured) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {"layouts": [_layout_json(plan, [one.purpose for one in best if one.plan is plan], measured) for plan in plans]}


def headers(load: Load) -> list[str]:
    """Of the table's columns."""
    return [
        "target\ndata x model",
        "fits",
        "GiB a device\nweights+KV+temp",
        f"room: tokens\nof {load.context:,} each",
        "collectives a step:\ndecode, then mixed",
        "predicted ms of decode\nweights+copies+KV+links",
        "tokens/s\na chip",
        "MFU\nMBU",
        "bound by",
        "mixed ms\nbound by",
        "compile s\neach",
    ]


def table(plans: Sequence[LayoutPlan], best: Sequence[Best], load: Load) -> Table:
    """One row a layout."""
    shown = Table(box=box.SIMPLE_HEAD, leading=1, header_style="bold", caption=NOTE, caption_justify="left")
    for index, header in enumerate(headers(load)):
        shown.add_column(header, justify="left" if index in LEFT_COLUMNS else "right")
    for plan in plans:
        cells = [escape(cell) for cell in row(plan, best)]
        shown.add_row(*cells, style="dim" if not plan.fits else "bold" if any(one.plan is plan for one in best) else "")
    return shown


def reasons(plans: Sequence[LayoutPlan], best: Sequence[Best]) -> list[str]:
    """The lines under the table: what does not fit and in whose words, then the best and why."""
    lines = [f"{plan.target} {plan.mesh} {_verdict(plan)}: {plan.reason}" for plan in plans if not plan.fits]
    lines += [f"best for {one.purpose} on {one.plan.target}: {one.plan.mesh}: {one.reason}" for one in best]
    rare = {_collectives(step.traffic.sometimes) for plan in plans for step in plan.steps.values() if step.traffic.sometimes}
    if rare:
        lines.append(f"only in some steps (such as sampling with temperature): {' or '.join(sorted(rare))}")
    unknown = sum(step.traffic.num_unknown_loops for plan in plans for step in plan.steps.values())
    if unknown:
        lines.append(f"{unknown} loops of unknown length were counted as one turn each")
    return lines


def _layout_json(plan: LayoutPlan, purposes: list[str], measured: Measured) -> dict[str, Any]:
    room = plan.room
    return {
        "target": str(plan.target),
        "mesh": dict(plan.mesh),
        "fits": plan.fits,
        "status": plan.status,
        "reason": plan.reason,
        "best_for": purposes,
        "bytes_per_device": {"weights": plan.weight_bytes, "kv": plan.kv_bytes, "temp": plan.temp_bytes, "usable": plan.target.chip.usable_bytes},
        "missing_bytes": plan.missing_bytes,
        "room": None if room is None else {"tokens": room.tokens, "sequences": room.sequences, "predicted": room.predicted and _rounded(room.predicted)},
        "compile_s": round(plan.compile_s, 2),
        "attention": plan.attention,
        **{kind: _step_json(plan.steps.get(kind), measured.get((str(plan.target), plan.mesh, kind))) for kind in STEPS},
    }


def _step_json(step: StepPlan | None, measured_ms: float | None) -> dict[str, Any] | None:
    if step is None:
        return None
    return {
        "collectives": [_collective_json(item) for item in step.traffic.collectives],
        "sometimes": [_collective_json(item) for item in step.traffic.sometimes],
        "weight_copy_bytes": step.traffic.weight_copy_bytes,
        "compile_s": step.compile_s,
        "temp": step.temp_bytes,
        "predicted": _rounded(step.predicted),
        **({} if measured_ms is None else {"measured": {"step_ms": measured_ms}}),
    }


def _collective_json(item: Collective) -> dict[str, Any]:
    return {"kind": item.kind, "axis": item.axis, "count": item.count, "bytes": item.bytes}


def _rounded(fields: Any) -> dict[str, Any]:
    return {name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in dataclasses.asdict(fields).items()}


def row(plan: LayoutPlan, best: Sequence[Best]) -> list[str]:
    """The table's cells for one layout; those that have nothing to say are missing at the end."""
    name = f"{plan.target}\n{plan.mesh.data} x {plan.mesh.model}"
    if plan.status == "refused":
        return [name, "refused"]
    temp = plan.temp_bytes
    memory = "+".join(["?" if value is None else f"{value / GIB:.1f}" for value in (plan.weight_bytes, plan.kv_bytes, temp)])
    memory += f"\nof {plan.target.chip.usable_bytes / GIB:.1f}"
    room = plan.room
    cells = [name, _verdict(plan), memory, f"{room.tokens:,}\n{room.sequences:,} sequences" if room is not None else ""]
    cells[1] += "".join(f"\nbest {one.purpose}" for one in best if one.plan is plan)
    decode, mixed = plan.steps.get("decode"), plan.steps.get("mixed")
    if decode is None:
        return cells
    p = decode.predicted
    moved = "\n".join(_collectives(step.traffic.collectives) or "none" for step in (decode, mixed) if step is not None)
    cells += [
        moved,
        f"{p.step_ms:.1f}\n{p.weights_ms:.1f}+{p.weight_copies_ms:.1f}+{p.kv_ms:.1f}+{p.links_ms:.1f}",
        f"{p.tokens_per_s:,.0f}\n{p.tokens_per_s_per_chip:,.0f}",
        f"{p.mfu:.0%}\n{p.mbu:.0%}",
        p.binds,
        f"{mixed.predicted.step_ms:.1f}\n{mixed.predicted.binds}" if mixed is not None else "",
        "\n".join(f"{step.compile_s:.0f}" for step in (decode, mixed) if step is not None),
    ]
    return cells


def _verdict(plan: LayoutPlan) -> str:
    if plan.status == "too large" and plan.missing_bytes:
        return f"no: {plan.missing_bytes / GIB:.1f} GiB short"
    return {"fits": "yes", "too large": "no", "refused": "refused", "failed": "failed"}[plan.status]


def _collectives(items: Sequence[Collective]) -> str:
    return ", ".join(f"{item.axis}: {item.count} {item.kind} {format_bytes(item.bytes)}" for item in items)

"""Plans as one self-contained page: plots first, the table under them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxserve import plots
from jaxserve.html_page import page, text
from jaxserve.output_files import write_text
from jaxserve.plan.advice import Best
from jaxserve.plan.planner import LayoutPlan, Question
from jaxserve.plan.report import GIB, LEFT_COLUMNS, NOTE, headers, row
from jaxserve.plan.request import STEPS, StepKind


def write_page(file: Path, question: Question, plans: Sequence[LayoutPlan], best: Sequence[Best], remarks: Sequence[str]) -> None:
    """Writes the page.

    Args:
        file: Where to.
        question: What was planned.
        plans: In the order to show.
        best: The best layouts and why.
        remarks: Lines under the table.

    Raises:
        ConfigError: The file cannot be written, or matplotlib is not installed.
    """
    load, config = question.load, question.config
    title = f"{question.name}: {len(plans)} layouts"
    about = f"{config.model.dtype}, {load.batch} sequences of {load.context:,} tokens, mixed steps of {load.chunk:,} tokens. {NOTE}"
    cards = [
        f"<div class=card><i>best for {text(one.purpose)}</i><b>{text(one.plan.target)} &middot; {text(one.plan.mesh)}</b>{text(one.reason)}</div>"
        for one in best
    ]
    parts = [
        f"<h1>{text(title)}</h1><p class=sub>{text(about)}</p>",
        f"<div class=cards>{''.join(cards)}</div>",
        f"<h2>Where memory and time go</h2><div class=panels>{''.join(f'<section>{svg}</section>' for svg in _plots(plans))}</div>",
        f"<h2>All layouts</h2><section>{_table(plans, best, question)}</section>",
        f"<ul class=note>{''.join(f'<li>{text(line.strip())}</li>' for line in remarks)}</ul>",
    ]
    write_text(file, page(title, parts))


def _plots(plans: Sequence[LayoutPlan]) -> list[str]:
    shown = [plan for plan in plans if plan.status != "refused"]
    found = [_memory_plot(shown)] if shown else []
    for step in STEPS:
        compiled = [plan for plan in shown if plan.fits and step in plan.steps]
        if compiled:
            found.append(_time_plot(compiled, step))
    full = [plan for plan in shown if plan.full_rate]
    return [*found, _trade_plot(full)] if full else found


def _memory_plot(plans: Sequence[LayoutPlan]) -> str:
    parts = {
        "weights": [plan.weight_bytes / GIB for plan in plans],
        "KV of the load": [plan.kv_bytes / GIB for plan in plans],
        "temporaries": [(plan.temp_bytes or 0) / GIB for plan in plans],
    }
    limits = [plan.target.chip.usable_bytes / GIB for plan in plans]
    return _stack(plans, parts, "Memory of a device", "GiB", limits, "usable")


def _time_plot(plans: Sequence[LayoutPlan], step: StepKind) -> str:
    predicted = [plan.steps[step].predicted for plan in plans]
    parts = {
        "weights": [p.weights_ms for p in predicted],
        "weight copies": [p.weight_copies_ms for p in predicted],
        "keys and values": [p.kv_ms for p in predicted],
        "activations": [p.activations_ms for p in predicted],
        "arithmetic beyond memory": [max(0.0, p.step_ms - p.links_ms - p.weights_ms - p.weight_copies_ms - p.kv_ms - p.activations_ms) for p in predicted],
        "links": [p.links_ms for p in predicted],
    }
    return _stack(plans, {name: values for name, values in parts.items() if any(values)}, f"One {step} step, predicted", "ms", (), "")


def _stack(plans: Sequence[LayoutPlan], parts: dict[str, list[float]], title: str, unit: str, limits: Sequence[float], limit_label: str) -> str:
    series = [plots.Series(name, (), values) for name, values in parts.items()]
    with plots.figure(width=6.4, height=1.5 + 0.42 * len(plans)) as (drawn, (axes,)):
        plots.stacked_bars(axes, [_label(plan) for plan in plans], series, title=title, x=unit, limits=limits, limit_label=limit_label)
        return plots.to_svg(drawn)


def _trade_plot(plans: Sequence[LayoutPlan]) -> str:
    series: list[plots.Series] = []
    for plan in plans:
        assert plan.room is not None and plan.room.predicted is not None
        ends = sorted((step.step_ms, step.tokens_per_s_per_chip) for step in (plan.steps["decode"].predicted, plan.room.predicted))
        series.append(plots.Series(_label(plan), [x for x, _ in ends], [y for _, y in ends]))
    with plots.figure(width=6.4, height=3.6) as (drawn, (axes,)):
        title = "From the load to a full memory, predicted"
        plots.lines(axes, series, title=title, x="ms a decode step", y="tokens/s a chip", markers=True)
        return plots.to_svg(drawn)


def _table(plans: Sequence[LayoutPlan], best: Sequence[Best], question: Question) -> str:
    titles = headers(question.load)

    def cell(tag: str, index: int, value: str) -> str:
        return f"<{tag}{' class=left' if index in LEFT_COLUMNS else ''}>{text(value)}</{tag}>"

    head = "".join(cell("th", index, title) for index, title in enumerate(titles))
    lines: list[str] = []
    for plan in plans:
        cells = row(plan, best)
        body = "".join(cell("td", index, value) for index, value in enumerate([*cells, *[""] * (len(titles) - len(cells))]))
        lines.append(f"<tr{'' if plan.fits else ' class=no'}>{body}</tr>")
    return f"<table class=wide><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _label(plan: LayoutPlan) -> str:
    return f"{plan.target}  {plan.mesh.data} x {plan.mesh.model}"

"""``jaxserve plan``: compares mesh layouts by real compiles for chips that need not be here."""

from __future__ import annotations

import dataclasses
import enum
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from jaxserve.cli.options import Debug, split_words
from jaxserve.cli.output import emit, tables_console
from jaxserve.cli.progress import progress_bars
from jaxserve.config import load_config
from jaxserve.log import set_up_logging
from jaxserve.output_files import require_folder
from jaxserve.platform import choose_platform


class Sort(enum.StrEnum):
    given = "given"
    latency = "latency"
    throughput = "throughput"
    room = "room"
    memory = "memory"


def plan(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL [SECTION.KEY=VALUE]...",
            help="MODEL is a name of configs/models, a config.json, a folder, a .gguf file or a hub id; weights are not needed. A word with = sets one key: "
            "model.dtype, cache.dtype, cache.page_size, mesh.replicate_kv_heads and sharding.… count here.",
            show_default=False,
        ),
    ],
    on: Annotated[list[str], typer.Option("--on", metavar="TARGET", help="Chips, such as v6e:2x4, v5p:2x2x1 or h200:8. Repeatable.", show_default=False)],
    mesh: Annotated[
        list[str] | None, typer.Option("--mesh", metavar="all|MESH", help="A layout, such as data=2,model=4. Repeatable.", show_default="all")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, max=65_536, metavar="N", help="Sequences that decode at once, over all data ranks.")] = 64,
    context: Annotated[int, typer.Option(min=2, max=2**24, metavar="N", help="Tokens that each of them holds.")] = 4096,
    chunk: Annotated[int, typer.Option(min=2, max=2**20, metavar="N", help="Tokens of a mixed step, prompt and decodes, over all data ranks.")] = 2048,
    budget: Annotated[
        bool, typer.Option("--budget", metavar="", help="Print each layout's memory as a hand calculation, beside the compiler's figures.")
    ] = False,
    sort: Annotated[Sort, typer.Option(help="Order of the table.")] = Sort.given,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON object and nothing else on stdout.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a page with plots.", show_default=False)] = None,
    measured: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON lines of measured steps to set beside the predictions (docs/plan.md).", show_default=False)
    ] = None,
    debug: Debug = False,
) -> None:
    """Compare mesh layouts without owning the chips: does it fit, what crosses the links, and a predicted step time.

    The engine's own decode and mixed step is compiled for each layout, two at a time. Times are predictions. Exits with 1 if no layout fits.

    Examples:

        jaxserve plan llama-3.1-70b --on v6e:2x4

        jaxserve plan qwen3-8b --on v6e:2x2 --on h100:2 --mesh data=1,model=2 --batch 128 --budget

        jaxserve plan llama-3.1-70b --on h200:8 --sort throughput --html plan.html
    """
    set_up_logging("debug" if debug else None)
    choose_platform("cpu")
    model, settings = split_words(words)
    if model is None:
        raise typer.BadParameter("MODEL is missing")

    from jaxserve.mesh_shape import parse_mesh
    from jaxserve.models.context_length import check_context_length
    from jaxserve.models.loading.specs import open_spec
    from jaxserve.plan import report
    from jaxserve.plan.advice import best_layouts, what_would_fit
    from jaxserve.plan.budget import budget as make_budget
    from jaxserve.plan.budget import format_budget
    from jaxserve.plan.html import write_page
    from jaxserve.plan.measured import Measured, comparisons, read_measured
    from jaxserve.plan.planner import Question, plan_layouts
    from jaxserve.plan.request import Load
    from jaxserve.plan.topology import parse_topology
    from jaxserve.plots import require_matplotlib

    require_folder("--html", html)
    if html is not None:
        require_matplotlib()
    seen: Measured = {} if measured is None else read_measured(measured)
    targets = [parse_topology(text) for text in on]
    wanted = mesh or ["all"]
    layouts = [
        (target, shape)
        for target in targets
        for text in wanted
        for shape in (target.all_meshes() if text.strip() == "all" else [target.mesh(parse_mesh(text))])
    ]
    layouts = list(dict.fromkeys(layouts))
    name, spec = open_spec(model)
    check_context_length(context, spec, key="--context", model=name)
    load = Load(batch=batch, context=context, chunk=chunk)
    question = Question(source=model, name=name, spec=spec, config=load_config(overrides=settings), settings=tuple(settings), load=load)
    with progress_bars() as progress:
        plans = plan_layouts(question, layouts, progress=progress)
    plans.sort(key=report.SORTS[sort.value])
    best = best_layouts(plans)
    misfits = what_would_fit(question, plans)
    remarks = [*report.reasons(plans, best), *comparisons(plans, seen)]
    budgets = [make_budget(question, one) if budget and one.status != "refused" else [] for one in plans]
    if as_json:
        shown = report.as_json(plans, best, seen)
        if budget:
            for one, lines in zip(shown["layouts"], budgets, strict=True):
                one["budget"] = [dataclasses.asdict(line) for line in lines]
        emit(json.dumps(shown))
    else:
        console = tables_console()
        console.print(report.table(plans, best, load))
        for line in remarks:
            console.print(line, soft_wrap=True, highlight=False, markup=False)
        for one, lines in zip(plans, budgets, strict=True):
            if lines:
                emit("\n" + format_budget(lines, f"{one.target} {one.mesh}, memory of one device"))
    for line in misfits:
        print(line, file=sys.stderr)
    if html is not None:
        write_page(html, question, plans, best, [*misfits, *remarks])
    if not any(one.fits for one in plans):
        raise typer.Exit(1)

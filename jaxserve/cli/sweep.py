"""``jaxserve sweep``: experiments of many cells, and comparing two of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jaxserve.cli.options import Debug
from jaxserve.cli.output import emit
from jaxserve.cli.progress import progress_bars
from jaxserve.log import set_up_logging


def sweep(
    file: Annotated[Path | None, typer.Argument(metavar="EXPERIMENT", help="YAML file of an experiment, such as those in configs/experiments.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the results; one that holds some is gone on with.", show_default="results/EXPERIMENT")
    ] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", metavar="", help="Run cells again that gave no figures.")] = False,
    show_cells: Annotated[bool, typer.Option("--list", metavar="", help="Print the cells and what became of each; run nothing.")] = False,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option("--compare", metavar="A B", help="Lay the results of two folders side by side instead.", show_default=False)
    ] = None,
    debug: Debug = False,
) -> None:
    """Run an experiment: every cell in a process of its own, measured on the devices at hand or planned for chips that are not.

    Stopped half-way, the same command goes on where it stopped. Exits with 1 if a cell gave no figures.

    Examples:

        jaxserve sweep configs/experiments/tp-or-dp.yaml

        jaxserve sweep --compare results/before results/after
    """
    set_up_logging("debug" if debug else None)
    from jaxserve.experiments.compare import compare as compare_folders
    from jaxserve.experiments.file import read_experiment
    from jaxserve.experiments.results import Results, held, read_results
    from jaxserve.experiments.summary import write_summary
    from jaxserve.experiments.sweep import process_runner, run_sweep

    if compare is not None:
        if file is not None:
            raise typer.BadParameter("--compare takes two folders and no experiment")
        emit(compare_folders(*compare))
        return
    if file is None:
        raise typer.BadParameter("EXPERIMENT is missing, or --compare A B")
    experiment = read_experiment(file)
    folder = out or Path("results") / experiment.name
    if show_cells:
        found = {result.cell: result for result in read_results(folder, missing_ok=True)}
        for cell in experiment.cells:
            result = found.get(cell.id)
            emit(f"{cell.id}  {'not run' if result is None else result.status:9}  {experiment.label(cell)}{f'  ({cell.problem})' if cell.problem else ''}")
        return
    ids = [cell.id for cell in experiment.cells]
    with held(folder):
        results = Results(folder)
        try:
            with progress_bars() as progress:
                run_sweep(
                    experiment, results, process_runner(file, experiment.time_limit_s), retry_failed=retry_failed,
                    progress=lambda done, total: progress("cells", done, total),
                )  # fmt: skip
        finally:
            lines = write_summary(experiment, results.of(ids), folder)
    for line in lines:
        emit(line)
    if any(result.status != "done" for result in results.of(ids)):
        raise typer.Exit(1)

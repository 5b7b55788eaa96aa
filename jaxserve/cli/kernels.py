"""``jaxserve kernels check``: proves the kernels on this machine, chips or none."""

from __future__ import annotations

from typing import Annotated

import typer

from jaxserve.errors import ConfigError
from jaxserve.platform import choose_platform

kernels = typer.Typer(help="Prove the kernels.", no_args_is_help=True)


@kernels.callback()
def _group() -> None:
    """Prove the kernels."""


@kernels.command()
def check(
    op: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Check this op. Repeatable.", show_default="all")] = None,
    target: Annotated[
        list[str] | None, typer.Option(metavar="CHIP", help="Compile for this chip. Repeatable.", show_default="all whose compilers are installed")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", metavar="", help="A part of each kind of check.")] = False,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="End with one JSON object: cells, held, failed.")] = False,
) -> None:
    """Check every implementation on every shape: numbers, races, and real compiles for chips that need not be here.

    Exits with 0 only if every cell of the table holds; a combination that docs/kernels.md lists as refused holds when it is refused.

    Examples:

        jaxserve kernels check --quick

        jaxserve kernels check --target v6e --target h200 --json
    """
    choose_platform("cpu")
    from jaxserve.kernels_pallas.proof.check import report
    from jaxserve.kernels_pallas.proof.ops import OPS
    from jaxserve.kernels_pallas.proof.targets import TARGETS

    for kind, given, known in (("op", op or [], OPS), ("target", target or [], TARGETS)):
        for name in given:
            if name not in known:
                raise ConfigError(f"--{kind} is {name!r}; must be one of {', '.join(known)}")
    raise typer.Exit(report(ops=[OPS[name] for name in dict.fromkeys(op or OPS)], chosen_targets=target, quick=quick, as_json=as_json))

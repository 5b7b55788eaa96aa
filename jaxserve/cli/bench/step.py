"""``jaxserve bench step``: where the time of one engine step goes."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from jaxserve.cli.bench import options
from jaxserve.cli.options import CompiledOption, ConfigFiles, Debug, MeshOption, PlatformOption, Words, resolve_config
from jaxserve.cli.output import tables_console
from jaxserve.cli.progress import progress_bars
from jaxserve.config import SchedulerConfig
from jaxserve.errors import ConfigError
from jaxserve.platform import choose_platform

_STEPS = "Steps"


def step(
    words: Words = None,
    batch: Annotated[
        str | None, typer.Option(metavar="N,M,…", help="Decode steps of so many sequences.", rich_help_panel=_STEPS, show_default="1,8,32 without others")
    ] = None,
    prefill: Annotated[
        str | None, typer.Option(metavar="N,M,…", help="Steps of one prompt of so many tokens.", rich_help_panel=_STEPS, show_default=False)
    ] = None,
    mixed: Annotated[
        str | None, typer.Option(metavar="B+N,…", help="Steps of B decodes and one prompt of N tokens.", rich_help_panel=_STEPS, show_default=False)
    ] = None,
    context: Annotated[int, typer.Option(min=2, metavar="N", help="Tokens that each decoding sequence attends to.", rich_help_panel=_STEPS)] = 200,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Steps of each kind that count.", rich_help_panel=_STEPS)] = 20,
    json_file: options.JsonFile = None,
    config: ConfigFiles = None,
    platform: PlatformOption = None,
    mesh: MeshOption = None,
    compiled: CompiledOption = None,
    debug: Debug = False,
) -> None:
    """Take steps of the engine apart: host schedule, batch build, dispatch, device, fetch, update and output; beside them bytes, FLOPs, MBU and MFU.

    The ceilings of MBU and MFU are measured on this machine just before.

    Examples:

        jaxserve bench step

        jaxserve bench step gemma3-270m --batch 1,8 --prefill 128,512 --mixed 31+128 --json step.json
    """
    options.check_outputs(json_file)
    batches, prompts = options.whole_numbers(batch, "--batch"), options.whole_numbers(prefill, "--prefill")
    both = _pairs(mixed)
    if not (batches or prompts or both):
        batches = [1, 8, 32]
    usual = SchedulerConfig()
    sequences = max([*batches, *(decodes + 1 for decodes, _ in both), usual.max_num_seqs])
    tokens = max([*prompts, *map(sum, both), sequences, usual.max_tokens_per_step])
    defaults: dict[str, Any] = {"engine.warmup": False}  # only what is measured is compiled
    if compiled is None:  # those programs have their own limits
        defaults |= {"scheduler.max_num_seqs": sequences, "scheduler.max_tokens_per_step": tokens}
    resolved = resolve_config(words, config, platform=platform, mesh=mesh, compiled=compiled, debug=debug, defaults=defaults)
    choose_platform(resolved.platform)

    from jaxserve.bench.local import step_report
    from jaxserve.bench.local.step_run import measure_steps
    from jaxserve.bench.local.steps import shapes_of

    with progress_bars() as progress:
        found = measure_steps(resolved, list(shapes_of(batches, prompts, both)), context=context, repeats=repeats, progress=progress)
    options.all_of(lambda: step_report.print_report(found, tables_console()), lambda: options.write_json(json_file, step_report.to_json(found)))
    if found.interrupted:
        raise typer.Exit(options.INTERRUPTED_STATUS)


def _pairs(text: str | None) -> list[tuple[int, int]]:
    """Reads ``31+128,7+64``.

    Raises:
        ConfigError: Not of this form.
    """
    pairs: list[tuple[int, int]] = []
    for part in text.split(",") if text is not None else ():
        decodes, plus, prompt = part.partition("+")
        if not plus or not (decodes.strip().isdigit() and prompt.strip().isdigit()) or not int(decodes) or int(prompt) < 2:
            raise ConfigError(f"--mixed is {text!r}; must be DECODES+TOKENS separated by commas, such as 31+128, with at least 1 and 2")
        pairs.append((int(decodes), int(prompt)))
    return pairs

"""``jaxserve generate``: complete prompts and end."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from jaxserve.cli.options import (
    ONE_SHOT_DEFAULTS,
    CompiledOption,
    ConfigFiles,
    Debug,
    MaxTokens,
    MeshOption,
    MinP,
    PlatformOption,
    Seed,
    Stop,
    Temperature,
    TopK,
    TopP,
    Words,
    resolve_config,
    sampling_fields,
)
from jaxserve.cli.output import emit
from jaxserve.cli.progress import progress_bars
from jaxserve.errors import EngineError
from jaxserve.platform import choose_platform

if TYPE_CHECKING:
    from jaxserve.llm import Completion


def generate(
    words: Words = None,
    prompt: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Text to continue. Repeatable; required.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="One JSON object a line, in the order of the prompts.")] = False,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = None,
    stop: Stop = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", metavar="", help="Go on past the model's end of text.")] = False,
    config: ConfigFiles = None,
    platform: PlatformOption = None,
    mesh: MeshOption = None,
    compiled: CompiledOption = None,
    debug: Debug = False,
) -> None:
    """Continue one or more prompts with MODEL (default: smollm2-135m), all in one batch. Results go to stdout, logs to stderr.

    Examples:

        jaxserve generate --prompt "The capital of France is" --max-tokens 16 --temperature 0

        jaxserve generate gemma3-270m --prompt "Once" --prompt "Twice" --json model.dtype=float32
    """
    if not prompt:
        raise typer.BadParameter("at least one is needed", param_hint="--prompt")
    resolved = resolve_config(words, config, platform=platform, mesh=mesh, compiled=compiled, debug=debug, defaults=ONE_SHOT_DEFAULTS)
    choose_platform(resolved.platform)

    from jaxserve.engine.requests.sampling_params import resolve_sampling

    fields = sampling_fields(max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, stop=stop, ignore_eos=ignore_eos)
    resolve_sampling(fields, {})  # a bad value shows before the model loads, and before jax does

    from jaxserve.llm import LLM

    with progress_bars() as progress:
        llm = LLM(config=resolved, progress=progress)
    completions = llm.generate(prompt, resolve_sampling(fields, llm.sampling_defaults), progress=sys.stderr.isatty())
    for index, completion in enumerate(completions):
        if as_json:
            emit(to_json(completion))
        elif len(prompt) == 1:
            emit(completion.text)
        else:
            emit(f"[{index + 1}] {completion.prompt}\n{completion.text}\n")
    for index, completion in enumerate(completions):
        if completion.error is not None:
            raise EngineError(f"prompt {index + 1} did not finish: {completion.error}")


def to_json(completion: Completion) -> str:
    """One line: prompt, text, token_ids (generated only), finish_reason, stop_reason, usage, and error where there is one."""
    fields: dict[str, object] = {
        "prompt": completion.prompt,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "usage": {**msgspec.structs.asdict(completion.usage), "total_tokens": completion.usage.total_tokens},
    }
    if completion.error is not None:
        fields["error"] = completion.error
    return json.dumps(fields, ensure_ascii=False)

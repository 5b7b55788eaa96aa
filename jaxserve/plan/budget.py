"""The memory of one device as an engineer works it out by hand, and beside it what the compiler says. Every line shows how it comes about."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxserve.engine.programs.pool_plan import ACCELERATOR_MEMORY_FRACTION
from jaxserve.plan.planner import LayoutPlan, Question
from jaxserve.plan.roofline import Split
from jaxserve.plan.units import format_bytes

CONTEXTS = (4096, 16_384, 131_072)
"""Lengths for which requests are counted."""


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of a budget.

    Args:
        name: What is counted.
        by_hand: The figure of the hand calculation.
        compiled: The compiler's, or what follows from it; ``None`` where it says nothing.
        unit: ``bytes``, ``tokens`` or ``requests``.
        how: The calculation.
    """

    name: str
    by_hand: float
    compiled: float | None
    unit: str
    how: str


def budget(question: Question, plan: LayoutPlan) -> list[Line]:
    """The budget of one layout, per device, and what all data ranks together can hold.

    Args:
        question: What is planned.
        plan: A layout that is not refused.
    """
    split = question.split(plan.target, plan.mesh)
    spec, model, ranks, load = split.spec, plan.mesh.model, plan.mesh.data, question.load
    usable = plan.target.chip.usable_bytes
    parameters = split.parameter_bytes()
    weights = sum(parameters.values())
    activations, how_activations = _activations(split, load.tokens("mixed", ranks), load.rows(ranks))
    token_bytes = split.kv_token_bytes()
    free = usable - weights
    pool = max(0.0, min(ACCELERATOR_MEMORY_FRACTION * free, free - activations))
    count = weights // split.weight_bytes
    compiled_tokens = plan.room.tokens if plan.room is not None else None
    tokens = int(pool / token_bytes) * ranks
    lines = [
        Line("memory of a device", usable, usable, "bytes", f"what a program may use of {plan.target.chip.memory_bytes / 2**30:.0f} GiB"),
        Line("weights", weights, plan.weight_bytes, "bytes", f"{count / 1e9:.3f}e9 weights of {split.weight_bytes} bytes on each of {model} model ranks"),
        Line("activations", activations, plan.temp_bytes, "bytes", how_activations),
        Line(
            "KV of one token", token_bytes, plan.kv_bytes / (question.pool_bytes(split) / token_bytes), "bytes",
            f"{spec.attention.token_formula(spec.num_layers, split.pool_parts)} x {split.kv_bytes} bytes",
        ),
        Line("KV pool", pool, None if compiled_tokens is None else compiled_tokens / ranks * token_bytes, "bytes", _how_pool(activations, free)),
        Line("KV tokens", tokens, compiled_tokens, "tokens", f"pool / KV of one token x {ranks} data ranks"),
    ]  # fmt: skip
    for length in CONTEXTS:
        of_compiled = None if compiled_tokens is None else compiled_tokens // ranks // length * ranks
        name = f"requests of {length // 1024}k"
        how = f"whole requests in each data rank's {tokens // ranks:,} tokens"
        if length <= spec.max_position:
            lines.append(Line(name, tokens // ranks // length * ranks, of_compiled, "requests", how))
    return lines


def _how_pool(activations: float, free: float) -> str:
    if (1 - ACCELERATOR_MEMORY_FRACTION) * free > activations:
        return f"{ACCELERATOR_MEMORY_FRACTION:.0%} of what weights leave, as an engine takes it"
    return "what weights and activations leave"


def _activations(split: Split, tokens: int, rows: int) -> tuple[float, str]:
    """The most that lives at once: in an MLP the residual stream twice, gate and up in float32 and their product; or the logits of all rows."""
    spec = split.spec
    mlp = max(kind.mlp.width for group in spec.groups for kind in group.unit) // split.model_parts("mlp")
    vocab = spec.vocab_size // split.model_parts("vocab")
    in_mlp = tokens * (2 * spec.width * split.weight_bytes + 2 * mlp * 4 + mlp * split.weight_bytes)
    logits = 2 * rows * vocab * 4
    if in_mlp >= logits:
        return in_mlp, f"{tokens} tokens in one MLP: 2 x {spec.width} and {mlp} in the model's dtype, 2 x {mlp} in float32"
    return logits, f"logits of {rows} rows, {vocab} in float32, twice"


def format_budget(lines: Sequence[Line], title: str) -> str:
    """A budget as text."""
    rows = [("", "by hand", "compiler", "how")] + [
        (line.name, _figure(line.by_hand, line.unit), "" if line.compiled is None else _figure(line.compiled, line.unit), line.how) for line in lines
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    body = [f"  {name:<{widths[0]}}  {hand:>{widths[1]}}  {compiled:>{widths[2]}}   {how}".rstrip() for name, hand, compiled, how in rows]
    return "\n".join([title, *body])


def _figure(value: float, unit: str) -> str:
    return format_bytes(value, digits=2) if unit == "bytes" else f"{value:,.0f}"

"""Predicts a step's time from what it must move and compute. Pure functions over plain numbers; every figure is of one device.

The model is the roofline of "How To Scale Your Model" (jax-ml.github.io/scaling-book, chapters on inference and on sharded matrices): memory traffic and
arithmetic overlap, collectives do not. It knows no kernel start-up, no host and no imperfect kernels, so real steps take longer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from jaxserve.config import ShardingConfig
from jaxserve.kernels_pallas.chips import Chip, Links
from jaxserve.mesh_axes import MODEL
from jaxserve.mesh_shape import MeshShape
from jaxserve.models.params import param_specs, product_flops
from jaxserve.models.spec import ModelSpec
from jaxserve.plan.request import Load, StepKind
from jaxserve.plan.traffic import Collective
from jaxserve.sharding_rules import ShardingRules

Binding = Literal["weights", "weight copies", "keys and values", "activations", "arithmetic", "links"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """A model as one device holds it.

    Args:
        spec: With as many KV heads as the model ranks need (``models.sharding.fit_kv_heads``).
        mesh: The mesh.
        rules: Sharding rules.
        weight_bytes: Of one weight.
        kv_bytes: Of one element of a key or value.
    """

    spec: ModelSpec
    mesh: MeshShape
    rules: ShardingConfig
    weight_bytes: int
    kv_bytes: int

    def parts(self, logical: str) -> int:
        """Into how many parts a logical axis is split."""
        return ShardingRules(self.rules, self.mesh).num_parts(logical)

    def parameter_bytes(self) -> dict[str, int]:
        """Bytes of each parameter on one device, all layers together."""
        return {path: param.num_bytes(self.weight_bytes, self.parts) for path, param in param_specs(self.spec).items()}

    @property
    def pool_parts(self) -> int:
        """How many model ranks share a data rank's pool."""
        return self.model_parts(self.spec.attention.pool_axis)

    def kv_token_bytes(self, num_layers: int | None = None) -> int:
        """Bytes of one token's keys and values, without what a pool's layout adds to fill its tiles."""
        layers = self.spec.num_layers if num_layers is None else num_layers
        return layers * self.spec.attention.token_values(self.pool_parts) * self.kv_bytes

    def attended(self, context: float) -> float:
        """Tokens that a query at ``context`` sees, summed over layers: fewer where a layer has a window."""
        return sum(layer.seen(context) for layer in self.spec.layers)

    def model_parts(self, logical: str) -> int:
        """Into how many parts the work along a logical axis is split. A weight split over ``data`` is gathered, not saved."""
        return ShardingRules(self.rules, self.mesh).parts_over(logical, MODEL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What one step does on one device.

    Args:
        weight_bytes: Weights read: all but the rows of the embedding table that no token asks for.
        weight_copy_bytes: Read and written to copy weights.
        kv_bytes: Keys and values read and written.
        activation_bytes: Inputs and outputs of the products with weights, and the logits.
        flops: Products with weights, and attention.
        collectives: What crosses links.
        tokens: Packed tokens of all data ranks.
        sequences: Of them those that yield a token of output.
    """

    weight_bytes: float
    weight_copy_bytes: float
    kv_bytes: float
    activation_bytes: float
    flops: float
    collectives: tuple[Collective, ...]
    tokens: int
    sequences: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """A predicted step: a model's word, not a measurement. Times in milliseconds.

    Args:
        step_ms: ``max(memory, arithmetic) + links``.
        weights_ms: Reading weights at the data sheet's bandwidth.
        weight_copies_ms: Copying weights, if the program does.
        kv_ms: Reading keys and values.
        activations_ms: Reading and writing activations.
        arithmetic_ms: At the data sheet's dense peak.
        links_ms: Collectives, one after the other.
        tokens_per_s: Packed tokens a second: of output in a decode step; of output and prompt in a mixed one.
        tokens_per_s_per_chip: The same for each chip of the mesh.
        mfu: Share of the peak FLOP/s.
        mbu: Share of the peak bandwidth that weights, keys and values take.
        binds: The largest of the terms.
    """

    step_ms: float
    weights_ms: float
    weight_copies_ms: float
    kv_ms: float
    activations_ms: float
    arithmetic_ms: float
    links_ms: float
    tokens_per_s: float
    tokens_per_s_per_chip: float
    mfu: float
    mbu: float
    binds: Binding


def step_work(split: Split, load: Load, step: StepKind, *, weight_copy_bytes: float = 0.0, collectives: Sequence[Collective] = ()) -> Work:
    """What a step does on a device of the data rank that has most to do.

    In a decode step every sequence is ``load.context`` long. In a mixed step all but one are, and the rest of the tokens are one prompt's chunk, whose
    tokens see half the context on average and whose keys and values are read once.

    Args:
        split: The model on the mesh.
        load: What runs at once.
        step: ``decode`` or ``mixed``.
        weight_copy_bytes: Written into copies of weights (``traffic.Traffic``).
        collectives: Of the compiled step.
    """
    ranks = split.mesh.data
    prompt = load.prompt_tokens(step, ranks)
    work = rank_work(
        split, decodes=load.sequences(ranks) - (prompt > 0), context=load.context, prompt=prompt, prompt_context=load.context,
        weight_copy_bytes=weight_copy_bytes, collectives=collectives,
    )  # fmt: skip
    return work if prompt else dataclasses.replace(work, tokens=load.batch, sequences=load.batch)  # not every rank has as many as the fullest


def rank_work(
    split: Split,
    *,
    decodes: int,
    context: float,
    prompt: int = 0,
    prompt_context: float = 0,
    weight_copy_bytes: float = 0.0,
    collectives: Sequence[Collective] = (),
) -> Work:
    """What a step of any make-up does on one device, where each data rank has the same.

    Args:
        split: The model on the mesh.
        decodes: Sequences of the rank that take one token.
        context: How long each of them is.
        prompt: Tokens of one prompt's chunk, 0 for none.
        prompt_context: Where the chunk ends: its tokens see half of that on average, and its keys and values are read once.
        weight_copy_bytes: Written into copies of weights (``traffic.Traffic``).
        collectives: Of the compiled step.
    """
    spec, ranks = split.spec, split.mesh.data
    rows, tokens = decodes + (prompt > 0), decodes + prompt
    attended = decodes * split.attended(context) + prompt * split.attended(prompt_context / 2)
    kv_token_layer = split.kv_token_bytes(num_layers=1)
    read_tokens = decodes * split.attended(context) + (split.attended(prompt_context) if prompt else 0)
    per_token, per_row = product_flops(spec, split.model_parts)
    per_seen_token = spec.attention.flops_per_seen_token / split.model_parts(spec.attention.head_axis)
    parameters = split.parameter_bytes()
    if not spec.tied:
        parameters.pop("embed")
    return Work(
        weight_bytes=sum(parameters.values()),
        weight_copy_bytes=2 * weight_copy_bytes,
        kv_bytes=read_tokens * kv_token_layer + tokens * split.kv_token_bytes(),
        activation_bytes=_activation_bytes(split, tokens, rows),
        flops=tokens * per_token + rows * per_row + per_seen_token * attended,
        collectives=tuple(collectives),
        tokens=tokens * ranks,
        sequences=rows * ranks,
    )


def predict(work: Work, chip: Chip, *, num_chips: int, dtype: str) -> Prediction:
    """The time of a step on one kind of chip.

    Args:
        work: What it does on one device.
        chip: The facts of the chip.
        num_chips: Of the whole mesh.
        dtype: Of the products' operands.
    """
    milli = 1e3
    memory = {
        "weights": work.weight_bytes, "weight copies": work.weight_copy_bytes, "keys and values": work.kv_bytes, "activations": work.activation_bytes,
    }  # fmt: skip
    memory_ms = {name: milli * num_bytes / chip.bytes_per_s for name, num_bytes in memory.items()}
    peak = chip.peak_flops_per_s(dtype)
    arithmetic_ms = milli * work.flops / peak
    links_ms = milli * sum(collective_seconds(collective, chip.links) for collective in work.collectives)
    step_ms = max(sum(memory_ms.values()), arithmetic_ms) + links_ms
    terms: dict[Binding, float] = {**memory_ms, "links": links_ms}  # type: ignore[dict-item]
    if arithmetic_ms > sum(memory_ms.values()):
        terms = {"arithmetic": arithmetic_ms, "links": links_ms}
    seconds = step_ms / milli
    return Prediction(
        step_ms=step_ms,
        weights_ms=memory_ms["weights"],
        weight_copies_ms=memory_ms["weight copies"],
        kv_ms=memory_ms["keys and values"],
        activations_ms=memory_ms["activations"],
        arithmetic_ms=arithmetic_ms,
        links_ms=links_ms,
        tokens_per_s=work.tokens / seconds,
        tokens_per_s_per_chip=work.tokens / seconds / num_chips,
        mfu=work.flops / (seconds * peak),
        mbu=(work.weight_bytes + work.kv_bytes) / (seconds * chip.bytes_per_s),
        binds=max(terms, key=lambda name: terms[name]),
    )


def collective_seconds(collective: Collective, links: Links) -> float:
    """Time of all collectives of one kind and axis, each a ring over its group.

    A ring sends ``(n-1)/n`` of the array to gather or to scatter it and twice that to reduce it everywhere. On a torus, whose rings run both ways, hops take
    ``n/2`` (twice that to reduce) and overlap with the bytes (scaling book, chapter on sharded matrices); at a switch they add to them (NCCL's tuning model).
    """
    if not collective.count:
        return 0.0
    n = collective.group_size
    passes = {"all-reduce": 2, "collective-permute": 1}.get(collective.kind, 1)
    share = 1.0 if collective.kind == "collective-permute" else passes * (n - 1) / n
    hops = 1.0 if collective.kind == "collective-permute" else passes * (n / 2 if links.kind == "torus" else n - 1)
    moving = share * collective.bytes / collective.count / links.ring_bytes_per_s
    waiting = links.start_s + hops * links.hop_s
    return collective.count * (max(moving, waiting) if links.kind == "torus" else moving + waiting)


def with_batch(collectives: Sequence[Collective], factor: float) -> tuple[Collective, ...]:
    """The same collectives for another number of tokens: a step's messages grow with its rows."""
    return tuple(dataclasses.replace(collective, bytes=round(collective.bytes * factor)) for collective in collectives)


def _activation_bytes(split: Split, tokens: int, rows: int) -> float:
    values = sum(param.row_values(split.model_parts) for param in param_specs(split.spec).values() if param.per_layer)
    logits = rows * split.spec.vocab_size / split.model_parts("vocab")
    return tokens * values * split.weight_bytes + 2 * logits * 4

"""Fills a model's parameters from a checkpoint, part by part and block by block, and accounts for every key."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxserve.errors import CheckpointError
from jaxserve.mesh import Layout
from jaxserve.models.loading.parts import make_array, num_local_values
from jaxserve.models.loading.pieces import Box, Place, place_of
from jaxserve.models.loading.progress import Progress
from jaxserve.models.loading.source import TensorSource
from jaxserve.models.param_spec import ParamSpec, Piece
from jaxserve.models.params import Params, build_params, param_specs
from jaxserve.models.sharding import param_sharding
from jaxserve.models.spec import ModelSpec

if TYPE_CHECKING:
    from jaxserve.models.model import Model

BLOCK_VALUES = 1 << 22
"""Values read at a time: 16 MiB as float32."""

MAX_LISTED_KEYS = 20
ROTARY_BUFFER = re.compile(r"(.*\.)?rotary_emb\.inv_freq")
"""Buffers that old checkpoints saved; recomputed from the config."""

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def assemble(source: TensorSource, model: Model, *, layout: Layout | None = None, progress: Progress | None = None) -> Params:
    """The parameters of a model, from a checkpoint. Each device of this process gets its own part of each, and only that is read for it.

    Peak memory of the host is one device's part of one parameter plus a block; on CPU the arrays take over the filled buffers.

    Args:
        source: The checkpoint.
        model: Says which parameters, in which dtype and form.
        layout: How they are split over devices; ``None`` puts them on jax's default device.
        progress: Called with a stage, values done and values in all: those that this process reads.

    Raises:
        CheckpointError: Keys are missing, left over or misshapen (all are listed), or data cannot be read.
    """
    check_keys(source, model.spec)

    def target(param: ParamSpec, layer: int | None) -> tuple[tuple[int, ...], NamedSharding | None]:
        return param.array_shape(layer), None if layout is None else param_sharding(param, layer, layout)

    def count(_path: str, param: ParamSpec, layer: int | None) -> int:
        return num_local_values(*target(param, layer))

    report = _Report(progress, sum(jax.tree.leaves(build_params(model.spec, model.layers, count))))

    def make(_path: str, param: ParamSpec, layer: int | None) -> jax.Array:
        stacked = param.per_layer and layer is None

        def fill(buffer: np.ndarray, part: Box) -> None:
            assert not stacked or part[0] == slice(0, len(param.indices)), "layers are never split"
            for index, destination in zip(param.indices, buffer, strict=True) if stacked else ((layer, buffer),):
                for piece in param.pieces:
                    report.add(_fill(destination, part[1:] if stacked else part, source, piece, place_of(piece, param.shape), piece.name.format(layer=index)))

        shape, sharding = target(param, layer)
        return make_array(shape, model.dtype, sharding, fill)

    return build_params(model.spec, model.layers, make)


def check_keys(source: TensorSource, spec: ModelSpec) -> None:
    """Raises one :class:`CheckpointError` that lists every key that is missing, left over or of another shape than the model needs.

    Two kinds of extra keys are let pass: rotary frequency buffers, and an output head beside tied embeddings when both are equal.
    """
    found = {name: source.shape(name) for name in source.keys() if not ROTARY_BUFFER.fullmatch(name)}  # noqa: SIM118  not a mapping
    clash = ""
    if spec.tied and HEAD in found and EMBEDDING in found:
        if _equal(source, HEAD, EMBEDDING):
            del found[HEAD]
        else:
            clash = f"{HEAD} differs from {EMBEDDING}, although the config ties them"
    refuse_problems("the checkpoint", [*key_problems(_expected_shapes(spec), found), clash])


def key_problems(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> list[str]:
    """What is wrong with a checkpoint's keys, one text a kind of problem; the first keys of each kind are named."""
    shared = sorted(expected.keys() & found.keys())
    wrong = [f"{name} is {list(found[name])}, expected {list(expected[name])}" for name in shared if found[name] != expected[name]]
    kinds = {"missing": sorted(expected.keys() - found.keys()), "not part of the model": sorted(found.keys() - expected.keys()), "of another shape": wrong}
    problems: list[str] = []
    for kind, names in kinds.items():
        if names:
            more = f", and {len(names) - MAX_LISTED_KEYS} more" if len(names) > MAX_LISTED_KEYS else ""
            problems.append(f"{len(names)} {kind}: {', '.join(names[:MAX_LISTED_KEYS])}{more}")
    return problems


def refuse_problems(what: object, problems: Sequence[str]) -> None:
    """Raises :class:`CheckpointError` if there is any problem."""
    if text := "; ".join(filter(None, problems)):
        raise CheckpointError(f"{what} does not fit the model: {text}")


def _expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    return {piece.name.format(layer=layer): piece.shape for param in param_specs(spec).values() for piece in param.pieces for layer in param.indices}


def _fill(destination: np.ndarray, part: Box, source: TensorSource, piece: Piece, place: Place, name: str) -> int:
    """Writes what a tensor has of one part of a layer's parameter, in blocks of whole entries of the rows' axis. Returns how many values that is."""
    shared = place.shared(part)
    if shared is None:
        return 0
    rows, columns = place.rows, place.columns
    view = destination[shared][(0,) * rows.axis]
    entries = rows.held(part)
    cut, num_columns = None, math.prod(piece.shape[1:])
    if columns is not None and len(held := columns.held(part)) < columns.num_entries:
        cut, num_columns = slice(held.start * columns.each, held.stop * columns.each), len(held) * columns.each
    step = max(1, BLOCK_VALUES // (rows.each * num_columns)) * piece.repeat
    for start in range(0, len(entries), step):
        block = view[start : start + step]
        first, last = entries[start], entries[start + len(block) - 1]
        heads = slice(first // piece.repeat, last // piece.repeat + 1)  # entries of the tensor, which stand `repeat` times in the parameter
        values = source.read(name, slice(heads.start * rows.each, heads.stop * rows.each), cut).reshape(-1, *block.shape[1:])
        block[...] = values if piece.repeat == 1 else values[np.arange(first, last + 1) // piece.repeat - heads.start]
    return view.size


def _equal(source: TensorSource, a: str, b: str) -> bool:
    shape = source.shape(a)
    if shape != source.shape(b):
        return False
    step = max(1, BLOCK_VALUES // max(1, int(np.prod(shape[1:], dtype=np.int64))))
    blocks = (slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step))
    return all(np.array_equal(source.read(a, rows), source.read(b, rows)) for rows in blocks)


class _Report:
    """Counts values for the progress callback."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._done, self._total = progress, 0, total

    def add(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress("loading weights", self._done, self._total)

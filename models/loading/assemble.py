"""Fills a model's parameters from a checkpoint, tensor by tensor and block of rows by block of rows, and accounts for every key."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.models.loading.progress import Progress
from jaxserve.models.loading.source import TensorSource
from jaxserve.models.params import Params, ParamSpec, Piece, build_params, param_specs
from jaxserve.models.spec import ModelSpec

if TYPE_CHECKING:
    from jaxserve.models.model import Model

BLOCK_VALUES = 1 << 22
"""Values read at a time: 16 MiB as float32."""

MAX_LISTED_KEYS = 20
ALIGNMENT = 64
"""XLA:CPU takes over a numpy buffer without a copy only at this alignment."""

ROTARY_BUFFER = re.compile(r"(.*\.)?rotary_emb\.inv_freq")
"""Buffers that old checkpoints saved; recomputed from the config."""

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

Placement = jax.Device | jax.sharding.Sharding | None


def assemble(source: TensorSource, model: Model, *, device: Placement = None, progress: Progress | None = None) -> Params:
    """The parameters of a model, from a checkpoint. Peak memory is the parameters plus one block; on CPU the arrays take over the filled buffers.

    Args:
        source: The checkpoint.
        model: Says which parameters, in which dtype and form.
        device: Where they go: a device, a sharding, or ``None`` for the default device.
        progress: Called with a stage, values done and values in all.

    Raises:
        CheckpointError: Keys are missing, left over or misshapen (all are listed), or data cannot be read.
    """
    check_keys(source, model.spec)
    report = _Report(progress, sum(num_values(param, model.spec) for param in param_specs(model.spec).values()))

    def make(_path: str, param: ParamSpec, layer: int | None) -> jax.Array:
        stacked = param.per_layer and layer is None
        buffer = _aligned_buffer((model.spec.num_layers, *param.shape) if stacked else param.shape, model.dtype)
        for index, destination in enumerate(buffer) if stacked else ((layer, buffer),):
            for piece in param.pieces:
                _fill(destination[piece.into], source, piece, piece.name.format(layer=index))
                report.add(int(np.prod(piece.shape)))
        array = jax.device_put(buffer, device, may_alias=True)
        # One host buffer at a time: a transfer must end before the next parameter is read.
        return array.block_until_ready()

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


def num_values(param: ParamSpec, spec: ModelSpec) -> int:
    """How many values a parameter has over all layers."""
    return int(np.prod(param.shape, dtype=np.int64)) * (spec.num_layers if param.per_layer else 1)


def _expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    return {
        piece.name.format(layer=layer): piece.shape
        for param in param_specs(spec).values()
        for piece in param.pieces
        for layer in (range(spec.num_layers) if param.per_layer else (0,))
    }


def _fill(destination: np.ndarray, source: TensorSource, piece: Piece, name: str) -> None:
    """Writes a tensor into a view of the same number of values, in blocks of whole leading rows of the view."""
    while destination.ndim > 1 and destination.shape[0] == 1:
        destination = destination[0]
    leading = destination.shape[0]
    rows_each, rest = divmod(piece.shape[0], leading)
    assert rest == 0, f"{piece} does not divide over {destination.shape}"
    step = max(1, BLOCK_VALUES * leading // int(np.prod(piece.shape, dtype=np.int64)))
    for start in range(0, leading, step):
        block = destination[start : start + step]
        block[...] = source.read(name, slice(start * rows_each, (start + len(block)) * rows_each)).reshape(block.shape)


def _equal(source: TensorSource, a: str, b: str) -> bool:
    shape = source.shape(a)
    if shape != source.shape(b):
        return False
    step = max(1, BLOCK_VALUES // max(1, int(np.prod(shape[1:], dtype=np.int64))))
    blocks = (slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step))
    return all(np.array_equal(source.read(a, rows), source.read(b, rows)) for rows in blocks)


def _aligned_buffer(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    raw = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + num_bytes].view(dtype).reshape(shape)


class _Report:
    """Counts values for the progress callback."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._done, self._total = progress, 0, total

    def add(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress("loading weights", self._done, self._total)

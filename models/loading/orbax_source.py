"""Tensors of a folder that :mod:`~jaxserve.models.loading.orbax_format` wrote, cut out of its arrays under their Hugging Face names."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax
import ml_dtypes  # noqa: F401  registers bfloat16 with numpy
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from jaxserve.errors import CheckpointError
from jaxserve.models.loading.assemble import key_problems, refuse_problems
from jaxserve.models.loading.orbax_layout import CHUNK_BYTES, WEIGHTS_FOLDER
from jaxserve.models.loading.pieces import Run, place_of
from jaxserve.models.param_spec import ParamSpec, Piece
from jaxserve.models.params import param_specs
from jaxserve.models.spec import ModelSpec

CACHE_BYTES = 4 * CHUNK_BYTES
"""Unpacked chunks that are kept."""

logger = logging.getLogger(__name__)


class OrbaxSource:
    """A :class:`TensorSource`.

    Orbax itself restores whole arrays, or the parts of a sharding of the same shape. Its arrays are Zarr in an OCDBT database: tensorstore, which Orbax
    reads through, reads any block of them.

    Args:
        folder: Holds ``orbax/``.
        spec: Of the checkpoint: KV heads as they were written.

    Raises:
        CheckpointError: Parameters are missing, left over or misshapen (all are listed), or the metadata cannot be read.
    """

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self._path = (folder / WEIGHTS_FOLDER).absolute()
        _check(self._path, spec)
        # Several tensors, and blocks of each, lie in one chunk: it is unpacked once while it is kept.
        context = ts.Context({"cache_pool": {"total_bytes_limit": CACHE_BYTES}})
        self._tensors: dict[str, tuple[Any, ParamSpec, Piece, tuple[int, ...]]] = {}
        largest = 0
        for path, param in param_specs(spec).items():
            array = self._open(path, context)
            largest = max(largest, math.prod(array.chunk_layout.read_chunk.shape) * array.dtype.numpy_dtype.itemsize)
            for place, layer in enumerate(param.indices):
                for piece in param.pieces:
                    self._tensors[piece.name.format(layer=layer)] = (array, param, piece, (place,) if param.per_layer else ())
        if largest > CHUNK_BYTES:
            size = f"{largest / 1e6:.0f} MB"
            logger.warning("%s: packed in chunks of up to %s, each of which is unpacked for every tensor in it; convert the model anew", folder, size)

    def keys(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name][2].shape

    def read(self, name: str, rows: slice, columns: slice | None = None) -> np.ndarray:
        array, param, piece, layer = self._tensors[name]
        place = place_of(piece, param.shape)
        box = [*place.box]
        box[place.rows.axis], num_rows, kept_rows = _entries(place.rows, rows)
        kept_columns = slice(None)
        if columns is not None:
            assert place.columns is not None, f"{name} has no columns"
            box[place.columns.axis], _, kept_columns = _entries(place.columns, columns)
        try:
            values = array[(*layer, *box)].read().result()
        except ValueError as error:
            raise CheckpointError(f"{self._path}: tensor {name!r} cannot be read: {error}") from error
        return values.reshape(num_rows)[kept_rows] if place.columns is None else values.reshape(num_rows, -1)[kept_rows, kept_columns]

    def _open(self, path: str, context: ts.Context) -> Any:
        spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": self._path.as_uri(), "path": f"{path}/"}}
        try:
            return ts.open(spec, open=True, read=True, context=context).result()
        except ValueError as error:
            raise CheckpointError(f"{self._path}: {path} cannot be read as an array that Orbax wrote: {error}") from error


def _entries(run: Run, wanted: slice) -> tuple[slice, int, slice]:
    """The entries of a parameter's axis that hold some rows (or columns), how many rows those are, and which of them were wanted."""
    first, last = wanted.start // run.each, -(-wanted.stop // run.each)
    before = first * run.each
    return slice(run.start + first, run.start + last), (last - first) * run.each, slice(wanted.start - before, wanted.stop - before)


def _check(path: Path, spec: ModelSpec) -> None:
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            metadata = checkpointer.metadata(path).item_metadata
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: cannot be read as an Orbax checkpoint: {error}") from error
    if metadata is None:
        raise CheckpointError(f"{path}: its metadata is missing; the checkpoint was not written to its end")
    found = {".".join(str(key.key) for key in keys): tuple(leaf.shape) for keys, leaf in jax.tree_util.tree_leaves_with_path(metadata.tree)}
    expected = {name: param.array_shape(None) for name, param in param_specs(spec).items()}
    refuse_problems(path, key_problems(expected, found))

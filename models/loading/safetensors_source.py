"""Tensors of a Hugging Face safetensors folder: one file, or shards with an index."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with numpy, which the safetensors library asks for by name
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxserve.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = ("F64", "F32", "F16", "BF16")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


class SafetensorsSource:
    """A :class:`TensorSource`. The files are mapped into memory; blocks are copied out when they are read.

    Args:
        folder: Holds ``model.safetensors``, or ``model.safetensors.index.json`` and its shards.

    Raises:
        CheckpointError: A file is missing or broken, the index and the shards disagree, or a tensor has a type that is no float.
    """

    def __init__(self, folder: Path) -> None:
        shards = _shard_names(folder)
        files = {name: _open(folder / name) for name in sorted(set(shards.values()) if isinstance(shards, dict) else {shards})}
        self._slices: dict[str, Any] = {}
        self._paths: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for file_name, file in files.items():
            for name in file.keys():  # noqa: SIM118  not a mapping
                if name in self._paths:
                    raise CheckpointError(f"{folder}: tensor {name!r} is in both {self._paths[name].name} and {file_name}")
                if isinstance(shards, dict) and shards.get(name) != file_name:
                    raise CheckpointError(f"{folder}: {file_name} holds tensor {name!r}, which {INDEX_FILE} places in {shards.get(name)!r}")
                self._add(folder / file_name, name, file.get_slice(name))
        if isinstance(shards, dict) and (lost := sorted(shards.keys() - self._paths.keys())):
            raise CheckpointError(f"{folder}: {INDEX_FILE} lists {len(lost)} tensors that the shards do not hold: {', '.join(lost[:20])}")

    def keys(self) -> Collection[str]:
        return self._slices.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str, rows: slice, columns: slice | None = None) -> np.ndarray:
        try:
            values = self._slices[name][rows if columns is None else (rows, columns)]
        except SafetensorError as error:
            raise CheckpointError(f"{self._paths[name]}: tensor {name!r} cannot be read: {error}") from error
        return values.astype(np.float32) if values.dtype == np.float64 else values

    def _add(self, path: Path, name: str, tensor: Any) -> None:
        dtype = tensor.get_dtype()
        if dtype not in DTYPES:
            raise CheckpointError(f"{path}: tensor {name!r} has type {dtype}; supported are {', '.join(DTYPES)}")
        self._slices[name], self._paths[name], self._shapes[name] = tensor, path, tuple(tensor.get_shape())


def _shard_names(folder: Path) -> str | dict[str, str]:
    """The one file's name, or the file of each tensor."""
    if not (folder / INDEX_FILE).is_file():
        if (folder / SINGLE_FILE).is_file():
            return SINGLE_FILE
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
        hint = f" ({pickles[0]} is a pickle, which can run code when it is loaded; jaxserve does not read those)" if pickles else ""
        raise CheckpointError(f"{folder}: holds neither {SINGLE_FILE} nor {INDEX_FILE}{hint}")
    try:
        weight_map = json.loads((folder / INDEX_FILE).read_text("utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{folder / INDEX_FILE}: no readable JSON object with a 'weight_map': {error}") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / INDEX_FILE}: 'weight_map' is no object with at least one tensor")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name or not file_name.endswith(".safetensors"):
            raise CheckpointError(f"{folder / INDEX_FILE}: tensor {name!r} is placed in {file_name!r}, which is no name of a .safetensors file in the folder")
    return weight_map


def _open(path: Path) -> Any:
    try:
        return safe_open(path, "numpy")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing, though {INDEX_FILE} names it") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors: {error}") from error

"""A bounds-checked reader of the GGUF container: metadata, tensor directory, raw rows. It knows nothing about models.

Every count, length, offset and type is checked against the file before it is used, so that no file can crash the reader or make it allocate
more than a small multiple of the file's own size.
"""

from __future__ import annotations

import dataclasses
import itertools
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from jaxserve.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_NAME_BYTES = 65535
MAX_DIMENSIONS = 4

_SCALARS: dict[int, str] = {
    GGUFValueType.UINT8: "<u1", GGUFValueType.INT8: "<i1", GGUFValueType.UINT16: "<u2", GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4", GGUFValueType.INT32: "<i4", GGUFValueType.FLOAT32: "<f4", GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8", GGUFValueType.FLOAT64: "<f8", GGUFValueType.BOOL: "?",
}  # fmt: skip
_MIN_METADATA_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GGUFTensor:
    """One entry of the tensor directory.

    Args:
        name: As the file has it.
        shape: Row-major: the reverse of the file's order.
        type: Storage type.
        offset: Of the first byte, from the start of the file.
        num_bytes: Size of the data.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class GGUFFile:
    """A checked GGUF header. The data stays in the file, mapped into memory.

    Args:
        path: The file.
        metadata: Values by key: str, int, float, bool, list of str, or a numpy array.
        tensors: The tensor directory by name.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    def rows(self, name: str) -> np.ndarray:
        """The raw bytes of a tensor, ``[rows, bytes a row]``, as a read-only view of the file; a 1-D tensor is one row."""
        tensor = self.tensors[name]
        num_rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
        return np.memmap(self.path, np.uint8, "r", offset=tensor.offset, shape=(num_rows, tensor.num_bytes // num_rows))


def open_gguf(path: Path) -> GGUFFile:
    """Reads and checks the header of a GGUF file (versions 2 and 3, little-endian).

    Raises:
        CheckpointError: The file cannot be opened, is no GGUF file, is truncated, or states something impossible; the message names it.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(path, data)
            try:
                return _parse(path, cursor)
            finally:
                cursor.data.release()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as GGUF: {error}") from error


def _parse(path: Path, cursor: _Cursor) -> GGUFFile:
    magic = cursor.take(4, "the magic")
    if magic != MAGIC:
        raise CheckpointError(f"{path}: not a GGUF file: starts with {magic!r} instead of {MAGIC!r}")
    version = cursor.uint32("the version")
    if version not in VERSIONS:
        hint = " (a big-endian file; only little-endian is supported)" if version & 0xFFFF == 0 else ""
        raise CheckpointError(f"{path}: GGUF version {version}{hint}; supported are {', '.join(map(str, VERSIONS))}")
    num_tensors = cursor.count("tensor count", _MIN_TENSOR_BYTES)
    num_keys = cursor.count("metadata count", _MIN_METADATA_BYTES)
    metadata: dict[str, Any] = {}
    for index in range(num_keys):
        key = cursor.name(f"the key of metadata entry {index}")
        if key in metadata:
            raise CheckpointError(f"{path}: metadata key {key!r} appears twice")
        metadata[key] = cursor.value(key)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise CheckpointError(f"{path}: general.alignment is {alignment!r}; allowed is a power of two up to {MAX_ALIGNMENT}")
    entries = [_tensor_entry(cursor, index) for index in range(num_tensors)]
    start = -(-cursor.offset // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for entry in entries:
        if entry.name in tensors:
            raise CheckpointError(f"{path}: tensor {entry.name!r} appears twice")
        if entry.offset % alignment:
            raise CheckpointError(f"{path}: tensor {entry.name!r} has offset {entry.offset}, not a multiple of the alignment {alignment}")
        end = start + entry.offset + entry.num_bytes
        if end > len(cursor.data):
            raise CheckpointError(f"{path}: tensor {entry.name!r} ends at byte {end}, the file at {len(cursor.data)} (truncated, or a false offset)")
        tensors[entry.name] = dataclasses.replace(entry, offset=start + entry.offset)
    _check_no_overlap(path, tensors)
    return GGUFFile(path=path, metadata=metadata, tensors=tensors)


def _tensor_entry(cursor: _Cursor, index: int) -> GGUFTensor:
    """One directory entry, its offset still relative to the data section."""
    path = cursor.path
    name = cursor.name(f"the name of tensor {index}")
    num_dims = cursor.uint32(f"the dimension count of {name!r}")
    if not 1 <= num_dims <= MAX_DIMENSIONS:
        raise CheckpointError(f"{path}: tensor {name!r} has {num_dims} dimensions; allowed are 1 to {MAX_DIMENSIONS}")
    dims = struct.unpack(f"<{num_dims}Q", cursor.take(8 * num_dims, f"the shape of {name!r}"))
    raw_type = cursor.uint32(f"the type of {name!r}")
    offset = cursor.uint64(f"the offset of {name!r}")
    try:
        tensor_type = GGMLQuantizationType(raw_type)
        block_size, block_bytes = GGML_QUANT_SIZES[tensor_type]
    except (ValueError, KeyError):
        raise CheckpointError(f"{path}: tensor {name!r} has the unknown type {raw_type}") from None
    if 0 in dims:
        raise CheckpointError(f"{path}: tensor {name!r} has the empty shape {list(reversed(dims))}")
    if dims[0] % block_size:
        raise CheckpointError(f"{path}: tensor {name!r} has rows of {dims[0]} values, not a multiple of the {block_size} of a {tensor_type.name} block")
    num_values = 1
    for dim in dims:
        num_values *= dim
    return GGUFTensor(name=name, shape=tuple(reversed(dims)), type=tensor_type, offset=offset, num_bytes=num_values // block_size * block_bytes)


def _check_no_overlap(path: Path, tensors: Mapping[str, GGUFTensor]) -> None:
    ordered = sorted(tensors.values(), key=lambda tensor: tensor.offset)
    for before, after in itertools.pairwise(ordered):
        if before.offset + before.num_bytes > after.offset:
            raise CheckpointError(f"{path}: tensors {before.name!r} and {after.name!r} overlap at byte {after.offset}")


class _Cursor:
    """Reads forward through the mapped file; everything it returns lies inside it."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = memoryview(data)
        self.offset = 0

    def take(self, size: int, what: str) -> bytes:
        left = len(self.data) - self.offset
        if size > left:
            raise CheckpointError(f"{self.path}: truncated: {what} needs {size} bytes at byte {self.offset}, {left} are left")
        self.offset += size
        return bytes(self.data[self.offset - size : self.offset])

    def uint32(self, what: str) -> int:
        return struct.unpack("<I", self.take(4, what))[0]

    def uint64(self, what: str) -> int:
        return struct.unpack("<Q", self.take(8, what))[0]

    def count(self, what: str, min_bytes: int) -> int:
        """A count of things that take at least ``min_bytes`` each."""
        value = self.uint64(f"the {what}")
        left = len(self.data) - self.offset
        if value * min_bytes > left:
            raise CheckpointError(f"{self.path}: the {what} is {value}, but only {left} bytes are left")
        return value

    def string(self, what: str) -> str:
        size = self.count(f"length of {what}", 1)
        try:
            return self.take(size, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: {what} is not valid UTF-8: {error.reason} at its byte {error.start}") from None

    def name(self, what: str) -> str:
        text = self.string(what)
        if not 0 < len(text) <= MAX_NAME_BYTES:
            raise CheckpointError(f"{self.path}: {what} has {len(text)} characters; allowed are 1 to {MAX_NAME_BYTES}")
        return text

    def value(self, key: str) -> Any:
        kind = self.uint32(f"the type of {key!r}")
        if kind == GGUFValueType.STRING:
            return self.string(f"the value of {key!r}")
        if kind == GGUFValueType.ARRAY:
            return self.array(key)
        return self.scalars(key, kind, 1)[0].item()

    def array(self, key: str) -> list[str] | np.ndarray:
        kind = self.uint32(f"the element type of {key!r}")
        if kind == GGUFValueType.STRING:
            what = f"an element of {key!r}"
            return [self.string(what) for _ in range(self.count(f"length of {key!r}", 8))]
        if kind == GGUFValueType.ARRAY:
            raise CheckpointError(f"{self.path}: {key!r} is an array of arrays, which GGUF readers do not support")
        return self.scalars(key, kind, self.count(f"length of {key!r}", 1))

    def scalars(self, key: str, kind: int, count: int) -> np.ndarray:
        if kind not in _SCALARS:
            raise CheckpointError(f"{self.path}: {key!r} has the unknown type {kind}; known are 0 to {max(GGUFValueType)}")
        dtype = np.dtype(_SCALARS[kind])
        raw = np.frombuffer(self.take(dtype.itemsize * count, f"the value of {key!r}"), np.uint8 if dtype == np.bool_ else dtype)
        return raw != 0 if dtype == np.bool_ else raw

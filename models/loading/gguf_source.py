"""Tensors of a GGUF file under Hugging Face names and in Hugging Face layout, dequantised by rows."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import numpy as np
from gguf import quants
from gguf.constants import GGMLQuantizationType

from jaxserve.errors import CheckpointError
from jaxserve.models.loading.gguf_config import ROPE_FACTORS, Architecture
from jaxserve.models.loading.gguf_file import GGUFFile, GGUFTensor

_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
_GEMMA_LAYER = _LAYER | {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_BLOCK_NAME = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_]+)\.(weight|bias)")
_PLAIN_NAME = re.compile(r"([a-z_]+)\.(weight|bias)")
_CHUNK_VALUES = 1 << 16


class GGUFSource:
    """A :class:`TensorSource`. Tensors of no known name keep their GGUF name.

    Args:
        file: The opened file.
        architecture: Its naming and layout.
        num_heads: N, for the order of query rows.
        num_kv_heads: K, for the order of key rows.

    Raises:
        CheckpointError: A tensor has a type that cannot be dequantised.
    """

    def __init__(self, file: GGUFFile, architecture: Architecture, *, num_heads: int, num_kv_heads: int) -> None:
        self._file = file
        self._architecture = architecture
        self._heads = {"attn_q": num_heads, "attn_k": num_kv_heads} if architecture.permuted_qk else {}
        self._names = {hf_name(name, architecture): name for name in file.tensors if name != ROPE_FACTORS}
        for tensor in {tensor.type: tensor for tensor in file.tensors.values()}.values():
            _check_type(file.path, tensor)

    def keys(self) -> Collection[str]:
        return self._names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._names[name]].shape

    def read(self, name: str, rows: slice, columns: slice | None = None) -> np.ndarray:
        tensor = self._file.tensors[self._names[name]]
        raw = self._file.rows(tensor.name)
        if len(tensor.shape) == 1:
            values = _dequantize(raw, tensor.type).reshape(-1)[self._stored_rows(tensor, rows)]
        elif columns is None:
            raw = raw.reshape(tensor.shape[0], -1)
            values = _dequantize(raw[self._stored_rows(tensor, rows)], tensor.type).reshape(-1, *tensor.shape[1:])
        else:
            # The quantised blocks that the columns touch, then the columns of those.
            block_size, block_bytes = quants.GGML_QUANT_SIZES[tensor.type]
            first, last = columns.start // block_size, -(-columns.stop // block_size)
            raw = raw[self._stored_rows(tensor, rows), first * block_bytes : last * block_bytes]
            values = _dequantize(raw, tensor.type)[:, columns.start - first * block_size : columns.stop - first * block_size]
        if self._architecture.norm_shift and tensor.name.endswith("norm.weight"):
            values = values - np.float32(self._architecture.norm_shift)
        return values

    def _stored_rows(self, tensor: GGUFTensor, rows: slice) -> slice | np.ndarray:
        """Where the file keeps these rows. llama.cpp's rotary embedding pairs neighbours, so its converter interleaves the halves of each head's rows."""
        block = _BLOCK_NAME.fullmatch(tensor.name)
        heads = self._heads.get(block[2]) if block else None
        if heads is None:
            return rows
        if tensor.shape[0] % (2 * heads):
            raise CheckpointError(f"{self._file.path}: tensor {tensor.name!r} has {tensor.shape[0]} rows, which do not divide into {heads} heads of two halves")
        half = tensor.shape[0] // heads // 2
        row = np.arange(rows.start, rows.stop)
        head, within = np.divmod(row, 2 * half)
        return head * 2 * half + within % half * 2 + within // half


def hf_name(name: str, architecture: Architecture) -> str:
    """The Hugging Face name of a GGUF tensor, or the name itself where it has none."""
    if block := _BLOCK_NAME.fullmatch(name):
        table = _GEMMA_LAYER if architecture.norm_shift else _LAYER
        if block[2] in table:
            return f"model.layers.{block[1]}.{table[block[2]]}.{block[3]}"
    elif (plain := _PLAIN_NAME.fullmatch(name)) and plain[1] in _WHOLE:
        return f"{_WHOLE[plain[1]]}.{plain[2]}"
    return name


def _dequantize(raw: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Raw rows, ``[rows, bytes a row]``, as values, ``[rows, values a row]``.

    The gguf package works on 16 rows at a time: on rows of a few hundred values its overhead is three times the work, so the bytes are first folded
    into long rows (blocks never straddle rows, so any multiple of a block will do).
    """
    if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        return np.ascontiguousarray(raw).view(np.float32 if kind == GGMLQuantizationType.F32 else np.float16)
    num_rows = raw.shape[0]
    flat = np.ascontiguousarray(raw).reshape(-1)
    block_size, block_bytes = quants.GGML_QUANT_SIZES[kind]
    chunk = max(1, _CHUNK_VALUES // block_size) * block_bytes
    body = flat.size // chunk * chunk
    parts = [quants.dequantize(part, kind).reshape(-1) for part in (flat[:body].reshape(-1, chunk), flat[body:].reshape(1, -1)) if part.size]
    values = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return values.reshape(num_rows, -1)


def _check_type(path: Path, tensor: GGUFTensor) -> None:
    try:
        _, block_bytes = quants.GGML_QUANT_SIZES[tensor.type]
        quants.dequantize(np.zeros((1, block_bytes), np.uint8), tensor.type)
    except (NotImplementedError, ValueError):
        raise CheckpointError(f"{path}: tensor {tensor.name!r} has type {tensor.type.name}, which the gguf package cannot dequantise") from None

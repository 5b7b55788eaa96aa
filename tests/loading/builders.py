"""Tiny checkpoints, written the way Hugging Face and llama.cpp write them. Independent of the code under test."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

from jaxserve.models.hf_config import spec_from_config
from jaxserve.models.params import param_specs

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA_GGUF_NAMES = GGUF_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


class MemorySource:
    """A TensorSource over arrays that notes what was read."""

    def __init__(self, tensors: Mapping[str, np.ndarray]) -> None:
        self.tensors = dict(tensors)
        self.times_read = {name: np.zeros(value.shape, np.int32) for name, value in tensors.items()}
        self.largest_read = 0

    def keys(self) -> Collection[str]:
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def read(self, name: str, rows: slice, columns: slice | None = None) -> np.ndarray:
        """A block; slices must lie inside the tensor."""
        index = (rows,) if columns is None else (rows, columns)
        for cut, size in zip(index, self.shape(name), strict=False):
            assert 0 <= cut.start < cut.stop <= size
        self.times_read[name][index] += 1
        values = self.tensors[name][index]
        self.largest_read = max(self.largest_read, values.size)
        return values


def tiny_config(family: str, **changes: Any) -> dict[str, Any]:
    """A Hugging Face config with every size different, so that a mix-up shows."""
    config: dict[str, Any] = {
        "architectures": [CLASSES[family]],
        "model_type": "gemma3_text" if family == "gemma3" else family,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 96,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "vocab_size": 48,
        "rope_theta": 20000.0,
        "tie_word_embeddings": family == "gemma3",
        "hidden_act": "silu",
    }
    if family == "gemma3":
        del config["hidden_act"]
        config |= {"hidden_activation": "gelu_pytorch_tanh", "sliding_window": 16, "rope_local_base_freq": 10000.0, "query_pre_attn_scalar": 32}
    if family == "mistral":
        config["sliding_window"] = 16
    return config | changes


def random_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors under all names that the config calls for; values are exact in bfloat16."""
    spec = spec_from_config(config)
    rng = np.random.default_rng(seed)
    return {
        piece.name.format(layer=layer): rng.integers(-100, 100, piece.shape).astype(np.float32) / 64
        for param in param_specs(spec).values()
        for piece in param.pieces
        for layer in param.indices
    }


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], *, num_shards: int = 1) -> Path:
    """A safetensors folder, sharded if asked."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    if num_shards == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return folder
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[shard::num_shards]}
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """A GGUF file as llama.cpp's converter writes it.

    Args:
        path: Where.
        config: As of :func:`tiny_config`.
        tensors: As of :func:`random_tensors`.
        quantization: Of matrices.
        metadata: Further keys; ``None`` as a value leaves a key out.
        extra: Further tensors by GGUF name.
    """
    model_type = str(config["model_type"]).removesuffix("_text")
    arch = "llama" if model_type == "mistral" else model_type
    keys: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
    }
    if "sliding_window" in config:
        keys["attention.sliding_window"] = config["sliding_window"]
    values = {f"{arch}.{name}": value for name, value in keys.items()} | dict(metadata or {})
    writer = gguf.GGUFWriter(path, arch)
    for name, value in values.items():
        _add(writer, name, value)
    for name, tensor in tensors.items():
        parts = name.split(".")
        base, suffix = ".".join(parts[3:-1]) if name.startswith("model.layers.") else ".".join(parts[:-1]), parts[-1]
        gguf_name = (GEMMA_GGUF_NAMES if arch == "gemma3" else GGUF_NAMES)[base]
        prefix = f"blk.{parts[2]}." if name.startswith("model.layers.") else ""
        if arch == "llama" and gguf_name in ("attn_q", "attn_k"):
            heads = config["num_attention_heads" if gguf_name == "attn_q" else "num_key_value_heads"]
            tensor = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
        if arch == "gemma3" and gguf_name.endswith("norm"):
            tensor = tensor + 1
        kind = quantization if tensor.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{prefix}{gguf_name}.{suffix}", gguf.quantize(np.ascontiguousarray(tensor), kind), raw_dtype=kind)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(name, value)
        case int():
            writer.add_uint32(name, value)
        case float():
            writer.add_float32(name, value)
        case str():
            writer.add_string(name, value)
        case _:
            writer.add_array(name, value)

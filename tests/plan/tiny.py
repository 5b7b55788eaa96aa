"""A tiny Llama as a bare Hugging Face configuration."""

from __future__ import annotations

import json
from pathlib import Path

L, D, V, N, K, H, F = 3, 64, 256, 8, 8, 16, 128
"""Layers, width, vocabulary, heads, KV heads, head dim, MLP width."""

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": D, "num_hidden_layers": L, "num_attention_heads": N,
    "num_key_value_heads": K, "head_dim": H, "intermediate_size": F, "vocab_size": V, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip


def write_config(folder: Path) -> str:
    """Writes it; returns the MODEL that names it."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)

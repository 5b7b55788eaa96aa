"""What a decoder is, as plain numbers: built by ``models/hf_config.py`` from a Hugging Face config, read by everything else. No arrays here."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary embedding of one kind of layer.

    Args:
        inv_freq: ``H / 2`` inverse frequencies in radians a token, every scaling rule already applied.
        attention_factor: Multiplies cos and sin (YaRN and LongRoPE; else 1).
    """

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """What may differ from layer to layer. These are numbers, so all layers share one compiled body.

    Args:
        window: A token sees itself and the ``window - 1`` tokens before it; ``None`` sees all.
        rope: Index into ``ModelSpec.ropes``.
    """

    window: int | None = None
    rope: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer. Letters are those of ``jaxserve.dims``.

    Args:
        family: Registry name of the family.
        vocab_size: V, as the checkpoint has it.
        width: D.
        num_layers: L.
        num_heads: N.
        num_kv_heads: K; divides N. Repeated heads are counted as often as they stand.
        head_dim: H.
        mlp_width: F.
        max_position: The model's context length in tokens.
        norm_eps: Added to the mean square in every RMSNorm.
        activation: Of the gated MLP.
        layers: One entry a layer.
        ropes: The kinds of rotary embedding that ``layers`` refer to.
        attention_scale: Multiplies query-key products.
        qkv_bias: Whether the query, key and value projections have biases.
        o_bias: Whether the output projection has a bias.
        mlp_bias: Whether the MLP's projections have biases.
        qk_norm: RMSNorm over H on queries and keys before the rotary embedding.
        post_norms: A second RMSNorm on each block's output before the residual sum (Gemma).
        norm_offset: Added to every norm weight (1 in Gemma, whose weights are stored minus one).
        embedding_scale: Multiplies the embeddings; rounded to the model dtype first, as the original does.
        tied: Whether the output head is the embedding.
        attention_soft_cap: ``c * tanh(x / c)`` on attention logits.
        final_soft_cap: The same on output logits.
        bos_token_id: Put before a prompt by the tokenizer, where the model has one.
        eos_token_ids: Any of these ends a generation.
        kv_repeat: How often each KV head of the checkpoint stands, side by side, so that every model rank has one (``models.sharding.fit_kv_heads``).
    """

    family: str
    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    max_position: int
    norm_eps: float
    activation: Literal["silu", "gelu_tanh"]
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeSpec, ...]
    attention_scale: float
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    tied: bool = False
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    kv_repeat: int = 1

    @property
    def group_size(self) -> int:
        """G, query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def layer_matrix_size(self) -> int:
        """Weights of one layer that every token is multiplied with."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * self.width
        return attention + 3 * self.width * self.mlp_width

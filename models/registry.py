"""The architectures that can be served: for each of Hugging Face's names, the family that reads its config."""

from __future__ import annotations

from collections.abc import Callable

from jaxserve.models.config_reader import ConfigReader
from jaxserve.models.families.gemma3 import gemma3
from jaxserve.models.families.llama import llama
from jaxserve.models.families.mistral import mistral
from jaxserve.models.families.qwen import qwen2, qwen3
from jaxserve.models.spec import ModelSpec

Family = Callable[[ConfigReader], ModelSpec]

ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Gemma3ForCausalLM": gemma3,
}

MODEL_TYPES: dict[str, Family] = {"llama": llama, "mistral": mistral, "qwen2": qwen2, "qwen3": qwen3, "gemma3_text": gemma3}
"""The families by ``model_type``, for configs that name no architecture."""

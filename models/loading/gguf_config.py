"""GGUF metadata as a Hugging Face config: one architecture a row, and every metadata key of the architecture accounted for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType

from jaxserve.errors import CheckpointError, UnsupportedModelError
from jaxserve.models.loading.gguf_file import GGUFFile

GEMMA_LOCAL_ROPE_BASE = 10000.0
GEMMA_WINDOW_PATTERN = 6
GEMMA_27B_LAYERS = 62

ROPE_FACTORS = "rope_freqs.weight"
"""Part of the spec (:func:`rope_factors`); no parameter."""

# Texts of control tokens that end a turn or a document: many converters record only one end token, so llama.cpp looks for these too.
END_TOKEN_TEXTS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<|endoftext|>")
CONTROL_TOKEN = 3

# Keys with no influence on the forward pass, or read elsewhere (vocab_size: the embedding's shape decides).
_IGNORED = {"rope.scaling.finetuned", "vocab_size", "attention.causal", "tensor_data_layout"}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How one ``general.architecture`` maps to Hugging Face.

    Args:
        class_name: Entry for ``architectures``.
        model_type: Entry for ``model_type``.
        extend: Adds what only this architecture has, given the keys and the config so far.
        permuted_qk: Query and key rows are stored with the two halves of each head interleaved.
        norm_shift: What the converter added to every norm weight.
    """

    class_name: str
    model_type: str
    extend: Callable[[_Keys, dict[str, Any]], None]
    permuted_qk: bool = False
    norm_shift: float = 0.0


def gguf_architecture(file: GGUFFile) -> Architecture:
    """The architecture of a GGUF file.

    Raises:
        CheckpointError: The metadata does not say.
        UnsupportedModelError: It is one that jaxserve does not have.
    """
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CheckpointError(f"{file.path}: metadata key 'general.architecture' is missing or no string: {name!r}")
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(f"{file.path}: GGUF architecture {name!r} is not supported; supported are {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


def gguf_config(file: GGUFFile) -> dict[str, Any]:
    """The config that a Hugging Face folder of the same model would hold.

    Raises:
        CheckpointError: A key is missing or has an impossible value.
        UnsupportedModelError: The file states something about the architecture that jaxserve does not implement.
    """
    architecture = gguf_architecture(file)
    if (num_files := file.metadata.get("split.count", 1)) != 1:
        raise UnsupportedModelError(f"{file.path}: split.count is {num_files!r}: one of several files; llama.cpp's gguf-split --merge joins them")
    keys = _Keys(file)
    heads = keys.uniform_int("attention.head_count")
    width = keys.uniform_int("embedding_length")
    if heads < 1 or width < 1:
        raise CheckpointError(f"{file.path}: {heads} attention heads and width {width}; both must be at least 1")
    num_layers = keys.uniform_int("block_count")
    if num_layers > len(file.tensors):
        raise CheckpointError(f"{file.path}: {keys.prefix}block_count is {num_layers}, but the file holds only {len(file.tensors)} tensors")
    head_dim = keys.uniform_int("attention.key_length", width // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if (value := keys.uniform_int(name, head_dim)) != head_dim:
            raise UnsupportedModelError(f"{file.path}: {keys.prefix}{name} is {value}, different from the head dim {head_dim}; that is not supported")
    if experts := keys.uniform_int("expert_count", 0):
        raise UnsupportedModelError(f"{file.path}: {keys.prefix}expert_count is {experts}; mixtures of experts are not supported")
    keys.uniform_int("expert_used_count", 0)
    config: dict[str, Any] = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "hidden_size": width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.uniform_int("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": keys.uniform_int("feed_forward_length"),
        "max_position_embeddings": keys.uniform_int("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "hidden_act": "silu",
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(keys),
        "bos_token_id": token_id(file, "bos"),
        "eos_token_id": end_token_ids(file),
    }
    architecture.extend(keys, config)
    keys.check_all_used()
    return config


def rope_factors(file: GGUFFile) -> list[float] | None:
    """``rope_freqs.weight``, the form in which GGUF keeps Llama 3's rope scaling: what each inverse frequency is divided by.

    Raises:
        CheckpointError: It holds something else than positive numbers, one a frequency.
    """
    tensor = file.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return None
    if tensor.type != GGMLQuantizationType.F32:
        raise CheckpointError(f"{file.path}: tensor {ROPE_FACTORS!r} has type {tensor.type.name}; expected is F32")
    return np.asarray(file.rows(ROPE_FACTORS)).reshape(-1).view("<f4").tolist()


def token_id(file: GGUFFile, name: str) -> int | None:
    """The id ``tokenizer.ggml.<name>_token_id``, ``None`` where the file has none; checked against the vocabulary.

    Raises:
        CheckpointError: It is no integer, or not in the vocabulary.
    """
    key = f"tokenizer.ggml.{name}_token_id"
    value = file.metadata.get(key)
    if value is None:
        return None
    size = _vocab_size(file)
    if type(value) is not int or not 0 <= value < size:
        raise CheckpointError(f"{file.path}: {key} is {value!r}; allowed is an integer in [0, {size})")
    return value


def end_token_ids(file: GGUFFile) -> list[int]:
    """Every id that ends a generation: end of sequence, of turn, of message, and control tokens whose text says so."""
    ids = [value for name in ("eos", "eot", "eom") if (value := token_id(file, name)) is not None]
    tokens, types = file.metadata.get("tokenizer.ggml.tokens"), file.metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(types, np.ndarray) and len(types) == len(tokens):
        ids += [index for index in np.flatnonzero(types == CONTROL_TOKEN).tolist() if tokens[index] in END_TOKEN_TEXTS]
    return sorted(set(ids), key=ids.index)


def _vocab_size(file: GGUFFile) -> int:
    if (tensor := file.tensors.get("token_embd.weight")) is None:
        raise CheckpointError(f"{file.path}: tensor 'token_embd.weight' is missing")
    return tensor.shape[0]


def _rope_scaling(keys: _Keys) -> dict[str, Any] | None:
    kind = keys.text("rope.scaling.type", "none")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    original = keys.uniform_int("rope.scaling.original_context_length", 0)
    if kind == "none":
        if factor != 1.0:
            raise UnsupportedModelError(f"{keys.file.path}: a rope scaling factor of {factor} without {keys.prefix}rope.scaling.type")
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if original and kind != "linear":
        scaling["original_max_position_embeddings"] = original
    return scaling


def _extend_llama(keys: _Keys, config: dict[str, Any]) -> None:
    tensors = keys.file.tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    config["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    if window := keys.uniform_int("attention.sliding_window", 0):
        if config["attention_bias"] or config["mlp_bias"]:
            raise UnsupportedModelError(f"{keys.file.path}: {keys.prefix}attention.sliding_window together with biases is not supported")
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
        del config["attention_bias"], config["mlp_bias"]


def _extend_qwen(keys: _Keys, config: dict[str, Any]) -> None:
    if window := keys.uniform_int("attention.sliding_window", 0):
        raise UnsupportedModelError(f"{keys.file.path}: {keys.prefix}attention.sliding_window is {window}; it is not supported for this architecture")
    config["use_sliding_window"] = False
    if config["model_type"] == "qwen3":
        config["attention_bias"] = False


def _extend_gemma3(keys: _Keys, config: dict[str, Any]) -> None:
    config["hidden_activation"] = "gelu_pytorch_tanh"
    del config["hidden_act"]
    config["attention_bias"] = False
    config["sliding_window"] = keys.uniform_int("attention.sliding_window")
    pattern = keys.uniform_int("attention.sliding_window_pattern", GEMMA_WINDOW_PATTERN)
    num_layers = config["num_hidden_layers"]
    config["layer_types"] = ["full_attention" if pattern and (layer + 1) % pattern == 0 else "sliding_attention" for layer in range(num_layers)]
    config["rope_local_base_freq"] = keys.number("rope.freq_base_swa", GEMMA_LOCAL_ROPE_BASE)
    # Not in the metadata: as in llama.cpp, only the 27B model scales by width / heads instead of the head dim.
    config["query_pre_attn_scalar"] = config["hidden_size"] // config["num_attention_heads"] if num_layers == GEMMA_27B_LAYERS else config["head_dim"]
    config["final_logit_softcapping"] = keys.number("final_logit_softcapping", 0.0) or None
    config["attn_logit_softcapping"] = keys.number("attn_logit_softcapping", 0.0) or None


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", "llama", _extend_llama, permuted_qk=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", _extend_qwen),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", _extend_qwen),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", _extend_gemma3, norm_shift=1.0),
}


class _Keys:
    """The metadata of one architecture; remembers which keys were asked for."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.prefix = f"{file.metadata['general.architecture']}."
        self._values: Mapping[str, Any] = {key.removeprefix(self.prefix): value for key, value in file.metadata.items() if key.startswith(self.prefix)}
        self._used = set(_IGNORED)

    def uniform_int(self, name: str, default: int | None = None) -> int:
        """A non-negative integer; an array with one value a layer must hold the same value throughout."""
        value = self._get(name, default)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.size:
            if (value != value[0]).any():
                raise UnsupportedModelError(f"{self.file.path}: {self.prefix}{name} differs from layer to layer; that is not supported")
            value = value[0].item()
        if type(value) is not int or not 0 <= value < 2**31:
            raise CheckpointError(f"{self.file.path}: {self.prefix}{name} is {value!r}; allowed is an integer in [0, 2**31)")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
            raise CheckpointError(f"{self.file.path}: {self.prefix}{name} is {value!r}; it must be a finite number")
        # The file holds float32; its shortest decimal is the number that was meant (1e-06, not 9.999999974752427e-07).
        return float(str(np.float32(value))) if abs(value) < np.finfo(np.float32).max else float(value)

    def text(self, name: str, default: str) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise CheckpointError(f"{self.file.path}: {self.prefix}{name} is {value!r}; it must be a string")
        return value

    def check_all_used(self) -> None:
        if unknown := sorted(set(self._values) - self._used):
            raise UnsupportedModelError(f"{self.file.path}: metadata that jaxserve does not implement: {', '.join(self.prefix + name for name in unknown)}")

    def _get(self, name: str, default: Any) -> Any:
        self._used.add(name)
        if name in self._values:
            return self._values[name]
        if default is None:
            raise CheckpointError(f"{self.file.path}: metadata key '{self.prefix}{name}' is missing")
        return default

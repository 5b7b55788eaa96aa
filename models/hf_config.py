"""The specification of a model from a Hugging Face ``config.json``. Keys are read, or known to change nothing; any other key is an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.models.config_reader import ConfigReader
from jaxserve.models.registry import ARCHITECTURES, MODEL_TYPES, Family
from jaxserve.models.spec import ModelSpec

_BOOKKEEPING = {"_name_or_path", "transformers_version", "transformers.js_config", "torch_dtype", "dtype", "unsloth_fixed", "unsloth_version"}
_TRAINING = {"initializer_range", "attention_dropout", "hidden_dropout", "gradient_checkpointing"}
_CLASSIFICATION = {"id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params"}
_EXECUTION = {
    "use_cache", "cache_implementation", "return_dict", "output_attentions", "output_hidden_states", "tie_last_hidden_states", "torchscript",
    "chunk_size_feed_forward", "use_bfloat16", "attn_implementation", "_attn_implementation", "_attn_implementation_autoset",
}  # fmt: skip
_OTHER_TOKEN_IDS = {"pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id", "prefix"}
_OLD_SAMPLING_DEFAULTS = {  # Today's home is generation_config.json.
    "max_length", "min_length", "max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "typical_p", "num_beams", "num_beam_groups",
    "num_return_sequences", "early_stopping", "length_penalty", "diversity_penalty", "output_scores", "return_dict_in_generate", "remove_invalid_values",
}  # fmt: skip
_WITHOUT_EFFECT = _BOOKKEEPING | _TRAINING | _CLASSIFICATION | _EXECUTION | _OTHER_TOKEN_IDS | _OLD_SAMPLING_DEFAULTS
"""Keys that do not change what a decoder computes, whatever their value."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "quantization_config": (),
    "auto_map": (),  # Code that comes with the model; it is never run.
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "cross_attention_hidden_size": (),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "per_layer_config": ({},),
    "repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "bad_words_ids": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "suppress_tokens": (),
    "begin_suppress_tokens": (),
    "exponential_decay_length_penalty": (),
}
"""Keys that are accepted only with the values listed here (or null), with which they change nothing."""


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """The specification of the model that a config describes, in the spelling of transformers 4 or 5.

    Raises:
        UnsupportedModelError: The architecture is not in the registry, a key is missing, has a wrong type or an impossible value,
            or is one that changes the maths in a way that is not implemented. The message names it and its value.
    """
    reader = ConfigReader(config)
    family = _family(reader)
    reader.ignore(_WITHOUT_EFFECT)
    for key, allowed in _NEUTRAL.items():
        reader.neutral(key, allowed)
    spec = family(reader)
    reader.finish()
    return spec


def _family(reader: ConfigReader) -> Family:
    architectures = reader.strings("architectures")
    if not architectures:
        return reader.choice("model_type", MODEL_TYPES)
    if any(name not in ARCHITECTURES for name in architectures):
        raise reader.error("architectures", f"is not supported; supported: {', '.join(ARCHITECTURES)}")
    family = ARCHITECTURES[architectures[0]]
    if len(architectures) > 1 or (reader.has("model_type") and reader.choice("model_type", MODEL_TYPES) is not family):
        raise reader.error("architectures", "must be one architecture, that of model_type")
    reader.ignore(["model_type"])
    return family

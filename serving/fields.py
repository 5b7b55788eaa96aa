"""Request fields of OpenAI's and vLLM's APIs that jaxserve does not implement, and the check that nothing a client asks for is silently ignored.

A field listed here is accepted where it asks for nothing: at null, at one of its neutral values, or with any value if it is inert. Everything else is
refused by name, unknown fields with the nearest known name. A field that becomes implemented leaves this table.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Collection, Mapping
from typing import Any

from jaxserve.errors import InvalidRequestError

INERT_FIELDS = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"})
"""Labels and hints about who asks and what to keep in a cache: no value of theirs may change an answer."""

_COMMON: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "n": (1,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    # vLLM: sampling
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "min_tokens": (0,),
    "repetition_penalty": (1,),
    "repetition_detection": (),
    "spaces_between_special_tokens": (True,),
    "thinking_token_budget": (-1,),
    "truncation_side": ("left",),
    "use_beam_search": (False,),
    "watermarking": (False,),
    # vLLM: structured output
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    "structured_outputs": (),
    # vLLM: what comes back, and how
    "echo": (False,),
    "logprob_token_ids": (),
    "prompt_logprobs": (),
    "request_id": (),
    "return_mm_kwargs": (True,),
    "return_prompt_text": (False,),
    "return_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "routed_experts_prompt_start": (0,),
    "stream_interval": (1,),
    # vLLM: deployment
    "ec_transfer_params": (),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
}

CHAT_FIELDS: dict[str, tuple[Any, ...]] = _COMMON | {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "include_reasoning": (True,),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
}
"""Field of ``/v1/chat/completions`` -> its neutral values beside null."""

COMPLETION_FIELDS: dict[str, tuple[Any, ...]] = _COMMON | {
    "logprobs": (False,),
    "prompt_embeds": (),
    "suffix": ("",),
}
"""Field of ``/v1/completions`` -> its neutral values beside null."""

GRPC_FIELDS: dict[str, tuple[Any, ...]] = {name: _COMMON[name] for name in ("n", "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty")}
"""Field of ``GenerateRequest`` -> its neutral values."""

STREAM_OPTION_FIELDS: dict[str, tuple[Any, ...]] = {"continuous_usage_stats": (False,), "include_obfuscation": (False,)}

TOKENIZE_FIELDS: dict[str, tuple[Any, ...]] = {
    "return_token_strs": (False,),
    **{name: CHAT_FIELDS[name] for name in ("chat_template", "continue_final_message", "documents", "media_io_kwargs", "mm_processor_kwargs", "tools")},
}
"""Field of ``/tokenize`` -> its neutral values."""

DETOKENIZE_FIELDS: dict[str, tuple[Any, ...]] = {}

MESSAGE_FIELDS: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "reasoning": ("",),
    "reasoning_content": ("",),
    "refusal": ("",),
    "tool_calls": ([],),
}
"""Field of one chat message -> its neutral values: an assistant's answer can be sent back as the client got it."""


def select_fields(given: Mapping[str, Any], *, implemented: Collection[str], neutral: Mapping[str, tuple[Any, ...]], where: str = "") -> dict[str, Any]:
    """The implemented fields of ``given`` that are not null.

    Args:
        given: A JSON object of a request.
        implemented: Names that the caller handles.
        neutral: Names that it does not, with their neutral values; inert ones need not be listed.
        where: Path of ``given`` in the request with its separator, such as ``stream_options.``, for messages.

    Raises:
        InvalidRequestError: An unknown field, or one of ``neutral`` that asks for something; ``param`` names it.
    """
    selected: dict[str, Any] = {}
    for name, value in given.items():
        if name in implemented:
            if value is not None:
                selected[name] = value
        elif name in neutral:
            if value is not None and not any(_same_json(value, allowed) for allowed in neutral[name]):
                raise _unsupported(where + name, value, neutral[name])
        elif where or name not in INERT_FIELDS:
            raise _unknown(name, [*implemented, *neutral, *([] if where else INERT_FIELDS)], where)
    return selected


def _unsupported(name: str, value: object, allowed: tuple[Any, ...]) -> InvalidRequestError:
    choices = " or ".join([*(repr(item) for item in allowed), "null"])
    return InvalidRequestError(
        f"{name} is not supported here other than as {choices} (or left out), got {reprlib.repr(value)}", param=name, code="unsupported_parameter"
    )


def _unknown(name: str, known: Collection[str], where: str) -> InvalidRequestError:
    shown = where + (name if len(name) <= 64 else name[:61] + "...")
    nearest = difflib.get_close_matches(name[:64], known, n=1)
    hint = f"; did you mean {where + nearest[0]!r}?" if nearest else ""
    return InvalidRequestError(f"unknown field {shown!r}{hint}", param=shown, code="unknown_parameter")


def _same_json(value: object, allowed: object) -> bool:
    """Equality of JSON values: 1 equals 1.0, but true does not equal 1."""
    if isinstance(value, bool) or isinstance(allowed, bool):
        return value is allowed
    return value == allowed

"""Checks of prompts and chat messages, for both APIs: from JSON-like values to what the tokenizer takes."""

from __future__ import annotations

import reprlib
from typing import Any

from jaxserve.errors import InvalidRequestError
from jaxserve.serving.fields import MESSAGE_FIELDS, select_fields

MAX_PROMPTS = 1024
MAX_MESSAGES = 4096
ROLES = ("system", "developer", "user", "assistant", "tool")

Prompt = str | list[int]


def parse_prompts(value: object) -> list[Prompt]:
    """A string, a list of strings, a list of token ids, or a list of lists of token ids, as a list of prompts.

    Whether ids are in the vocabulary and prompts fit the context is the engine's to check.

    Raises:
        InvalidRequestError: None of these, no prompt at all, or more than ``MAX_PROMPTS``.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise _bad_prompt(value)
    if not value:
        raise InvalidRequestError("prompt is an empty list; at least one prompt or token id is needed", param="prompt")
    if _is_ids(value):
        return [value]
    if len(value) > MAX_PROMPTS:
        raise InvalidRequestError(f"prompt holds {len(value)} prompts; at most {MAX_PROMPTS} are allowed", param="prompt")
    if all(isinstance(item, str) for item in value) or all(isinstance(item, list) and _is_ids(item) for item in value):
        return value
    raise _bad_prompt(value)


def parse_messages(value: object) -> list[dict[str, Any]]:
    """Chat messages with string contents: text parts are joined by newlines, as chat templates expect one text.

    Raises:
        InvalidRequestError: A message that is not an object with a known role and text content; ``param`` is its path.
    """
    if not isinstance(value, list) or not value:
        raise InvalidRequestError(f"messages must be a list of at least one message, got {reprlib.repr(value)}", param="messages")
    if len(value) > MAX_MESSAGES:
        raise InvalidRequestError(f"messages holds {len(value)} messages; at most {MAX_MESSAGES} are allowed", param="messages")
    return [_parse_message(item, f"messages[{index}]") for index, item in enumerate(value)]


def _is_ids(value: list[Any]) -> bool:
    return all(type(item) is int for item in value)


def _bad_prompt(value: object) -> InvalidRequestError:
    return InvalidRequestError(
        f"prompt must be a string, a list of strings, a list of token ids or a list of lists of token ids, got {reprlib.repr(value)}",
        param="prompt",
        code="invalid_type",
    )


def _parse_message(value: object, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{path} must be an object with role and content, got {reprlib.repr(value)}", param=path, code="invalid_type")
    message = select_fields(value, implemented=("role", "content", "name", "tool_call_id"), neutral=MESSAGE_FIELDS, where=f"{path}.")
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequestError(f"{path}.role must be one of {', '.join(ROLES)}, got {reprlib.repr(role)}", param=f"{path}.role")
    for name in ("name", "tool_call_id"):
        if name in message and not isinstance(message[name], str):
            raise InvalidRequestError(f"{path}.{name} must be a string, got {reprlib.repr(message[name])}", param=f"{path}.{name}", code="invalid_type")
    return message | {"content": _parse_content(message.get("content"), f"{path}.content")}


def _parse_content(value: object, path: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise InvalidRequestError(f"{path} must be a string or a list of text parts, got {reprlib.repr(value)}", param=path, code="invalid_type")
    texts: list[str] = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequestError(
                f'{path}[{index}] must be a text part, {{"type": "text", "text": "…"}}; no other kind is supported, got {reprlib.repr(part)}',
                param=f"{path}[{index}]",
            )
        select_fields(part, implemented=("type", "text"), neutral={}, where=f"{path}[{index}].")
        texts.append(part["text"])
    return "\n".join(texts)

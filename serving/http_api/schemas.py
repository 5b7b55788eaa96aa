"""Request bodies of the HTTP API as pydantic models: the fields that jaxserve implements, their types, nothing about their ranges."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema

from jaxserve.errors import InvalidRequestError
from jaxserve.serving import fields
from jaxserve.serving.messages import Prompt, parse_messages, parse_prompts
from jaxserve.serving.service import OPTION_FIELDS, SAMPLING_FIELDS

_TOKEN_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_PROMPT_SCHEMA = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, _TOKEN_IDS_SCHEMA, {"type": "array", "items": _TOKEN_IDS_SCHEMA}],
}
_MESSAGES_SCHEMA = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"type": "string"},
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
            "name": {"type": "string"},
            "tool_call_id": {"type": "string"},
        },
    },
}

Prompts = Annotated[list[Prompt], PlainValidator(parse_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
Messages = Annotated[list[dict[str, Any]], PlainValidator(parse_messages), WithJsonSchema(_MESSAGES_SCHEMA)]
StopStrings = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]


class Body(BaseModel):
    """A request body. Strict: no type is converted into another but integers into floats."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False, extra="forbid", protected_namespaces=())

    neutral_fields: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Accepted fields that are not implemented; see ``jaxserve.serving.fields``."""

    model: str | None = None


class StreamOptions(BaseModel):
    """Options of a stream.

    Args:
        include_usage: Send one more chunk at the end, with the token counts and no choices.
    """

    model_config = Body.model_config

    include_usage: bool = False


def _select_stream_options(value: object) -> object:
    if not isinstance(value, dict):
        return value
    return fields.select_fields(value, implemented=StreamOptions.model_fields, neutral=fields.STREAM_OPTION_FIELDS, where="stream_options.")


class GenerationBody(Body):
    """Fields that completions and chat share. Omitted sampling fields take the model's defaults.

    Args:
        truncate_prompt_tokens: Keep only that many tokens at the prompt's end; -1 keeps as many as leave room for max_tokens.
    """

    stream: bool = False
    stream_options: Annotated[StreamOptions, BeforeValidator(_select_stream_options)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: StopStrings | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    priority: int | None = None
    deadline_ms: int | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling_given(self) -> dict[str, Any]:
        """The sampling fields that the client set."""
        return self._given(SAMPLING_FIELDS)

    def options_given(self) -> dict[str, Any]:
        """What the client said about the treatment of its request."""
        return self._given(OPTION_FIELDS)

    def _given(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class CompletionBody(GenerationBody):
    """Body of ``/v1/completions``."""

    neutral_fields = fields.COMPLETION_FIELDS

    prompt: Prompts
    add_special_tokens: bool = True


class ChatBody(GenerationBody):
    """Body of ``/v1/chat/completions``. ``max_completion_tokens`` is the newer name of ``max_tokens``."""

    neutral_fields = fields.CHAT_FIELDS

    messages: Messages
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class TokenizeBody(Body):
    """Body of ``/tokenize``: a prompt or messages, not both. ``add_special_tokens`` is true for a prompt and false for messages by default."""

    neutral_fields = fields.TOKENIZE_FIELDS

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class DetokenizeBody(Body):
    """Body of ``/detokenize``."""

    neutral_fields = fields.DETOKENIZE_FIELDS

    tokens: list[int]


B = TypeVar("B", bound=Body)


def parse_body(schema: type[B], given: Mapping[str, Any]) -> B:
    """Checks a JSON object against a schema. Null means left out.

    Raises:
        InvalidRequestError: The first field at fault.
    """
    selected = fields.select_fields(given, implemented=schema.model_fields, neutral=schema.neutral_fields)
    try:
        body = schema.model_validate(selected)
    except pydantic.ValidationError as error:
        raise _refusal(error) from None
    if isinstance(body, GenerationBody) and body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options is only allowed when stream is true", param="stream_options")
    return body


def _refusal(error: pydantic.ValidationError) -> InvalidRequestError:
    first = error.errors(include_url=False, include_context=False)[0]
    # Steps in capitals or with brackets name branches of the schema, not fields.
    steps = [step for step in first["loc"] if isinstance(step, int) or step.isidentifier()]
    param = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")
    if first["type"] == "missing":
        return InvalidRequestError(f"{param} is required", param=param, code="missing_required_parameter")
    reason = first["msg"].removeprefix("Input ")
    return InvalidRequestError(f"{param} {reason}, got {reprlib.repr(first['input'])}", param=param, code="invalid_type")

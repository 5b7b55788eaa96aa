"""The check of the longest sequence that a configuration or a command asks for against the model's limit. It is made here only."""

from __future__ import annotations

from jaxserve.errors import ConfigError
from jaxserve.models.spec import ModelSpec


def check_context_length(length: int | None, spec: ModelSpec, *, key: str, model: str) -> int:
    """The context length to use, in tokens of prompt and output together.

    Args:
        length: The wanted length; ``None`` takes the model's own limit.
        spec: The model's specification.
        key: Name of the setting that gave the length, such as ``model.max_model_len`` or ``--context``, for the message.
        model: The model's name, for the message.

    Returns:
        The length, or the model's limit for ``None``.

    Raises:
        ConfigError: The length is below 2 (one token of prompt and one of output) or above the model's limit.
    """
    if length is None:
        return spec.max_position
    if not 2 <= length <= spec.max_position:
        raise ConfigError(f"{key} is {length}; must be in [2, {spec.max_position}], the limit of {model}")
    return length

"""How long a sequence may be: what a configuration or a command asks for, held against what the model was made for. The one place that checks it."""

from __future__ import annotations

from jaxserve.errors import ConfigError
from jaxserve.models.spec import ModelSpec


def check_context_length(length: int | None, spec: ModelSpec, *, key: str, model: str) -> int:
    """Checks a wanted context length, in tokens of prompt and output together.

    Args:
        length: What is wanted; ``None`` takes the model's own limit.
        spec: The model.
        key: What the user set it with, such as ``model.max_model_len`` or ``--context``; for the message.
        model: The model's name, for the message.

    Returns:
        The length, or the model's limit for ``None``.

    Raises:
        ConfigError: The length is below 2, a token of prompt and one of output, or more than the model was made for.
    """
    if length is None:
        return spec.max_position
    if not 2 <= length <= spec.max_position:
        raise ConfigError(f"{key} is {length}; must be in [2, {spec.max_position}], the limit of {model}")
    return length

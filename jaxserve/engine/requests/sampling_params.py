"""From what a client gave, and what the model's authors recommend, to the sampling parameters of a request."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

from jaxserve.errors import InvalidRequestError
from jaxserve.request import SamplingParams

_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams))


def resolve_sampling(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    """Builds the parameters of a request.

    Args:
        given: Fields of :class:`SamplingParams` as a client wrote them: ``None`` means omitted, ``stop`` may be one string, lists are fine.
        defaults: Values for omitted fields, such as ``Engine.sampling_defaults``.

    Raises:
        InvalidRequestError: An unknown field, or a value of the wrong type or out of range; ``param`` names it.
    """
    values = dict(defaults)
    for name, value in given.items():
        if name not in _FIELDS:
            raise InvalidRequestError(f"{name} is not a sampling parameter; allowed are {', '.join(sorted(_FIELDS))}", param=name)
        if value is not None:
            values[name] = _as_tuple(name, value) if name in ("stop", "stop_token_ids") else value
    return SamplingParams(**values)


def _as_tuple(name: str, value: object) -> tuple[object, ...]:
    if name == "stop" and isinstance(value, str):
        return (value,)
    if not isinstance(value, (list, tuple)):
        raise InvalidRequestError(f"{name} must be a list, got {value!r:.80}", param=name)
    return tuple(cast("list[object] | tuple[object, ...]", value))

"""The sampling parameters of a request, made from the fields that a client gave and the model's recommended defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

from jaxserve.errors import InvalidRequestError
from jaxserve.request import SamplingParams

_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams))


def resolve_sampling(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters of a request.

    Args:
        given: Fields of :class:`SamplingParams` as a client wrote them. ``None`` means that the field is omitted, ``stop`` may be one string, and lists may
            stand for tuples.
        defaults: Values for omitted fields, such as ``Engine.sampling_defaults``.

    Raises:
        InvalidRequestError: A field is unknown, or its value has the wrong type or is out of range; ``param`` names it.
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

"""From what a client gave, and what the model's authors recommend, to the sampling parameters of a request."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from jaxserve.errors import InvalidRequestError, ModelError
from jaxserve.request import SamplingParams

_log = logging.getLogger(__name__)

_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams))
_RECOMMENDED = ("temperature", "top_k", "top_p", "min_p")
_NEUTRAL = {"repetition_penalty": 1.0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "no_repeat_ngram_size": 0, "num_beams": 1}
"""Recommendations that would change the tokens and that jaxserve does not have, at the value where they do nothing."""


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Picks from a model's ``generation_config.json`` what becomes the default of requests, and logs it.

    Temperature, top-k, top-p and min-p are taken. A recommendation that cannot be followed is logged as a warning. ``do_sample`` is not looked at:
    greedy decoding is ``temperature: 0``.

    Raises:
        ModelError: A recommended value is out of its range.
    """
    defaults = {name: generation_config[name] for name in _RECOMMENDED if generation_config.get(name) is not None}
    try:
        SamplingParams(**defaults)
    except InvalidRequestError as error:
        raise ModelError(f"the model's generation_config.json cannot be used: {error}") from error
    if defaults:
        _log.info("sampling defaults from generation_config.json: %s", ", ".join(f"{name}={value}" for name, value in defaults.items()))
    for name, neutral in _NEUTRAL.items():
        value = generation_config.get(name)
        if value is not None and value != neutral:
            _log.warning("generation_config.json recommends %s=%s, which jaxserve does not implement: it is not applied", name, value)
    return defaults


def resolve_params(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    """Builds the parameters of a request.

    Args:
        given: Fields of :class:`SamplingParams` as a client wrote them: ``None`` means omitted, ``stop`` may be one string, lists are fine.
        defaults: Values for omitted fields, as :func:`sampling_defaults` returns them.

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


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    if name == "stop" and isinstance(value, str):
        return (value,)
    if not isinstance(value, (list, tuple)):
        raise InvalidRequestError(f"{name} must be a list, got {value!r:.80}", param=name)
    return tuple(value)

"""One log line about each request that has ended: all that decides its answer but the prompt, which is never logged, and how long it took."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import re
from collections.abc import Mapping
from typing import Any

from jaxserve.config import Config
from jaxserve.errors import UnexpectedError
from jaxserve.request import Request, RequestOutput, RequestTimes, SamplingParams
from jaxserve.serving.contract import ServedEngine

logger = logging.getLogger(__name__)

_PLAIN = re.compile(r"[\w.,:/+@-]+", re.ASCII)
"""What stands in a line without quotes: a request's id is its client's word, and must neither look like another field nor begin a line."""


class RequestLog:
    """Logs at the level info, in the form ``name=value``.

    Args:
        config: Its ``model`` is what was asked for.
        engine: Tells what that has come to.
    """

    def __init__(self, config: Config, engine: ServedEngine) -> None:
        self._config = config
        self._engine = engine

    def __call__(self, request: Request, last: RequestOutput) -> None:
        """Logs a request.

        Args:
            request: It has ended.
            last: Its last output.
        """
        if logger.isEnabledFor(logging.INFO):
            fields = {"request": request.request_id, **_outcome(request, last), **self._model, **_sampling(request.sampling_params)}
            logger.info("%s", " ".join(f"{name}={_text(value)}" for name, value in fields.items() if value is not None))

    @functools.cached_property
    def _model(self) -> Mapping[str, Any]:
        engine = self._engine
        tokenizer = engine.tokenizer
        template = tokenizer.chat_template
        return {
            "model": engine.model_name,
            "source": self._config.model.source,
            "revision": engine.model_revision or "none",
            "dtype": self._config.model.dtype,
            "tokenizer": f"{tokenizer.source}/{tokenizer.vocab_size}",
            "template": "none" if template is None else hashlib.sha256(template.encode()).hexdigest()[:12],
        }


def _outcome(request: Request, last: RequestOutput) -> dict[str, Any]:
    usage, options = last.usage, request.options
    return {
        "tenant": options.tenant or None,
        "priority": options.priority or None,
        "finish": last.finish_reason,
        # By its class: the text of an error that nobody expected may hold anything.
        "error": None if last.error is None else "unexpected" if last.error.error_class is UnexpectedError else last.error.error_class.__name__,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "generated_tokens": usage.completion_tokens,
        "degraded_max_tokens": last.degraded_max_tokens,
        **({} if last.times is None else _durations(last.times, usage.completion_tokens)),
    }


def _durations(times: RequestTimes, num_tokens: int) -> dict[str, float | None]:
    """In milliseconds; ``None`` for what did not happen."""

    def since_arrival(moment_s: float | None) -> float | None:
        return None if moment_s is None else round((moment_s - times.arrival_s) * 1e3, 1)

    per_token_s = times.per_token_s(num_tokens)
    return {
        "queue_ms": since_arrival(times.scheduled_s),
        "ttft_ms": since_arrival(times.first_token_s),
        "tpot_ms": None if per_token_s is None else round(per_token_s * 1e3, 2),
        "e2e_ms": since_arrival(times.finished_s),
    }


def _sampling(sampling_params: SamplingParams) -> dict[str, Any]:
    """What its client asked for; of stop strings, which are its words, the number."""
    return {
        "temperature": sampling_params.temperature,
        "top_k": sampling_params.top_k,
        "top_p": sampling_params.top_p,
        "min_p": sampling_params.min_p,
        "seed": sampling_params.seed,
        "max_tokens": sampling_params.max_tokens,
        "num_stops": len(sampling_params.stop) + len(sampling_params.stop_token_ids),
        "ignore_eos": sampling_params.ignore_eos,
    }


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = f"{value:g}" if isinstance(value, float) and value == round(value) else str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)

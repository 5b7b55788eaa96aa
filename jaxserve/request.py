"""Requests and their outputs as plain data. Imports no tokenizer, no transport and no jax."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Literal

import msgspec

from jaxserve.errors import ErrorData, InvalidRequestError

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_SEED = 2**63 - 1
MAX_CACHE_SALT_CHARS = 256
MAX_SESSION_ID_CHARS = 256
MAX_PRIORITY = 1000
MAX_DEADLINE_MS = 24 * 3600 * 1000


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """The sampling parameters of a request: how its tokens are chosen and what ends them. Field names are those of the OpenAI and vLLM APIs.

    The order of operations is: temperature, then top-k, then top-p, then min-p, each on what the one before left.
    Randomness is a function of ``seed`` and the token's position alone.

    Args:
        temperature: Divides the logits; ``>= 0``. 0 is greedy: the lowest id among the largest logits.
        top_k: Keep the ``top_k`` most likely tokens; 0 or -1 keeps all.
        top_p: Keep the smallest set of most likely tokens whose probability reaches ``top_p``; in ``(0, 1]``.
        min_p: Drop tokens less likely than ``min_p`` times the most likely one; in ``[0, 1]``.
        seed: ``None`` draws a fresh seed for the request; else in ``[-2**63, 2**63)``.
        max_tokens: Largest number of tokens to generate, ``>= 1``; ``None`` means up to the context length.
        stop: Texts that end the generation where they first appear in the generated text.
        stop_token_ids: Token ids that end the generation, in addition to the model's own end-of-sequence (EOS) ids.
        include_stop_str_in_output: Keep the matched stop text in the output.
        ignore_eos: Go on past the model's EOS ids (``stop_token_ids`` still end it).
        skip_special_tokens: Leave special tokens out of the text.

    Raises:
        InvalidRequestError: A value out of its range; ``param`` names the field.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _check_number(self.temperature, "temperature", low=0.0, high=1e4)
        _check_number(self.top_p, "top_p", low=0.0, high=1.0, open_low=True)
        _check_number(self.min_p, "min_p", low=0.0, high=1.0)
        _check_int(self.top_k, "top_k", low=-1, high=2**31 - 1)
        if self.seed is not None:
            _check_int(self.seed, "seed", low=-MAX_SEED - 1, high=MAX_SEED)
        if self.max_tokens is not None:
            _check_int(self.max_tokens, "max_tokens", low=1, high=2**31 - 1)
        _check_stops(self.stop, self.stop_token_ids)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be true or false, got {getattr(self, name)!r:.80}", param=name)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RequestOptions:
    """The options of a request that do not concern its tokens: how it is scheduled, cached, accounted and traced.

    Args:
        cache_salt: The request shares the prefix cache only with requests of the same salt; ``None`` shares it with all that have none.
        session_id: If given, the pages that the request leaves in the prefix cache are kept longer, for the next turn of a conversation.
        priority: Smaller runs first, if ``scheduler.order`` is ``priority``; in ``[-MAX_PRIORITY, MAX_PRIORITY]``.
        deadline_ms: Time from arrival, in milliseconds, after which the answer is of no use, ``>= 1``. The request is ended then, or refused at once if it is
            expected to wait longer.
        tenant: Name of the tenant on whose account it runs; set by the server from the API key.
        traceparent: The caller's span in the form of W3C Trace Context; set by the server from the header.
        detokenize: Whether the engine makes the text and looks for stop strings in it; set by the server. If not, outputs have tokens only, and the maker of
            the text tells the engine when a stop string has ended it.

    Raises:
        InvalidRequestError: A value out of its range; ``param`` names the field.
    """

    cache_salt: str | None = None
    session_id: str | None = None
    priority: int = 0
    deadline_ms: int | None = None
    tenant: str = ""
    traceparent: str | None = None
    detokenize: bool = True

    def __post_init__(self) -> None:
        for name, limit in (("cache_salt", MAX_CACHE_SALT_CHARS), ("session_id", MAX_SESSION_ID_CHARS)):
            value: object = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, str):
                raise InvalidRequestError(f"{name} must be a string, got {value!r:.80}", param=name)
            if not 0 < len(value) <= limit:
                raise InvalidRequestError(f"{name} must have 1 to {limit} characters, got {len(value)}", param=name)
        _check_int(self.priority, "priority", low=-MAX_PRIORITY, high=MAX_PRIORITY)
        if self.deadline_ms is not None:
            _check_int(self.deadline_ms, "deadline_ms", low=1, high=MAX_DEADLINE_MS)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request to continue one prompt, already tokenised and validated.

    Args:
        request_id: Id that no other request in flight has.
        prompt_token_ids: Token ids of the prompt: at least one, each in ``[0, V)``.
        sampling_params: How its tokens are chosen and what ends them.
        options: How it is treated otherwise.
        arrival_s: Time of its arrival, by ``time.monotonic()``, in seconds.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling_params: SamplingParams
    options: RequestOptions = dataclasses.field(default_factory=RequestOptions)
    arrival_s: float = dataclasses.field(default_factory=time.monotonic)


class Usage(msgspec.Struct, frozen=True, kw_only=True):  # each token makes one: msgspec's structs are made in C
    """The token counts of one request.

    Args:
        prompt_tokens: Number of tokens of the prompt.
        completion_tokens: Number of generated tokens, including a final EOS or stop id.
        cached_tokens: Number of prompt tokens that a prefix cache held when the request was first admitted.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RequestTimes:
    """The times of the events in one request's life, all by the engine's clock, in seconds.

    Args:
        arrival_s: Time of its arrival.
        scheduled_s: Time at which its first step was scheduled; ``None`` if it never ran.
        first_token_s: Time at which its first generated token was there; ``None`` if there was none.
        last_token_s: Time at which its last generated token was there; ``None`` if there was none.
        finished_s: Time of its end.
        num_gaps: Number of gaps: intervals between two tokens in which the request was paused because its client read too slowly.
        gaps_s: Sum of these intervals.
    """

    arrival_s: float
    scheduled_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    finished_s: float
    num_gaps: int = 0
    gaps_s: float = 0.0

    @property
    def decode_s(self) -> float | None:
        """Time from the first token to the last, without gaps; ``None`` if there was no token."""
        return None if self.first_token_s is None or self.last_token_s is None else self.last_token_s - self.first_token_s - self.gaps_s

    def per_token_s(self, num_tokens: int) -> float | None:
        """The mean time between two consecutive tokens, gaps aside (TPOT).

        Args:
            num_tokens: Number of generated tokens.

        Returns:
            ``decode_s`` divided by the number of intervals between tokens; ``None`` if there is no interval.
        """
        decode_s, num_intervals = self.decode_s, num_tokens - 1 - self.num_gaps
        return None if decode_s is None or num_intervals < 1 else decode_s / num_intervals


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The output that one step added to one request. All ``text`` concatenated is the whole text, and all ``token_ids`` concatenated are all generated ids.

    Args:
        request_id: Id of the request that this belongs to.
        token_ids: New generated ids; empty when only held-back text is released.
        text: New text. Text that may yet turn out to be a stop string or half a character is held back.
        finish_reason: ``None`` while running. Exactly one output of a request has a reason, and it is the last one.
        stop_reason: The stop string or stop token id that ended it; ``None`` for EOS, length and others.
        usage: Token counts so far.
        error: What went wrong, if the finish reason is "error"; ``errors.from_data`` turns it into the error for the client.
        times: Times of the request, in the last output of a request that the engine queued; else ``None``.
        degraded_max_tokens: Limit of generated tokens that the server imposed under load in place of a larger one; ``None`` if it did not.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    usage: Usage
    error: ErrorData | None = None
    times: RequestTimes | None = None
    degraded_max_tokens: int | None = None


def joined(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """One output that stands for several consecutive outputs of one request, at least one."""
    if len(outputs) == 1:
        return outputs[0]
    token_ids = tuple(token_id for output in outputs for token_id in output.token_ids)
    return msgspec.structs.replace(outputs[-1], token_ids=token_ids, text="".join(output.text for output in outputs))


def ended_output(request: Request, num_tokens: int, reason: FinishReason, error: ErrorData | None) -> RequestOutput:
    """The last output of a request that the engine has refused, or can no longer end itself.

    Args:
        request: The request.
        num_tokens: Number of tokens generated so far.
        reason: Why it ends.
        error: What went wrong, if the reason is "error".
    """
    usage = Usage(prompt_tokens=len(request.prompt_token_ids), completion_tokens=num_tokens)
    return RequestOutput(request_id=request.request_id, token_ids=(), text="", finish_reason=reason, stop_reason=None, usage=usage, error=error)


def _check_number(value: object, name: str, *, low: float, high: float, open_low: bool = False) -> None:
    bounds = f"{'(' if open_low else '['}{low:g}, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequestError(f"{name} must be a number in {bounds}, got {value!r}", param=name)
    if not low <= value <= high or (open_low and value == low):  # NaN is in no range
        raise InvalidRequestError(f"{name} must be in {bounds}, got {value!r}", param=name)


def _check_int(value: object, name: str, *, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be an integer, got {value!r}", param=name)
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} must be in [{low}, {high}], got {value}", param=name)


def _check_stops(stop: tuple[str, ...], stop_token_ids: tuple[int, ...]) -> None:
    if isinstance(stop, str):  # a sequence of its characters, which nobody means
        raise InvalidRequestError(f"stop must be a tuple of strings, got the string {stop!r:.80}", param="stop")
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"stop holds {len(stop)} strings; at most {MAX_STOP_STRINGS} are allowed", param="stop")
    for text in stop:
        if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_STRING_CHARS:  # pyright: ignore[reportUnnecessaryIsInstance] - from outside
            raise InvalidRequestError(f"each stop must be a string of 1 to {MAX_STOP_STRING_CHARS} characters, got {text!r:.80}", param="stop")
    if len(stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError(f"stop_token_ids holds {len(stop_token_ids)} ids; at most {MAX_STOP_TOKEN_IDS} are allowed", param="stop_token_ids")
    for token_id in stop_token_ids:
        _check_int(token_id, "stop_token_ids", low=0, high=2**31 - 1)

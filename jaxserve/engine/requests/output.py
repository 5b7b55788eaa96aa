"""The output of a request, made from its sampled token ids: text, stop tokens, stop strings and the limit of its length. Knows nothing of scheduling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from jaxserve.request import FinishReason, SamplingParams


class Detokenizer(Protocol):
    """The interface of an object that turns the token ids of one generation into text; see ``jaxserve.tokenizer``."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes the next token ids. Returns the new text that is complete with them, which never ends within a character."""
        ...

    def finish(self) -> str:
        """Ends the generation. Returns the text that is left."""
        ...


class Delta(msgspec.Struct, frozen=True):
    """The part that some tokens, or the end of the generation, add to a request's output.

    Args:
        text: See :class:`jaxserve.request.RequestOutput`; so for the next two.
        finish_reason: Why the generation ended; ``None`` if it goes on.
        stop_reason: The stop string or stop token that ended it.
        num_tokens: Number of the tokens that belong to the output; the rest came after its end.
    """

    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_tokens: int = 0


_GOES_ON = Delta("", num_tokens=1)
"""What a token adds that does not end the generation, if the text is made elsewhere."""


class StopMatcher:
    """Finds the first of several stop strings in a text that arrives in pieces, and holds back text that may be the beginning of one.

    The result depends on the text alone, not on the pieces: it is the match that ends first, and of those that end at the same place the longest. Time is
    linear in the text (Knuth-Morris-Pratt, one state for each string), and pieces in which no stop string begins are searched by Python's fast ``in``.

    Args:
        stops: The stop strings, none of them empty.
        include: Whether the matched string stays in the text; nothing has to be held back then.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = [_StopState(text) for text in stops]
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Takes the next piece of text.

        Returns:
            The text that need not be held back, and the matched stop string or ``None``. Nothing may be pushed after a match.
        """
        begun = [stop for stop in self._stops if stop.num_matched or stop.text[0] in text]
        if not begun:
            released, self._held = self._held + text, ""
            return released, None
        buffer = self._held + text
        matched: str | None = None
        for end, char in enumerate(text, start=len(self._held) + 1):
            for stop in begun:
                if stop.feed(char) and (matched is None or len(stop.text) > len(matched)):
                    matched = stop.text
            if matched is not None:
                self._held = ""
                return buffer[: end if self._include else end - len(matched)], matched
        num_held = 0 if self._include else max(stop.num_matched for stop in begun)
        num_released = len(buffer) - num_held
        self._held = buffer[num_released:]
        return buffer[:num_released], None

    def finish(self) -> str:
        """Ends the text. Returns what was held back, which is no stop string because nothing follows."""
        released, self._held = self._held, ""
        return released


class _StopState:
    """The state of the search for one stop string: how many of its characters the text so far ends with."""

    __slots__ = ("_fallback", "num_matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self._fallback = [0] * len(text)  # [i]: the longest proper prefix of text[: i + 1] that is also its suffix
        length = 0
        for i in range(1, len(text)):
            while length and text[i] != text[length]:
                length = self._fallback[length - 1]
            length += text[i] == text[length]
            self._fallback[i] = length

    def feed(self, char: str) -> bool:
        """Takes one character of text. Returns whether the string is complete."""
        length = self.num_matched
        while length and char != self.text[length]:
            length = self._fallback[length - 1]
        self.num_matched = length + (char == self.text[length])
        return self.num_matched == len(self.text)


class TokenRules:
    """The rules that end a generation by its tokens alone: end-of-sequence ids, stop token ids and the limit of its length.

    Args:
        sampling_params: The request's sampling parameters.
        eos_token_ids: The model's end-of-sequence ids.
        max_tokens: Largest number of tokens to generate, ``>= 1``.
    """

    def __init__(self, sampling_params: SamplingParams, eos_token_ids: frozenset[int], max_tokens: int) -> None:
        self._eos_token_ids: frozenset[int] = frozenset() if sampling_params.ignore_eos else eos_token_ids
        self._last_token_ids = self._eos_token_ids.union(sampling_params.stop_token_ids)
        self._max_tokens = max_tokens
        self._num_tokens = 0

    def push(self, token_id: int) -> tuple[FinishReason, int | None] | None:
        """Takes the next generated token. Returns the finish reason and the stop reason if it is the last one, else ``None``."""
        self._num_tokens = num_tokens = self._num_tokens + 1
        if token_id in self._last_token_ids:
            return "stop", None if token_id in self._eos_token_ids else token_id
        return None if num_tokens < self._max_tokens else ("length", None)


class TextMaker:
    """Makes the text of a generation, and finds the stop string that ends it.

    Args:
        sampling_params: The request's sampling parameters.
        detokenizer: A detokenizer that knows the prompt, whose text it does not repeat.
    """

    def __init__(self, sampling_params: SamplingParams, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._include_stop = sampling_params.include_stop_str_in_output
        self._matcher = StopMatcher(sampling_params.stop, include=sampling_params.include_stop_str_in_output) if sampling_params.stop else None

    def push(self, token_ids: Sequence[int]) -> tuple[str, str | None, int]:
        """Takes the next generated tokens, none of which is the last by :class:`TokenRules`.

        Returns:
            The text that need not be held back; the stop string that has ended the generation, after which nothing may be pushed, or ``None``; and the number
            of tokens up to that end.
        """
        if self._matcher is None:
            return self._detokenizer.push(token_ids), None, len(token_ids)
        texts: list[str] = []
        for index, token_id in enumerate(token_ids):
            text, matched = self._matcher.push(self._detokenizer.push((token_id,)))
            texts.append(text)
            if matched is not None:
                return "".join(texts), matched, index + 1
        return "".join(texts), None, len(token_ids)

    def end(self, reason: FinishReason, stop_reason: str | int | None = None, last_token_id: int | None = None) -> Delta:
        """Ends the generation and releases all text held back.

        A stop string that this text completes still cuts it, and becomes the stop reason unless the request was aborted.

        Args:
            reason: Why the generation ends.
            stop_reason: The stop token id, if one has ended it.
            last_token_id: The token that has ended it, if one has.
        """
        text = ""
        if last_token_id is not None and (reason == "length" or self._include_stop):
            text = self._detokenizer.push((last_token_id,))
        text += self._detokenizer.finish()
        if self._matcher is None:
            return Delta(text, reason, stop_reason)
        text, matched = self._matcher.push(text)
        if matched is not None:
            return Delta(text, reason) if reason == "abort" else Delta(text, "stop", matched)
        return Delta(text + self._matcher.finish(), reason, stop_reason)


class OutputProcessor:
    """Follows one generation token by token. A streamed answer and a whole answer are both the concatenation of its deltas, hence equal.

    The rules are those of vLLM where it has one, in this order:

    1. An end-of-sequence id (unless ``ignore_eos``) or one of ``stop_token_ids`` ends with "stop". The token counts and stays in the ids, but its text, special
       or not, is left out unless ``include_stop_str_in_output``. ``stop_reason`` is the id; ``None`` for an end-of-sequence id.
    2. A stop string in the generated text (never in the prompt) ends with "stop". The text is cut before the string, or after it if
       ``include_stop_str_in_output``. ``stop_reason`` is the string.
    3. ``max_tokens`` generated tokens end with "length".

    Args:
        rules: The first and the third rule.
        text: Makes the text and applies the second rule; ``None`` if the text is made elsewhere, so that deltas have no text.
    """

    def __init__(self, rules: TokenRules, text: TextMaker | None) -> None:
        self._rules = rules
        self._text = text

    def push(self, token_ids: Sequence[int]) -> Delta:
        """Takes the next generated tokens, at least one. Those after the one that ends the generation are ignored, and nothing may be pushed after that end."""
        if len(token_ids) == 1:  # as nearly always
            return self._push(token_ids[0])
        delta = Delta("")
        while delta.finish_reason is None and delta.num_tokens < len(token_ids):
            following = self._push(token_ids[delta.num_tokens])
            delta = Delta(delta.text + following.text, following.finish_reason, following.stop_reason, delta.num_tokens + 1)
        return delta

    def _push(self, token_id: int) -> Delta:
        end = self._rules.push(token_id)
        if self._text is None:
            return _GOES_ON if end is None else Delta("", *end, 1)
        if end is not None:
            return msgspec.structs.replace(self._text.end(*end, token_id), num_tokens=1)
        text, matched, _ = self._text.push((token_id,))
        return Delta(text, None if matched is None else "stop", matched, 1)

    def finish(self, reason: FinishReason) -> Delta:
        """Ends the generation for a reason that does not come from its tokens, such as an abort."""
        return Delta("", reason) if self._text is None else self._text.end(reason)

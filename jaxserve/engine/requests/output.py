"""From sampled ids to text and to the end of a request: detokenisation, stop ids, stop strings, length. One request at a time; no scheduling."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from jaxserve.request import FinishReason, SamplingParams


class Detokenizer(Protocol):
    """Turns the ids of one generation into text; see ``jaxserve.tokenizer``."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the text that is complete with these ids; never half a character."""
        ...

    def finish(self) -> str:
        """Returns what is left at the end."""
        ...


@dataclasses.dataclass(slots=True)  # one a step and sequence: not frozen for the reason given in schedule.py
class Delta:
    """What some tokens, or the end, add: fields as in :class:`jaxserve.request.RequestOutput`.

    Args:
        num_tokens: How many of the tokens belong to the output; the rest came behind its end.
    """

    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_tokens: int = 0


class StopMatcher:
    """Finds the first of several strings in a text that arrives in pieces, and holds back what may yet become one.

    The result depends on the text alone, not on how it is cut: the match is the one that ends first, among those that end together the longest.
    Time is linear in the text (Knuth-Morris-Pratt, one state a string), and C speed where no string has begun.

    Args:
        stops: The strings, none empty.
        include: Keep the matched string in the text; nothing needs to be held back then.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = [_StopState(text) for text in stops]
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Takes the next piece.

        Returns:
            The text that is free to go, and the matched stop string, after which nothing may be pushed.
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
        """Returns the text still held back: no more follows, so it is no stop string."""
        released, self._held = self._held, ""
        return released


class _StopState:
    """How much of one stop string the text so far ends with."""

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
    """Ends a generation by its tokens alone.

    Args:
        params: Of the request.
        eos_token_ids: The model's own.
        max_tokens: Most tokens to generate, ``>= 1``.
    """

    def __init__(self, params: SamplingParams, eos_token_ids: frozenset[int], max_tokens: int) -> None:
        self._eos_token_ids: frozenset[int] = frozenset() if params.ignore_eos else eos_token_ids
        self._stop_token_ids = frozenset(params.stop_token_ids)
        self._max_tokens = max_tokens
        self._num_tokens = 0

    def push(self, token_id: int) -> tuple[FinishReason, int | None] | None:
        """Takes the next generated token. Returns the reason and the stop reason if it is the last."""
        self._num_tokens += 1
        if token_id in self._eos_token_ids:
            return "stop", None
        if token_id in self._stop_token_ids:
            return "stop", token_id
        return ("length", None) if self._num_tokens >= self._max_tokens else None


class TextMaker:
    """Makes the text of a generation, and finds the stop string that ends it.

    Args:
        params: Of the request.
        detokenizer: Primed with the prompt, of which it repeats nothing.
    """

    def __init__(self, params: SamplingParams, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._include_stop = params.include_stop_str_in_output
        self._matcher = StopMatcher(params.stop, include=params.include_stop_str_in_output) if params.stop else None

    def push(self, token_ids: Sequence[int]) -> tuple[str, str | None, int]:
        """Takes the next generated tokens, none of which is the last by :class:`TokenRules`.

        Returns:
            The text that is free to go; the stop string that has ended it, after which nothing may be pushed; how many of the tokens were taken.
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
        """Releases all held text. A stop string that this text completes still cuts it, and is the reason unless aborted.

        Args:
            reason: Why it ends.
            stop_reason: The stop token id, if it was one.
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
    """Follows one generation token by token. A stream and a whole answer both are the concatenation of its deltas, hence equal.

    Rules, in this order, those of vLLM where it has one:

    1. An EOS id (unless ``ignore_eos``) or one of ``stop_token_ids`` ends with "stop". The token counts and stays in the ids, but its text, special
       or not, is left out unless ``include_stop_str_in_output``. ``stop_reason`` is the id; ``None`` for an EOS.
    2. A stop string in the generated text (never in the prompt) ends with "stop"; it and what follows are cut. ``stop_reason`` is the string.
    3. ``max_tokens`` generated tokens end with "length".

    Args:
        rules: The first and the third.
        text: The second; ``None`` where the text is made elsewhere: deltas have none then.
    """

    def __init__(self, rules: TokenRules, text: TextMaker | None) -> None:
        self._rules = rules
        self._text = text

    def push(self, token_ids: Sequence[int]) -> Delta:
        """Takes the next generated tokens, at least one, up to the one that ends the generation. Nothing may be pushed after a delta with a finish reason."""
        delta = self._push(token_ids[0])
        delta.num_tokens = 1
        while delta.finish_reason is None and delta.num_tokens < len(token_ids):
            following = self._push(token_ids[delta.num_tokens])
            delta = Delta(delta.text + following.text, following.finish_reason, following.stop_reason, delta.num_tokens + 1)
        return delta

    def _push(self, token_id: int) -> Delta:
        end = self._rules.push(token_id)
        if end is not None:
            return Delta("", *end) if self._text is None else self._text.end(*end, token_id)
        if self._text is None:
            return Delta("")
        text, matched, _ = self._text.push((token_id,))
        return Delta(text) if matched is None else Delta(text, "stop", matched)

    def finish(self, reason: FinishReason) -> Delta:
        """Ends the generation for a reason that is not in its tokens."""
        return Delta("", reason) if self._text is None else self._text.end(reason)

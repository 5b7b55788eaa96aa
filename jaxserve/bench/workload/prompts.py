"""Prompts of a wanted number of tokens, from a plan's segments: as token ids where the server takes them, else as words that are one token each."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol

from jaxserve.bench.workload.plan import Segment
from jaxserve.bench.workload.randomness import seeded

ID_RANGE = (1_000, 20_000)
"""Ids of ordinary tokens in every common vocabulary: special tokens and raw bytes stand at its beginning, rare ones and more special ones at its end."""

_WORDS = """
about after again all also and another any around as at back because been before being between both but called came can come could day did different
do does down each end even every find first for found from get give go good great had hand hard has have head help her here high him his home house
how if important in into is it its just keep kind know large last left letter life light like line little live long look made make man many may me
mean men might mother move much must my name near need never new next night no not now number of off old on one only open or other our out over own
page part people place plant play point read right run said same saw say school see sentence set she should show side small so some something
sometimes soon sound still stop story study such take tell than that the their them then there these they thing think this those thought three through
time to together too took tree try turn two under until up us use very walk want was water way we well went were what when where which while white who
why will with without word work world would write year you young your
"""

WORDS: tuple[str, ...] = tuple(_WORDS.split())
"""Short common words: with the blank before it, each is one token of nearly every vocabulary."""


class PromptMaker(Protocol):
    """From segments to what a request carries."""

    @property
    def exact(self) -> bool:
        """Whether the lengths are true by construction, rather than estimates."""
        ...

    @property
    def source(self) -> str:
        """How lengths come about, for the report."""
        ...

    def prompt(self, segments: Sequence[Segment]) -> str | list[int]:
        """The prompt of a completion."""
        ...

    def messages(self, segments: Sequence[Segment]) -> list[dict[str, Any]]:
        """The messages of a chat."""
        ...


@dataclasses.dataclass(frozen=True)
class IdPrompts:
    """Random token ids; for completions only."""

    low: int = ID_RANGE[0]
    high: int = ID_RANGE[1]
    exact: bool = True
    source: str = "token ids"

    @classmethod
    def within(cls, vocab_size: int) -> IdPrompts:
        """Ids of a vocabulary that may be smaller than common ones."""
        high = min(ID_RANGE[1], vocab_size)
        return cls(min(ID_RANGE[0], high // 2), high)

    def prompt(self, segments: Sequence[Segment]) -> list[int]:
        ids: list[int] = []
        for segment in segments:
            ids += _ids(segment.key, segment.length, self.low, self.high)
        return ids

    def messages(self, segments: Sequence[Segment]) -> list[dict[str, Any]]:
        raise NotImplementedError("a chat is made of text")


@dataclasses.dataclass(frozen=True)
class WordPrompts:
    """Random words.

    Args:
        words: Each is one token where it follows a blank.
        overhead: Tokens that server and template add to the first request of a session; they count as part of its length: the last segment is that much
            shorter, but never empty.
        turn_overhead: What each further turn (an answer and a question) adds.
        tokens_per_word: Where words could not be told from several tokens: how many tokens one has on average.
    """

    words: tuple[str, ...] = WORDS
    overhead: int = 0
    turn_overhead: int = 0
    tokens_per_word: float = 1.0
    exact: bool = True
    source: str = "words"

    def prompt(self, segments: Sequence[Segment]) -> str:
        return " ".join(self._texts(segments))

    def messages(self, segments: Sequence[Segment]) -> list[dict[str, Any]]:
        return [{"role": segment.role, "content": text} for segment, text in zip(segments, self._texts(segments), strict=True)]

    def _texts(self, segments: Sequence[Segment]) -> list[str]:
        lengths = [segment.length for segment in segments]
        lengths[-1] -= self.overhead + self.turn_overhead * sum(segment.role == "assistant" for segment in segments)
        counts = [max(1, round(length / self.tokens_per_word)) for length in lengths]
        return [" ".join(_words(segment.key, count, self.words)) for segment, count in zip(segments, counts, strict=True)]


# Shared prefixes and the turns of a session come again and again.
@functools.lru_cache(maxsize=256)
def _ids(key: str, length: int, low: int, high: int) -> tuple[int, ...]:
    return tuple(seeded(key).choices(range(low, high), k=length))


@functools.lru_cache(maxsize=256)
def _words(key: str, count: int, words: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(seeded(key).choices(words, k=count))

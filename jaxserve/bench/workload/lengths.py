"""Lengths of prompts and outputs, in tokens: drawn from a distribution, a joint histogram or recorded conversations."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from jaxserve.errors import ConfigError

MAX_LEN = 10_000_000

_FORMS = "a number, uniform:LOW:HIGH or normal:MEAN:STD"


@dataclasses.dataclass(frozen=True, slots=True)
class Lengths:
    """One distribution of lengths ``>= 1``.

    Args:
        kind: ``fixed`` is always ``a``; ``uniform`` a whole number in ``[a, b]``; ``normal`` has mean ``a`` and standard deviation ``b``, rounded, and drawn
            again while below 1.
    """

    kind: Literal["fixed", "uniform", "normal"]
    a: float
    b: float = 0.0

    def draw(self, rng: random.Random) -> int:
        if self.kind == "fixed":
            return int(self.a)
        if self.kind == "uniform":
            return rng.randint(int(self.a), int(self.b))
        while (length := round(rng.gauss(self.a, self.b))) < 1:
            pass
        return length


def parse_lengths(text: str, key: str) -> Lengths:
    """Reads ``128``, ``uniform:64:256`` or ``normal:128:32``.

    Args:
        text: As typed.
        key: Its option or field, for messages.

    Raises:
        ConfigError: Not of these forms, or out of range.
    """
    kind, *numbers = ["fixed", *text.split(":")] if text[:1].isdigit() else text.split(":")
    try:
        values = [float(number) for number in numbers]
    except ValueError:
        values = []
    if not all(0 <= value <= MAX_LEN for value in values) or len(values) != {"fixed": 1, "uniform": 2, "normal": 2}.get(kind):
        raise ConfigError(f"{key} is {text!r}; must be {_FORMS}, of lengths in [1, {MAX_LEN}]")
    whole = kind == "normal" or all(value.is_integer() for value in values)
    if values[0] < 1 or not whole or (kind == "uniform" and values[1] < values[0]):
        raise ConfigError(f"{key} is {text!r}; lengths are whole numbers of at least 1, and HIGH is not below LOW")
    return Lengths(cast(Literal["fixed", "uniform", "normal"], kind), *values)


LengthPairs = Iterator[tuple[int, int]]
"""Endless (prompt, output) lengths."""


def independent_pairs(inputs: Lengths, outputs: Lengths, rng: random.Random) -> LengthPairs:
    """Prompt and output lengths that know nothing of each other."""
    while True:
        yield inputs.draw(rng), outputs.draw(rng)


@dataclasses.dataclass(frozen=True)
class LengthFile:
    """A file of joint lengths, read.

    Args:
        bins: (prompt range, output range, weight), both ends included; of a histogram.
        conversations: (prompt, answer) as texts; of ShareGPT-style JSON.
        broken: Entries that could not be read.
    """

    bins: tuple[tuple[tuple[int, int], tuple[int, int], float], ...] = ()
    conversations: tuple[tuple[str, str], ...] = ()
    broken: int = 0

    def pairs(self, rng: random.Random, count_tokens: Callable[[str], int]) -> LengthPairs:
        """Endless draws: a bin by weight and a place in it, or a conversation whose texts are counted. An empty text counts as one token."""
        while True:
            if self.bins:
                ((inputs, outputs, _),) = rng.choices(self.bins, weights=[weight for *_, weight in self.bins])
                yield rng.randint(*inputs), rng.randint(*outputs)
            else:
                prompt, answer = rng.choice(self.conversations)
                yield max(1, count_tokens(prompt)), max(1, count_tokens(answer))


def read_length_file(path: str) -> LengthFile:
    """Reads joint lengths: ``{"bins": [{"input": [low, high], "output": [low, high], "weight": w}, …]}`` or ShareGPT's list of conversations.

    Raises:
        ConfigError: No readable JSON of either form, or more than half of its entries are broken.
    """
    try:
        tree: Any = json.loads(Path(path).expanduser().read_bytes())
    except OSError as error:
        raise ConfigError(f"lengths: cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"lengths: {path} is no JSON: {error}") from None
    if isinstance(tree, dict) and isinstance(bins := cast(dict[str, Any], tree).get("bins"), list):
        entries, parse = cast(list[Any], bins), _bin
    elif isinstance(tree, list):
        entries, parse = cast(list[Any], tree), _conversation
    else:
        raise ConfigError(f'lengths: {path} is neither {{"bins": […]}} nor a list of conversations')
    read = [parse(entry) for entry in entries]
    good = [entry for entry in read if entry is not None]
    refuse_mostly_broken(f"lengths: {path}", len(good), len(read) - len(good), "entries")
    if parse is _bin:
        return LengthFile(bins=tuple(cast(Any, good)), broken=len(read) - len(good))
    return LengthFile(conversations=tuple(cast(Any, good)), broken=len(read) - len(good))


def refuse_mostly_broken(what: str, good: int, broken: int, noun: str) -> None:
    """A few broken rows are counted and left out, but a file of which most are broken is not the file that was meant.

    Raises:
        ConfigError: None are good, or more are broken than good.
    """
    if not good or broken > good:
        raise ConfigError(f"{what}: {broken} of {good + broken} {noun} cannot be read; at least half must be")


def _bin(entry: Any) -> tuple[tuple[int, int], tuple[int, int], float] | None:
    try:
        ranges = [(int(low), int(high)) for low, high in (entry["input"], entry["output"])]
        weight = float(entry.get("weight", 1))
    except (TypeError, ValueError, KeyError, AttributeError):
        return None
    good = all(1 <= low <= high <= MAX_LEN for low, high in ranges) and 0 < weight < math.inf
    return (ranges[0], ranges[1], weight) if good else None


def _conversation(entry: Any) -> tuple[str, str] | None:
    """The first question and its answer, under ShareGPT's names or OpenAI's."""
    try:
        turns: Sequence[Any] = entry.get("conversations") or entry["messages"]
        texts = [turn.get("value") or turn["content"] for turn in turns if (turn.get("from") or turn["role"]) != "system"][:2]
    except (TypeError, KeyError, AttributeError):
        return None
    return (texts[0], texts[1]) if len(texts) == 2 and all(isinstance(text, str) and text for text in texts) else None

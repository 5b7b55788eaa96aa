"""Typed fields of a configuration: what a value may be, stated in its annotation, and the reading of text by that annotation. Knows no section."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Protocol, Union, cast, get_args, get_origin

from jaxserve.errors import ConfigError

_NONE_WORDS = frozenset({"", "~", "null", "none"})
_BOOL_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


class Rule(Protocol):
    """A limit on a value, written into its annotation as ``Annotated[int, rule]``. Its ``str`` completes the sentence "must be …"."""

    def admits(self, value: Any) -> bool: ...


@dataclasses.dataclass(frozen=True)
class Between:
    """A finite number in ``[low, high]``; in ``(low, high]`` with ``open_low``."""

    low: float
    high: float = math.inf
    open_low: bool = False

    def admits(self, value: Any) -> bool:
        return self.low <= value <= self.high and value != math.inf and not (self.open_low and value == self.low)  # NaN is in no range

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"{'more than' if self.open_low else 'at least'} {self.low}"
        return f"in {'(' if self.open_low else '['}{self.low}, {self.high}]"


@dataclasses.dataclass(frozen=True)
class PowerOfTwo:
    """1, 2, 4, …"""

    def admits(self, value: Any) -> bool:
        return value > 0 and value & (value - 1) == 0

    def __str__(self) -> str:
        return "a power of two"


@dataclasses.dataclass(frozen=True)
class Ascending:
    """Numbers ``>= 1``, each larger than the one before; may be empty."""

    def admits(self, value: Any) -> bool:
        return all(low < high for low, high in zip((0, *value), value, strict=False))

    def __str__(self) -> str:
        return "positive and strictly ascending"


@dataclasses.dataclass(frozen=True)
class NotBlank:
    """A text, or each of several, that is neither empty nor padded with blanks."""

    def admits(self, value: Any) -> bool:
        return all(text and text == text.strip() for text in ((value,) if isinstance(value, str) else value))

    def __str__(self) -> str:
        return "without blanks around it and not empty"


@dataclasses.dataclass(frozen=True)
class Distinct:
    """No entry twice; may be empty."""

    def admits(self, value: Any) -> bool:
        return len(set(value)) == len(value)

    def __str__(self) -> str:
        return "without the same entry twice"


@dataclasses.dataclass(frozen=True)
class OneOf:
    """One of some texts that a table gives; what the code itself lists is a ``Literal``."""

    allowed: tuple[str, ...]

    def admits(self, value: Any) -> bool:
        return value in self.allowed

    def __str__(self) -> str:
        return f"one of {', '.join(self.allowed)}"


def coerce(value: object, annotation: Any, key: str) -> Any:
    """Reads ``value`` as ``annotation`` says: text from a file or a command line, or a Python value of the right type already.

    Args:
        value: Text, or an int, float, bool, ``None``, list or tuple. An int is also a float; a bool is never a number.
        annotation: ``int``, ``float``, ``bool``, ``str``, a ``Literal`` of texts, ``tuple[X, ...]``, ``X | None``, or ``Annotated`` of one of them.
            A tuple is also read from ``a,b`` and ``[a, b]``. For ``X | None`` the words null, none, ~ and the empty text are ``None``.
        key: Full path of the key, for messages.

    Raises:
        ConfigError: The value is none of these; names key, value and what is allowed.
    """
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        if value is None or (isinstance(value, str) and value.strip().lower() in _NONE_WORDS):
            return None
        (inner,) = (arg for arg in args if arg is not types.NoneType)
        return coerce(value, inner, key)
    if origin is tuple:
        return tuple(coerce(item, args[0], f"{key}[{i}]") for i, item in enumerate(_items(value, key)))
    if origin is Literal:
        if value not in args:
            raise _refusal(key, value, f"one of {', '.join(args)}")
        return value
    if annotation is str:
        if not isinstance(value, str):
            raise _refusal(key, value, "a text")
        return value
    if annotation is bool:
        read = value if isinstance(value, bool) else _BOOL_WORDS.get(value.strip().lower()) if isinstance(value, str) else None
        if read is None:
            raise _refusal(key, value, "true or false")
        return read
    assert annotation in (int, float), f"{key} is declared as {annotation!r}, which the loader does not know"
    return _number(value, annotation, key)


def check(value: object, annotation: Any, key: str) -> None:
    """Checks a coerced value, and each item of a tuple, against the rules in its annotation.

    Raises:
        ConfigError: A rule does not admit the value; names key, value and what is allowed.
    """
    if value is None:
        return
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        for rule in args[1:]:
            if not rule.admits(value):
                raise _refusal(key, value, str(rule))
        check(value, args[0], key)
    elif origin in (Union, types.UnionType):
        for part in args:
            check(value, part, key)
    elif origin is tuple:
        for i, item in enumerate(cast("tuple[object, ...]", value)):
            check(item, args[0], f"{key}[{i}]")


def _number(value: object, kind: type[int] | type[float], key: str) -> int | float:
    wanted = "a whole number" if kind is int else "a number"
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise _refusal(key, value, wanted)
    try:
        number = kind(value)
    except (ValueError, OverflowError):
        raise _refusal(key, value, wanted) from None
    if not isinstance(value, str) and number != value:
        raise _refusal(key, value, wanted)
    return number


def _items(value: object, key: str) -> Iterable[object]:
    if isinstance(value, list | tuple):
        return value  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, str):
        text = value.strip()
        if text.startswith("[") and text.endswith("]"):
            text = text[1:-1].strip()
        return [item.strip() for item in text.split(",")] if text else []
    raise _refusal(key, value, "a list, or values separated by commas")


def _refusal(key: str, value: object, allowed: str) -> ConfigError:
    shown = repr(value)
    return ConfigError(f"{key} is {shown if len(shown) <= 80 else shown[:77] + '...'}; must be {allowed}")

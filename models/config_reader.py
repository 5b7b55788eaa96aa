"""Strict reading of a model's config: every key is checked for type and range, and a key that nobody read is an error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

from jaxserve.errors import UnsupportedModelError

T = TypeVar("T")

_REQUIRED = object()


class ConfigReader:
    """A config mapping that remembers which of its keys were read. A null value counts as absent.

    Args:
        config: Parsed JSON.
        path: What to put before key names in messages: empty at the top, ``rope_scaling.`` in that section.

    Raises:
        UnsupportedModelError: From every method, naming key, value and what is allowed.
    """

    def __init__(self, config: object, path: str = "") -> None:
        if not isinstance(config, Mapping):
            raise UnsupportedModelError(f"model config: {path.removesuffix('.') or 'the whole'} must be a JSON object, got {_show(config)}")
        self._config = cast(Mapping[str, Any], config)
        self._path = path
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self._config.get(key) is not None

    def is_null(self, key: str) -> bool:
        """Whether the key is there and null, for the few keys where that differs from absent."""
        self._read.add(key)
        return key in self._config and self._config[key] is None

    def integer(self, key: str, *, low: int, high: int, default: Any = _REQUIRED) -> int:
        """An integer in ``[low, high]``. ``default`` stands in for an absent key and may be ``None``, then the result is too."""
        value = self._get(key, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, f"must be an integer in [{low}, {high}]")
        return value

    def number(self, key: str, *, low: float, high: float, default: Any = _REQUIRED) -> float:
        """A number in ``[low, high]``, or ``default`` for an absent key."""
        value = self._get(key, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise self.error(key, f"must be a number in [{low:g}, {high:g}]")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return value

    def choice(self, key: str, options: Mapping[str, T], *, default: Any = _REQUIRED) -> T:
        """What ``options`` has for the key's value."""
        value = self._get(key, default)
        if not isinstance(value, str) or value not in options:
            raise self.error(key, f"is not supported; supported: {', '.join(options)}")
        return options[value]

    def strings(self, key: str) -> tuple[str, ...] | None:
        """A list of strings, or ``None`` for an absent key."""
        value = self._get(key, None)
        if value is None:
            return None
        if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(item, str) for item in value):
            raise self.error(key, "must be a list of strings")
        return tuple(value)

    def token_ids(self, key: str, *, vocab_size: int) -> tuple[int, ...]:
        """A token id, a list of them, or none at all."""
        value = self._get(key, ())
        ids = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < vocab_size for item in ids):
            raise self.error(key, f"must be token ids in [0, {vocab_size})")
        return tuple(ids)

    def section(self, key: str) -> ConfigReader | None:
        """The object under the key, to be read and finished by itself; ``None`` for an absent key."""
        value = self._get(key, None)
        return None if value is None else ConfigReader(value, f"{self._path}{key}.")

    def neutral(self, key: str, allowed: Iterable[Any]) -> None:
        """Accepts the key at the values that change nothing."""
        value = self._get(key, None)
        if value is not None and not any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in allowed):
            raise self.error(key, f"changes the model and is not supported; supported: {', '.join(map(_show, allowed)) or 'null'}")

    def ignore(self, keys: Iterable[str]) -> None:
        """Accepts these keys at any value."""
        self._read.update(keys)

    def finish(self) -> None:
        """Refuses keys that nothing has read: they might change the maths."""
        unread = [key for key in self._config if key not in self._read]
        if unread:
            raise self.error(unread[0], "is an attribute that jaxserve does not know, and it may change the model")

    def error(self, key: str, problem: str) -> UnsupportedModelError:
        """An error about a key, with its value."""
        value = f" = {_show(self._config[key])}" if key in self._config else ""
        return UnsupportedModelError(f"model config: {self._path}{key}{value} {problem}")

    def _get(self, key: str, default: Any) -> Any:
        self._read.add(key)
        value = self._config.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise UnsupportedModelError(f"model config: {self._path}{key} is missing")
        return default


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

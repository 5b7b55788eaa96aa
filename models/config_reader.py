"""A strict reader of a model's config: every key is checked for type and range, and a key that nobody has read is an error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

from jaxserve.errors import UnsupportedModelError

T = TypeVar("T")

_REQUIRED = object()


class ConfigReader:
    """A config mapping that remembers which of its keys were read. A null value counts as absent.

    Args:
        config: The parsed JSON.
        path: Prefix of key names in messages: empty at the top, ``rope_scaling.`` in that section.

    Raises:
        UnsupportedModelError: The config is not a JSON object. Every method raises it too, for a value that is not allowed; the message names key and
            value.
    """

    def __init__(self, config: object, path: str = "") -> None:
        if not isinstance(config, Mapping):
            raise UnsupportedModelError(f"model config: {path.removesuffix('.') or 'the whole'} must be a JSON object, got {_show(config)}")
        self._config = cast(Mapping[str, Any], config)
        self._path = path
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        """Whether the key is present and not null."""
        return self._config.get(key) is not None

    def is_null(self, key: str) -> bool:
        """Whether the key is present and null, for the few keys for which that differs from absent."""
        self._read.add(key)
        return key in self._config and self._config[key] is None

    def integer(self, key: str, *, low: int, high: int, default: Any = _REQUIRED) -> int:
        """The key's integer, in ``[low, high]``, or ``default`` (which may be ``None``) for an absent key."""
        value = self._get(key, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, f"must be an integer in [{low}, {high}]")
        return value

    def number(self, key: str, *, low: float, high: float, default: Any = _REQUIRED) -> float:
        """The key's number, in ``[low, high]``, or ``default`` for an absent key."""
        value = self._get(key, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise self.error(key, f"must be a number in [{low:g}, {high:g}]")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """The key's boolean, or ``default`` for an absent key."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return value

    def choice(self, key: str, options: Mapping[str, T], *, default: Any = _REQUIRED) -> T:
        """The item of ``options`` that the key's value names."""
        value = self._get(key, default)
        if not isinstance(value, str) or value not in options:
            raise self.error(key, f"is not supported; supported: {', '.join(options)}")
        return options[value]

    def strings(self, key: str) -> tuple[str, ...] | None:
        """The key's list of strings, or ``None`` for an absent key."""
        value = self._get(key, None)
        if value is None:
            return None
        if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(item, str) for item in value):
            raise self.error(key, "must be a list of strings")
        return tuple(value)

    def token_ids(self, key: str, *, vocab_size: int) -> tuple[int, ...]:
        """The key's token ids, which are a single id or a list in the config; empty for an absent key."""
        value = self._get(key, ())
        ids = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < vocab_size for item in ids):
            raise self.error(key, f"must be token ids in [0, {vocab_size})")
        return tuple(ids)

    def section(self, key: str) -> ConfigReader | None:
        """A reader of the object under the key, which must be finished separately; ``None`` for an absent key."""
        value = self._get(key, None)
        return None if value is None else ConfigReader(value, f"{self._path}{key}.")

    def neutral(self, key: str, allowed: Iterable[Any]) -> None:
        """Accepts the key if it is absent or has one of the ``allowed`` values, which change nothing."""
        value = self._get(key, None)
        if value is not None and not any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in allowed):
            raise self.error(key, f"changes the model and is not supported; supported: {', '.join(map(_show, allowed)) or 'null'}")

    def ignore(self, keys: Iterable[str]) -> None:
        """Accepts these keys with any value."""
        self._read.update(keys)

    def finish(self) -> None:
        """Refuses keys that have not been read, since they might change the maths."""
        unread = [key for key in self._config if key not in self._read]
        if unread:
            raise self.error(unread[0], "is an attribute that jaxserve does not know, and it may change the model")

    def error(self, key: str, problem: str) -> UnsupportedModelError:
        """The error for a problem with a key; its message includes the key's value."""
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

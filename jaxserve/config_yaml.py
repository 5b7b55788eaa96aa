"""Reads a YAML file of nested mappings from an untrusted hand: bounded, plain, and with every scalar left as text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from jaxserve.errors import ConfigError

MAX_FILE_BYTES = 256 * 1024


def read_yaml(file: Path) -> Mapping[str, Any]:
    """The file's mapping; an empty file is an empty one. Values are texts, lists and mappings: what a text means is for its reader to say.

    Raises:
        ConfigError: No readable file, too large, not YAML, a repeated key, an anchor or a tag, or no mapping; with line and column where there is one.
    """
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the config file: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"the config file is larger than {MAX_FILE_BYTES} bytes, the most allowed")
    try:
        tree: object = yaml.load(data, _Loader)  # noqa: S506 - a BaseLoader builds only texts, lists and mappings
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"not valid YAML: {where}{getattr(error, 'problem', None) or error}") from None
    if tree in (None, ""):
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"the config file holds a {type(tree).__name__}; must be a mapping of sections")
    return cast(dict[str, Any], tree)


class _Loader(yaml.BaseLoader):
    """Leaves scalars as text and refuses what can surprise: repeated keys, keys that are no words, anchors, aliases and tags."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = cast(Any, self).peek_event()
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None or getattr(event, "tag", None) is not None:
            raise ComposerError(None, None, "anchors, aliases and tags are not allowed", event.start_mark)
        return cast(Any, super()).compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConstructorError(None, None, "a key must be a single word", key.start_mark)
            if key.value in seen:
                raise ConstructorError(None, None, f"key {key.value!r} appears twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

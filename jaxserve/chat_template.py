"""Renders chat templates: Jinja from a model's author, run in an immutable sandbox with limits on output and time.

The environment is that of transformers (block trimming, ``tojson``, ``raise_exception``, ``strftime_now``, ``{% generation %}``), so that
templates give the same text.
"""

from __future__ import annotations

import datetime
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from jaxserve.errors import InvalidRequestError, ModelError

MAX_OUTPUT_CHARS = 16 * 1024 * 1024
MAX_RENDER_S = 10.0
MAX_TEMPLATE_CHARS = 4 * 1024 * 1024
MAX_POWER_BITS = 4096


class ChatTemplate:
    """A compiled template.

    Args:
        source: Jinja.
        origin: Where it came from, for messages.

    Raises:
        ModelError: It is no valid Jinja.
    """

    def __init__(self, source: str, origin: str) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelError(f"the chat template ({origin}) has {len(source)} characters; at most {MAX_TEMPLATE_CHARS} are allowed")
        try:
            self._template = _Sandbox().from_string(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
            raise ModelError(f"the chat template ({origin}) is no valid Jinja: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """The text of a conversation.

        Args:
            messages: With ``role`` and ``content``. A list of text parts becomes one string, joined with newlines: every template understands that.
            variables: Everything else that the template may use.

        Raises:
            InvalidRequestError: The template refuses the messages (its own words), fails on them, or runs past a limit.
        """
        environment = self._template.environment
        assert isinstance(environment, _Sandbox)
        plain = [_plain_message(index, message) for index, message in enumerate(messages)]
        parts: list[str] = []
        size = 0
        limit = environment.start_clock()
        try:
            for part in self._template.generate(messages=plain, **variables):
                size += len(part)
                limit(size)
                parts.append(part)
        except jinja2.TemplateError as error:
            raise InvalidRequestError(f"the chat template refuses these messages: {error.message or error}", param="messages") from error
        except Exception as error:
            # A template is a program of its own: whatever goes wrong in it is about these messages.
            raise InvalidRequestError(f"the chat template fails on these messages: {type(error).__name__}: {error}", param="messages") from error
        return "".join(parts)


def _plain_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    plain = dict(message)
    content = plain.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        plain["content"] = "\n".join(_part_text(index, part) for part in content)
    return plain


def _part_text(index: int, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(part.get("text"), str):
        raise InvalidRequestError(f"messages[{index}].content holds a part of type {kind!r}; only text parts are supported", param="messages")
    return part["text"]


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, with a clock that runs on calls and output, and a limit on what an operator may build.

    A loop that neither calls nor prints anything cannot be stopped; Jinja's ``range`` (at most 100,000) and the size of the request bound those.
    """

    def __init__(self) -> None:
        self.intercepted_binops = frozenset({"*", "**"})
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols])
        self._clock = threading.local()
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["namespace"] = _namespace
        self.globals["dict"] = _dict
        del self.globals["lipsum"]

    def start_clock(self) -> Callable[[int], None]:
        """Starts the time limit of one rendering; the result checks it and the output's size."""
        self._clock.deadline = time.monotonic() + MAX_RENDER_S

        def check(size: int) -> None:
            if size > MAX_OUTPUT_CHARS:
                raise jinja2.TemplateRuntimeError(f"its output is longer than {MAX_OUTPUT_CHARS} characters")
            self._check_clock()

        return check

    def call(self, *args: Any, **kwargs: Any) -> Any:
        self._check_clock()
        return super().call(*args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for items, factor in ((left, right), (right, left)):
                if isinstance(items, str | list | tuple) and isinstance(factor, int) and len(items) * factor > MAX_OUTPUT_CHARS:
                    raise jinja2.TemplateRuntimeError(f"it repeats something to more than {MAX_OUTPUT_CHARS} items")
        elif isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MAX_POWER_BITS:
            raise jinja2.TemplateRuntimeError(f"it computes a power of more than {MAX_POWER_BITS} bits")
        return super().call_binop(context, operator, left, right)

    def _check_clock(self) -> None:
        if time.monotonic() > self._clock.deadline:
            raise jinja2.TemplateRuntimeError(f"it runs longer than {MAX_RENDER_S:g} s")


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}…{% endgeneration %}``, which marks the assistant's own text for training; here it only prints what it holds."""

    tags = {"generation"}  # noqa: RUF012  as in the base class

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """Instead of the class, whose attributes lead out of the sandbox."""
    return dict(*args, **kwargs)


def _namespace(*args: Any, **kwargs: Any) -> _Namespace:
    values = dict(*args, **kwargs)
    for name in values:
        _check_name(name)
    return _Namespace(values)


class _Namespace(jinja2.utils.Namespace):
    """Refuses names with an underscore in front, which reach Python's internals."""

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not hold {name!r}: names must not begin with an underscore")

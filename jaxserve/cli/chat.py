"""``jaxserve chat``: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxserve.cli.options import (
    ONE_SHOT_DEFAULTS,
    ConfigFiles,
    Debug,
    MaxTokens,
    MeshOption,
    MinP,
    PlatformOption,
    Seed,
    Stop,
    Temperature,
    TopK,
    TopP,
    Words,
    resolve_config,
    sampling_fields,
)
from jaxserve.cli.output import emit
from jaxserve.cli.progress import progress_bars
from jaxserve.errors import EngineError, InvalidRequestError
from jaxserve.platform import choose_platform

if TYPE_CHECKING:
    from jaxserve.engine.engine import Engine

_HINT = "Ctrl-D ends, Ctrl-C stops an answer, /clear starts over."


def chat(
    words: Words = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="What the model is told before the conversation.", show_default=False)] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = None,
    stop: Stop = None,
    config: ConfigFiles = None,
    platform: PlatformOption = None,
    mesh: MeshOption = None,
    debug: Debug = False,
) -> None:
    """Talk with MODEL (default: smollm2-135m). Ctrl-D ends, Ctrl-C stops an answer, /clear starts over.

    From a pipe, each line is one message and only the answers are printed.

    Examples:

        jaxserve chat

        jaxserve chat ./Qwen3-0.6B --system "Answer in one sentence." --temperature 0.7
    """
    resolved = resolve_config(words, config, platform=platform, mesh=mesh, debug=debug, defaults=ONE_SHOT_DEFAULTS)
    choose_platform(resolved.platform)

    from jaxserve.engine.requests.sampling_params import resolve_sampling

    fields = sampling_fields(max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, stop=stop)
    resolve_sampling(fields, {})  # a bad value shows before the model loads, and before jax does

    from jaxserve.engine.build import build_engine

    with progress_bars() as progress:
        engine = build_engine(resolved, progress=progress)
    conversation = Conversation(engine, fields, system)
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if interactive:
        print(f"{conversation.model_name}: {_HINT}", file=sys.stderr)
    for text in _read_lines("> " if interactive else ""):
        if text == "/clear":
            conversation.clear()
            continue
        try:
            with interrupts() as is_interrupted:
                for piece in conversation.reply(text, is_interrupted):
                    emit(piece, end="")
            emit("")
        except InvalidRequestError as error:
            print(f"error: {error} (/clear starts over)", file=sys.stderr)


class Conversation:
    """The messages so far, and the engine that answers them.

    Args:
        engine: Built and warm; used by this conversation alone.
        fields: Sampling fields, ``None`` where the model's default applies.
        system: The system message, if any.

    Raises:
        InvalidRequestError: The model has no chat template.
    """

    def __init__(self, engine: Engine, fields: Mapping[str, Any], system: str | None = None) -> None:
        if engine.tokenizer.chat_template is None:
            raise InvalidRequestError(f"{engine.model_name} has no chat template, so it cannot chat; complete text with jaxserve generate", param="messages")
        self.model_name = engine.model_name
        self._engine = engine
        self._fields = fields
        self._opening = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._opening)

    def clear(self) -> None:
        """Forgets all but the system message."""
        self._messages = list(self._opening)

    def reply(self, text: str, is_interrupted: Callable[[], bool] = lambda: False) -> Iterator[str]:
        """Answers ``text`` piece by piece. An answer that was interrupted stays in the conversation as far as it came; a refused message does not.

        Raises:
            InvalidRequestError: The conversation has become longer than the context, or the template refuses it.
            EngineError: The engine failed.
        """
        from jaxserve.engine.requests.sampling_params import resolve_sampling

        messages = [*self._messages, {"role": "user", "content": text}]
        prompt = self._engine.tokenizer.encode_chat(messages)
        request = self._engine.make_request(prompt, resolve_sampling(self._fields, self._engine.sampling_defaults))
        self._engine.add(request)
        answer: list[str] = []
        is_over = False
        while not is_over:
            if is_interrupted():
                last = self._engine.abort(request.request_id)
                outputs, is_over = [last] if last else [], True
            else:
                outputs = self._engine.step()
                is_over = not self._engine.has_work
            for output in outputs:
                if output.error is not None:
                    raise EngineError(output.error.message)
                answer.append(output.text)
                yield output.text
        self._messages = [*messages, {"role": "assistant", "content": "".join(answer)}]


@contextlib.contextmanager
def interrupts() -> Generator[Callable[[], bool]]:
    """Inside, Ctrl-C only sets what the yielded function returns, so that no step is torn in two."""
    seen = False

    def note(_signum: int, _frame: FrameType | None) -> None:
        nonlocal seen
        seen = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: seen
    finally:
        signal.signal(signal.SIGINT, before)


def _read_lines(prompt: str) -> Iterator[str]:
    """Lines that say something, until the end of input. Ctrl-C drops the line being typed."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # pyright: ignore[reportUnusedImport] - gives input() its line editing
    while True:
        try:
            line = input(prompt)
        except EOFError:
            if prompt:
                print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            if not prompt:
                raise
            print(f"\n{_HINT}", file=sys.stderr)
            continue
        if line.strip():
            yield line.strip()

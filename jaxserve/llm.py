"""The Python front end: prompts in, completions out, all in the calling thread."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from jaxserve.config import Config, from_mapping
from jaxserve.engine.requests.sampling_params import resolve_sampling
from jaxserve.errors import InvalidRequestError
from jaxserve.platform import choose_platform
from jaxserve.request import FinishReason, Request, RequestOutput, SamplingParams, Usage, joined

if TYPE_CHECKING:
    from jaxserve.engine.engine import Engine
    from jaxserve.models.loading.progress import Progress

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """The answer to one prompt.

    Args:
        prompt: The prompt as text: as given, the rendered chat, or decoded from the ids.
        prompt_token_ids: The prompt as the model saw it.
        text: The generated text.
        token_ids: The generated ids.
        finish_reason: Why it ended; "error" if the engine failed on this prompt.
        stop_reason: The stop string or stop token id that ended it, if one did.
        usage: Token counts.
        error: With "error": what went wrong.
    """

    prompt: str
    prompt_token_ids: Sequence[int]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    usage: Usage
    error: str | None = None


class LLM:
    """A model in this process.

    Prompts of one call run together, batched by the engine. Not to be used from several threads at once.

    Args:
        model: A folder, a ``.gguf`` file, a hub id or an alias; ``None`` takes the configuration's.
        config: The configuration; ``None`` takes the defaults.
        overrides: Further settings by their full key, which win over ``config``: ``{"model.dtype": "float32"}``.
        progress: Told about downloads, loading and compiling.

    Raises:
        ConfigError: A setting that does not exist or cannot be used.
        ModelError: The model cannot be found, read or served.
    """

    def __init__(
        self, model: str | None = None, *, config: Config | None = None, overrides: Mapping[str, Any] | None = None, progress: Progress | None = None
    ) -> None:
        settings = dict(overrides or {}) | ({} if model is None else {"model.source": model})
        self.config = _override(config or Config(), settings)
        choose_platform(self.config.platform)  # before jax is imported
        from jaxserve.engine.build import build_engine

        self._engine: Engine = build_engine(self.config, progress=progress)

    @property
    def engine(self) -> Engine:
        """The engine underneath, for its facts and statistics."""
        return self._engine

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """The model's own sampling parameters, where a request leaves them out."""
        return self._engine.sampling_defaults

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *, progress: bool = False
    ) -> list[Completion]:
        """Continues prompts.

        Args:
            prompts: A text, or token ids, or a list of these.
            sampling_params: For all prompts, or one for each; ``None`` takes the model's defaults.
            progress: Show a progress bar.

        Returns:
            One completion for each prompt, in the order of the prompts.

        Raises:
            InvalidRequestError: A prompt or its parameters cannot be served; nothing has run then.
            EngineDeadError: The engine cannot go on.
        """
        return self._run([self._tokenize(prompt) for prompt in _as_list(prompts)], sampling_params, progress=progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Completion]:
        """Answers conversations through the model's chat template.

        Args:
            messages: One conversation, or a list of them; a message has ``role`` and ``content``.
            sampling_params: As for :meth:`generate`.
            progress: As for :meth:`generate`.

        Returns:
            One completion for each conversation, in their order.

        Raises:
            InvalidRequestError: As for :meth:`generate`; also a model without a chat template, or a template that refuses the messages.
            EngineDeadError: The engine cannot go on.
        """
        is_one = not messages or isinstance(messages[0], Mapping)
        conversations = cast("list[Sequence[Message]]", [messages] if is_one else messages)
        tokenizer = self._engine.tokenizer
        rendered = [tokenizer.render_chat(conversation) for conversation in conversations]
        prompts = [(text, tokenizer.encode(text, add_special_tokens=False)) for text in rendered]  # the template writes them itself
        return self._run(prompts, sampling_params, progress=progress)

    def _tokenize(self, prompt: Prompt) -> tuple[str, Sequence[int]]:
        tokenizer = self._engine.tokenizer
        if isinstance(prompt, str):
            return prompt, tokenizer.encode(prompt)
        self._engine.make_request(prompt, SamplingParams())  # decoding wants ids in range
        return tokenizer.decode(prompt, skip_special_tokens=False), prompt

    def _run(
        self, prompts: Sequence[tuple[str, Sequence[int]]], sampling_params: SamplingParams | Sequence[SamplingParams] | None, *, progress: bool
    ) -> list[Completion]:
        engine = self._engine
        if sampling_params is None:
            sampling_params = resolve_sampling({}, engine.sampling_defaults)
        each = [sampling_params] * len(prompts) if isinstance(sampling_params, SamplingParams) else sampling_params
        if len(each) != len(prompts):
            raise InvalidRequestError(
                f"{len(each)} sampling parameters for {len(prompts)} prompts; one for all, or one for each is allowed", param="sampling_params"
            )
        requests = [engine.make_request(token_ids, own) for (_, token_ids), own in zip(prompts, each, strict=True)]
        outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
        for output in self._outputs(requests, progress=progress):
            outputs[output.request_id].append(output)
        return [_complete(text, request, outputs[request.request_id]) for (text, _), request in zip(prompts, requests, strict=True)]

    def _outputs(self, requests: Sequence[Request], *, progress: bool) -> Iterator[RequestOutput]:
        """Runs requests to their end; aborts those still running if it is left early, by Ctrl-C for one."""
        engine = self._engine
        try:
            for request in requests:
                engine.add(request)
            with _Progress(len(requests), shown=progress) as bar:
                while engine.has_work:
                    for output in engine.step():
                        bar.advance(output)
                        yield output
                    if engine.idle_s:  # a dynamic batch waits for its time
                        time.sleep(engine.idle_s)
        finally:
            for request in requests:
                engine.abort(request.request_id)


class _Progress:
    """A progress bar over requests, with the rate of generated tokens; or nothing."""

    def __init__(self, num_requests: int, *, shown: bool) -> None:
        from rich.console import Console
        from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[tokens]} tokens"))
        self._bar = Progress(*columns, console=Console(stderr=True), disable=not shown)
        self._task = self._bar.add_task("prompts", total=num_requests, tokens=0)
        self._num_tokens = 0

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, output: RequestOutput) -> None:
        self._num_tokens += len(output.token_ids)
        self._bar.update(self._task, advance=output.finish_reason is not None, tokens=self._num_tokens)


def _override(config: Config, settings: Mapping[str, Any]) -> Config:
    if not settings:
        return config
    values: dict[str, Any] = dataclasses.asdict(config)
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": inner for key, inner in cast("dict[str, Any]", value).items()}
        else:
            flat[name] = value
    return from_mapping(flat | dict(settings))


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many: a sequence that begins with a number is one prompt's ids."""
    is_one = isinstance(prompts, str) or (len(prompts) > 0 and not hasattr(prompts[0], "__len__"))
    return cast("list[Prompt]", [prompts] if is_one else list(prompts))


def _complete(prompt: str, request: Request, outputs: Sequence[RequestOutput]) -> Completion:
    whole = joined(outputs)
    assert whole.finish_reason is not None
    return Completion(
        prompt=prompt,
        prompt_token_ids=request.prompt_token_ids,
        text=whole.text,
        token_ids=whole.token_ids,
        finish_reason=whole.finish_reason,
        stop_reason=whole.stop_reason,
        usage=whole.usage,
        error=None if whole.error is None else whole.error.message,
    )

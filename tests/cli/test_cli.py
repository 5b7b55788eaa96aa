"""The command line around a fake model: what it parses, prints and returns."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import typer
import yaml

from jaxserve import __version__
from jaxserve.cli import main
from jaxserve.cli.chat import Conversation, interrupts
from jaxserve.cli.options import split_words
from jaxserve.config import Config
from jaxserve.errors import CheckpointError, EngineError, InvalidRequestError, to_data
from jaxserve.request import Request, RequestOutput, SamplingParams, Usage
from tests.waiting import LIMIT_S

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass
class Result:
    status: int
    out: str
    err: str


@pytest.fixture
def jaxserve(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Result]]:
    """Runs the command line in this process."""
    import logging

    root, own = logging.getLogger(), logging.getLogger("jaxserve")
    before = root.handlers[:], root.level, own.level
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")

    def call(*words: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["jaxserve", *words])
        try:
            main()
            status = 0
        except SystemExit as exit_:
            status = int(exit_.code or 0)
        return Result(status, *capsys.readouterr())

    yield call
    root.handlers[:], root.level = before[0], before[1]
    own.setLevel(before[2])


class FakeLLM:
    """Answers each prompt with itself reversed, and remembers what it was asked."""

    sampling_defaults: Mapping[str, Any] = {"top_k": 7}
    made: FakeLLM
    error: Exception | None = None

    def __init__(self, *, config: Config, progress: Any) -> None:
        if type(self).error:
            raise type(self).error
        type(self).made = self
        self.config = config

    def generate(self, prompts: Sequence[str], params: SamplingParams, *, progress: bool) -> list[Any]:
        self.params = params
        usage = Usage(prompt_tokens=2, completion_tokens=3)
        return [
            SimpleNamespace(
                prompt=prompt,
                text=prompt[::-1],
                token_ids=(3, 4, 5),
                finish_reason="error" if prompt == "fail" else "stop",
                stop_reason=None,
                usage=usage,
                error="out of luck" if prompt == "fail" else None,
            )
            for prompt in prompts
        ]


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    fake = ModuleType("jaxserve.llm")
    kind = type("LLM", (FakeLLM,), {})
    fake.LLM = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jaxserve.llm", fake)
    return kind


def test_words_are_model_or_override() -> None:
    assert split_words(["org/name=x", "a.b=c=d", "k="]) == ("org/name=x", ["a.b=c=d", "k="])
    assert split_words(["./a=b"]) == ("./a=b", [])
    assert split_words([]) == (None, [])
    with pytest.raises(typer.BadParameter, match="one MODEL at most, got 2: a, b"):
        split_words(["a", "b"])


def test_config_merges_files_words_and_model(jaxserve: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("server: {port: 1, host: file}\nmodel: {source: file}")
    result = jaxserve("config", "server.port=2", "mine", "--config", str(tmp_path / "a.yaml"), "platform=cpu")
    tree = yaml.safe_load(result.out)
    assert (tree["server"]["port"], tree["server"]["host"], tree["model"]["source"], tree["platform"]) == (2, "file", "mine", "cpu")
    assert result.err == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["config", "sever.port=1"], "unknown config key 'sever.port'; did you mean 'server.port'?"),
        (["run", "port=1"], "unknown config key 'port'; did you mean 'server.port'?"),
        (["config", "--config", "/none.yaml"], "/none.yaml: cannot read the config file"),
        (["generate", "--prompt", "x", "--temperature", "-1"], "temperature must be in [0, 10000], got -1.0"),
        (["chat", "--top-p", "2"], "top_p must be in (0, 1], got 2.0"),
        (["config", "a", "b"], "one MODEL at most"),
        (["generate"], "--prompt"),
        (["nonsense"], "nonsense"),
        (["run", "--port", "x"], "--port"),
    ],
)
def test_usage_errors_end_with_2_and_no_traceback(jaxserve: Callable[..., Result], words: list[str], message: str) -> None:
    result = jaxserve(*words)
    assert result.status == 2
    assert message in result.err
    assert "Traceback" not in result.err
    assert result.out == ""


def test_other_errors_end_with_1(jaxserve: Callable[..., Result], llm: type[FakeLLM]) -> None:
    llm.error = CheckpointError("the file is truncated")
    result = jaxserve("generate", "--prompt", "x")
    assert (result.status, result.out) == (1, "")
    assert result.err.endswith("error: the file is truncated\n")
    llm.error = RuntimeError("boom")
    result = jaxserve("generate", "--prompt", "x")
    assert result.status == 1
    assert "error: RuntimeError: boom (this is a bug" in result.err
    assert "Traceback" not in result.err
    assert "Traceback" in jaxserve("generate", "--prompt", "x", "--debug").err


def test_generate_prints_json_lines_in_order(jaxserve: Callable[..., Result], llm: type[FakeLLM]) -> None:
    result = jaxserve(
        *("generate", "tiny", "--prompt", "äb", "--prompt", "c\nd", "--json", "--max-tokens", "4", "--temperature", "0"),
        *("--stop", "x", "--stop", "y", "--seed", "3", "--ignore-eos", "model.dtype=float32"),
    )
    assert result.status == 0
    lines = [json.loads(line) for line in result.out.splitlines()]
    assert lines[0] == {
        "prompt": "äb",
        "text": "bä",
        "token_ids": [3, 4, 5],
        "finish_reason": "stop",
        "stop_reason": None,
        "usage": {"prompt_tokens": 2, "completion_tokens": 3, "cached_tokens": 0, "total_tokens": 5},
    }
    assert lines[1]["prompt"] == "c\nd"
    assert (llm.made.config.model.source, llm.made.config.model.dtype) == ("tiny", "float32")
    assert llm.made.params == SamplingParams(max_tokens=4, temperature=0.0, top_k=7, stop=("x", "y"), seed=3, ignore_eos=True)


def test_generate_prints_plain_text(jaxserve: Callable[..., Result], llm: type[FakeLLM]) -> None:
    assert jaxserve("generate", "--prompt", "abc").out == "cba\n"
    assert jaxserve("generate", "--prompt", "abc", "--prompt", "de").out == "[1] abc\ncba\n\n[2] de\ned\n\n"


def test_generate_prints_the_others_when_one_prompt_fails(jaxserve: Callable[..., Result], llm: type[FakeLLM]) -> None:
    result = jaxserve("generate", "--prompt", "fail", "--prompt", "abc", "--json")
    assert [json.loads(line)["text"] for line in result.out.splitlines()] == ["liaf", "cba"]
    assert json.loads(result.out.splitlines()[0])["error"] == "out of luck"
    assert result.status == 1
    assert "prompt 1 did not finish: out of luck" in result.err


def test_version(jaxserve: Callable[..., Result]) -> None:
    assert jaxserve("--version").out == f"jaxserve {__version__}\n"
    assert "\njax " in jaxserve("version").out


@pytest.mark.parametrize("command", ["run", "generate", "chat", "models", "convert", "config", "version"])
def test_every_command_has_help(jaxserve: Callable[..., Result], command: str) -> None:
    result = jaxserve(command, "--help")
    assert result.status == 0
    assert f"Usage: jaxserve {command}" in result.out


def test_models_lists_aliases_and_architectures(jaxserve: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path))
    listed = json.loads(jaxserve("models", "--json").out)
    assert {alias["name"]: alias["cached"] for alias in listed["aliases"]} == {"smollm2-135m": False, "gemma3-270m": False}
    assert "LlamaForCausalLM" in listed["architectures"]
    assert "smollm2-135m" in jaxserve("models").out


def test_convert_refuses_a_destination_that_exists(jaxserve: Callable[..., Result], tmp_path: Path) -> None:
    result = jaxserve("convert", "smollm2-135m", str(tmp_path))
    assert result.status == 2
    assert "exists already; must be a new folder" in result.err


def test_help_and_config_import_nothing_heavy() -> None:
    code = (
        "import sys\nfrom jaxserve.cli import main\n"
        "for words in (['--help'], ['config'], ['generate', '--prompt', 'x', '--top-p', '2']):\n"
        "    sys.argv = ['jaxserve', *words]\n"
        "    try: main()\n"
        "    except SystemExit: pass\n"
        "print(*({'jax', 'numpy', 'transformers', 'fastapi', 'grpc'} & set(sys.modules)), file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert ran.stderr.splitlines()[-1] == "", ran.stderr


def test_module_and_closed_pipe() -> None:
    """A reader that has seen enough is no error."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as stdout:
        ran = subprocess.run([sys.executable, "-m", "jaxserve", "config"], cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S)
    assert (ran.returncode, ran.stderr) == (0, "")


class FakeEngine:
    """Answers with the words of ``script``, one a step."""

    model_name = "fake"
    sampling_defaults: Mapping[str, Any] = {}

    def __init__(self, script: str, chat_template: str | None = "t") -> None:
        self.tokenizer = SimpleNamespace(chat_template=chat_template, encode_chat=self._encode_chat)
        self.seen: list[list[dict[str, str]]] = []
        self.aborted: list[str] = []
        self._script = script.split()
        self._pending: list[str] = []

    def _encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        if any(message["content"] == "too long" for message in messages):
            raise InvalidRequestError("too long", param="messages")
        self.seen.append(messages)
        return [1]

    def make_request(self, token_ids: list[int], params: SamplingParams) -> Request:
        return Request(request_id="r", prompt_token_ids=token_ids, sampling_params=params)

    def add(self, request: Request) -> None:
        self._pending = list(self._script)

    @property
    def has_work(self) -> bool:
        return bool(self._pending)

    def step(self) -> list[RequestOutput]:
        text = self._pending.pop(0)
        reason = "error" if text == "!" else None if self._pending else "stop"
        return [self._output(text, reason)]

    def abort(self, request_id: str) -> RequestOutput:
        self.aborted.append(request_id)
        self._pending = []
        return self._output(".", "abort")

    @staticmethod
    def _output(text: str, reason: Any) -> RequestOutput:
        usage = Usage(prompt_tokens=1, completion_tokens=1)
        error = to_data(EngineError("it failed")) if reason == "error" else None
        return RequestOutput(request_id="r", token_ids=(), text=text, finish_reason=reason, stop_reason=None, usage=usage, error=error)


def test_conversation_remembers_and_clears() -> None:
    engine: Any = FakeEngine("a b")
    conversation = Conversation(engine, {}, "be nice")
    assert list(conversation.reply("one")) == ["a", "b"]
    list(conversation.reply("two"))
    assert [message["content"] for message in engine.seen[-1]] == ["be nice", "one", "ab", "two"]
    with pytest.raises(InvalidRequestError):
        list(conversation.reply("too long"))
    conversation.clear()
    list(conversation.reply("three"))
    assert [message["content"] for message in engine.seen[-1]] == ["be nice", "three"]


def test_ctrl_c_stops_the_answer_and_keeps_what_came() -> None:
    engine: Any = FakeEngine("a b c d")
    conversation = Conversation(engine, {})
    with interrupts() as is_interrupted:
        pieces = conversation.reply("one", is_interrupted)
        assert next(pieces) == "a"
        signal.raise_signal(signal.SIGINT)
        assert list(pieces) == ["."]
    assert engine.aborted == ["r"]
    list(conversation.reply("two"))
    assert [message["content"] for message in engine.seen[-1]] == ["one", "a.", "two"]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_ends_the_answer_though_a_step_is_under_way() -> None:
    """With overlap an engine has work left after the abort: a step whose tokens nobody wants."""

    class Overlapping(FakeEngine):
        num_under_way = 0

        @property
        def has_work(self) -> bool:
            return bool(self._pending) or self.num_under_way > 0

        def abort(self, request_id: str) -> RequestOutput:
            self.num_under_way = 1
            return super().abort(request_id)

        def step(self) -> list[RequestOutput]:
            if self.num_under_way:
                self.num_under_way = 0
                return []
            return super().step()

    engine: Any = Overlapping("a b c d")
    conversation = Conversation(engine, {})
    pieces = conversation.reply("one", lambda: len(seen) > 0)
    seen: list[str] = []
    seen.extend(itertools.islice(pieces, 1))
    seen.extend(itertools.islice(pieces, 5))
    assert seen == ["a", "."] and engine.aborted == ["r"]
    assert list(conversation.reply("two")) == ["a", "b", "c", "d"]


def test_conversation_reports_what_cannot_go_on() -> None:
    with pytest.raises(InvalidRequestError, match="fake has no chat template"):
        Conversation(FakeEngine("a", chat_template=None), {})  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="it failed"):
        list(Conversation(FakeEngine("a !"), {}).reply("x"))  # type: ignore[arg-type]


def test_chat_from_a_pipe_prints_the_answers(jaxserve: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    build = ModuleType("jaxserve.engine.build")
    warmups: list[bool] = []

    def build_engine(config: Config, *, progress: object) -> FakeEngine:
        warmups.append(config.engine.warmup)
        return FakeEngine("a b")

    build.build_engine = build_engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jaxserve.engine.build", build)
    lines = iter(["hello", "  ", "too long", "/clear", "again"])

    def read(prompt: str = "") -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    result = jaxserve("chat")
    assert result.out == "ab\nab\n"
    assert "error: too long (/clear starts over)" in result.err
    assert jaxserve("chat", "engine.warmup=true").status == 0
    assert warmups == [False, True], "compiles what it needs, unless told otherwise"


def test_models_fetch_names_what_cannot_be_found(jaxserve: Callable[..., Result]) -> None:
    result = jaxserve("models", "--fetch", "smollm")
    assert result.status == 1 and "smollm2-135m" in result.err

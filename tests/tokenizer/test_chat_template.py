"""Chat templates: the text of transformers, the template's own words in errors, limits, and where templates come from."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from jaxserve import chat_template
from jaxserve.chat_template import ChatTemplate
from jaxserve.config import ModelConfig
from jaxserve.errors import ConfigError, InvalidRequestError, ModelError
from jaxserve.models.loading.checkpoint import Checkpoint, open_checkpoint
from jaxserve.tokenizer import Tokenizer, load_tokenizer
from tests.tokenizer.vocabularies import byte_level, wrap

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
ALTERNATING = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message.role == 'user' %}
[INST] {{ message.content | trim }} [/INST]
    {%- else %}
        {%- generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
    {%- endif %}
{%- endfor %}
"""
TOOLS = """\
{%- set ns = namespace(count=0) %}
{%- for tool in tools or [] %}
    {%- if loop.index > 2 %}{% break %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
{{ tool | tojson(indent=2) }}
{% endfor %}
{{- ns.count }} {{ messages[-1].content }}
"""
MESSAGES = [{"role": "user", "content": " Hi <b>ü</b> "}, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "?"}]


@pytest.mark.parametrize("source", [CHATML, ALTERNATING, TOOLS])
def test_same_text_as_transformers(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    variables: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True}
    tools = [{"type": "function", "function": {"name": f"f{index}", "description": "ä"}} for index in range(4)]
    (expected,), _ = render_jinja_template(conversations=[MESSAGES], tools=tools, chat_template=source, **variables)
    assert ChatTemplate(source, "test").render(MESSAGES, variables | {"tools": tools}) == expected


def tokenizer(source: str | None, **options: Any) -> Tokenizer:
    return wrap(byte_level(**options), chat_template=source, template_source="test" if source else "its GGUF metadata holds none")


def refusal(source: str, messages: list[dict[str, Any]]) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        tokenizer(source).render_chat(messages)
    assert caught.value.param == "messages"
    return str(caught.value)


def test_the_templates_own_message() -> None:
    """vllm#6862: two user turns."""
    assert "Conversation roles must alternate user/assistant/user/assistant/..." in refusal(ALTERNATING, [MESSAGES[0], MESSAGES[0]])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages[5].content }}", "no element 5"),
        ("{{ messages.missing.content }}", "missing"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", "underscore"),
        ("{% include 'x' %}", "no loader"),
        ("{{ range(1000000) | list }}", "Range too big"),
        ("{{ 'a' * 100000000 }}", "repeats something"),
        ("{{ 10 ** 10000000 }}", "power"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_templates_that_fail(source: str, words: str) -> None:
    assert words in refusal(source, [MESSAGES[0]])


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_OUTPUT_CHARS", 1000)
    assert "longer than 1000 characters" in refusal("{% for a in range(99999) %}xxxxxxxx{% endfor %}", [MESSAGES[0]])


def test_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDER_S", 0.2)
    source = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    assert "runs longer than 0.2 s" in refusal(source, [MESSAGES[0]])


def test_no_valid_jinja() -> None:
    for source in ("{% for %}", "{{ x", "{% nothing %}"):
        with pytest.raises(ModelError, match=r"the chat template \(test\) is no valid Jinja"):
            tokenizer(source)


def test_no_template() -> None:
    with pytest.raises(InvalidRequestError, match="no chat template .its GGUF metadata holds none") as caught:
        tokenizer(None).encode_chat(MESSAGES)
    assert caught.value.param == "messages"


def test_no_messages() -> None:
    assert "messages is empty" in refusal(CHATML, [])


def test_text_parts() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert tokenizer(CHATML).render_chat(parts) == tokenizer(CHATML).render_chat([{"role": "user", "content": "a\nb"}])
    assert "messages[0].content holds a part of type 'image_url'; only text" in refusal(CHATML, [{"role": "user", "content": [{"type": "image_url"}]}])


def test_one_bos() -> None:
    """vllm#27515: the template writes BOS, the tokenizer must not."""
    chat = tokenizer("{{ bos_token }}{{ messages[0].content }}", add_bos_token=True)
    assert chat.encode_chat([{"role": "user", "content": "he"}]).count(1) == 1
    assert chat.encode("he").count(1) == 1


def test_second_bos_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    chat = tokenizer("{{ bos_token }}{{ messages[0].content }}")
    with caplog.at_level(logging.WARNING):
        chat.encode_chat([{"role": "user", "content": "<|start|>he"}])
    assert "'<|start|>' twice" in caplog.text


def test_variables() -> None:
    chat = tokenizer("{{ add_generation_prompt }} {{ tools is none }} {{ thinking }}{{ messages | length }}")
    assert chat.render_chat(MESSAGES, add_generation_prompt=False, thinking="x") == "False True x3"


class TestSources:
    """vllm#4119: flag, then chat_template.jinja, then tokenizer_config.json."""

    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Checkpoint:
        backend = byte_level().backend
        backend.save(str(tmp_path / "tokenizer.json"))
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        config |= {"intermediate_size": 8, "max_position_embeddings": 8, "rms_norm_eps": 1e-5, "vocab_size": 300, "hidden_act": "silu", "eos_token_id": 3}
        (tmp_path / "config.json").write_text(json.dumps(config))
        self.write(tmp_path, "from tokenizer_config")
        return open_checkpoint(ModelConfig(source=str(tmp_path)))

    def write(self, folder: Path, template: object) -> None:
        names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|start|>", "eos_token": "<|end|>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(names | {"chat_template": template}))

    def rendered(self, checkpoint: Checkpoint, **options: str) -> tuple[str, str]:
        loaded = load_tokenizer(checkpoint, **options)
        return loaded.render_chat(MESSAGES), loaded.template_source

    def test_order(self, checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        assert self.rendered(checkpoint) == ("from tokenizer_config", "tokenizer_config.json")
        (tmp_path / "chat_template.jinja").write_text("from jinja file")
        with caplog.at_level(logging.INFO):
            assert self.rendered(checkpoint) == ("from jinja file", "chat_template.jinja")
        assert "chat template: chat_template.jinja" in caplog.text
        given = tmp_path / "given.jinja"
        given.write_text("given {{ bos_token }}{{ eos_token }}")
        assert self.rendered(checkpoint, chat_template=str(given)) == ("given <|start|><|end|>", str(given))

    def test_named_templates(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        self.write(tmp_path, [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}])
        assert self.rendered(checkpoint)[0] == "plain"

    def test_none(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        self.write(tmp_path, None)
        loaded = load_tokenizer(checkpoint)
        assert loaded.chat_template is None
        with pytest.raises(InvalidRequestError, match=r"neither chat_template\.jinja nor tokenizer_config\.json"):
            loaded.render_chat(MESSAGES)

    def test_given_file_is_missing(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"model\.chat_template: .*missing\.jinja"):
            load_tokenizer(checkpoint, chat_template=str(tmp_path / "missing.jinja"))

    def test_ids_are_those_of_the_file(self, checkpoint: Checkpoint) -> None:
        loaded, original = load_tokenizer(checkpoint), byte_level().backend
        text = "hello <|start|> 123 日本"
        assert loaded.encode(text) == original.encode(text).ids
        assert loaded.eos_token_ids == (3, 0)
        assert loaded.bos_token_id == 1

    def test_broken_tokenizer(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").write_text("{")
        with pytest.raises(ModelError, match="its tokenizer cannot be loaded"):
            load_tokenizer(checkpoint)
        shutil.move(tmp_path / "tokenizer.json", tmp_path / "elsewhere")
        with pytest.raises(ModelError, match="its tokenizer cannot be loaded"):
            load_tokenizer(checkpoint)

"""The loader: strict about keys, forgiving about spelling of values, exact about what it refuses."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import CacheConfig, Config, ServerConfig, from_mapping, load_config, to_yaml
from jaxserve.config_yaml import MAX_FILE_BYTES
from jaxserve.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"


def write(folder: Path, text: str, name: str = "config.yaml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def test_without_files_it_is_the_default() -> None:
    assert load_config() == Config()


def test_text_is_read_as_the_field_says(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        """
        platform: cpu
        model: {source: 135, dtype: float32, max_model_len: null, generation_config: none}
        cache:
          memory_fraction: 1e-4
        engine:
          token_buckets: [16, 32]
          warmup: no
        server:
          served_model_name: no
          grpc_port: ~
          drain_timeout_s: 3
          api_keys: one,two
        scheduler:
        """,
    )
    config = load_config([file])
    assert config.model.source == "135"
    assert config.model.max_model_len is None
    assert config.model.generation_config == "none"
    assert config.cache.memory_fraction == 1e-4
    assert config.engine.token_buckets == (16, 32)
    assert config.engine.warmup is False
    assert config.server.served_model_name == "no"
    assert config.server.grpc_port is None
    assert config.server.drain_timeout_s == 3.0
    assert config.server.api_keys == ("one", "two")


def test_the_last_word_wins(tmp_path: Path) -> None:
    first = write(tmp_path, "server: {port: 1, host: first}", "first.yaml")
    second = write(tmp_path, "server: {port: 2}", "second.yaml")
    config = load_config([first, second], ["server.port=3", "server.port=4"], defaults={"server.host": "default", "engine.warmup": False})
    assert (config.server.port, config.server.host, config.engine.warmup) == (4, "first", False)


def test_mapping_takes_sections_dotted_keys_and_values(tmp_path: Path) -> None:
    config = from_mapping({"model": {"dtype": "float32"}, "cache.page_size": 8, "server": {"api_keys": ["a"], "grpc_port": None}, "scheduler": None})
    assert config == Config(
        model=dataclasses.replace(Config().model, dtype="float32"),
        cache=CacheConfig(page_size=8),
        server=ServerConfig(api_keys=("a",), grpc_port=None),
    )


def test_yaml_round_trip(tmp_path: Path) -> None:
    config = load_config([], ["server.api_keys=a b,null", "model.source=no", "engine.sequence_buckets=2,4", "cache.memory_fraction=1e-05", "server.host=::1"])
    assert load_config([write(tmp_path, to_yaml(config, show_secrets=True))]) == config


def test_secrets_stay_out_and_their_placeholder_is_no_key(tmp_path: Path) -> None:
    text = to_yaml(Config(server=ServerConfig(api_keys=("hunter2",))))
    assert "hunter2" not in text
    with pytest.raises(ConfigError, match=r"server.api_keys is '\*\*\*'"):
        load_config([write(tmp_path, text)])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("cache.pagesize=16", "unknown config key 'cache.pagesize'; did you mean 'cache.page_size'?"),
        ("port=1", "unknown config key 'port'; did you mean 'server.port'?"),
        ("dtype=float32", "unknown config key 'dtype'; did you mean 'model.dtype'?"),
        ("serve.port=1", "unknown config key 'serve.port'; did you mean 'server.port'?"),
        ("zzz.qqq=1", "unknown config key 'zzz.qqq'; known sections: platform, model, mesh, sharding, cache, scheduler, engine, server, tenants, distributed"),
        ("cache=1", "unknown config key 'cache'; known sections:"),
        ("words", "'words' is no override; must be section.key=value"),
        ("platform=cuda", "platform is 'cuda'; must be one of auto, cpu, gpu, tpu"),
        ("cache.page_size=12", "cache.page_size is 12; must be a power of two"),
        ("cache.page_size=0", "cache.page_size is 0; must be in [1, 256]"),
        ("cache.page_size=1.5", "cache.page_size is '1.5'; must be a whole number"),
        ("cache.memory_fraction=0", "cache.memory_fraction is 0.0; must be in (0, 1]"),
        ("cache.memory_fraction=nan", "cache.memory_fraction is nan; must be in (0, 1]"),
        ("cache.num_pages=0", "cache.num_pages is 0; must be in [1, 16777216]"),
        ("engine.warmup=maybe", "engine.warmup is 'maybe'; must be true or false"),
        ("engine.token_buckets=32,16", "engine.token_buckets is (32, 16); must be positive and strictly ascending"),
        ("engine.token_buckets=16,x", "engine.token_buckets[1] is 'x'; must be a whole number"),
        ("server.port=65536", "server.port is 65536; must be in [0, 65535]"),
        (f"server.port={10**400}", "must be in [0, 65535]"),
        ("server.grpc_port=8000", "server.grpc_port is 8000; must differ from server.port"),
        ("server.api_keys=a,,b", "server.api_keys is ('a', '', 'b'); must be without blanks around it and not empty"),
        ("server.host=", "server.host is ''; must be without blanks around it and not empty"),
        ("scheduler.max_tokens_per_step=8", "scheduler.max_tokens_per_step is 8; must be at least scheduler.max_num_seqs (32)"),
    ],
)
def test_a_bad_override_says_key_value_and_what_is_allowed(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([], [override])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("server: {port: 1, port: 2}", "key 'port' appears twice"),
        ("server: &a {port: 1}\nmodel: *a", "anchors, aliases and tags are not allowed"),
        ("server: !!python/object:os.system {}", "anchors, aliases and tags are not allowed"),
        ("server: [", "not valid YAML: line 1"),
        ("[" * 5000, "not valid YAML"),
        ("? [a]\n: b", "a key must be a single word"),
        ("- a", "holds a list; must be a mapping of sections"),
        ("server: 8000", "server is '8000'; must be a section of keys: server.host"),
        ("sever: {port: 1}", "unknown config section 'sever'"),
        ("server: {port: {a: 1}}", "server.port is {'a': '1'}; must be a whole number"),
        ("engine: {warmup: [1]}", "engine.warmup is ['1']; must be true or false"),
        ("\x00", "not valid YAML"),
        (" " * (MAX_FILE_BYTES + 1), "larger than"),
    ],
)
def test_a_bad_file_is_named_with_the_reason(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config([file])
    assert str(caught.value).startswith(f"{file}: ")
    assert message in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot read the config file: No such file"):
        load_config([tmp_path / "none.yaml"])


@pytest.mark.parametrize("value", [True, "8", 8.5, [8]])
def test_python_values_of_the_wrong_type_are_refused(value: Any) -> None:
    if value == "8":
        assert from_mapping({"cache.page_size": value}).cache.page_size == 8
    else:
        with pytest.raises(ConfigError, match="cache.page_size is .* whole number"):
            from_mapping({"cache": {"page_size": value}})


def test_a_config_made_in_python_is_checked_too() -> None:
    with pytest.raises(ConfigError, match="cache.page_size is 3"):
        Config(cache=CacheConfig(page_size=3))


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.name)
def test_shipped_configs_load_and_say_what_they_are_for(file: Path) -> None:
    load_config([file])
    header = file.read_text().split("\n\n")[0]
    assert all(line.startswith("#") for line in header.splitlines())
    assert all(word in header for word in ("Hardware:", "Command:", "Measured:"))

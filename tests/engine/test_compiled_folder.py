"""Programs kept in a folder: which are taken again, which are not, and the reasons."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxserve.config import CacheConfig, Config, EngineConfig, ModelConfig, SchedulerConfig, ShardingConfig
from jaxserve.engine.programs.compiled_folder import CompiledFolder, ProgramRecorder, live_facts, program_name
from jaxserve.engine.programs.manifest import Manifest, read_manifest, sha256
from jaxserve.engine.programs.memory import Memory
from jaxserve.engine.programs.plan import lower_bucket, plan_programs
from jaxserve.engine.programs.pool_plan import PoolPlan
from jaxserve.engine.step.buckets import Buckets, make_buckets
from jaxserve.engine.step.execution import choose_execution
from jaxserve.engine.step.function import abstract_params
from jaxserve.errors import ConfigError
from jaxserve.mesh import make_layout
from jaxserve.mesh_shape import MeshShape
from jaxserve.models.model import Model, build_model
from tests.engine.tiny import MAX_POSITION, tiny_spec

CONFIG = Config(
    model=ModelConfig(source="tiny", dtype="float32", max_model_len=MAX_POSITION),
    cache=CacheConfig(num_pages=16, page_size=8),
    scheduler=SchedulerConfig(max_num_seqs=2, max_tokens_per_step=8),
    engine=EngineConfig(token_buckets=(8,), sequence_buckets=(2,)),
)
LAYOUT = make_layout(MeshShape(), ShardingConfig())
FACTS = live_facts(list(LAYOUT.mesh.devices.flat))
SPEC = tiny_spec(layers=tiny_spec().layers[:1])


def programs(config: Config = CONFIG) -> tuple[Model, PoolPlan, Buckets]:
    execution = choose_execution(config, "cpu")
    model = build_model(SPEC, dtype="float32", layers=execution.layers, is_split=False)
    return model, *plan_programs(config, model, execution, LAYOUT, max_model_len=MAX_POSITION, memory=Memory(2**30, 2**30))


def compile_all(compile_program: Any, config: Config = CONFIG, *, only: str = "") -> list[str]:
    model, plan, buckets = programs(config)
    names = []
    for bucket in buckets.all():
        if only not in program_name(bucket):
            continue
        compile_program(lower_bucket(model, abstract_params(model, LAYOUT), plan, bucket, max_num_seqs=2), bucket)
        names.append(program_name(bucket))
    return names


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compiled")
    settings = {name: getattr(jax.config, name) for name in ("jax_persistent_cache_min_compile_time_secs", "jax_persistent_cache_min_entry_size_bytes")}
    recorder = ProgramRecorder(folder)
    with recorder.in_use():
        compile_all(recorder.compile)
    recorder.finish(target="", facts=FACTS, config=CONFIG, spec=SPEC)
    for name, value in settings.items():
        jax.config.update(name, value)
    return folder


def changed(made: Path, folder: Path, change: Any) -> Path:
    """A copy of the folder whose manifest ``change`` has edited."""
    (folder / "programs").mkdir(parents=True)
    for file in (made / "programs").iterdir():
        (folder / "programs" / file.name).write_bytes(file.read_bytes())
    tree = json.loads((made / "manifest.json").read_text())
    change(tree)
    (folder / "manifest.json").write_text(json.dumps(tree))
    return folder


def open_folder(path: Path, config: Config = CONFIG, **facts: Any) -> CompiledFolder:
    return CompiledFolder(path, facts=dataclasses.replace(FACTS, **facts), config=config, spec=SPEC)


def test_the_manifest_tells_what_was_compiled(made: Path) -> None:
    manifest = read_manifest(made)
    steps = [program for program in manifest.programs if program.program_sha256]
    assert [program.name for program in steps] == ["decode_2", "mixed_8x2"]
    assert manifest.facts == FACTS
    assert manifest.settings()["cache.num_pages"] == 16
    assert "server" not in manifest.config
    for program in steps:
        assert sha256((made / program.file).read_bytes()) == program.sha256
        assert program.compile_s > 0


def test_every_bucket_has_a_name_of_its_own() -> None:
    buckets = make_buckets((8, 16), (2, 4), max_tokens=32, max_rows=8, table_width=4, sampling=("greedy", "plain", "filtered")).all()
    assert len({program_name(bucket) for bucket in buckets}) == len(buckets)
    assert {program_name(bucket) for bucket in buckets} > {"decode_2_greedy", "mixed_32x8_filtered"}


def test_every_program_is_taken_and_nothing_is_compiled(made: Path) -> None:
    folder = open_folder(made)
    events: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_facts: events.append(event))
    try:
        names = compile_all(folder.compile)
    finally:
        jax.monitoring.clear_event_listeners()
    assert folder.used == set(names)
    assert folder.compiled_here == {}
    assert events.count("/jax/compilation_cache/cache_hits") == events.count("/jax/compilation_cache/compile_requests_use_cache") == len(names)
    assert not [event for event in events if "miss" in event]


def test_a_changed_file_is_not_loaded(made: Path, tmp_path: Path) -> None:
    path = changed(made, tmp_path / "copy", lambda tree: None)
    with (path / "programs/decode_2.bin").open("ab") as file:
        file.write(b"x")
    folder = open_folder(path)
    compile_all(folder.compile, only="decode")
    assert folder.used == set()
    assert "not the file that was made" in folder.compiled_here["decode_2"]


def test_what_the_runtime_refuses_is_compiled_with_its_reason(made: Path, tmp_path: Path) -> None:
    def break_program(tree: dict[str, Any]) -> None:
        (program,) = (program for program in tree["programs"] if program["name"] == "decode_2")
        (tmp_path / "copy" / program["file"]).write_bytes(b"no program")
        program["sha256"] = sha256(b"no program")

    folder = open_folder(changed(made, tmp_path / "copy", break_program))
    compile_all(folder.compile, only="decode")
    assert folder.used == set()
    assert folder.compiled_here["decode_2"].startswith("the runtime refuses it: ")
    assert not jax.config.jax_raise_persistent_cache_errors


def test_another_configuration_is_named(made: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = dataclasses.replace(CONFIG, cache=dataclasses.replace(CONFIG.cache, num_pages=20))
    folder = open_folder(made, config)
    compile_all(folder.compile, config, only="decode")
    assert folder.compiled_here == {"decode_2": "the step is another program"}
    assert "cache.num_pages is 20, was 16" in caplog.text


def test_programs_for_absent_chips_are_offered_under_another_key(made: Path, tmp_path: Path) -> None:
    """As a GPU's: compiled where no driver was, whose version is in the live key. Here the live runtime is the CPU's, which takes them."""

    def pretend(tree: dict[str, Any]) -> None:
        tree["target"] = "chip:2"
        tree["facts"]["runtime"] = "a compiler"
        for program in tree["programs"]:
            program["key"] = "jit_step-0"

    path = changed(made, tmp_path / "copy", pretend)
    folder = open_folder(path)
    assert compile_all(folder.compile) == sorted(folder.used)
    assert folder.compiled_here == {}
    other = open_folder(path, flags=("--xla_some=1",))
    compile_all(other.compile, only="decode")
    assert other.used == set()
    assert other.compiled_here["decode_2"].startswith("the program is the same, but jax's key is another: ")
    assert "flags is --xla_some=1, was none" in other.compiled_here["decode_2"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree: tree.update(format=2), "has format 2"),
        (lambda tree: tree.pop("facts"), "no manifest"),
        (lambda tree: tree["programs"][0].update(file="../../etc/passwd"), "must be a file in programs/"),
        (lambda tree: tree["config"]["cache"].update(page_size="many"), "cache.page_size"),
        (lambda tree: tree["config"].pop("sharding"), "no manifest"),
    ],
)
def test_a_broken_manifest_is_refused(made: Path, tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_manifest(changed(made, tmp_path / "copy", change))


def test_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read its manifest\.json"):
        read_manifest(tmp_path)


def test_a_manifest_survives_its_file(made: Path) -> None:
    manifest: Manifest = read_manifest(made)
    assert json.loads((made / "manifest.json").read_text())["programs"] == [dataclasses.asdict(program) for program in manifest.programs]

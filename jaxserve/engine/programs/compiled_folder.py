"""Folders of compiled programs: ``jaxserve compile`` writes them and an engine loads from them. The files are entries of jax's compilation cache.

jax has no public way from ``lower()`` to a stored program without unpickling, so both classes replace its compilation cache for a while. The only private
name used, ``compilation_cache._cache``, is in ``_standing_in``. Nothing is unpickled. A program is still machine code: whoever can write to the folder can
run code in the engine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax._src import compilation_cache
from jax._src.compilation_cache_interface import CacheInterface

from jaxserve import __version__
from jaxserve.config import Config
from jaxserve.engine.programs.manifest import PROGRAMS, Facts, Manifest, Program, differences, read_manifest, sections, sha256, write_manifest
from jaxserve.engine.step.buckets import Bucket
from jaxserve.errors import ConfigError
from jaxserve.models.spec import ModelSpec

logger = logging.getLogger(__name__)

CompileProgram = Callable[[jax.stages.Lowered, Bucket], jax.stages.Compiled]
"""Function that compiles the step of a bucket, or loads it already compiled."""

_IDLE_FLAGS = ("--xla_force_host_platform_device_count", "--xla_dump", "--xla_gpu_cuda_data_dir")
"""Beginnings of flags that change no program; jax leaves them out of its cache keys too."""


def compile_program(lowered: jax.stages.Lowered, _bucket: Bucket) -> jax.stages.Compiled:
    """The step of a bucket, compiled by jax as usual."""
    return lowered.compile()


def program_name(bucket: Bucket) -> str:
    """The name of a bucket's program, unique among the buckets of an engine: ``decode_8``, ``mixed_128x8``, or ``decode_8_greedy`` if the program has a fixed
    set of sampling stages.
    """
    name = f"decode_{bucket.num_rows}" if bucket.decode_only else f"mixed_{bucket.num_tokens}x{bucket.num_rows}"
    return name if bucket.sampling == "any" else f"{name}_{bucket.sampling}"


def program_sha256(lowered: jax.stages.Lowered) -> str:
    """The SHA-256 of a program's text before it is compiled, without source locations."""
    return sha256(lowered.as_text())


def spec_sha256(spec: ModelSpec) -> str:
    return sha256(repr(spec))


def live_facts(devices: Sequence[Any]) -> Facts:
    """The facts about a mesh's devices, which may also be absent chips that are only compiled for."""
    first = devices[0]
    flags = f"{os.environ.get('XLA_FLAGS', '')} {os.environ.get('LIBTPU_INIT_ARGS', '')}".split()
    return Facts(
        jax=jax.__version__,
        jaxlib=jaxlib.__version__,
        runtime=first.client.platform_version,
        platform="gpu" if first.platform == "cuda" else first.platform,
        device_kind=first.device_kind,
        coords=tuple(tuple(device.coords) for device in devices) if first.platform == "tpu" else None,
        num_devices=len(devices),
        flags=tuple(sorted(flag for flag in flags if not flag.startswith(_IDLE_FLAGS))),
    )


class ProgramRecorder:
    """Compiles steps, and stores every program that is compiled meanwhile in a folder.

    Args:
        folder: Path of an empty folder.
    """

    def __init__(self, folder: Path) -> None:
        _forget_source_folders()
        _keep_everything()
        self._folder = folder
        self._lock = threading.Lock()
        self._programs: dict[str, Program] = {}
        self._thread = threading.local()
        (folder / PROGRAMS).mkdir()

    def in_use(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which every program that jax compiles is stored."""
        return _standing_in(_StandIn(lambda _key: None, self._put))

    def compile(self, lowered: jax.stages.Lowered, bucket: Bucket) -> jax.stages.Compiled:
        """Compiles and stores a bucket's step. Call it inside :meth:`in_use`.

        Raises:
            ConfigError: jax's compilation cache is switched off.
        """
        name = program_name(bucket)
        self._thread.name = name
        started = time.perf_counter()
        try:
            compiled = lowered.compile()
        finally:
            self._thread.name = None
        seconds = time.perf_counter() - started
        memory = compiled.memory_analysis()
        if name not in self._programs:
            raise ConfigError("jax's compilation cache is switched off (JAX_ENABLE_COMPILATION_CACHE), and with it the way to keep programs")
        self._programs[name] = dataclasses.replace(
            self._programs[name],
            program_sha256=program_sha256(lowered),
            compile_s=round(seconds, 3),
            temp_bytes=None if memory is None else memory.temp_size_in_bytes,
        )
        return compiled

    def finish(self, *, target: str, facts: Facts, config: Config, spec: ModelSpec) -> Manifest:
        """Writes the manifest of all stored programs.

        Args:
            target: Name of the chips if they are absent, such as ``v6e:2x4``; else empty.
            facts: Facts about the mesh's devices.
            config: The resolved configuration.
            spec: The model's specification as it is split over the mesh.
        """
        manifest = Manifest(
            jaxserve=__version__,
            made=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            target=target,
            facts=facts,
            config=sections(config),
            spec_sha256=spec_sha256(spec),
            programs=tuple(sorted(self._programs.values(), key=lambda program: program.file)),
        )
        write_manifest(self._folder, manifest)
        return manifest

    def _put(self, key: str, value: bytes) -> None:
        module, _, digest = key.rpartition("-")
        name = getattr(self._thread, "name", None) or f"{re.sub(r'[^A-Za-z0-9_]', '_', module)}_{digest[:12]}"
        file = f"{PROGRAMS}/{name}.bin"
        with self._lock:
            (self._folder / file).write_bytes(value)
            self._programs[name] = Program(name=name, file=file, num_bytes=len(value), sha256=sha256(value), key=key)


def _forget_source_folders() -> None:
    """Makes programs name their source files without folders, so that a program is the same wherever jaxserve is installed. Call it before compiling."""
    jax.config.update("jax_hlo_source_file_canonicalization_regex", ".*/")


def _keep_everything() -> None:
    """Tells jax to hand every program to its compilation cache, however small and quickly compiled."""
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


class CompiledFolder:
    """Loads the programs of a folder that are the ones an engine would compile, compiles the others, and logs why each of those was not loaded.

    A program is loaded if jax's own key for it is the one that it was stored under: the program, the compile options, jax and the runtime are then the same.
    Programs for chips that were absent cannot have the key of a live runtime (on GPUs it includes the CUDA version). Such a program is also offered to the
    runtime if the program's text, the versions of jax, the flags, the kind of the devices and their places are the same. The runtime may still refuse it.

    Args:
        path: Path of the folder.
        facts: Facts about the live mesh's devices.
        config: The live configuration.
        spec: The live model's specification as it is split over the mesh.

    Attributes:
        used: Names of the programs that were loaded.
        compiled_here: Names of the buckets that were compiled instead, each with the reason.

    Raises:
        ConfigError: The path is not a folder of compiled programs.
    """

    def __init__(self, path: Path, *, facts: Facts, config: Config, spec: ModelSpec) -> None:
        _forget_source_folders()
        self._manifest = read_manifest(path)
        self._path = path
        self._facts = facts
        self._differences = differences(self._manifest, facts, config, spec_sha256(spec))
        made_for = self._manifest.target or "the devices of its machine"
        logger.info("compiled programs: %s, made %s for %s", path, self._manifest.made, made_for)
        if self._differences:
            logger.warning("here it is otherwise than where they were made: %s", "; ".join(self._differences))
        self._contents, self._broken = _read_programs(path, self._manifest.programs)
        self._by_key = {program.key: program for program in self._manifest.programs if program.name in self._contents}
        self._by_name = {program.name: program for program in self._manifest.programs}
        self._thread = threading.local()
        self._stand_in: _StandIn | None = None
        self.used: set[str] = set()
        self.compiled_here: dict[str, str] = {}

    def log_summary(self) -> None:
        """Logs how many programs were loaded and how many compiled."""
        logger.info("%s: %d programs used, %d compiled here", self._path, len(self.used), len(self.compiled_here))

    @contextlib.contextmanager
    def in_use(self) -> Generator[None]:
        """A context in which jax looks for a program in the folder first, then in its own cache. May be nested."""
        if self._stand_in is not None:
            yield
            return
        owner: list[CacheInterface] = []  # jax's own cache, once that is known

        def get(key: str) -> bytes | None:
            found = self._find(key)
            return next((_quietly(own.get, key) for own in owner), None) if found is None else found

        def put(key: str, value: bytes) -> None:
            for own in owner:
                _quietly(own.put, key, value)

        self._stand_in = _StandIn(get, put)
        raises = jax.config.jax_raise_persistent_cache_errors
        try:
            with _standing_in(self._stand_in) as own:
                owner += [] if own is None else [own]
                jax.config.update("jax_raise_persistent_cache_errors", True)  # a program that the runtime refuses is to say why
                yield
        finally:
            jax.config.update("jax_raise_persistent_cache_errors", raises)
            self._stand_in = None

    def compile(self, lowered: jax.stages.Lowered, bucket: Bucket) -> jax.stages.Compiled:
        """The bucket's step, loaded from the folder if possible, else compiled."""
        name = program_name(bucket)
        state = self._thread
        state.offered, state.taken = self._offer(lowered, name), None
        with self.in_use():
            try:
                compiled = lowered.compile()
                refusal = ""
            except Exception as error:
                if state.taken is None:
                    raise
                refusal = f"the runtime refuses it: {str(error).strip().splitlines()[0][:300]}"
                self.used.discard(state.taken.name)
                self._contents.pop(state.taken.name, None)
                state.offered, state.taken = None, None
                compiled = lowered.compile()
        if state.taken is None:
            self.compiled_here[name] = refusal or self._why_not(lowered, name)
            logger.warning("%s is not taken from %s: %s", name, self._path, self.compiled_here[name])
        self._contents.pop(name, None)  # A bucket is compiled once; its bytes need no memory any more.
        return compiled

    def _find(self, key: str) -> bytes | None:
        """The content of the program stored under jax's key, or of the program offered for the step that this thread compiles; ``None`` if there is neither."""
        program: Program | None = self._by_key.get(key) or getattr(self._thread, "offered", None)
        data = None if program is None else self._contents.get(program.name)
        if program is not None and data is not None:
            self._thread.taken = program
            self.used.add(program.name)
        return data

    def _offer(self, lowered: jax.stages.Lowered, name: str) -> Program | None:
        """The folder's program of that name, if it was made for absent chips and everything but its key fits; else ``None``."""
        program = self._by_name.get(name)
        if program is None or not self._manifest.is_for_absent_chips or name not in self._contents:
            return None
        there = dataclasses.replace(self._manifest.facts, runtime=self._facts.runtime)
        return program if there == self._facts and program.program_sha256 == program_sha256(lowered) else None

    def _why_not(self, lowered: jax.stages.Lowered, name: str) -> str:
        program = self._by_name.get(name)
        if program is None:
            return "the folder has no program of these shapes"
        if name in self._broken:
            return self._broken[name]
        if program.program_sha256 != program_sha256(lowered):
            return "the step is another program"
        return "the program is the same, but jax's key is another: " + ("; ".join(self._differences) or "for no reason that the manifest tells")


class _StandIn(CacheInterface):
    """A compilation cache made of two functions."""

    def __init__(self, get: Callable[[str], bytes | None], put: Callable[[str, bytes], None]) -> None:
        self._path = Path()
        self._get, self._put = get, put

    def get(self, key: str) -> bytes | None:
        return self._get(key)

    def put(self, key: str, value: bytes) -> None:
        self._put(key, value)


@contextlib.contextmanager
def _standing_in(cache: CacheInterface) -> Generator[CacheInterface | None]:
    """A context in which jax uses ``cache`` as its compilation cache. Yields the cache that jax had; ``None`` if it had none."""
    own = compilation_cache._get_cache(jax.devices()[0].client)
    compilation_cache._cache = cache
    try:
        yield own
    finally:
        compilation_cache._cache = own


def _read_programs(path: Path, programs: Sequence[Program]) -> tuple[dict[str, bytes], Mapping[str, str]]:
    """The contents of the files whose hash is that of the manifest, by name, and what is wrong with each of the others."""
    contents: dict[str, bytes] = {}
    broken: dict[str, str] = {}
    for program in programs:
        try:
            data = (path / program.file).read_bytes()
        except OSError as error:
            broken[program.name] = f"cannot read {program.file}: {error.strerror}"
            continue
        if sha256(data) == program.sha256:
            contents[program.name] = data
        else:
            broken[program.name] = f"{program.file} is not the file that was made: its SHA-256 is {sha256(data)[:12]}..., must be {program.sha256[:12]}..."
    return contents, broken


def _quietly(call: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a call of jax's cache; ``None`` if it fails, which only costs a compile."""
    try:
        return call(*arguments)
    except Exception as error:
        logger.warning("the compilation cache cannot be used: %s", error)
        return None

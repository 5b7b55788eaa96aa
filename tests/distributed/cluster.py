"""A tiny model with a tokenizer, and ``jaxserve run`` on it as several processes of this machine, watched and ended whatever happens."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx

from tests.loading.builders import random_tensors, tiny_config, write_folder
from tests.tokenizer.vocabularies import byte_level
from tests.waiting import wait_until

LIMIT_S = 600.0
"""For anything that a start waits for: two processes compile at once, perhaps beside other tests."""
DEVICES_A_HOST = 4
MESH = "data=2,model=4"
SETTINGS = (
    "model.dtype=float32", "cache.page_size=8", "cache.num_pages=24", "scheduler.max_num_seqs=4", "scheduler.max_tokens_per_step=16",
    "engine.token_buckets=16", "engine.sequence_buckets=4", "engine.compilation_cache=false",
)  # fmt: skip


def write_model(folder: Path) -> Path:
    """Eight query heads and four KV heads, so that four model ranks share both evenly; weights so small that greedy texts do not repeat one token."""
    parts = byte_level()
    config = tiny_config("llama", vocab_size=parts.backend.get_vocab_size() // 4 * 4 + 4, num_attention_heads=8, num_key_value_heads=4, head_dim=16)
    write_folder(folder, config, {name: values / 16 for name, values in random_tensors(config).items()})
    parts.backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **parts.special_tokens}))
    return folder


def free_ports(count: int) -> int:
    """The first of so many free ports in a row."""
    for first in range(20_000 + os.getpid() % 5_000, 32_000, count):
        sockets: list[socket.socket] = []
        try:
            sockets.extend(socket.create_server(("127.0.0.1", port)) for port in range(first, first + count))
        except OSError:
            continue
        finally:
            for listener in sockets:
                listener.close()
        return first
    raise AssertionError("no free ports")


@dataclasses.dataclass
class Host:
    process: subprocess.Popen[bytes]
    log_file: Path

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def wait(self, limit_s: float) -> int:
        """The exit status; fails with the log when it does not come."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {limit_s:g} s:\n{self.log}") from None

    def until_logged(self, text: str) -> None:
        def is_there() -> bool:
            assert text in self.log or self.process.poll() is None, f"ended without {text!r}:\n{self.log}"
            return text in self.log

        wait_until(is_there, repr(text), LIMIT_S)


class Cluster:
    """Hosts that are started one by one; leaving the context kills what is left of them.

    Args:
        folder: For logs.
        num_hosts: How many ``--hosts`` names.
    """

    def __init__(self, folder: Path, num_hosts: int = 2) -> None:
        self._folder = folder
        self._num_hosts = num_hosts
        self._hosts: list[Host] = []
        self.port = free_ports(4)
        self.http_port = self.port + 2

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for host in self._hosts:
            if host.process.poll() is None:
                os.killpg(host.process.pid, signal.SIGKILL)
                host.process.wait(30)

    def start(self, index: int, model: str | Path, *words: str, mesh: str = MESH, cwd: Path | None = None) -> Host:
        log_file = self._folder / f"host{index}-{len(self._hosts)}.log"
        command = [
            sys.executable, "-m", "jaxserve", "run", str(model), "--hosts", ",".join(["127.0.0.1"] * self._num_hosts), "--host-index", str(index),
            "--mesh", mesh, "--port", str(self.http_port), "--grpc-port", str(self.http_port + 1), f"distributed.port={self.port}",
            *SETTINGS, *words,
        ]  # fmt: skip
        repository = Path(__file__).parents[2]
        environment = os.environ | {
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES_A_HOST}", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(repository),
        }  # fmt: skip
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                command, cwd=cwd or repository, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._hosts.append(Host(process, log_file))
        return self._hosts[-1]

    def start_all(self, model: Path, *words: str) -> tuple[Host, Host]:
        """Two hosts, ready to serve."""
        leader, follower = self.start(0, model, *words), self.start(1, model, *words)
        leader.until_logged("ready: ")
        return leader, follower

    def complete(self, body: dict[str, object]) -> str:
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=LIMIT_S)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

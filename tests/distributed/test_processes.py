"""``jaxserve run`` as two processes of four devices: the tokens of one process, and an end of both, told clearly, whatever happens to one of them."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import jax
import pytest

from jaxserve.config import Config, load_config
from jaxserve.engine.build import build_runner
from jaxserve.engine.multihost.processes import CPU_COLLECTIVES_SINCE, Processes, join
from jaxserve.engine.programs.memory import Memory
from jaxserve.errors import ConfigError
from jaxserve.llm import LLM
from jaxserve.request import SamplingParams
from jaxserve.serving.grpc_api import jaxserve_v1_pb2 as pb
from jaxserve.serving.grpc_api import jaxserve_v1_pb2_grpc as pb_grpc
from tests.distributed.cluster import LIMIT_S, SETTINGS, Cluster, Host, write_model
from tests.waiting import wait_until

needs_collectives = pytest.mark.skipif(jax.__version_info__ < CPU_COLLECTIVES_SINCE, reason="the CPU collectives of JAX 0.10 hang between processes")
LOST_LIMIT_S = 240.0
"""From the loss of a host to the end of the others."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny") / "model")


def bodies() -> list[dict[str, object]]:
    """Greedy and seeded, of unlike length; some begin alike in the middle of a page, some prompts take several steps."""
    start = "a long beginning "
    prompts = [start + "of one", "x", start + "of another", "hello world", "1" * 40, start * 3, "y" * 9]
    return [
        {"prompt": prompt, "max_tokens": 4 + 5 * index, "ignore_eos": True, "seed": index, "temperature": float(index % 2)}
        for index, prompt in enumerate(prompts)
    ]


def stats(cluster: Cluster) -> dict[str, float]:
    with grpc.insecure_channel(f"127.0.0.1:{cluster.http_port + 1}") as channel:
        return dict(pb_grpc.InferenceStub(channel).GetServerInfo(pb.GetServerInfoRequest(), timeout=LIMIT_S).stats)


def stream_of(cluster: Cluster) -> contextlib.AbstractContextManager[httpx.Response]:
    """A long answer under way."""
    body = {"prompt": "z", "max_tokens": 100, "ignore_eos": True, "temperature": 0, "stream": True}
    return httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=LIMIT_S)


def ends_within(limit_s: float, *hosts: Host) -> list[int]:
    return [host.wait(limit_s) for host in hosts]


@needs_collectives
def test_two_processes_serve_the_tokens_of_one(model: Path, tmp_path: Path) -> None:
    """Steps overlap in the two and not in the one."""
    llm = LLM(str(model), config=load_config((), [*SETTINGS, "engine.warmup=false"]))
    params = [SamplingParams(**{key: value for key, value in body.items() if key != "prompt"}) for body in bodies()]
    expected = [llm.generate(str(body["prompt"]), one)[0].text for body, one in zip(bodies(), params, strict=True)]
    assert all(len(set(text)) > len(text) / 4 for text in expected) and len(set(expected)) == len(expected), "a model that tells errors apart"
    with Cluster(tmp_path) as cluster:
        leader = cluster.start(0, model, "engine.overlap=true")
        stranger: list[socket.socket] = []

        def connect() -> bool:
            with contextlib.suppress(ConnectionRefusedError):
                stranger.append(socket.create_connection(("127.0.0.1", cluster.port + 1), timeout=LIMIT_S))
            return bool(stranger)

        wait_until(connect, "the step port", LIMIT_S)
        stranger[0].sendall(b"GET / HTTP/1.1\r\nHost: nobody of the engine\r\n\r\n")
        follower = cluster.start(1, model, "engine.overlap=true")
        leader.until_logged("ready: ")
        with stranger[0], contextlib.suppress(ConnectionResetError):
            assert stranger[0].recv(1) == b""
        assert "turned away a connection from 127.0.0.1" in leader.log
        assert "ready: " not in follower.log, "a follower opens no port"
        num_pages = stats(cluster)["num_free_pages"]

        assert cluster.complete(bodies()[0]) == expected[0]
        with ThreadPoolExecutor(2 * len(expected)) as clients:
            with stream_of(cluster) as leaving:
                next(leaving.iter_lines())
                answers = clients.map(cluster.complete, [*bodies(), *reversed(bodies())])
            assert list(answers) == expected + expected[::-1]

        def is_idle() -> bool:
            return stats(cluster)["num_running"] == 0

        wait_until(is_idle, "the end of the stream that was left", LIMIT_S)
        for _ in range(10):  # it may have ended before it was left, on a machine that stands still
            if stats(cluster)["finished_abort"]:
                break
            with stream_of(cluster) as leaving:
                next(leaving.iter_lines())
            wait_until(is_idle, "the end of the stream that was left", LIMIT_S)
        assert stats(cluster)["num_free_pages"] == num_pages
        assert stats(cluster)["finished_abort"] == 1
        assert stats(cluster)["prefix_hit_tokens"] > 0

        follower.signal(signal.SIGTERM)
        follower.until_logged("host 1 ends when the leader does")
        with stream_of(cluster) as last:
            lines = last.iter_lines()
            next(lines)
            leader.signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]", "what runs may finish"
        assert ends_within(LIMIT_S, leader, follower) == [0, 0]
        assert "the leader has ended" in follower.log


@needs_collectives
def test_a_lost_follower_ends_the_leader(model: Path, tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        leader, follower = cluster.start_all(model, "engine.warmup=false")
        last = "data: [DONE]"
        while last == "data: [DONE]":
            with stream_of(cluster) as stream:
                lines = stream.iter_lines()
                next(lines)
                follower.signal(signal.SIGSTOP)
                is_under_way = stats(cluster)["num_running"] == 1  # and it stays so
                follower.signal(signal.SIGKILL if is_under_way else signal.SIGCONT)
                last = [line for line in lines if line][-1]
        assert leader.wait(LOST_LIMIT_S) == 1
        assert "host 1 (127.0.0.1) is lost: " in leader.log
        assert "The engine cannot go on" in leader.log
        assert "error" in json.loads(last.removeprefix("data: ")), "a stream ends with a message"


@needs_collectives
def test_a_lost_leader_ends_the_follower(model: Path, tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        leader, follower = cluster.start_all(model, "engine.warmup=false")
        leader.signal(signal.SIGKILL)
        assert follower.wait(LOST_LIMIT_S) != 0
        # jax notices it too, at the same moment, and aborts.
        assert "the leader (127.0.0.1) is lost: " in follower.log or "another task died" in follower.log


@needs_collectives
def test_a_dead_engine_ends_both(model: Path, tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        leader, follower = cluster.start_all(model, "engine.watchdog_s=0.001")  # no step is so short
        answer = httpx.post(f"{cluster.url}/v1/completions", json={"prompt": "a", "max_tokens": 20}, timeout=LIMIT_S)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
        assert ends_within(LIMIT_S, leader, follower) == [1, 1]
        assert "the leader (127.0.0.1) has failed: the engine has stopped" in follower.log


@needs_collectives
@pytest.mark.parametrize("failing", [0, 1], ids=["leader", "follower"])
def test_a_failed_start_ends_both(model: Path, tmp_path: Path, failing: int) -> None:
    """One host does not have the model."""
    (tmp_path / "elsewhere").mkdir()
    with Cluster(tmp_path) as cluster:
        hosts = [cluster.start(index, f"./{model.name}", cwd=tmp_path / "elsewhere" if index == failing else model.parent) for index in (0, 1)]
        statuses = ends_within(LIMIT_S, *hosts)
        assert statuses == [1, 1], [host.log for host in hosts]
        assert "error: " in hosts[failing].log
        assert f"{'the leader' if failing == 0 else 'host 1'} (127.0.0.1) has failed: " in hosts[1 - failing].log
        assert "stack trace" not in hosts[0].log + hosts[1].log


@needs_collectives
def test_hosts_that_are_not_alike(model: Path, tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        hosts = [cluster.start(0, model, "server.drain_timeout_s=1"), cluster.start(1, model, "cache.page_size=16", "server.drain_timeout_s=2")]
        assert all(ends_within(LIMIT_S, *hosts))
        for host in hosts:
            assert "the hosts must be alike, and are not: cache.page_size is 8 on host 0, 16 on host 1" in host.log


@needs_collectives
def test_nobody_comes(model: Path, tmp_path: Path) -> None:
    with Cluster(tmp_path, num_hosts=3) as cluster:
        leader = cluster.start(0, model, "distributed.join_timeout_s=2")
        assert leader.wait(LIMIT_S) == 1
        assert "error: hosts 1, 2 of 3 did not come within 2 s" in leader.log


@pytest.mark.parametrize(
    ("processes", "words", "message"),
    [
        (Processes(0, 2), ("mesh.data=1", "mesh.model=4"), "the mesh data=1,model=4 leaves devices of the 2 hosts unused; it must take all 8"),
        (Processes(0, 2), ("mesh.data=2", "mesh.model=4", "scheduler.preemption=swap"), "on several hosts it must be"),
        (Processes(), ("distributed.hosts=[a, b]",), "distributed.hosts names 2 hosts; only jaxserve run works on several"),
    ],
)
def test_what_several_processes_cannot_run(model: Path, processes: Processes, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_runner(load_config((), [f"model.source={model}", *SETTINGS, *words]), processes)


def test_an_old_jax_is_refused_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    with pytest.raises(ConfigError, match=r"names 2 hosts, and jax is .*; on CPUs it must be 0\.11 or newer"):
        join(Config(), ("a", "b"), 0, lambda reason: None)


class FakeChannel:
    def __init__(self, *others: object) -> None:
        self.others = others

    def gather(self, value: object) -> list[object]:
        return [value, *self.others]


def test_processes_agree_on_facts_and_on_memory() -> None:
    assert Processes().smallest(Memory(10, 5)) == Memory(10, 5)
    assert Processes(0, 3, sender=FakeChannel([2**40, 7], [2**35, 9])).smallest(Memory(2**38, 8)) == Memory(2**35, 7)  # type: ignore[arg-type]
    Processes().agree({"jax": 1})
    alike = {"jax": "1", "a": "None"}
    Processes(0, 2, sender=FakeChannel(alike)).agree({"jax": 1, "a": None})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"are not: jax is 1 on host 0, 2 on host 2; b is missing on host 0, x on host 2$"):
        Processes(0, 3, sender=FakeChannel(alike, {"jax": "2", "a": "None", "b": "x"})).agree({"jax": 1, "a": None})  # type: ignore[arg-type]

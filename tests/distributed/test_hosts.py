"""Which hosts there are and which of them this is."""

from __future__ import annotations

import contextlib
import hmac
import http.server
import queue
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxserve.config import DistributedConfig
from jaxserve.engine.multihost.connections import _PUBLIC, await_all, await_leader, listen
from jaxserve.engine.multihost.hosts import find_hosts, own_address
from jaxserve.errors import ConfigError, HostLostError
from tests.waiting import LIMIT_S, longer_and_longer, wait_until

ON_TPU = {"JAX_PLATFORMS": "tpu,cpu", "TPU_SKIP_MDS_QUERY": "1"}
FOUR = {"TPU_WORKER_HOSTNAMES": "t-0,t-1, t-2,t-3", "TPU_WORKER_ID": "2"}
THIS = socket.gethostname()


@pytest.mark.parametrize(
    ("config", "environment", "expected"),
    [
        ({}, {}, ((), 0)),
        ({"hosts": ("a", "b", "c"), "host_index": 1}, ON_TPU | FOUR, (("a", "b", "c"), 1)),
        ({"hosts": ("a", THIS)}, {}, (("a", THIS), 1)),
        ({"hosts": ("a", "a"), "host_index": 0}, {}, (("a", "a"), 0)),
        ({"hosts": ("a",)}, {}, (("a",), 0)),
        ({}, ON_TPU | FOUR, (("t-0", "t-1", "t-2", "t-3"), 2)),
        ({"host_index": 3}, ON_TPU | FOUR, (("t-0", "t-1", "t-2", "t-3"), 3)),
        ({}, ON_TPU | {"TPU_WORKER_HOSTNAMES": f"a,{THIS}"}, (("a", THIS), 1)),
        ({}, ON_TPU | {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, (("localhost",), 0)),
        ({}, ON_TPU | {"TPU_WORKER_ID": "0"}, ((), 0)),
        ({}, FOUR | {"JAX_PLATFORMS": "cpu"}, ((), 0)),
        ({}, FOUR, ((), 0)),
    ],
)
def test_find_hosts(config: dict[str, object], environment: dict[str, str], expected: object) -> None:
    assert find_hosts(DistributedConfig(**config), environment) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hosts": ("a", "b"), "host_index": 2}, r"distributed.host_index is 2; must be in \[0, 1\], an index into distributed.hosts \(a, b\)"),
        ({"hosts": ("a",), "host_index": 1}, r"distributed.host_index is 1; must be in \[0, 0\]"),
        ({"host_index": 1}, "distributed.host_index is 1, and distributed.hosts is empty; must name all hosts"),
        ({"hosts": ("a", "b")}, f"distributed.hosts is a, b; this host's name, .*{THIS}.*, is none of them: give --host-index N"),
        ({"hosts": (THIS, "a", THIS)}, "is 2 of them: give --host-index N"),
    ],
)
def test_hosts_that_cannot_be(config: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_hosts(DistributedConfig(**config), {})


@pytest.fixture(autouse=True)
def _metadata_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.engine.multihost.hosts._METADATA_TIMEOUT_S", LIMIT_S)


@contextlib.contextmanager
def metadata_server(attributes: Mapping[str, str]) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            value = attributes.get(self.path.removeprefix("/computeMetadata/v1/instance/attributes/"))
            self.send_response(404 if value is None or self.headers["Metadata-Flavor"] != "Google" else 200)
            self.end_headers()
            self.wfile.write((value or "").encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@pytest.mark.parametrize("endpoints", ["a:1:10.0.0.1,b:2:10.0.0.2", "10.0.0.1,10.0.0.2"])
def test_hosts_of_a_tpu_vm(endpoints: str) -> None:
    with metadata_server({"worker-network-endpoints": endpoints, "agent-worker-number": "1"}) as server:
        assert find_hosts(DistributedConfig(), {"JAX_PLATFORMS": "tpu", "GCE_METADATA_IP": server}) == (("10.0.0.1", "10.0.0.2"), 1)


def test_a_tpu_without_a_metadata_server() -> None:
    with metadata_server({}) as server:
        assert find_hosts(DistributedConfig(), {"JAX_PLATFORMS": "tpu", "GCE_METADATA_IP": server}) == ((), 0)
    assert find_hosts(DistributedConfig(), {"JAX_PLATFORMS": "tpu", "GCE_METADATA_IP": server}) == ((), 0)


def test_own_address() -> None:
    assert own_address("127.0.0.1") == own_address("localhost") == "127.0.0.1"
    assert own_address("192.0.2.1") == "", "an address that is translated to this machine's"
    with pytest.raises(ConfigError, match="'no such host' is no name or address"):
        own_address("no such host")


def test_port_in_use() -> None:
    with listen("127.0.0.1", 0, "distributed.port") as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"distributed.port is {port} and cannot be listened on: Address already in use; choose another"):
            listen("127.0.0.1", port, "distributed.port")


def test_hosts_wait_for_each_other(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    compare = hmac.compare_digest

    def noticing(one: bytes, other: bytes) -> bool:
        shown.put(one)  # from here on nobody else is let in before who shows this
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", noticing)
    with listen("127.0.0.1", 0, "distributed.port") as listener, ThreadPoolExecutor(3) as executor, contextlib.ExitStack() as strangers:
        port = listener.getsockname()[1]
        stranger = strangers.enter_context(socket.create_connection(("127.0.0.1", port)))
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        all_here = executor.submit(await_all, listener, 2, LIMIT_S)
        again = executor.submit(await_leader, "127.0.0.1", port, 2, LIMIT_S)
        while shown.get(timeout=LIMIT_S) != _PUBLIC:
            pass
        with pytest.raises(TimeoutError):
            again.result(0.3)
        latest = executor.submit(await_leader, "127.0.0.1", port, 2, LIMIT_S)  # Started anew: the earlier one counts no more.
        with pytest.raises(HostLostError, match="went before all hosts had come, or another process came as host 2"):
            again.result(LIMIT_S)
        await_leader("127.0.0.1", port, 1, LIMIT_S)
        latest.result(LIMIT_S)
        all_here.result(LIMIT_S)
    wait_until(lambda: "turned away a connection from 127.0.0.1" in caplog.text)  # said by a thread of its own, when the stranger has gone


def test_hosts_that_do_not_come() -> None:
    for timeout_s in longer_and_longer(0.5):
        with ThreadPoolExecutor(1) as executor:
            with listen("127.0.0.1", 0, "distributed.port") as listener:
                waiting = executor.submit(await_leader, "127.0.0.1", listener.getsockname()[1], 2, timeout_s + 10.0)
                with pytest.raises(HostLostError, match=rf"of 4 did not come within {timeout_s:g} s") as lost:
                    await_all(listener, 3, timeout_s)
            with pytest.raises(HostLostError, match="the leader at 127.0.0.1 went|could not be reached"):
                waiting.result(2 * LIMIT_S)
        if "hosts 1, 3 of 4" in str(lost.value):
            assert "went" in str(waiting.exception())
            return
    pytest.fail("host 2 was there, and was missed")

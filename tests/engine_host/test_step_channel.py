"""The channel between the leader and its followers, alone: what arrives, who is let in, and what a lost or failing process looks like to the others."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pytest

from jaxserve.engine.multihost.connections import admit, call, listen
from jaxserve.engine.multihost.step_channel import SECRET_BYTES, StepReceiver, StepSender, Times
from jaxserve.engine.scheduling.schedule import NO_MOVES, PageMoves
from jaxserve.engine.step.batch import FILL_TOKENS, StepMessage
from jaxserve.errors import HostLostError
from tests.waiting import LIMIT_S, longer_and_longer

SECRET = bytes(range(SECRET_BYTES))
TIMES = Times(heartbeat_s=0.05, silence_s=LIMIT_S, connect_s=LIMIT_S, shake_s=2 * LIMIT_S, close_s=LIMIT_S, stop_s=LIMIT_S)
"""Nothing is given up because this machine stands still for a while; a test of giving up shortens the one time that it is about."""


@dataclasses.dataclass
class Channel:
    """A leader and its followers in one process; the queues hold what each was told of the others' end."""

    port: int
    sender: StepSender
    receivers: list[StepReceiver]
    leader_told: queue.SimpleQueue[str]
    followers_told: list[queue.SimpleQueue[str]]


@contextlib.contextmanager
def open_channel(
    num_followers: int = 1, leader_times: Times = TIMES, follower_times: Times = TIMES, before: Callable[[int], object] = lambda port: None
) -> Iterator[Channel]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    leader_told: queue.SimpleQueue[str] = queue.SimpleQueue()
    followers_told: list[queue.SimpleQueue[str]] = [queue.SimpleQueue() for _ in range(num_followers)]
    sender = StepSender(listener, num_followers, leader_told.put, leader_times)
    accepting = threading.Thread(target=sender.accept, args=(SECRET,))
    accepting.start()
    before(port)
    receivers = [
        StepReceiver("127.0.0.1", port, index, SECRET, told.put, lambda told=told: told.put("early stop"), follower_times)
        for index, told in enumerate(followers_told, start=1)
    ]
    accepting.join(LIMIT_S)
    assert not accepting.is_alive()
    try:
        yield Channel(port, sender, receivers, leader_told, followers_told)
    finally:
        for receiver in receivers:
            receiver.close()
        sender.close()


def step(bucket: int, moves: tuple[PageMoves, ...] = (NO_MOVES, NO_MOVES)) -> StepMessage:
    packed = np.arange(2 * (bucket + 3), dtype=np.int32).reshape(2, -1) - 5
    fills = np.arange(bucket % 5 * 2 * (2 + FILL_TOKENS), dtype=np.int32).reshape(bucket % 5, 2, 2 + FILL_TOKENS)
    return StepMessage(bucket, packed, moves, fills)


def test_steps_arrive_as_they_were_sent() -> None:
    steps = [step(0), step(7, (PageMoves(copies=((3, 9), (4, 1))), NO_MOVES)), step(2, (NO_MOVES, PageMoves(copies=((0, 5),)))), step(1000)]
    with open_channel(num_followers=3) as channel:
        got: list[list[StepMessage]] = [[] for _ in channel.receivers]
        threads = [
            threading.Thread(target=lambda sink=sink, receiver=receiver: sink.extend(receiver.messages(2)))
            for sink, receiver in zip(got, channel.receivers, strict=True)
        ]
        for thread in threads:
            thread.start()
        for message in steps:
            channel.sender.send(message)
        channel.sender.close()
        for thread in threads:
            thread.join(LIMIT_S)
        for received in got:
            assert [message.bucket for message in received] == [0, 7, 2, 1000]
            for message, sent in zip(received, steps, strict=True):
                np.testing.assert_array_equal(message.packed, sent.packed)
                assert message.packed.dtype == np.int32
                np.testing.assert_array_equal(message.fills, sent.fills)
                assert tuple(message.moves) == sent.moves
        assert channel.leader_told.empty()
        assert all(told.empty() for told in channel.followers_told)


def test_heartbeats_keep_an_idle_channel_alive() -> None:
    for silence_s in longer_and_longer(0.6):
        times = dataclasses.replace(TIMES, silence_s=silence_s)
        with open_channel(leader_times=times, follower_times=times) as channel:
            time.sleep(2 * silence_s)
            if channel.leader_told.empty() and channel.followers_told[0].empty():
                return
    pytest.fail("an idle channel is lost, however much silence it may keep")


def test_values_are_gathered_in_the_order_of_the_hosts() -> None:
    with open_channel(num_followers=2) as channel:
        results: dict[int, object] = {}
        threads = [
            threading.Thread(target=lambda index=index, receiver=receiver: results.update({index: receiver.gather({"host": index})}))
            for index, receiver in enumerate(channel.receivers, start=1)
        ]
        for thread in reversed(threads):
            thread.start()
            time.sleep(0.05)
        everything = channel.sender.gather({"host": 0})
        for thread in threads:
            thread.join(LIMIT_S)
        assert everything == [{"host": 0}, {"host": 1}, {"host": 2}]
        assert results == {1: everything, 2: everything}


def test_strangers_are_turned_away_and_hold_up_nobody(caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.ExitStack() as strangers:

        def intrude(port: int) -> None:
            for data in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(SECRET_BYTES + 4), SECRET + (9).to_bytes(4, "little"), SECRET[:-1]):
                connection = strangers.enter_context(socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S))
                connection.sendall(data)
                connections.append(connection)

        connections: list[socket.socket] = []
        with open_channel(before=intrude) as channel:  # sooner than those who say too little are given up
            for connection in connections[2:4]:
                with contextlib.suppress(ConnectionResetError):
                    assert connection.recv(1) == b""
            with pytest.raises(ConnectionRefusedError):  # Nobody else is expected.
                socket.create_connection(("127.0.0.1", channel.port), timeout=LIMIT_S)
            assert channel.leader_told.empty()
    assert sum("none of the hosts" in record.message for record in caplog.records) >= 2


def test_who_says_nothing_is_turned_away() -> None:
    with listen("127.0.0.1", 0, "distributed.port") as listener, ThreadPoolExecutor(1) as executor, contextlib.ExitStack() as calls:
        admitting = executor.submit(admit, listener, 1, SECRET, LIMIT_S, 0.2)
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as silent:
            assert silent.recv(1) == b""
        while not admitting.done():  # again, should this machine have stood still for longer than a host may say nothing
            calls.enter_context(call("127.0.0.1", port, 1, SECRET, LIMIT_S))
            wait([admitting], timeout=1.0)
        for connection in admitting.result().values():
            connection.close()


@pytest.mark.parametrize("secret", [b"\1" * SECRET_BYTES, b""], ids=["wrong", "none"])
def test_who_does_not_come_is_named(secret: bytes) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    sender = StepSender(listener, 2, lambda reason: None, dataclasses.replace(TIMES, connect_s=0.5))
    with socket.create_connection(listener.getsockname()) as stranger:
        stranger.sendall(secret)
        with pytest.raises(HostLostError, match="hosts 1, 2 of 3 did not come within 0.5 s"):
            sender.accept(SECRET)
    sender.close()


def test_no_leader() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(HostLostError, match="could not be reached within 0.3 s: Connection refused"):
        StepReceiver("127.0.0.1", port, 1, SECRET, lambda reason: None, lambda: None, dataclasses.replace(TIMES, connect_s=0.3))


def freeze(monkeypatch: pytest.MonkeyPatch, channel: Channel, whose: str) -> None:
    """No more heartbeats from one side, though its connection is open."""
    end = channel.sender if whose == "leader" else channel.receivers[0]
    peers = [*end._peers.values()] if isinstance(end, StepSender) else [end._peer]
    for peer in peers:
        monkeypatch.setattr(peer, "send", lambda kind, data=b"": None)


def test_silence_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    impatient = dataclasses.replace(TIMES, silence_s=0.6)
    with open_channel(leader_times=impatient) as channel:
        freeze(monkeypatch, channel, "follower")
        assert channel.leader_told.get(timeout=LIMIT_S) == "host 1 (127.0.0.1) is lost: nothing heard for 0.6 s"
    with open_channel(follower_times=impatient) as channel:
        freeze(monkeypatch, channel, "leader")
        assert channel.followers_told[0].get(timeout=LIMIT_S) == "the leader (127.0.0.1) is lost: nothing heard for 0.6 s"
        with pytest.raises(HostLostError, match="nothing heard"):
            next(channel.receivers[0].messages(2))


def test_a_lost_follower_is_told_to_the_leader_once_and_to_the_other_followers() -> None:
    with open_channel(num_followers=3) as channel:
        channel.receivers[1].close()
        assert channel.leader_told.get(timeout=LIMIT_S) == "host 2 (127.0.0.1) is lost: it closed the connection"
        for told in (channel.followers_told[0], channel.followers_told[2]):
            assert told.get(timeout=LIMIT_S) == "the leader (127.0.0.1) has failed: host 2 (127.0.0.1) is lost: it closed the connection"
        channel.receivers[0].close()
        channel.sender.send(step(0))
        time.sleep(0.1)
        assert channel.leader_told.empty()


def in_background(end: Callable[..., None], *arguments: str) -> None:
    """Ends one side, which waits until the other has heard it and gone: at the end of the channel."""
    threading.Thread(target=end, args=arguments).start()


def test_who_fails_says_why() -> None:
    with open_channel(num_followers=2) as channel:
        channel.receivers[0].fail("no such model: x")
        assert channel.leader_told.get(timeout=LIMIT_S) == "host 1 (127.0.0.1) has failed: no such model: x"
        assert channel.followers_told[1].get(timeout=LIMIT_S).endswith("host 1 (127.0.0.1) has failed: no such model: x")
    with open_channel() as channel:
        in_background(channel.sender.fail, "out of memory")
        assert channel.followers_told[0].get(timeout=LIMIT_S) == "the leader (127.0.0.1) has failed: out of memory"


def test_a_leader_that_stops_before_anybody_follows() -> None:
    with open_channel() as channel:
        in_background(channel.sender.close)
        assert channel.followers_told[0].get(timeout=LIMIT_S) == "early stop"


def test_a_follower_that_hangs_in_a_step_when_the_leader_ends() -> None:
    with open_channel(follower_times=dataclasses.replace(TIMES, stop_s=0.3)) as channel:
        messages = channel.receivers[0].messages(2)
        channel.sender.send(step(0))
        next(messages)  # It never comes back for more.
        in_background(channel.sender.close)
        assert channel.followers_told[0].get(timeout=LIMIT_S) == "the leader has ended, and a step is still under way here"
        assert channel.leader_told.empty()


def test_a_frame_of_another_version() -> None:
    with open_channel() as channel:
        channel.sender._send_all(77, b"")
        with pytest.raises(HostLostError, match="frame of kind 77, not 1 or 4; do all hosts run the same version"):
            next(channel.receivers[0].messages(2))
    with open_channel() as channel:
        channel.receivers[0]._peer._connection.sendall(b"\xff" * 5)
        assert "frame of 4294967295 bytes" in channel.leader_told.get(timeout=LIMIT_S)

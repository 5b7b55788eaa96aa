"""Several processes that run one engine: joining jax's distributed runtime, checking that all are alike, following the leader, and ending together."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxserve import __version__
from jaxserve.config import Config, DistributedConfig
from jaxserve.engine.multihost.connections import await_all, await_leader, listen
from jaxserve.engine.multihost.hosts import own_address
from jaxserve.engine.multihost.step_channel import SECRET_BYTES, StepReceiver, StepSender
from jaxserve.engine.programs.memory import Memory
from jaxserve.errors import ConfigError, HostLostError

if TYPE_CHECKING:
    from jaxserve.engine.device.runner import DeviceRunner

logger = logging.getLogger(__name__)

LOST_HOST_STATUS = 1
CPU_COLLECTIVES_SINCE = (0, 11)
"""First version of jax with which several processes on CPUs are allowed. They hang with 0.10.2, and ran with 0.12.0."""
SECOND_SIGNAL_STATUS = 130
_LAST_WORDS_S = 1.0
"""Seconds that a process waits before it ends, so that clients get their errors and the other processes can end first."""
_EXIT_TIMEOUT_S = 30
"""Longest time, in seconds, that jax lets the processes wait for each other when they shut down."""


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes of an engine, seen from one of them. All run the same programs in the same order.

    Args:
        index: Index of this process; the process with index 0 leads.
        count: Number of all processes.
        sender: The leader's end of the step channel; ``None`` in a follower, or if there is one process.
        receiver: A follower's end of the step channel; ``None`` in the leader.
    """

    index: int = 0
    count: int = 1
    sender: StepSender | None = None
    receiver: StepReceiver | None = None

    @property
    def is_leader(self) -> bool:
        return self.index == 0

    def gather(self, value: Any) -> list[Any]:
        """The values that the processes gave, in the order of their indices. Every process must call it, and it waits for all. Values are JSON data."""
        end = self.sender or self.receiver
        return [value] if end is None else end.gather(value)

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Checks that these facts are the same in all processes. Every process must call it.

        Raises:
            ConfigError: They differ. The message names those that do.
        """
        leads, *others = self.gather({key: str(value) for key, value in facts.items()})
        for index, other in enumerate(others, start=1):
            differing = [key for key in leads | other if leads.get(key) != other.get(key)]
            if differing:
                told = "; ".join(f"{key} is {leads.get(key, 'missing')} on host 0, {other.get(key, 'missing')} on host {index}" for key in differing)
                raise ConfigError(f"the hosts must be alike, and are not: {told}")

    def smallest(self, memory: Memory) -> Memory:
        """The smallest memory of all processes. The pool is sized by it, because its size is a shape of programs that must be the same in all processes."""
        each = self.gather([memory.total_bytes, memory.free_bytes])
        return Memory(*map(min, zip(*each, strict=True)))

    def meet(self) -> None:
        """Waits until all processes have called it."""
        self.gather(None)

    @contextlib.contextmanager
    def ending_together(self) -> Iterator[None]:
        """A context in which an exception, which ends this process, is told to the other processes, so that they end too."""
        try:
            yield
        except BaseException as error:
            self.fail(str(error).strip() or type(error).__name__)
            raise

    def fail(self, reason: str) -> None:
        """Tells the other processes why this one is about to end, so that they end too."""
        end = self.sender or self.receiver
        if end is not None:
            end.fail(reason)

    def close(self) -> None:
        """Tells the followers to end. Does nothing in a follower."""
        if self.sender is not None:
            self.sender.close()


def join(config: Config, hosts: Sequence[str], index: int, before_end: Callable[[str], None]) -> Processes:
    """Joins the processes of all hosts, and returns when all have come and are alike. Call it in the main thread, before jax looks for devices.

    From then on, this process ends with status ``LOST_HOST_STATUS`` when another one is lost, because a collective may be waiting for the lost one and cannot
    be interrupted.

    Args:
        config: The configuration, which must be the same in all processes, except for keys that only the leader reads.
        hosts: All hosts. With fewer than two there is nothing to join.
        index: Index of this host.
        before_end: Called with the reason, from another thread, before this process is ended in that way. The leader then still waits for a second.

    Raises:
        ConfigError: A port cannot be listened on, the processes are not alike, or this version of jax cannot run several processes on CPUs.
        HostLostError: Not all hosts came.
    """
    if len(hosts) < 2:
        return Processes()
    if (jax.config.jax_platforms or "").startswith("cpu") and jax.__version_info__ < CPU_COLLECTIVES_SINCE:
        since = ".".join(map(str, CPU_COLLECTIVES_SINCE))
        raise ConfigError(
            f"distributed.hosts names {len(hosts)} hosts, and jax is {jax.__version__}; on CPUs it must be {since} or newer: collectives hang before"
        )

    def end(reason: str) -> None:
        logger.critical("%s. The engine cannot go on without it", reason)
        before_end(reason)
        if index == 0:
            time.sleep(_LAST_WORDS_S)
        _exit(LOST_HOST_STATUS)

    def end_early() -> None:
        logger.info("the leader was stopped before the engine was ready")
        _exit(0)

    port, sender, address, timeout_s = config.distributed.port, None, "", config.distributed.join_timeout_s
    logger.info("host %d of %d: waiting for the others, for %g s at most", index, len(hosts), timeout_s)
    if index == 0:
        address = own_address(hosts[0])
        listen(address, port, "distributed.port").close()  # jax would share a port that is in use.
        listener = listen(address, port + 1, "distributed.port + 1")
        sender = StepSender(listener, len(hosts) - 1, end)
        await_all(listener, len(hosts) - 1, timeout_s)
    else:
        await_leader(hosts[0], port + 1, index, timeout_s)
    _initialize(config.distributed, hosts, index, address)
    secret = _share_secret()
    receiver = StepReceiver(hosts[0], port + 1, index, secret, end, end_early) if sender is None else None
    processes = Processes(index, len(hosts), sender, receiver)
    with processes.ending_together():
        if sender is not None:
            sender.accept(secret)
        processes.agree(_facts(config))
    return processes


def follow(processes: Processes, runner: DeviceRunner) -> None:
    """Runs the leader's steps in a follower, until the leader ends.

    Raises:
        HostLostError: The leader is lost.
    """
    assert processes.receiver is not None
    buckets = runner.buckets.all()
    for message in processes.receiver.messages(runner.num_ranks):
        runner.execute(buckets[message.bucket], message.packed, message.moves, message.fills)


@contextlib.contextmanager
def leaving_the_end_to_the_leader(processes: Processes) -> Iterator[threading.Event]:
    """A context for a follower, in which the first SIGINT or SIGTERM only logs a warning and the second ends the process.

    Whoever stops all hosts at once wants the leader to drain its requests, for which it needs the followers.

    Yields:
        An event to set when the engine is ready. Before that there is nothing to drain, and the first signal ends this process.
    """
    is_ready, is_noted = threading.Event(), threading.Event()

    def on_signal(number: int, _: object) -> None:
        name = signal.Signals(number).name
        if is_ready.is_set() and not is_noted.is_set():
            is_noted.set()
            logger.warning("%s: host %d ends when the leader does; stop that one. A second signal ends this one, and the engine with it", name, processes.index)
            return
        processes.fail(f"it was stopped by {name}")
        logger.info("stopped by %s", name)
        _exit(SECOND_SIGNAL_STATUS if is_ready.is_set() else 0)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield is_ready
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _initialize(config: DistributedConfig, hosts: Sequence[str], index: int, address: str) -> None:
    # Its handler would swallow SIGTERM, which is ours: it drains.
    jax.config.update("jax_enable_preemption_service", False)
    # The call does not come back to Python while it waits: without this Ctrl-C would wait with it.
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        jax.distributed.initialize(
            f"{hosts[0]}:{config.port}", len(hosts), index,
            coordinator_bind_address=f"{address or '[::]'}:{config.port}",
            cluster_detection_method="deactivate",  # Slurm's would give each process one device.
            initialization_timeout=int(config.join_timeout_s),
            shutdown_timeout_seconds=_EXIT_TIMEOUT_S,
        )  # fmt: skip
    except RuntimeError as error:
        raise HostLostError(f"the hosts could not come together at distributed.port ({config.port}): {str(error).splitlines()[0]}") from error
    finally:
        signal.signal(signal.SIGINT, before)


def _facts(config: Config) -> dict[str, Any]:
    """The facts that must be the same in all processes so that they compile the same programs: versions, devices, and the configuration that all read."""
    sections = dataclasses.asdict(config)
    del sections["server"], sections["tenants"], sections["distributed"]["host_index"]
    platform = sections.pop("platform")
    device = jax.local_devices()[0]
    return {
        "jaxserve": __version__,
        "jax": jax.__version__,
        "platform": platform,
        "the device": device.device_kind,
        "its runtime": device.client.platform_version,
        "the number of devices": jax.local_device_count(),
        **{f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()},
    }


def _share_secret() -> bytes:
    """Random bytes from the leader, which only the processes that joined know."""
    from jax.experimental.multihost_utils import broadcast_one_to_all

    own = np.frombuffer(secrets.token_bytes(SECRET_BYTES), np.uint8)
    return np.asarray(broadcast_one_to_all(own)).astype(np.uint8).tobytes()


def _exit(status: int) -> None:
    logging.shutdown()
    os._exit(status)

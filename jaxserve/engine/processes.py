"""Several processes as one engine: joining jax's distributed runtime, what all must agree on, and what a follower does. One leads and schedules."""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxserve.config import DistributedConfig
from jaxserve.engine.memory import Memory
from jaxserve.engine.step_channel import SECRET_BYTES, StepReceiver, StepSender
from jaxserve.errors import ConfigError, HostLostError

if TYPE_CHECKING:
    from jaxserve.engine.runner import DeviceRunner

logger = logging.getLogger(__name__)

LOST_HOST_STATUS = 1


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes of an engine, seen from one of them. All run the same programs in the same order.

    Args:
        index: Of this one; 0 leads.
        count: Of all.
        sender: The leader's end of the step channel.
        receiver: A follower's end.
    """

    index: int = 0
    count: int = 1
    sender: StepSender | None = None
    receiver: StepReceiver | None = None

    @property
    def is_leader(self) -> bool:
        return self.index == 0

    def close(self) -> None:
        """Lets the followers end."""
        if self.sender is not None:
            self.sender.close()

    def smallest(self, memory: Memory) -> Memory:
        """What every process has: the pool's size is a shape of programs that all must compile alike."""
        if self.count == 1:
            return memory
        from jax.experimental.multihost_utils import process_allgather

        # Thousands of bytes, so that a 32-bit integer holds them: jax would cut a larger one.
        each = np.array([min(memory.total_bytes >> 10, 2**31 - 1), min(memory.free_bytes >> 10, 2**31 - 1)], np.int32)
        total, free = np.min(np.asarray(process_allgather(each)), axis=0).tolist()
        return Memory(total << 10, free << 10)


def find_hosts(config: DistributedConfig, environment: Mapping[str, str] = os.environ) -> tuple[Sequence[str], int]:
    """The hosts and which of them this is: as configured, else as the environment of a TPU VM says, else this one alone.

    Raises:
        ConfigError: It cannot be told which host this is.
    """
    hosts, index = config.hosts, config.host_index
    if not hosts:
        hosts = tuple(name.strip() for name in environment.get("TPU_WORKER_HOSTNAMES", "").split(",") if name.strip())
        worker = environment.get("TPU_WORKER_ID", "")
        index = int(worker) if index is None and worker.isdigit() else index
    if len(hosts) < 2:
        return hosts, 0
    if index is None:
        own = {socket.gethostname(), socket.getfqdn()}
        matches = [position for position, host in enumerate(hosts) if host in own]
        if len(matches) != 1:
            raise ConfigError(f"distributed.hosts is {', '.join(hosts)}; this host is {' or '.join(sorted(own))}, not one of them: give --host-index N")
        index = matches[0]
    if not 0 <= index < len(hosts):
        raise ConfigError(f"distributed.host_index is {index}; must be in [0, {len(hosts) - 1}], an index into distributed.hosts")
    return hosts, index


def join(config: DistributedConfig, hosts: Sequence[str], index: int) -> Processes:
    """Joins the processes of all hosts; returns when all are there. Call it before jax looks for devices, in the main thread.

    Raises:
        HostLostError: Not all came.
    """
    if len(hosts) < 2:
        return Processes()
    # Its handler would swallow SIGTERM, which is ours: it drains.
    jax.config.update("jax_enable_preemption_service", False)
    logger.info("host %d of %d: waiting for the others", index, len(hosts))
    try:
        jax.distributed.initialize(f"{hosts[0]}:{config.port}", len(hosts), index, initialization_timeout=int(config.join_timeout_s))
    except RuntimeError as error:
        raise HostLostError(f"not all of {', '.join(hosts)} came together within {config.join_timeout_s:.0f} s: {str(error).splitlines()[0]}") from error
    sender = StepSender(config.port + 1, len(hosts) - 1, _end_process) if index == 0 else None
    secret = _share_secret()
    if sender is not None:
        sender.accept(secret)
        return Processes(index, len(hosts), sender=sender)
    return Processes(index, len(hosts), receiver=StepReceiver(hosts[0], config.port + 1, secret))


def follow(processes: Processes, runner: DeviceRunner) -> None:
    """Runs the leader's steps until it ends.

    Raises:
        HostLostError: The leader is lost.
    """
    assert processes.receiver is not None
    buckets = runner.buckets.all()
    for message in processes.receiver.messages(runner.num_ranks):
        runner.execute(buckets[message.bucket], message.packed, message.moves)


def _share_secret() -> bytes:
    """Random bytes of the leader's, known to the processes that joined and to no one else."""
    from jax.experimental.multihost_utils import broadcast_one_to_all

    own = np.frombuffer(secrets.token_bytes(SECRET_BYTES), np.uint8)
    return np.asarray(broadcast_one_to_all(own)).astype(np.uint8).tobytes()


def _end_process(reason: str) -> None:
    """Ends at once: the engine's thread may be waiting in a collective for ever."""
    logger.critical("%s. The engine cannot go on without it", reason)
    logging.shutdown()
    os._exit(LOST_HOST_STATUS)

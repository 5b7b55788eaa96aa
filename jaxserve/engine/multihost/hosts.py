"""Which hosts run the engine together, and which of them this is: as configured, or as Cloud TPU tells. No jax."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
from collections.abc import Mapping, Sequence

from jaxserve.config import DistributedConfig
from jaxserve.errors import ConfigError

_METADATA_TIMEOUT_S = 3.0


def find_hosts(config: DistributedConfig, environment: Mapping[str, str] = os.environ) -> tuple[Sequence[str], int]:
    """The hosts and the index of this one: as configured; on a TPU as its environment or the metadata server of its VM says; else this one alone.

    Args:
        config: What is set wins.
        environment: With the ``JAX_PLATFORMS`` that is in force.

    Returns:
        Fewer than two hosts where there are no others.

    Raises:
        ConfigError: It cannot be told which host this is.
    """
    hosts, index = config.hosts, config.host_index
    if not hosts and environment.get("JAX_PLATFORMS", "").split(",")[0] == "tpu":
        hosts, worker = _tpu_hosts(environment)
        index = worker if index is None and len(hosts) > 1 else index  # a single host has a number too
    if len(hosts) < 2 and index is None:
        return hosts, 0
    if not hosts:
        raise ConfigError(f"distributed.host_index is {index}, and distributed.hosts is empty; must name all hosts")
    index = _own_index(hosts) if index is None else index
    if not 0 <= index < len(hosts):
        raise ConfigError(f"distributed.host_index is {index}; must be in [0, {len(hosts) - 1}], an index into distributed.hosts ({', '.join(hosts)})")
    return hosts, index


def own_address(host: str) -> str:
    """The address to listen on for connections to ``host``, this machine: its own, or empty for all where that one is only translated to it.

    Raises:
        ConfigError: The name is none.
    """
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        raise ConfigError(f"distributed.hosts: {host!r} is no name or address of a host: {error.strerror}") from error
    try:
        socket.create_server((address, 0)).close()
    except OSError:
        return ""
    return address


def _own_index(hosts: Sequence[str]) -> int:
    names = {socket.gethostname(), socket.getfqdn()}
    matches = [index for index, host in enumerate(hosts) if host in names]
    if len(matches) != 1:
        found = "none of them" if not matches else f"{len(matches)} of them"
        raise ConfigError(f"distributed.hosts is {', '.join(hosts)}; this host's name, {' or '.join(sorted(names))}, is {found}: give --host-index N")
    return matches[0]


def _tpu_hosts(environment: Mapping[str, str]) -> tuple[tuple[str, ...], int | None]:
    """From the variables that a TPU's container has, else from the metadata server that a TPU VM has."""
    names, worker = environment.get("TPU_WORKER_HOSTNAMES", ""), environment.get("TPU_WORKER_ID", "")
    if not names and "TPU_SKIP_MDS_QUERY" not in environment:
        server = environment.get("GCE_METADATA_IP", "metadata.google.internal")
        names, worker = _metadata(server, "worker-network-endpoints"), _metadata(server, "agent-worker-number")
    # One a host: a name, or name:id:address, as jax's own detection reads them.
    hosts = tuple(name.strip().split(":")[-1] for name in names.split(",") if name.strip())
    return hosts, int(worker) if worker.strip().isdigit() else None


def _metadata(server: str, key: str) -> str:
    """An attribute of this VM; empty where there is no such server or attribute."""
    connection = http.client.HTTPConnection(server, timeout=_METADATA_TIMEOUT_S)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", f"/computeMetadata/v1/instance/attributes/{key}", headers={"Metadata-Flavor": "Google"})
        response = connection.getresponse()
        return response.read().decode() if response.status == http.client.OK else ""
    return ""

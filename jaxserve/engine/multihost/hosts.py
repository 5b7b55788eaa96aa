"""The hosts that run the engine together, and which of them this is, from the configuration or from Cloud TPU. Imports no jax."""

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
    """The hosts and the index of this one. If the configuration names none, a TPU's environment or its VM's metadata server is asked; else this host is alone.

    Args:
        config: The configuration; what it sets has precedence.
        environment: The environment variables. ``JAX_PLATFORMS`` must be the one in force.

    Returns:
        The hosts, fewer than two if there are no others, and this host's index.

    Raises:
        ConfigError: It is not clear which host this is.
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
    """The address to listen on for connections to ``host``, which names this machine. Empty, for all addresses, if the machine does not have that address
    itself because it is only translated to it.

    Raises:
        ConfigError: The name cannot be resolved.
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
    """The hosts and this host's index, from the environment variables of a TPU's container, else from the metadata server of a TPU VM."""
    names, worker = environment.get("TPU_WORKER_HOSTNAMES", ""), environment.get("TPU_WORKER_ID", "")
    if not names and "TPU_SKIP_MDS_QUERY" not in environment:
        server = environment.get("GCE_METADATA_IP", "metadata.google.internal")
        names, worker = _metadata(server, "worker-network-endpoints"), _metadata(server, "agent-worker-number")
    # One a host: a name, or name:id:address, as jax's own detection reads them.
    hosts = tuple(name.strip().split(":")[-1] for name in names.split(",") if name.strip())
    return hosts, int(worker) if worker.strip().isdigit() else None


def _metadata(server: str, key: str) -> str:
    """An attribute of this VM; empty if there is no such server or attribute."""
    connection = http.client.HTTPConnection(server, timeout=_METADATA_TIMEOUT_S)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", f"/computeMetadata/v1/instance/attributes/{key}", headers={"Metadata-Flavor": "Google"})
        response = connection.getresponse()
        return response.read().decode() if response.status == http.client.OK else ""
    return ""

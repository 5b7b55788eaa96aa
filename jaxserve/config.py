"""The configuration: one frozen dataclass for each section. YAML sections and dotted overrides name exactly these fields. ``load_config`` reads them."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, cast, get_type_hints

import yaml

from jaxserve.config_fields import Ascending, Between, Distinct, NotBlank, OneOf, PowerOfTwo, check, coerce
from jaxserve.config_yaml import read_yaml
from jaxserve.errors import ConfigError
from jaxserve.mesh_axes import MESH_AXES, axis_names
from jaxserve.tenants import TenantLimits, Tenants, read_tenants

REDACTED = "***"

_SECRETS: Mapping[str, Callable[[str], str]] = MappingProxyType(
    {
        "server.api_keys": lambda _: REDACTED,
        "server.admin_keys": lambda _: REDACTED,
        "tenants.keys": lambda text: f"{text.partition('=')[0]}={REDACTED}",
    }
)
"""Keys whose values are secret, each with a function that shows one value without the secret."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model to serve, and its arithmetic.

    Args:
        source: A folder, a ``.gguf`` file, a hub id, or an alias (``jaxserve models`` lists them).
        dtype: Dtype of weights and activations.
        max_model_len: Largest number of tokens that prompt and output may have together; ``None`` takes the model's own limit.
        revision: Hub revision; only for hub ids.
        chat_template: Path of a Jinja file that replaces the model's own template.
        generation_config: ``auto`` takes sampling defaults from the model's ``generation_config.json``, ``none`` does not.
    """

    source: Annotated[str, NotBlank()] = "smollm2-135m"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    max_model_len: Annotated[int, Between(1, 2**24)] | None = None
    revision: Annotated[str, NotBlank()] | None = None
    chat_template: Annotated[str, NotBlank()] | None = None
    generation_config: Literal["auto", "none"] = "auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """The mesh: the number of ranks of each axis (``mesh_axes.MESH_AXES``). The mesh takes the first devices, as many as the product of these numbers.

    Args:
        data: Number of data ranks, each with its own sequences and pages; ``None`` is 1.
        model: Number of model ranks, each with a part of every layer; ``None`` is 1 on CPU, elsewhere all devices that ``data`` leaves.
        replicate_kv_heads: Whether a mesh with more model ranks than KV heads is allowed. Each head is then held by several ranks, so keys and values, and the
            weights that make them, take that many times the memory.
    """

    data: Annotated[int, Between(1, 2**16)] | None = None
    model: Annotated[int, Between(1, 2**16)] | None = None
    replicate_kv_heads: bool = False


MeshAxisName = Annotated[str, OneOf(axis_names(MESH_AXES))]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingConfig:
    """The sharding rules: for each logical axis of the parameters, the mesh axes that it is split over, in order. ``null`` or an empty list splits nothing.

    All rules give the same tokens at different cost. The defaults need one reduction for each block and gather no weights. ``vocab`` and ``kv_heads`` over
    ``model`` also split sampling and attention. A rule with ``data`` splits weights over data ranks too, which must then gather them in every step.

    Args:
        vocab: Rows of the embedding and of the output head.
        kv_heads: KV heads, each with its group of query heads.
        mlp: Width of the MLP.
        width: Width of the residual stream.
    """

    vocab: Annotated[tuple[MeshAxisName, ...], Distinct()] | None = ("model",)
    kv_heads: Annotated[tuple[MeshAxisName, ...], Distinct()] | None = ("model",)
    mlp: Annotated[tuple[MeshAxisName, ...], Distinct()] | None = ("model",)
    width: Annotated[tuple[MeshAxisName, ...], Distinct()] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged KV pool.

    Args:
        page_size: Tokens that one page holds.
        num_pages: Pages of one layer and one data rank; ``None`` sizes the pool from ``memory_fraction``.
        memory_fraction: Fraction of the device's memory that the pool may take, as far as it is free, but never more than all sequences at full length need;
            ``None`` is 0.1 of a host's memory and 0.9 of an accelerator's.
        swap_gib: Host memory, in GiB, to which pages of preempted sequences can be swapped; ``None`` is 4 with an accelerator and 0 (no swapping) on CPU.
        dtype: Dtype of keys and values; ``auto`` is the model's dtype (float32 on CPU with JAX 0.10, whose bfloat16 scatter copies the pool).
            ``fp8`` and ``float8_e4m3fn`` are the same: half of bfloat16's memory, 3 bits of mantissa, saturating at 448.
        prefix: Kind of the prefix cache, which keeps the keys and values of prompts and answers for prompts that begin with the same tokens: ``radix`` is a
            radix tree, which finds the longest common beginning to the token; ``hash`` is a table of digests of whole pages; ``off`` keeps none.
        session_ttl_s: Seconds by which the pages of a request with a ``session_id`` outlast others in the prefix cache, as long as there is memory.
        isolate_tenants: Whether tenants share no cached pages, so that the speed of an answer tells nobody what others asked.
    """

    page_size: Annotated[int, Between(1, 256), PowerOfTwo()] = 16
    num_pages: Annotated[int, Between(1, 2**24)] | None = None
    memory_fraction: Annotated[float, Between(0, 1, open_low=True)] | None = None
    swap_gib: Annotated[float, Between(0, 2**16)] | None = None
    dtype: Literal["auto", "bfloat16", "float32", "float8_e4m3fn", "fp8"] = "auto"
    prefix: Literal["radix", "hash", "off"] = "radix"
    session_ttl_s: Annotated[float, Between(0, 86_400)] = 300.0
    isolate_tenants: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The scheduling of requests. The limits of a step hold for each data rank.

    Args:
        max_num_seqs: Largest number of sequences in one step, which is also the number of sequence slots.
        max_tokens_per_step: Token budget of one step; a longer prompt is prefilled in chunks.
        chunk_by: How a prefill chunk counts against the budget while other sequences decode: ``tokens`` counts its tokens; ``work`` counts their cost, so that
            chunks become shorter as their context grows and steps take about equally long.
        policy: How waiting sequences join the running ones: ``continuous`` lets them join at any time. ``static`` and ``dynamic`` run batches to their end, for
            comparison: a static batch takes what waits when nothing runs; a dynamic one waits for ``preferred_batch_size`` sequences, for
            ``max_batch_delay_s`` at most.
        preferred_batch_size: Number of waiting sequences that begins a dynamic batch; ``None`` is ``max_num_seqs``.
        max_batch_delay_s: Longest time, in seconds, that the first sequence of a dynamic batch waits for others.
        order: Which waiting request is next: with ``fcfs`` the one that came first; with ``priority`` the one with the smallest ``priority``, with ageing;
            with ``deadline`` the one whose ``deadline_ms`` ends first; with ``fair`` the first of the tenant that has been served the fewest tokens.
        preemption: What happens to a running request whose pages others need: ``recompute`` forgets its keys and values, ``swap`` moves them to host memory
            (``cache.swap_gib``) while there is room, ``auto`` takes what costs less time according to measurements at the start.
        ageing_s: Seconds of waiting that make up for one level of priority, with ``order=priority``.
        max_queued_requests: Largest number of waiting requests, beyond those that free slots take in the next step; ``None`` for no limit. Further requests
            are refused, or replace another: with ``order=priority`` one of lower priority, with ``order=fair`` one whose tenant has more in the queue.
        max_queued_tokens: Largest number of prompt tokens that wait; ``None`` for no limit.
        queue_timeout_s: Seconds after which a request that has not begun is refused; ``None`` for no limit.
        degrade_at: Fraction of ``max_queued_requests`` from which on new requests get at most ``degraded_max_tokens``.
        degraded_max_tokens: Largest number of tokens that such a request may generate; the answer says when it was applied. ``None`` for no such limit.
    """

    max_num_seqs: Annotated[int, Between(1, 4096)] = 32
    max_tokens_per_step: Annotated[int, Between(1, 2**20)] = 512
    chunk_by: Literal["work", "tokens"] = "work"
    policy: Literal["continuous", "static", "dynamic"] = "continuous"
    preferred_batch_size: Annotated[int, Between(1, 2**20)] | None = None
    max_batch_delay_s: Annotated[float, Between(0, 3600)] = 0.05
    order: Literal["fcfs", "priority", "deadline", "fair"] = "fcfs"
    preemption: Literal["auto", "recompute", "swap"] = "auto"
    ageing_s: Annotated[float, Between(0, 86_400, open_low=True)] = 10.0
    max_queued_requests: Annotated[int, Between(0, 2**31)] | None = 1024
    max_queued_tokens: Annotated[int, Between(1, 2**40)] | None = None
    queue_timeout_s: Annotated[float, Between(0, 86_400, open_low=True)] | None = 120.0
    degrade_at: Annotated[float, Between(0, 1)] = 0.5
    degraded_max_tokens: Annotated[int, Between(1, 2**24)] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The engine: how steps are compiled and run.

    Args:
        attention: Name of the implementation of ragged paged attention, or ``auto``.
        layers: Form of the layers: ``scan`` runs one compiled layer over stacked weights, ``unroll`` compiles each layer; ``auto`` chooses by platform and
            JAX version.
        token_buckets: Token counts of mixed steps to compile for, ascending; empty chooses by platform.
        sequence_buckets: Sequence counts to compile for, ascending; empty chooses by platform.
        warmup: Whether every bucket is compiled before the engine is ready.
        compilation_cache: Whether compiled programs are kept on disk, in the user's cache folder.
        compiled: Path of a folder that ``jaxserve compile`` made. Its programs are used if they fit, the others are compiled. The folder is trusted as code.
        overlap: Whether each step is launched while the one before it runs, so that the device does not wait for the host; ``None`` does it on accelerators.
        bind_threads: Whether, on CPU, each compute thread is bound to a processor of its own; otherwise the kernel now and then lets two of them share one.
            Switch it off if other work runs on these processors all the time.
        check_integrity: Whether the records of pages and requests are checked when the server is idle, every ten seconds at most. If they are wrong, they are
            made anew.
        watchdog_s: Seconds after which a step counts as stuck and the engine as dead, which health reports. Compiling does not count; ``None`` for no limit.
        reader_buffer: Number of outputs that may wait for a slow client before its request is paused. It goes on when they are read.
        reader_timeout_s: Seconds after which a paused request is ended with an error; ``None`` for no limit.
    """

    attention: Annotated[str, NotBlank()] = "auto"
    layers: Literal["auto", "scan", "unroll"] = "auto"
    token_buckets: Annotated[tuple[int, ...], Ascending()] = ()
    sequence_buckets: Annotated[tuple[int, ...], Ascending()] = ()
    warmup: bool = True
    compilation_cache: bool = True
    compiled: Annotated[str, NotBlank()] | None = None
    overlap: bool | None = None
    bind_threads: bool = True
    check_integrity: bool = True
    watchdog_s: Annotated[float, Between(0, 86_400, open_low=True)] | None = 120.0
    reader_buffer: Annotated[int, Between(2, 2**20)] = 1024
    reader_timeout_s: Annotated[float, Between(0, 86_400, open_low=True)] | None = 300.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The HTTP and gRPC front ends.

    Args:
        host: Address to listen on.
        port: HTTP port; 0 takes a free one.
        grpc_port: gRPC port; 0 takes a free one, ``None`` serves no gRPC.
        served_model_name: Name of the model in the API; ``None`` takes the alias, or the last part of the source.
        api_keys: API keys, any of which gives access to both APIs. If there are none, the APIs are open to all.
        max_body_bytes: Largest size of a request body; larger ones are refused.
        drain_timeout_s: Seconds that running requests may go on after SIGTERM or Ctrl-C.
        log_requests: Whether a line is logged about each request that has ended, with its settings, counts and times, but never its prompt.
        otlp_endpoint: URL to which traces are sent over OTLP/HTTP, such as ``http://localhost:4318``; ``None`` makes no traces. Needs the extra ``otel``.
        admin_keys: Keys, any of which gives access to ``/debug``. If there are none, ``/debug`` does not exist.
        processes: Number of front-end processes, which share the ports. They parse, tokenize and make the text, while the engine's process only runs the
            engine.
            With 1 there is no further process, and the engine's process does all of it.
    """

    host: Annotated[str, NotBlank()] = "127.0.0.1"
    port: Annotated[int, Between(0, 65535)] = 8000
    grpc_port: Annotated[int, Between(0, 65535)] | None = 8001
    served_model_name: Annotated[str, NotBlank()] | None = None
    api_keys: Annotated[tuple[str, ...], NotBlank()] = ()
    max_body_bytes: Annotated[int, Between(1024, 2**31 - 1)] = 8 * 1024 * 1024
    drain_timeout_s: Annotated[float, Between(0, 86_400)] = 30.0
    log_requests: bool = True
    otlp_endpoint: Annotated[str, NotBlank()] | None = None
    admin_keys: Annotated[tuple[str, ...], NotBlank()] = ()
    processes: Annotated[int, Between(1, 256)] = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class TenantsConfig:
    """The tenants and their quotas. A request belongs to the tenant of its API key. Requests with a key of ``server.api_keys``, or without a key, belong
    to one further tenant.

    Args:
        keys: API keys of tenants, each as ``NAME=KEY``; a tenant may have several. They give access to both APIs, as those of ``server.api_keys`` do.
        max_requests: Largest number of one tenant's requests in flight; ``None`` for no limit.
        tokens_per_minute: Number of tokens of prompts and answers that one tenant may use in a minute; ``None`` for no limit.
        limits: Exceptions for single tenants: ``NAME.max_requests=8``, ``NAME.tokens_per_minute=1000``, and ``NAME.weight=2`` for ``scheduler.order=fair``.
    """

    keys: Annotated[tuple[str, ...], NotBlank()] = ()
    max_requests: Annotated[int, Between(1, 2**31)] | None = None
    tokens_per_minute: Annotated[int, Between(1, 2**40)] | None = None
    limits: Annotated[tuple[str, ...], NotBlank()] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """The hosts that run one engine together, one process on each. The first one leads, schedules and serves; the others follow its steps.

    Args:
        hosts: Names or addresses of all hosts, the leader first, the same list on each host. If empty, a TPU VM's environment tells them, or this host is
            alone.
        host_index: Index of this host in the list; ``None`` finds it by the host's name.
        port: The leader's port for jax's coordinator; the next port carries the steps. Only the hosts themselves should be able to reach the two.
        join_timeout_s: Longest time, in seconds, that the hosts wait for each other at the start.
    """

    hosts: Annotated[tuple[str, ...], NotBlank()] = ()
    host_index: Annotated[int, Between(0, 2**16)] | None = None
    port: Annotated[int, Between(1, 65534)] = 8476
    join_timeout_s: Annotated[float, Between(1, 86_400)] = 300.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The whole configuration. It is always checked as a whole when it is made.

    Args:
        platform: Platform to run on; ``auto`` chooses by the device files that it finds, before jax is imported.

    Raises:
        ConfigError: A value is out of its range, or two values contradict each other.
    """

    platform: Literal["auto", "cpu", "gpu", "tpu"] = "auto"
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    sharding: ShardingConfig = dataclasses.field(default_factory=ShardingConfig)
    cache: CacheConfig = dataclasses.field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = dataclasses.field(default_factory=SchedulerConfig)
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    server: ServerConfig = dataclasses.field(default_factory=ServerConfig)
    tenants: TenantsConfig = dataclasses.field(default_factory=TenantsConfig)
    distributed: DistributedConfig = dataclasses.field(default_factory=DistributedConfig)

    def __post_init__(self) -> None:
        for key, annotation in _declared().items():
            check(_lookup(self, key), annotation, key)
        limits = self.scheduler
        if limits.max_tokens_per_step < limits.max_num_seqs:
            raise ConfigError(
                f"scheduler.max_tokens_per_step is {limits.max_tokens_per_step}; must be at least scheduler.max_num_seqs ({limits.max_num_seqs}), "
                f"so that every running sequence can take its token in each step"
            )
        if limits.preferred_batch_size is not None and limits.policy != "dynamic":
            raise ConfigError(
                f"scheduler.preferred_batch_size is {limits.preferred_batch_size} and scheduler.policy is {limits.policy}; "
                f"one must change: only dynamic batches have a preferred size"
            )
        if limits.degraded_max_tokens is not None and limits.max_queued_requests is None:
            raise ConfigError(
                f"scheduler.degraded_max_tokens is {limits.degraded_max_tokens} and scheduler.max_queued_requests is null; "
                f"one must change: the limit applies from a share of that bound on (scheduler.degrade_at)"
            )
        if limits.preemption == "swap" and self.cache.swap_gib == 0:
            raise ConfigError("scheduler.preemption is swap and cache.swap_gib is 0; one must change: there is no host memory to swap to")
        if self.server.port and self.server.port == self.server.grpc_port:
            raise ConfigError(f"server.grpc_port is {self.server.grpc_port}; must differ from server.port, which is the same")
        for key in _SECRETS:
            if any(text.rpartition("=")[2] == REDACTED for text in cast(tuple[str, ...], _lookup(self, key))):
                raise ConfigError(f"{key} is {REDACTED!r}, which stands for keys that were not shown; must be the keys themselves")
        if self.read_tenants().has_weights and limits.order != "fair":
            raise ConfigError(f"tenants.limits has a weight and scheduler.order is {limits.order}; one must change: weights count for order=fair alone")

    def read_tenants(self) -> Tenants:
        """The tenants, from the keys and limits of the sections ``server`` and ``tenants``.

        Raises:
            ConfigError: A key or limit is not written as it must be.
        """
        section = self.tenants
        default = TenantLimits(max_requests=section.max_requests, tokens_per_minute=section.tokens_per_minute)
        return read_tenants(self.server.api_keys, section.keys, section.limits, default)


def load_config(
    files: Sequence[Path] = (),
    overrides: Sequence[str] = (),
    values: Mapping[str, Any] = MappingProxyType({}),
    *,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> Config:
    """The configuration from several sources: ``defaults``, then YAML files, then ``section.key=value`` overrides, then ``values``. Later ones win.

    Args:
        files: YAML files whose sections are those of :class:`Config`.
        overrides: Texts ``section.key=value``, as typed on a command line.
        values: Values by full key, such as ``model.dtype``.
        defaults: Values by full key that replace the defaults of the dataclasses.

    Raises:
        ConfigError: A file cannot be read or is not a plain YAML mapping of sections, a key is unknown, or a value has the wrong type or is out of range.
    """
    merged = _read(defaults)
    for file in files:
        try:
            merged |= _read(dict(_flatten(read_yaml(file))))
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from None
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator:
            raise ConfigError(f"{override!r} is no override; must be section.key=value")
        merged |= _read({key.strip(): text.strip()})
    return _build(merged | _read(values))


def from_mapping(mapping: Mapping[str, Any]) -> Config:
    """The configuration from nested sections, dotted keys, or both: ``{"model": {"dtype": "float32"}, "server.port": 80}``.

    Raises:
        ConfigError: A key is unknown, or a value has the wrong type or is out of range.
    """
    return _build(_read(dict(_flatten(mapping))))


def to_yaml(config: Config, *, show_secrets: bool = False) -> str:
    """The whole configuration as YAML, from which :func:`load_config` makes an equal one.

    Args:
        config: The configuration.
        show_secrets: Whether API keys are included. If not, ``***`` stands for each of them, and reading that back is an error.
    """
    tree: dict[str, Any] = {}
    for key in _declared():
        section, _, name = key.rpartition(".")
        value = _lookup(config, key)
        if key in _SECRETS and not show_secrets:
            value = tuple(_SECRETS[key](text) for text in cast(tuple[str, ...], value))
        (tree.setdefault(section, {}) if section else tree)[name] = [*cast(tuple[object, ...], value)] if isinstance(value, tuple) else value
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=160)


def summarize(config: Config) -> Iterator[str]:
    """Yields one line for each section, without secrets, for logs."""
    tree: dict[str, Any] = yaml.safe_load(to_yaml(config))
    for name, section in tree.items():
        yield f"{name}: {json.dumps(section, ensure_ascii=False)}"


@cache
def _declared() -> dict[str, Any]:
    """The annotation of every field by its full key, in order of declaration."""
    declared: dict[str, Any] = {}
    for name, annotation in get_type_hints(Config, include_extras=True).items():
        if dataclasses.is_dataclass(annotation):
            declared |= {f"{name}.{field}": hint for field, hint in get_type_hints(annotation, include_extras=True).items()}
        else:
            declared[name] = annotation
    return declared


def _lookup(config: Config, key: str) -> object:
    value: object = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _read(given: Mapping[str, object]) -> dict[str, object]:
    for key in given:
        if key not in _declared():
            raise ConfigError(f"unknown config key {key!r}{_nearest(key)}")
    return {key: coerce(value, _declared()[key], key) for key, value in given.items()}


def _build(values: Mapping[str, object]) -> Config:
    sections: dict[str, dict[str, object]] = {}
    top: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (sections.setdefault(section, {}) if section else top)[name] = value
    hints = get_type_hints(Config)
    return Config(**top, **{section: hints[section](**fields) for section, fields in sections.items()})


def _flatten(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in mapping.items():
        path = f"{prefix}{key}"
        is_section = any(known.startswith(f"{path}.") for known in _declared())
        if not is_section and not (isinstance(value, Mapping) and path not in _declared()):
            yield path, value
        elif not is_section:
            raise ConfigError(f"unknown config section {path!r}{_nearest(path)}")
        elif isinstance(value, Mapping):
            yield from _flatten(cast(Mapping[str, Any], value), f"{path}.")
        elif value not in (None, ""):  # a section header with nothing under it is an empty section
            raise ConfigError(f"{path} is {str(value)[:80]!r}; must be a section of keys: {', '.join(k for k in _declared() if k.startswith(path + '.'))}")


def _nearest(key: str) -> str:
    """The end of the message about an unknown key: the known key that was probably meant, else the keys that exist."""
    known = list(_declared())
    section, _, leaf = key.rpartition(".")
    by_leaf = {path.rpartition(".")[2]: path for path in reversed(known)}  # of equal names the first declared
    close = [by_leaf[leaf]] if leaf in by_leaf else difflib.get_close_matches(key, known, n=1, cutoff=0.7)
    close = close or [by_leaf[name] for name in difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.7)]
    if close:
        return f"; did you mean {close[0]!r}?"
    siblings = [path for path in known if section and path.startswith(f"{section}.")]
    return f"; known keys: {', '.join(siblings)}" if siblings else f"; known sections: {', '.join(dict.fromkeys(path.partition('.')[0] for path in known))}"

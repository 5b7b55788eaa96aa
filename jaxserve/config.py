"""The configuration: one frozen dataclass a section. YAML sections and dotted overrides name exactly these fields; the loader below is the only way in."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, and in which arithmetic.

    Args:
        source: A folder, a ``.gguf`` file, a hub id, or an alias (``jaxserve models`` lists them).
        dtype: Of weights and activations.
        max_model_len: Most tokens of prompt and output together; ``None`` takes the model's own limit.
        revision: Hub revision; only for hub ids.
        chat_template: Path of a Jinja file that replaces the model's own template.
        generation_config: ``auto`` takes sampling defaults from the model's ``generation_config.json``, ``none`` does not.
    """

    source: str = "smollm2-135m"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    max_model_len: int | None = None
    revision: str | None = None
    chat_template: str | None = None
    generation_config: Literal["auto", "none"] = "auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged KV pool.

    Args:
        page_size: Slots (tokens) of one page.
        num_pages: Pages of one layer; ``None`` sizes the pool from ``memory_fraction``.
        memory_fraction: Share of the device's free memory, after the weights, that the pool may take; never more than all slots at full length need.
        dtype: Of keys and values; ``auto`` is the model's dtype (float32 on CPU with JAX 0.10, whose bfloat16 scatter copies the pool).
    """

    page_size: int = 16
    num_pages: int | None = None
    memory_fraction: float = 0.5
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """What runs in a step.

    Args:
        max_num_seqs: Most sequences in one step; also the number of sequence slots.
        max_tokens_per_step: Token budget of one step; a longer prompt is prefilled in chunks.
    """

    max_num_seqs: int = 32
    max_tokens_per_step: int = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the step is compiled and run.

    Args:
        attention: Implementation of ragged paged attention, by name, or ``auto``.
        layers: ``scan`` runs one compiled layer over stacked weights, ``unroll`` compiles each; ``auto`` chooses by platform and JAX version.
        token_buckets: Packed token counts of mixed steps to compile for, ascending; empty chooses by platform.
        sequence_buckets: Sequence counts to compile for, ascending; empty chooses by platform.
        warmup: Compile every bucket before the engine is ready.
        compilation_cache: Keep compiled programs on disk in the user's cache folder.
        check_integrity: Check the page pool's books when the engine falls idle.
    """

    attention: str = "auto"
    layers: Literal["auto", "scan", "unroll"] = "auto"
    token_buckets: tuple[int, ...] = ()
    sequence_buckets: tuple[int, ...] = ()
    warmup: bool = True
    compilation_cache: bool = True
    check_integrity: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The HTTP and gRPC front ends.

    Args:
        host: Address to listen on.
        port: HTTP port; 0 takes a free one.
        grpc_port: gRPC port; 0 takes a free one, ``None`` serves no gRPC.
        served_model_name: Name in the API; ``None`` takes the alias, or the last part of the source.
        api_keys: Any of these opens both APIs; none leaves them open.
        max_body_bytes: Larger request bodies are refused.
        drain_timeout_s: How long running requests may go on after SIGTERM or Ctrl-C.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = 8001
    served_model_name: str | None = None
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 8 * 1024 * 1024
    drain_timeout_s: float = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The whole configuration.

    Args:
        platform: ``auto`` looks for device files before jax is imported.
    """

    platform: Literal["auto", "cpu", "gpu", "tpu"] = "auto"
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    cache: CacheConfig = dataclasses.field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = dataclasses.field(default_factory=SchedulerConfig)
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    server: ServerConfig = dataclasses.field(default_factory=ServerConfig)

"""Tuned tile sizes: one JSON file a device and implementation, filled by ``scripts/tune_kernels.py`` on the device itself."""

from __future__ import annotations

import functools
import importlib.resources
import json
from typing import Any

import jax.numpy as jnp

from jaxserve.kernels_pallas.ragged_paged_attention.contract import Problem


def key(problem: Problem, *, prefill: bool) -> str:
    """What tile sizes depend on: the kernel, head shape, page size and dtypes; those of prefill also on the bucket's tokens."""
    pool = problem.pool
    kernel = f"prefill,t{problem.num_tokens}" if prefill else "decode"
    dtypes = f"{jnp.dtype(problem.q_dtype).name},{jnp.dtype(pool.dtype).name}"
    return f"{kernel},n{problem.num_heads},k{pool.num_kv_heads},h{pool.head_dim},z{pool.page_size},{dtypes}"


def file_name(implementation: str, chip: str) -> str:
    """Name of the file, beside this one."""
    return f"tuned_{implementation}_{chip}.json"


@functools.cache
def _load(name: str) -> dict[str, dict[str, int]]:
    path = importlib.resources.files("jaxserve.kernels_pallas.ragged_paged_attention") / name
    return json.loads(path.read_text("utf-8"))["tiles"] if path.is_file() else {}


def look_up(implementation: str, chip: str, problem: Problem) -> dict[str, Any]:
    """The sizes of a problem that were tuned, by field: those of decode and, where there is prefill, those of prefill over them."""
    found = _load(file_name(implementation, chip))
    return found.get(key(problem, prefill=False), {}) | ({} if problem.decode_only else found.get(key(problem, prefill=True), {}))

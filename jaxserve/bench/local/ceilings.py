"""The most that this device gives to XLA's programs, measured: bytes and FLOPs a second. What a step is held against."""

# pyright: basic
# jax is not typed strictly.
from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

_ROUNDS = 10


@dataclasses.dataclass(frozen=True, slots=True)
class Ceilings:
    """Of one device, with no other at work.

    Args:
        bytes_per_s: Read and written by adding a number to a large array in place.
        flops_per_s: Of a large matrix product with operands of the model's dtype and a float32 result.
    """

    bytes_per_s: float
    flops_per_s: float


def measure_ceilings(dtype: str, *, num_bytes: int | None = None, matrix_size: int | None = None) -> Ceilings:
    """Measures the first device: the best of ten rounds of each.

    Args:
        dtype: Of the products' operands.
        num_bytes: Of the array; ``None`` takes one that no cache holds.
        matrix_size: Rows and columns of each factor; ``None`` takes enough to keep the device busy.
    """
    is_cpu = jax.devices()[0].platform == "cpu"
    num_bytes = num_bytes or (2**29 if is_cpu else 2**31)
    matrix_size = matrix_size or (2048 if is_cpu else 8192)

    # In place, as a step reads its weights: the pages of a fresh result are faulted in first, more than ten times slower on CPU.
    array = jnp.zeros(num_bytes // 4, jnp.float32)
    add_one: Callable[[Any], Any] = jax.jit(lambda array: array + 1, donate_argnums=0)

    def move() -> None:
        nonlocal array
        array = jax.block_until_ready(add_one(array))

    move_s = _best_s(move)
    del array

    factor = jnp.ones((matrix_size, matrix_size), dtype)
    product: Callable[[Any, Any], Any] = jax.jit(lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32))
    multiply_s = _best_s(lambda: jax.block_until_ready(product(factor, factor)))
    return Ceilings(2 * num_bytes / move_s, 2 * matrix_size**3 / multiply_s)


def _best_s(run: Callable[[], object]) -> float:
    run()
    seconds: list[float] = []
    for _ in range(_ROUNDS):
        started_s = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started_s)
    return min(seconds)

"""Runs the shared cases through an implementation and compares with the reference: outputs, and every entry of the pool."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.kernels_pallas.ragged_paged_attention import pallas_tpu
from jaxserve.kernels_pallas.ragged_paged_attention.api import IMPLEMENTATIONS, Implementation, ragged_paged_attention
from jaxserve.kernels_pallas.ragged_paged_attention.contract import PoolShape
from jaxserve.kernels_pallas.ragged_paged_attention.shapes import Case, Inputs, make_inputs
from jaxserve.kernels_pallas.ragged_paged_attention.tpu_tiles import Tiles
from jaxserve.kernels_pallas.ragged_paged_attention.tpu_write import write_windows

NEEDS_FINITE_POOL = ("xla",)
"""Implementations that multiply what nobody wrote by zero: stale entries must be finite, as in the engine, whose pool starts as zeros."""
SMALL_TILES = Tiles(block_pages=2, query_block=16, write_buffers=2)
"""So that in the checking interpreter even small cases have several blocks and work items, and use every buffer again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """How an implementation did on a case.

    Args:
        error: Relative norm of the difference of outputs.
        tolerance: What it may be.
        pool_equal: Whether all layers' keys and values came out bit for bit as the reference's: new ones written, all others untouched.
        padding_zero: Whether padding tokens got zeros.
    """

    error: float
    tolerance: float
    pool_equal: bool
    padding_zero: bool

    @property
    def held(self) -> bool:
        """Whether all of it is right. NaN is not."""
        return self.error <= self.tolerance and self.pool_equal and self.padding_zero


@functools.lru_cache(maxsize=64)
def _compiled(implementation: Implementation, shape: PoolShape, scale: float, soft_cap: float | None, decode_only: bool, checked: bool) -> Callable[..., Any]:
    """The op on logical pools, jitted: cases of one bucket share it. Layer and window are traced, as in a scan over layers."""

    def run(q: Any, k: Any, v: Any, k_PZKH: Any, v_PZKH: Any, batch: Any, layer: Any, window: Any, sinks_N: Any, kv_scales: Any) -> Any:
        pool = implementation.pack(k_PZKH, v_PZKH, shape)
        out, pool = ragged_paged_attention(
            q, k, v, pool, batch, shape=shape, layer=layer, window=window, scale=scale, soft_cap=soft_cap, sinks_N=sinks_N, kv_scales=kv_scales,
            decode_only=decode_only, implementation=implementation,
        )  # fmt: skip
        return out, implementation.unpack(pool, shape)

    # Compile time is all of a test's time; the checking interpreter's callbacks and real devices want the ordinary pipeline.
    options = None if checked or jax.default_backend() != "cpu" else {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(run, compiler_options=options)


def run(implementation: Implementation, case: Case, inputs: Inputs, *, checked: bool = False) -> tuple[Any, tuple[Any, Any]]:
    """Output and the logical pool afterwards, on the host.

    Args:
        implementation: What to run.
        case: The static part.
        inputs: The values.
        checked: Whether it runs in the checking interpreter.
    """
    function = _compiled(implementation, case.pool_shape(), inputs.scale, inputs.soft_cap, case.decode_only, checked)
    layer, window = jnp.int32(inputs.layer), jnp.int32(inputs.window)
    return jax.tree.map(np.asarray, function(*inputs[:5], inputs.batch, layer, window, inputs.sinks_N, inputs.kv_scales))


def compare(implementation: Implementation, case: Case, *, seed: int = 0, checked: bool = False) -> Comparison:
    """Runs a case with the implementation and the reference.

    Entries that no row owns hold NaN, so that reading one shows. Arguments as :func:`run`, ``seed`` as ``make_inputs``.

    Raises:
        NotImplementedError: The implementation refuses the case.
    """
    inputs = make_inputs(case, seed=seed, garbage=7.0 if implementation.name in NEEDS_FINITE_POOL else np.nan)
    out, pool = run(implementation, case, inputs, checked=checked)
    want_out, want_pool = run(IMPLEMENTATIONS["reference"], case, inputs)
    live = sum(case.queries)
    out, want_out = out.astype(np.float32), want_out.astype(np.float32)
    norm = np.linalg.norm(want_out[:live])
    difference = np.linalg.norm(out[:live] - want_out[:live])
    return Comparison(
        error=float(difference / norm) if norm else float(difference), tolerance=case.tolerance, padding_zero=not out[live:].any(),
        pool_equal=all(np.array_equal(got.astype(np.float32), want.astype(np.float32), equal_nan=True) for got, want in zip(pool, want_pool, strict=True)),
    )  # fmt: skip


def compare_checked(case: Case, interpret: Any, *, write_phase: Any = write_windows) -> Comparison:
    """Runs a case with the TPU kernels in an interpreter, and with the reference.

    Args:
        case: A small one.
        interpret: The interpreter's parameters.
        write_phase: The kernels' write phase; tests put broken ones here.
    """
    return compare(pallas_tpu.make_implementation(interpret=interpret, tiles=SMALL_TILES, write_phase=write_phase), case, checked=True)

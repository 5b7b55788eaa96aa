"""What is compiled of the op for chips that are not here: combinations of head shape, page size and dtypes, each as two layers of the op."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.kernels_pallas.proof.compiling import compile_report, device_of, place
from jaxserve.kernels_pallas.proof.op import CompiledOp
from jaxserve.kernels_pallas.proof.targets import TPU_TOPOLOGIES
from jaxserve.kernels_pallas.ragged_paged_attention import gpu_tiles, tpu_tiles
from jaxserve.kernels_pallas.ragged_paged_attention.api import (
    IMPLEMENTATIONS,
    NO_WINDOW,
    KVScales,
    PoolShape,
    RaggedBatch,
    make_problem,
    ragged_paged_attention,
)
from jaxserve.kernels_pallas.ragged_paged_attention.contract import abstract_array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Combination:
    """One thing to compile.

    Args:
        head_dim: H.
        group_size: G.
        kv_dtype: Of the pool.
        page_size: Z.
        decode_only: Without the code for prefill.
        num_kv_heads: K.
        q_dtype: Of queries.
        extras: With soft cap and sinks.
    """

    head_dim: int
    group_size: int
    kv_dtype: str = "bfloat16"
    page_size: int = 32
    decode_only: bool = False
    num_kv_heads: int = 4
    q_dtype: str = "bfloat16"
    extras: bool = False

    @property
    def name(self) -> str:
        """Short, unique."""
        kind = "decode" if self.decode_only else "mixed"
        heads = f"h{self.head_dim}_g{self.group_size}_k{self.num_kv_heads}_z{self.page_size}"
        return f"{kind}_{heads}_{self.q_dtype}_{self.kv_dtype}{'_extras' if self.extras else ''}"


CORE = tuple(Combination(head_dim=h, group_size=g, kv_dtype=d) for h in (64, 128, 256) for g in (1, 4, 8) for d in ("bfloat16", "float8_e4m3fn"))
"""What every target must compile."""
MORE = (
    Combination(head_dim=80, group_size=4), Combination(head_dim=96, group_size=4), Combination(head_dim=128, group_size=4, page_size=8),
    Combination(head_dim=128, group_size=4, page_size=16), Combination(head_dim=128, group_size=4, page_size=128),
    Combination(head_dim=64, group_size=3, page_size=16, num_kv_heads=3, extras=True), Combination(head_dim=128, group_size=4, kv_dtype="int8"),
    Combination(head_dim=128, group_size=4, kv_dtype="int8", page_size=8), Combination(head_dim=128, group_size=4, kv_dtype="float8_e4m3fn", page_size=8),
    Combination(head_dim=64, group_size=4, kv_dtype="float32", q_dtype="float32"), Combination(head_dim=128, group_size=8, num_kv_heads=1),
    Combination(head_dim=128, group_size=4, num_kv_heads=8, decode_only=True),
)  # fmt: skip
"""Everything else once: odd head dims, page sizes, int8, float32, soft cap and sinks, one key head, decode only."""
QUICK = (CORE[0], CORE[9], CORE[16])
"""For CI: the head dims, group sizes and dtypes once each."""

_LAYERS, _TOKENS, _ROWS, _CONTEXT, _POOL_TOKENS = 2, 128, 16, 4096, 262144


def kernels_for(target: str) -> str:
    """The name of the implementation that is compiled for a target."""
    return "pallas_tpu" if target in TPU_TOPOLOGIES else "pallas_gpu"


def compile_combination(target: str, combination: Combination) -> CompiledOp:
    """Compiles two layers of the op, scanned on TPU and unrolled on GPU as the engine does.

    Raises:
        NotImplementedError: The implementation refuses it; the message says why.
    """
    name = kernels_for(target)
    implementation = IMPLEMENTATIONS[name]
    K, N, H, Z = combination.num_kv_heads, combination.num_kv_heads * combination.group_size, combination.head_dim, combination.page_size
    T = _ROWS if combination.decode_only else _TOKENS
    shape = PoolShape(num_layers=_LAYERS, num_pages=_POOL_TOKENS // Z, page_size=Z, num_kv_heads=K, head_dim=H, dtype=jnp.dtype(combination.kv_dtype))
    q_dtype = jnp.dtype(combination.q_dtype)
    quantised = combination.kv_dtype in ("int8", "float8_e4m3fn")
    with device_of(target) as sharding:
        problem = make_problem(
            num_tokens=T, num_rows=_ROWS, table_width=_CONTEXT // Z, num_heads=N, shape=shape, q_dtype=q_dtype, decode_only=combination.decode_only
        )  # fmt: skip
        reason = implementation.refusal(problem)
        if reason is not None:
            raise NotImplementedError(reason)
        int32, float32 = jnp.int32, jnp.float32
        sizes = {
            "pool": implementation.init_pool(shape),
            "q": abstract_array((T, N, H), q_dtype),
            "kv": abstract_array((T, K, H), q_dtype),
            "batch": RaggedBatch(*(abstract_array(s, int32) for s in ((_ROWS,), (_ROWS + 1,), (_ROWS, _CONTEXT // Z), (T,), (T,), (2,)))),
            "sinks": abstract_array((N,), float32) if combination.extras else None,
            "scales": KVScales(*[abstract_array((K,), float32)] * 2) if quantised else None,
        }
        arguments = place(tuple(sizes.values()), sharding)

        def layers(pool: Any, q: Any, kv: Any, batch: Any, sinks: Any, scales: Any) -> Any:
            work = implementation.prepare(batch, problem)

            def body(carry: Any, layer: Any) -> Any:
                out, pool = ragged_paged_attention(
                    carry[0], kv, kv, carry[1], batch, work, shape=shape, layer=layer, window=NO_WINDOW, scale=H**-0.5,
                    soft_cap=30.0 if combination.extras else None, sinks_N=sinks, kv_scales=scales, decode_only=combination.decode_only,
                    implementation=implementation,
                )  # fmt: skip
                return (out, pool), None

            carry = (q, pool)
            if name == "pallas_tpu":
                return jax.lax.scan(body, carry, jnp.arange(_LAYERS, dtype=int32))[0]
            for layer in range(_LAYERS):
                carry, _ = body(carry, layer)
            return carry

        report = compile_report(lambda: jax.jit(layers, donate_argnums=0).lower(*arguments), arguments[0])
    fast_memory_bytes = (tpu_tiles if name == "pallas_tpu" else gpu_tiles).fast_memory_bytes(problem)
    return CompiledOp(report=report, fast_memory_bytes=fast_memory_bytes)

"""The cost that XLA is told of each kernel is what its docstring says."""

import jax
import jax.numpy as jnp
import pytest

from jaxserve.dims import ceil_div
from jaxserve.kernels_pallas.ragged_paged_attention import gpu_tiles, tpu_tiles
from jaxserve.kernels_pallas.ragged_paged_attention.api import IMPLEMENTATIONS, PoolShape, RaggedBatch, make_problem, ragged_paged_attention

T, B, M, N, K, Z, L = 64, 8, 16, 8, 2, 16, 2
BOTH = pytest.mark.parametrize(("name", "product_width"), [("pallas_tpu", 128), ("pallas_gpu", 0)])
"""Lanes of a product's operands, where they are more than the head has: on TPU a key and a value of 64 share 128."""


def kernel_costs(name, H):
    """CostEstimate of every Pallas call of a mixed step, by the kernel's name."""
    implementation = IMPLEMENTATIONS[name]
    shape = PoolShape(num_layers=L, num_pages=200, page_size=Z, num_kv_heads=K, head_dim=H, dtype=jnp.bfloat16)
    sizes = ((B,), (B + 1,), (B, M), (T,), (T,), (2,))
    batch = RaggedBatch(*(jax.ShapeDtypeStruct(size, jnp.int32) for size in sizes))
    q, k = (jax.ShapeDtypeStruct((T, heads, H), jnp.bfloat16) for heads in (N, K))

    def call(q, k, v, pool, batch):
        return ragged_paged_attention(q, k, v, pool, batch, shape=shape, layer=0, scale=1.0, implementation=implementation)

    costs = {}

    def visit(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "pallas_call":
                costs[equation.params["name"]] = equation.params["cost_estimate"]
            elif "jaxpr" in equation.params:
                inner = equation.params["jaxpr"]
                visit(getattr(inner, "jaxpr", inner))

    visit(jax.make_jaxpr(call)(q, k, k, implementation.init_pool(shape), batch).jaxpr)
    problem = make_problem(num_tokens=T, num_rows=B, table_width=M, num_heads=N, shape=shape, q_dtype=jnp.bfloat16)
    return costs, problem


@pytest.mark.parametrize("H", [64, 128])
@BOTH
def test_decode_reads_each_live_page_once(name, product_width, H):
    costs, _ = kernel_costs(name, H)
    cost = costs["ragged_paged_decode"]
    keys = B * M * Z
    assert cost.flops == 4 * keys * N * max(H, product_width)
    assert cost.transcendentals == keys * N
    pages = keys * K * 2 * H * 2
    assert pages <= cost.bytes_accessed <= 1.4 * pages


@pytest.mark.parametrize("H", [64, 128])
@BOTH
def test_prefill_reads_the_context_once_a_work_item(name, product_width, H):
    costs, problem = kernel_costs(name, H)
    cost = costs["ragged_paged_prefill"]
    assert cost.flops == 4 * T * problem.max_context * N * max(H, product_width)
    queries = 2 * T * N * max(H, product_width) * 2
    context = M * Z * K * 2 * H * 2
    items = {"pallas_tpu": tpu_tiles.choose_tiles(problem).query_block, "pallas_gpu": gpu_tiles.query_block(problem, gpu_tiles.choose_tiles(problem))}
    assert cost.bytes_accessed - queries == context * ceil_div(T, items[name])
    assert cost.transcendentals == T * problem.max_context * N

"""The problems that an implementation refuses, as the table of docs/kernels.md lists them: each must be refused, with its reason, before any launch."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxserve.kernels_pallas.ragged_paged_attention.api import PoolShape, Problem, choose_implementation, make_problem
from jaxserve.kernels_pallas.target import Target

_TPU, _GPU = Target("tpu", "TPU v6 lite"), Target("gpu", "NVIDIA H200")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refusal:
    """One documented refusal.

    Args:
        implementation: Who refuses.
        name: Unique; what is refused.
        problem: An example.
        reason: A part of the message.
    """

    implementation: str
    name: str
    problem: Problem
    reason: str

    @property
    def message(self) -> str | None:
        """What a caller is told, or ``None`` if the problem is served."""
        try:
            choose_implementation(self.implementation, self.problem)
        except NotImplementedError as error:
            return str(error)
        return None


def _problem(target: Target, *, table_width: int = 256, **shape: Any) -> Problem:
    """Llama 8B's heads, but for what the refusal is about."""
    fields: dict[str, Any] = {"num_layers": 1, "num_pages": 4, "page_size": 16, "num_kv_heads": 8, "head_dim": 128, "dtype": jnp.bfloat16} | shape
    return make_problem(num_tokens=512, num_rows=32, table_width=table_width, num_heads=32, shape=PoolShape(**fields), q_dtype=jnp.bfloat16, target=target)


REFUSALS: tuple[Refusal, ...] = (
    Refusal(implementation="pallas_tpu", name="page_size_4", problem=_problem(_TPU, page_size=4), reason="page size 4; it takes (8, 16"),
    Refusal(implementation="pallas_gpu", name="page_size_4", problem=_problem(_GPU, page_size=4), reason="page size 4; it takes (8, 16"),
    Refusal(implementation="pallas_tpu", name="table_of_100000_pages", problem=_problem(_TPU, table_width=100_000), reason="scalar memory"),
    Refusal(implementation="pallas_gpu", name="int8_pool_of_3_gib", problem=_problem(_GPU, dtype=jnp.int8, num_pages=196_608), reason="one-byte keys"),
    Refusal(implementation="pallas_gpu", name="fp8_pool_of_3_gib", problem=_problem(_GPU, dtype=jnp.float8_e4m3fn, num_pages=196_608), reason="overflows"),
    Refusal(implementation="pallas_gpu", name="more_than_31_bits_of_entries", problem=_problem(_GPU, num_pages=2**27), reason="entry numbers have 31 bits"),
    Refusal(implementation="pallas_tpu", name="on_a_gpu", problem=_problem(_GPU), reason="it needs a TPU"),
    Refusal(implementation="pallas_gpu", name="on_a_tpu", problem=_problem(_TPU), reason="it needs an NVIDIA GPU"),
)

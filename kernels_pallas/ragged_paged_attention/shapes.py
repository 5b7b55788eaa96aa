"""The shapes that tests, the proof harness and benchmarks share: one list, realistic head shapes and the edges of the contract."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxserve.dims import ceil_div
from jaxserve.kernels_pallas.ragged_paged_attention.api import make_problem
from jaxserve.kernels_pallas.ragged_paged_attention.contract import NO_WINDOW, KVScales, PoolShape, Problem, RaggedBatch, quantise
from jaxserve.kernels_pallas.target import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call.

    Args:
        name: Unique; what the case is about.
        queries: New tokens of each row.
        contexts: Context length of each row, new tokens included.
        heads: N, K.
        head_dim: H.
        page_size: Z.
        q_dtype: Of queries, new keys and values.
        kv_dtype: Of the pool.
        window: Or ``None``.
        soft_cap: Or ``None``.
        sinks: Whether heads have sinks.
        scaled: Whether a quantised pool has scales other than 1.
        padding: Tokens and rows after the live ones.
        num_layers: L; the call is for the last layer.
        bucket: T, B, M and P, as an engine's bucket has them; cases of one bucket share their compiled program. ``None``: as small as the case.
    """

    name: str
    queries: tuple[int, ...]
    contexts: tuple[int, ...]
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    page_size: int = 16
    q_dtype: str = "float32"
    kv_dtype: str = "float32"
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    scaled: bool = False
    padding: tuple[int, int] = (0, 0)
    num_layers: int = 2
    bucket: tuple[int, int, int, int] | None = None

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.bucket[0] if self.bucket else sum(self.queries) + self.padding[0]

    @property
    def num_rows(self) -> int:
        """B."""
        return self.bucket[1] if self.bucket else len(self.queries) + self.padding[1]

    @property
    def is_small(self) -> bool:
        """Whether the checking interpreter runs it in seconds."""
        return self.num_tokens <= 64 and max(self.contexts, default=0) <= 1024 and sum(self.contexts) <= 2048

    @property
    def decode_only(self) -> bool:
        """Whether no row has more than one new token and each token has its row."""
        return self.bucket is None and set(self.queries) == {1} and self.num_rows <= self.num_tokens

    @property
    def tolerance(self) -> float:
        """Largest relative norm of the difference to the reference."""
        return 2e-6 if (self.q_dtype, self.kv_dtype) == ("float32", "float32") else 1e-2

    def pool_shape(self) -> PoolShape:
        """Pages for every row, and a few that belong to nobody."""
        pages = self.bucket[3] if self.bucket else sum(ceil_div(length, self.page_size) for length in self.contexts) + 3
        return PoolShape(
            num_layers=self.num_layers, num_pages=pages, page_size=self.page_size, num_kv_heads=self.heads[1], head_dim=self.head_dim,
            dtype=jnp.dtype(self.kv_dtype),
        )  # fmt: skip

    def problem(self, target: Target | None = None) -> Problem:
        """The static description."""
        table_width = self.bucket[2] if self.bucket else ceil_div(max(self.contexts), self.page_size)
        return make_problem(
            num_tokens=self.num_tokens, num_rows=self.num_rows, table_width=table_width,
            num_heads=self.heads[0], shape=self.pool_shape(), q_dtype=jnp.dtype(self.q_dtype), decode_only=self.decode_only, target=target,
        )  # fmt: skip


class Inputs(NamedTuple):
    """Arguments of the op for one case, on the host. ``k_PZKH`` and ``v_PZKH`` are the logical pool before the call."""

    q_TNH: Any
    k_TKH: Any
    v_TKH: Any
    k_PZKH: Any
    v_PZKH: Any
    batch: RaggedBatch
    layer: int
    window: int
    scale: float
    soft_cap: float | None
    sinks_N: Any
    kv_scales: KVScales | None


def make_inputs(case: Case, *, seed: int = 0, garbage: float = np.nan) -> Inputs:
    """Seeded inputs. Pages are scattered at random; entries that no row owns, and those after a row's context, hold ``garbage`` (the largest value in int8)."""
    rng = np.random.default_rng(seed)
    shape, (N, K), Z, H = case.pool_shape(), case.heads, case.page_size, case.head_dim
    T, B = case.num_tokens, case.num_rows
    q_dtype, kv_dtype = jnp.dtype(case.q_dtype), jnp.dtype(case.kv_dtype)
    q, k, v = (rng.standard_normal((T, heads, H), np.float32).astype(q_dtype) for heads in (N, K, K))
    scales = None
    if kv_dtype in (jnp.int8, jnp.float8_e4m3fn):
        unit = 0.03 if kv_dtype == jnp.int8 else 0.01
        if case.scaled:
            pair: list[Any] = [np.asarray(unit * (1 + rng.random(K)), np.float32) for _ in range(2)]
            scales = KVScales(*pair)
        if kv_dtype == jnp.int8 and not case.scaled:
            k, v = (np.asarray(20 * x.astype(np.float32), q_dtype) for x in (k, v))  # Rounding to whole numbers must leave something.
            q = np.asarray(q.astype(np.float32) / 20, q_dtype)
    order = iter(rng.permutation(shape.num_pages))
    table = rng.integers(0, shape.num_pages, (B, case.problem(Target("cpu", "")).table_width)).astype(np.int32)
    entries = np.full(T, shape.num_pages * Z, np.int32)
    positions = np.zeros(T, np.int32)
    owned = np.zeros((shape.num_pages, Z), bool)
    token = 0
    for row, (new, length) in enumerate(zip(case.queries, case.contexts, strict=True)):
        pages = np.array([next(order) for _ in range(ceil_div(length, Z))])
        table[row, : len(pages)] = pages
        where = np.arange(length)
        owned[pages[where[: length - new] // Z], where[: length - new] % Z] = True
        positions[token : token + new] = where[length - new :]
        entries[token : token + new] = pages[where[length - new :] // Z] * Z + where[length - new :] % Z
        token += new

    def old(head_scales: Any) -> Any:
        size = 20.0 if kv_dtype == jnp.int8 and not case.scaled else 1.0
        values = rng.standard_normal((shape.num_layers * shape.num_pages, Z, K, H), np.float32) * size
        stored = np.array(quantise(jnp.asarray(values), head_scales, kv_dtype))
        foreign = ~np.tile(owned, (shape.num_layers, 1))
        stored[foreign] = 127 if kv_dtype == jnp.int8 else np.float32(garbage).astype(kv_dtype)
        return stored

    arrays: dict[str, Any] = {
        "context_lens_B": np.array([*case.contexts, *[0] * (B - len(case.contexts))], np.int32),
        "query_starts_B1": np.concatenate([[0], np.cumsum([*case.queries, *[0] * (B - len(case.queries))])]).astype(np.int32),
        "page_table_BM": table,
        "entries_T": entries,
        "positions_T": positions,
        "counts_2": np.array([next((i for i, n in enumerate(case.queries) if n != 1), len(case.queries)), len(case.queries)], np.int32),
    }
    return Inputs(
        q, k, v, old(scales and scales.k_K), old(scales and scales.v_K), RaggedBatch(**arrays), shape.num_layers - 1, case.window or NO_WINDOW, H**-0.5,
        case.soft_cap, rng.standard_normal(N).astype(np.float32) if case.sinks else None, scales,
    )  # fmt: skip


_BF16: dict[str, Any] = {"q_dtype": "bfloat16", "kv_dtype": "bfloat16"}
_FP8: dict[str, Any] = {"q_dtype": "bfloat16", "kv_dtype": "float8_e4m3fn"}
_INT8: dict[str, Any] = {"q_dtype": "bfloat16", "kv_dtype": "int8", "scaled": True}


_BUCKET = (48, 6, 16, 40)


def _edge(name: str, queries: tuple[int, ...], contexts: tuple[int, ...], **fields: Any) -> Case:
    """An edge of the ragged contract, in the bucket that all of them share."""
    return Case(name=name, queries=queries, contexts=contexts, bucket=_BUCKET, **fields)


def _mixed(name: str, **fields: Any) -> Case:
    """Two decodes, a fresh prompt, and a chunk that continues one; with padding."""
    return Case(**{"name": name, "queries": (1, 1, 19, 9), "contexts": (40, 5, 19, 77), "bucket": _BUCKET} | fields)


CASES: tuple[Case, ...] = (
    # Edges of the ragged contract.
    _edge("one_token", (1,), (1,)),
    _edge("all_padding", (), ()),
    _edge("one_page", (1,), (16,)),
    _edge("one_over_a_page", (1,), (17,)),
    _edge("fresh_page_exactly", (16,), (16,)),
    _edge("fresh_one_over_a_page", (17,), (17,)),
    _edge("chunk_ends_on_page", (7,), (32,)),
    _edge("chunk_starts_on_page", (5,), (37,)),
    _edge("chunk_of_one_after_prefill", (3, 1, 2), (3, 9, 30)),
    _edge("six_decodes", (1,) * 6, (1, 2, 16, 33, 100, 255)),
    _edge("decodes_of_one_token", (1,) * 4, (1,) * 4),
    _edge("prefill_only", (23, 2, 21), (33, 50, 21)),
    _edge("no_padding", (1, 20, 7, 5, 8, 7), (256, 20, 9, 50, 64, 8)),
    _edge("mixed", (1, 1, 19, 9), (40, 5, 19, 77)),
    _edge("window", (1, 1, 19, 9), (40, 5, 19, 77), window=13),
    _edge("window_smaller_than_page", (1, 1, 19, 9), (40, 5, 19, 77), window=5),
    _edge("window_of_one", (1, 1, 19, 9), (40, 5, 19, 77), window=1),
    _edge("window_skips_pages", (1, 1, 12), (250, 90, 200), window=40),
    Case(name="decode_only", queries=(1,) * 6, contexts=(1, 2, 16, 33, 100, 255), padding=(2, 2)),
    Case(name="one_row_as_small_as_can_be", queries=(1,), contexts=(1,), num_layers=1),
    Case(name="more_rows_than_tokens", queries=(1, 1), contexts=(9, 12), padding=(0, 6)),
    Case(name="long_among_short", queries=(1, 1, 1), contexts=(5, 131072, 40), page_size=128, heads=(2, 1), num_layers=1),
    Case(name="long_prefill_chunk", queries=(1, 70), contexts=(300, 1500), heads=(2, 1), page_size=32),
    # Head shapes.
    _mixed("mha", heads=(4, 4)),
    _mixed("mqa", heads=(8, 1)),
    _mixed("gqa_3", heads=(9, 3)),
    _mixed("gqa_8", heads=(16, 2)),
    _mixed("head_dim_80", head_dim=80),
    _mixed("head_dim_96", head_dim=96),
    _mixed("head_dim_128", head_dim=128),
    _mixed("head_dim_256", head_dim=256),
    Case(name="llama_8b_decode", queries=(1,) * 4, contexts=(200, 64, 65, 129), heads=(32, 8), head_dim=128, num_layers=1, **_BF16),
    Case(name="qwen_32b_decode", queries=(1,) * 2, contexts=(70, 33), heads=(64, 8), head_dim=128, num_layers=1, **_BF16),
    Case(name="llama_70b_tp8_mixed", queries=(1, 1, 24), contexts=(100, 33, 60), heads=(8, 1), head_dim=128, **_BF16),
    Case(name="smollm2_mixed", queries=(1, 1, 24), contexts=(100, 33, 24), heads=(9, 3), **_BF16),
    # Page sizes.
    _mixed("page_8", page_size=8),
    _mixed("page_32", page_size=32),
    _mixed("page_64", page_size=64),
    _mixed("page_128", page_size=128),
    _mixed("page_8_bf16", page_size=8, **_BF16),
    # Logits.
    _mixed("soft_cap", soft_cap=2.0),
    _mixed("sinks", sinks=True),
    _mixed("window_soft_cap_sinks", window=21, soft_cap=5.0, sinks=True, head_dim=128, **_BF16),
    # Pool dtypes.
    _mixed("bf16", **_BF16),
    _mixed("bf16_pool_f32_queries", kv_dtype="bfloat16"),
    _mixed("f32_pool_bf16_queries", q_dtype="bfloat16"),
    _mixed("bf16_128", head_dim=128, page_size=32, **_BF16),
    _mixed("fp8", **_FP8),
    _mixed("fp8_scaled", scaled=True, head_dim=128, page_size=32, **_FP8),
    _mixed("int8", **(_INT8 | {"scaled": False})),
    _mixed("int8_scaled", head_dim=128, page_size=32, **_INT8),
    Case(name="int8_decode", queries=(1,) * 4, contexts=(33, 70, 1, 16), head_dim=128, heads=(8, 2), **_INT8),
    Case(name="fp8_decode_page_8", queries=(1,) * 4, contexts=(33, 70, 1, 16), page_size=8, scaled=True, **_FP8),
)
"""Every case, by increasing specialty. Names are unique."""

"""The step: a pure function from parameters, pool, carry and a packed batch to the next pool, carry and sampled tokens, compiled once for each bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int32

from jaxserve.engine.step.batch import FROM_CARRY
from jaxserve.engine.step.buckets import Bucket
from jaxserve.engine.step.execution import compiler_options
from jaxserve.engine.step.rows import OFF, OWNER_FIELDS, ROW_FIELDS
from jaxserve.engine.step.sampler import SamplingArrays, sample
from jaxserve.engine.step.slot_state import SlotState, SlotTokens, States, advance
from jaxserve.engine.step.split_sampler import sample_split
from jaxserve.kernels_pallas.ragged_paged_attention.api import Implementation, KVPool, PoolShape, Problem, RaggedBatch, make_problem, ragged_paged_attention
from jaxserve.mesh import DATA, EACH_DEVICE, EACH_RANK, REPLICATED, Layout
from jaxserve.models.model import Model
from jaxserve.models.params import Params
from jaxserve.models.sharding import param_shardings


class Carry(NamedTuple):
    """The per-sequence state that stays on the device from step to step, because the next step may need it before the host knows it.

    Each array has one element for each sequence slot, rank by rank.
    """

    last_token: Int32[Array, "slots"]
    """Id of the last token sampled in the slot."""
    num_tokens: Int32[Array, "slots"]
    """Number of the sequence's tokens whose keys and values are computed, which is the position of ``last_token``."""
    states: States
    """The wide state of the slots by name; empty if the engine has none."""


class StepInput(NamedTuple):
    """A packed batch taken apart into arrays of the bucket's shapes."""

    token_ids_T: Int32[Array, "T"]
    """Token ids; ``FROM_CARRY`` for the last token sampled in the row's slot."""
    row_T: Int32[Array, "T"]
    """Index of each token's row; any row for padding."""
    last_token_B: Int32[Array, "B"]
    """Index of each row's last token in the packed tokens; any index for an empty row."""
    slot_B: Int32[Array, "B"]
    """Sequence slot of each row; out of range for an empty row."""
    begins_B: Bool[Array, "B"]
    """Whether the slot's wide state must be reset first."""
    ragged: RaggedBatch
    sampling: SamplingArrays


Step = Callable[[Params, KVPool, Carry, Int32[Array, "R X"]], tuple[KVPool, Carry, Int32[Array, "RB"]]]


def attention_problem(model: Model, bucket: Bucket, shape: PoolShape, layout: Layout) -> Problem:
    """The attention problem (shapes and dtypes) of a bucket on each device.

    Args:
        model: The model to run.
        bucket: Shapes of a rank's batch.
        shape: Shape of a device's part of the pool.
        layout: The mesh and the sharding rules.
    """
    num_heads = model.spec.attention.group_size * shape.num_kv_heads
    with layout.tracing():
        return make_problem(
            num_tokens=bucket.num_tokens, num_rows=bucket.num_rows, table_width=bucket.table_width, num_heads=num_heads,
            shape=shape, q_dtype=model.dtype, decode_only=bucket.decode_only,
        )  # fmt: skip


def make_step(model: Model, bucket: Bucket, *, shape: PoolShape, attention: Implementation, layout: Layout, states: Sequence[SlotState] = ()) -> Step:
    """The step of one bucket, as a pure function ``step(params, pool, carry, packed_RX) -> (pool, carry, token_ids_RB)``.

    When it is compiled, ``pool`` and ``carry`` should be donated. Padding has no effect: it writes to no page and no slot, and no live row reads it.

    On a mesh, XLA splits the model by the shardings of its parameters. The batch, the pool, attention and sampling belong to one data rank or one device
    each, which computes its own part; their arrays are concatenated along the first axis.

    Args:
        model: The model to run.
        bucket: Shapes of each rank's packed batch.
        shape: Shape of a device's part of the pool.
        attention: The implementation of attention, which also decides the pool's layout.
        layout: The mesh and the sharding rules.
        states: The kinds of wide state that each slot has.
    """
    kind = model.spec.attention
    problem = attention_problem(model, bucket, shape, layout)
    vocab_axis = layout.model_axis("vocab")
    per_head = PartitionSpec(DATA, layout.model_axis(kind.head_axis))

    def read_batch(packed_1X: Array, carry: Carry) -> tuple[StepInput, Any, Array, States]:
        batch = unpack(packed_1X[0], bucket, page_size=shape.page_size, num_pages=shape.num_pages)
        work = jax.tree.map(lambda array: array[None], attention.prepare(batch.ragged, problem))  # A first axis to lie along, of arrays of any shape.
        carried_T = carry.last_token.at[batch.slot_B[batch.row_T]].get(mode="clip")
        token_ids_T = jnp.where(batch.token_ids_T == FROM_CARRY, carried_T, batch.token_ids_T)
        is_token_T = jnp.arange(bucket.num_tokens) < batch.ragged.query_starts_B1[-1]
        tokens = SlotTokens(token_ids_T, batch.ragged.positions_T, jnp.where(is_token_T, batch.slot_B[batch.row_T], OFF))
        return batch, work, token_ids_T, advance(carry.states, states, batch.slot_B, batch.begins_B, tokens)

    def attend_one(q_TNH: Array, k_TKH: Array, v_TKH: Array, pool: KVPool, ragged: RaggedBatch, work: Any, layer: Any, window: Any) -> tuple[Array, KVPool]:
        return ragged_paged_attention(
            q_TNH, k_TKH, v_TKH, pool, ragged, jax.tree.map(lambda array: array[0], work), shape=shape, layer=layer, window=window,
            scale=kind.scale, soft_cap=kind.soft_cap, decode_only=bucket.decode_only, implementation=attention,
        )  # fmt: skip

    def choose_tokens(logits_BV: Array, batch: StepInput, carry: Carry) -> tuple[Carry, Array]:
        if vocab_axis is None:
            token_ids_B = sample(logits_BV, batch.sampling, sampling=bucket.sampling)
        else:
            token_ids_B = sample_split(logits_BV, batch.sampling, vocab_axis, sampling=bucket.sampling)
        carry = carry._replace(
            last_token=carry.last_token.at[batch.slot_B].set(token_ids_B, mode="drop"),
            num_tokens=carry.num_tokens.at[batch.slot_B].set(batch.ragged.context_lens_B, mode="drop"),
        )
        # The leader of several processes sees its own devices only.
        return carry, lax.all_gather(token_ids_B, DATA, tiled=True) if layout.is_multi_process else token_ids_B

    read_batches = layout.map_devices(read_batch, in_specs=(EACH_RANK, EACH_RANK), out_specs=EACH_RANK)
    attend_all = layout.map_devices(
        attend_one,
        in_specs=(per_head, per_head, per_head, EACH_DEVICE, EACH_RANK, EACH_RANK, REPLICATED, REPLICATED),
        out_specs=(per_head, EACH_DEVICE),
    )
    take_rows = layout.map_devices(lambda x_TD, index_B: x_TD[index_B], in_specs=(EACH_RANK, EACH_RANK), out_specs=EACH_RANK)
    chosen_by = REPLICATED if layout.is_multi_process else EACH_RANK
    choose_all_tokens = layout.map_devices(choose_tokens, in_specs=(PartitionSpec(DATA, vocab_axis), EACH_RANK, EACH_RANK), out_specs=(EACH_RANK, chosen_by))

    def step(params: Params, pool: KVPool, carry: Carry, packed_RX: Array) -> tuple[KVPool, Carry, Array]:
        batch, work, token_ids_T, slot_states = read_batches(packed_RX, carry)

        def attend(q_TNH: Array, k_TKH: Array, v_TKH: Array, pool: KVPool, layer: Array | int, window: Array | int) -> tuple[Array, KVPool]:
            return attend_all(q_TNH, k_TKH, v_TKH, pool, batch.ragged, work, layer, window)

        x_TD, pool = model.forward(params, token_ids_T, batch.ragged.positions_T, pool, attend)
        logits_BV = model.logits(params, take_rows(x_TD, batch.last_token_B))
        carry, token_ids_B = choose_all_tokens(logits_BV, batch, carry._replace(states=slot_states))
        # Said once more for XLA, which otherwise brings the tokens of all data ranks together.
        return pool, carry, lax.with_sharding_constraint(token_ids_B, layout.sharding(chosen_by))

    return step


def unpack(packed: Int32[Array, "X"], bucket: Bucket, *, page_size: int, num_pages: int) -> StepInput:
    """The arrays of a step from a rank's packed batch. Positions and entries are computed here from lengths and page tables instead of being sent.

    Args:
        packed: The rank's packed batch, as ``batch.BatchBuilder`` writes it.
        bucket: Its shapes.
        page_size: Tokens that one page holds.
        num_pages: Pages of one layer; the entry of a padding token is ``num_pages * page_size``, which is out of range.
    """
    T, B = bucket.num_tokens, bucket.num_rows
    rows = packed[2 + T :].reshape(B, -1)
    fields = {field.name: _typed(rows[:, column], field.dtype) for column, field in enumerate(ROW_FIELDS)}
    query_len_B, context_len_B = fields["query_len"], fields["context_len"]
    table_BM = rows[:, len(ROW_FIELDS) :]
    query_ends_B = jnp.cumsum(query_len_B)
    query_starts_B1 = jnp.concatenate([jnp.zeros(1, jnp.int32), query_ends_B])
    token_T = jnp.arange(T, dtype=jnp.int32)
    row_T = jnp.searchsorted(query_ends_B, token_T, side="right").astype(jnp.int32)
    live_T = row_T < B
    row_T = jnp.minimum(row_T, B - 1)
    position_T = jnp.where(live_T, (context_len_B - query_ends_B)[row_T] + token_T, 0)
    entries_T = jnp.where(live_T, table_BM[row_T, position_T // page_size] * page_size + position_T % page_size, num_pages * page_size)
    ragged = RaggedBatch(context_len_B, query_starts_B1, table_BM, entries_T, position_T, packed[:2])
    sampling = SamplingArrays(**{f"{field.name}_B": fields[field.name] for field in OWNER_FIELDS}, position_B=context_len_B)
    return StepInput(packed[2 : 2 + T], row_T, jnp.maximum(query_ends_B - 1, 0), fields["slot"], fields["begins"] != 0, ragged, sampling)


def _typed(column_B: Int32[Array, "B"], dtype: Any) -> Array:
    return column_B if dtype == column_B.dtype else lax.bitcast_convert_type(column_B, dtype)


def abstract_params(model: Model, layout: Layout) -> Params:
    """The parameters as abstract arrays, each with its sharding."""
    shardings = param_shardings(model.spec, model.layers, layout)
    return jax.tree.map(lambda array, sharding: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding), model.abstract_params(), shardings)


def abstract_carry(max_num_seqs: int, layout: Layout, states: Sequence[SlotState] = ()) -> Carry:
    """The carry as abstract arrays with their shardings, for ``max_num_seqs`` slots of each rank."""

    def of_slots(shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct((layout.shape.data * max_num_seqs, *shape), dtype, sharding=layout.sharding(EACH_RANK))

    return Carry(of_slots((), jnp.int32), of_slots((), jnp.int32), {state.name: of_slots(state.shape, state.dtype) for state in states})


def lower_step(step: Step, params: Params, pool: KVPool, carry: Carry, bucket: Bucket, layout: Layout) -> jax.stages.Lowered:
    """Lowers a step for a bucket, with pool and carry donated.

    Args:
        step: The step function from :func:`make_step`.
        params: The parameters, as abstract or real arrays with their shardings on the layout's mesh; so are pool and carry.
        pool: The KV pool.
        carry: The carry.
        bucket: Shapes of each rank's batch.
        layout: The mesh and the sharding rules. Its devices may belong to a topology that is not present and only compiled for.
    """
    packed = jax.ShapeDtypeStruct((layout.shape.data, bucket.packed_size), jnp.int32, sharding=layout.sharding(EACH_RANK))
    with layout.tracing():
        options = compiler_options(layout.mesh.devices.flat[0].device_kind)
        return jax.jit(step, donate_argnums=(1, 2), compiler_options=options).lower(params, pool, carry, packed)

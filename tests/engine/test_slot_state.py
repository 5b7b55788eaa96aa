"""Wide state of sequence slots: counts of each owner's tokens, whatever became of the slot, against numpy's."""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from jaxserve.config import ShardingConfig
from jaxserve.engine.device.runner import DeviceRunner
from jaxserve.engine.device.slot_filler import SlotFiller
from jaxserve.engine.engine import Engine
from jaxserve.engine.scheduling.schedule import RankSchedule, Schedule, ScheduledSequence
from jaxserve.engine.scheduling.sequence import Sequence
from jaxserve.engine.step.batch import FILL_TOKENS, BatchBuilder
from jaxserve.engine.step.buckets import make_buckets
from jaxserve.engine.step.function import abstract_carry
from jaxserve.engine.step.slot_state import SlotState, SlotTokens, advance
from jaxserve.mesh import make_layout
from jaxserve.mesh_shape import MeshShape
from jaxserve.request import Request, SamplingParams
from tests.engine.tiny import tiny_engine, tiny_spec

VOCAB = tiny_spec().vocab_size
BASE = 7
"""Where counts begin: a slot that was not reset shows it."""


def count(counts: Array, tokens: SlotTokens) -> Array:
    return counts.at[tokens.slots_N, tokens.token_ids_N].add(1, mode="drop")


def note_positions(sums: Array, tokens: SlotTokens) -> Array:
    return sums.at[tokens.slots_N].add(tokens.positions_N.astype(jnp.float32), mode="drop")


STATES = (SlotState("counts", (VOCAB,), jnp.int16, BASE, count), SlotState("positions", (), jnp.float32, 0.0, note_positions))


def check(engine: Engine, grown: set[str]) -> int:
    """Compares the state of each running sequence's slot with its tokens; of those that have just grown, also the last one. Returns how many run."""
    runner: Any = engine._runner
    carry = jax.tree.map(lambda array: np.asarray(array).reshape(runner.num_ranks, runner.max_num_seqs, *array.shape[1:]), runner._carry)
    num_running = 0
    for rank in engine._scheduler.ranks:
        for sequence in rank.running:
            place, known = (rank.index, sequence.slot), sequence.num_scheduled_tokens
            want = np.bincount(sequence.token_ids[:known], minlength=VOCAB) + BASE
            np.testing.assert_array_equal(carry.states["counts"][place], want)
            assert carry.states["positions"][place] == known * (known - 1) / 2
            assert carry.num_tokens[place] == known
            if sequence.request.request_id in grown:
                assert carry.last_token[place] == sequence.token_ids[-1]
            num_running += 1
    return num_running


HISTORIES = {
    "swapped": {"preemption": "swap", "num_host_pages": 40},
    "recomputed": {"preemption": "recompute", "mesh": MeshShape(2, 2)},
}


@pytest.mark.parametrize("name", HISTORIES)
def test_counts_are_those_of_the_owner_after_random_histories(name: str) -> None:
    """Slots change owners, prompts come in chunks and share prefixes, sequences are preempted, aborted and paused."""
    engine = tiny_engine(num_pages=14, max_num_seqs=3, max_tokens_per_step=16, token_buckets=(16,), states=STATES, **HISTORIES[name])
    runner: Any = engine._runner
    fills = spy_on(runner._filler)
    rng = random.Random(name)
    prefixes = [[rng.randrange(VOCAB) for _ in range(25)] for _ in range(2)]
    num_checked = 0
    for step in range(100):
        if step < 80 and rng.random() < 0.35:
            prompt = rng.choice(prefixes)[: rng.randint(1, 25)] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 8))]
            engine.add(engine.make_request(prompt, SamplingParams(max_tokens=rng.randint(1, 40), seed=step, ignore_eos=True), str(step)))
        if step < 80 and rng.random() < 0.05:
            engine.abort(str(rng.randrange(step + 1)))
        outputs = engine.step()
        assert not any(output.error for output in outputs)
        num_checked += check(engine, {output.request_id for output in outputs if output.token_ids})
    stats = engine.stats()
    assert num_checked > 100 and stats.num_preemptions > 0 and len(fills) > 5


def spy_on(filler: SlotFiller) -> list[np.ndarray]:
    """Every fill from now on."""
    seen: list[np.ndarray] = []
    apply = filler.apply

    def spy(carry: Any, fills_FRX: np.ndarray) -> Any:
        seen.extend(fills_FRX)
        return apply(carry, fills_FRX)

    filler.apply = spy  # pyright: ignore[reportAttributeAccessIssue]
    return seen


def test_a_long_fill_comes_in_portions_and_each_rank_has_its_own() -> None:
    layout = make_layout(MeshShape(2, 1), ShardingConfig())
    rng = np.random.default_rng(0)
    starts = [(2 * FILL_TOKENS + 5, 3), (FILL_TOKENS,)]  # of the sequences of each rank
    builder = BatchBuilder(make_buckets((8,), (2,), max_tokens=8, max_rows=2, table_width=4), max_num_seqs=2, num_ranks=2, fills=True)
    ranks: list[list[ScheduledSequence]] = []
    for each in starts:
        ranks.append([])
        for slot, start in enumerate(each):
            request = Request(request_id="", prompt_token_ids=rng.integers(0, VOCAB, start + 1).tolist(), sampling_params=SamplingParams())
            sequence = Sequence.of(request, seed=0, max_tokens=1)
            sequence.slot = sequence.tenure = slot
            ranks[-1].append(ScheduledSequence(sequence, start, 1, True))
    schedule = Schedule(tuple(RankSchedule(tuple(items), len(items), len(items)) for items in ranks))
    fills = builder.build(schedule).fills
    assert len(fills) == 4, "three portions and one on the first rank, one on the second"
    assert len(builder.build(schedule).fills) == 0, "an owner's slot is filled once"
    filler = SlotFiller(STATES, layout, 2)
    carry = jax.tree.map(lambda array: jnp.full(array.shape, 99, array.dtype, device=array.sharding), abstract_carry(2, layout, STATES))
    counts = np.asarray(filler.apply(carry, fills).states["counts"])
    for rank, items in enumerate(ranks):
        for slot, item in enumerate(items):
            np.testing.assert_array_equal(counts[2 * rank + slot], np.bincount(item.sequence.token_ids[: item.start], minlength=VOCAB) + BASE)
    assert (counts[3] == 99).all(), "the slot of nobody stays as it was"


def test_an_engine_without_wide_state_fills_and_carries_nothing() -> None:
    runner = tiny_engine()._runner
    assert isinstance(runner, DeviceRunner)
    assert jax.tree.leaves(runner._carry) == [runner._carry.last_token, runner._carry.num_tokens]
    runner._filler.warmup()
    assert "_program" not in vars(runner._filler), "nothing was compiled"


def test_state_is_reset_in_place() -> None:
    """A conditional that copied the state would need its size once more."""
    slots, shape = 64, (4096,)
    wide = SlotState("wide", shape, jnp.float32, 0.0, lambda state, tokens: state.at[tokens.slots_N, tokens.token_ids_N].add(1.0, mode="drop"))
    state = jax.ShapeDtypeStruct((slots, *shape), jnp.float32)
    row_B, begins_B = jax.ShapeDtypeStruct((8,), jnp.int32), jax.ShapeDtypeStruct((8,), jnp.bool_)
    step = jax.jit(lambda states, slot_B, begins_B, tokens: advance(states, (wide,), slot_B, begins_B, tokens), donate_argnums=0)
    memory = step.lower({"wide": state}, row_B, begins_B, SlotTokens(row_B, row_B, row_B)).compile().memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < slots * shape[0] * 4 / 4

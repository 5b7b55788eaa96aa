"""How long chunks are: by their context, by what runs beside them, by the buckets."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jaxserve.config import SchedulerConfig, ShardingConfig
from jaxserve.engine.scheduling.chunking import Chunking, ContextCost, context_cost, make_chunking
from jaxserve.engine.scheduling.scheduler import Scheduler
from jaxserve.mesh_shape import MeshShape
from jaxserve.models.attention_kind import GroupedQueryAttention
from jaxserve.models.mlp_kind import GatedMlp
from jaxserve.models.spec import LayerGroup, LayerSpec, ModelSpec, RopeSpec
from jaxserve.plan.roofline import Split, rank_work
from tests.engine_host.fakes import FakeRunner, results_of
from tests.engine_host.test_scheduler import make_sequence, run_to_end

DOUBLE_AT_100 = ContextCost(((1000.0, 0.01),))


def make_spec(*windows: int | None) -> ModelSpec:
    attention = GroupedQueryAttention(num_heads=8, num_kv_heads=2, head_dim=16, scale=0.25)
    group = LayerGroup.uniform(attention, GatedMlp(width=128, activation="silu"), tuple(LayerSpec(window=window) for window in windows))
    return ModelSpec(
        family="llama", vocab_size=256, width=64, groups=(group,), max_position=10_000, norm_eps=1e-6, ropes=(RopeSpec(inv_freq=(1.0,) * 8),),
    )  # fmt: skip


@pytest.mark.parametrize("windows", [(None, None, None), (32, 32, None), (16, 32)])
def test_the_cost_is_that_of_the_roofline(windows: tuple[int | None, ...]) -> None:
    spec = make_spec(*windows)
    split = Split(spec=spec, mesh=MeshShape(1, 1), rules=ShardingConfig(), weight_bytes=2, kv_bytes=2)

    def flops(context: int) -> float:
        """Of one more token of a prompt, whose tokens see ``context`` tokens on average."""
        two, one = (rank_work(split, decodes=0, context=0, prompt=tokens, prompt_context=2 * context).flops for tokens in (2, 1))
        return two - one

    cost = context_cost(spec)
    for context in (0, 10, 20, 100, 5000):
        assert cost.at(context) == pytest.approx(flops(context) / flops(0))


@given(
    num_pending=st.integers(1, 400), budget=st.integers(0, 200), context=st.integers(0, 2000), num_beside=st.integers(0, 40),
    buckets=st.sets(st.integers(2, 240)), each=st.sampled_from([0.0, 0.01, 1.0]),
)  # fmt: skip
def test_a_chunk_keeps_to_its_budget_and_moves(num_pending: int, budget: int, context: int, num_beside: int, buckets: set[int], each: float) -> None:
    chunking = Chunking(ContextCost(((1000.0, each),)), tuple(sorted(buckets)))
    num_tokens, taken = chunking.fit(num_pending, budget, context=context, num_beside=num_beside)
    assert 0 <= num_tokens <= min(num_pending, budget) and 0 <= taken <= budget
    assert (num_tokens > 0) == (budget > 0)
    assert num_tokens == num_pending or taken == budget, "a chunk that is cut leaves nothing to others, who would be behind it"
    if not each and num_tokens < num_pending:
        assert num_tokens == budget or num_beside + num_tokens in buckets


def test_chunks_shrink_as_their_context_grows() -> None:
    chunking = Chunking(DOUBLE_AT_100)
    assert [chunking.fit(1000, 60, context=context, num_beside=4) for context in (0, 100, 500)] == [(60, 60), (30, 60), (10, 60)]
    assert chunking.fit(20, 60, context=100, num_beside=4) == (20, 40), "the rest goes to who is next"


def test_a_chunk_that_is_cut_fills_a_bucket_unless_that_costs_too_much_of_it() -> None:
    chunking = Chunking(DOUBLE_AT_100, (16, 32, 48, 128))
    assert chunking.fit(1000, 60, context=100, num_beside=4) == (28, 60), "32 in all instead of 34, for which the step would have 48"
    assert chunking.fit(1000, 120, context=40, num_beside=4) == (85, 120), "89 in all: the bucket of 48 would take half of them"
    assert chunking.fit(30, 60, context=100, num_beside=4) == (30, 60), "the end of the prompt is not put off"


def test_only_decodes_shorten_chunks() -> None:
    def scheduler() -> Scheduler:
        return Scheduler(200, 4, SchedulerConfig(max_num_seqs=4, max_tokens_per_step=64), num_ranks=2, chunking=Chunking(DOUBLE_AT_100))

    def chunks(scheduler: Scheduler) -> list[int]:
        """Of the long prompt, but for its last one."""
        lengths: list[int] = []
        while True:
            step = scheduler.schedule()
            (chunk,) = (row for row in step.sequences if row.sequence.request.request_id == "long")
            if chunk.num_samples:
                return lengths
            lengths.append(chunk.num_tokens)
            scheduler.update(step, results_of(step, 0))

    alone = scheduler()
    alone.add(make_sequence("long", 500, 1))
    assert chunks(alone) == [64] * 7
    beside = scheduler()
    beside.add(make_sequence("short", 1, 200))
    first = beside.schedule()
    beside.update(first, results_of(first))
    beside.add(make_sequence("long", 500, 1))
    lengths = chunks(beside)
    assert lengths == sorted(lengths, reverse=True) and lengths[0] == 64 and lengths[-1] < 64 / 4, "the one who decodes is on the other rank"


def test_all_finish_with_any_budget() -> None:
    runner = FakeRunner(num_pages=64, page_size=4, max_num_seqs=3)
    for budget in (3, 4, 7, 40):
        config = SchedulerConfig(max_num_seqs=3, max_tokens_per_step=budget)
        scheduler = Scheduler(64, 4, config, chunking=Chunking(ContextCost(((1000.0, 1.0),)), runner.token_buckets))
        for index, length in enumerate((3, 60, 2, 50)):
            scheduler.add(make_sequence(f"s{index}", length, 30))
        run_to_end(scheduler, runner)


def test_the_configuration_chooses() -> None:
    spec = make_spec(None)
    assert make_chunking(SchedulerConfig(), spec, [16, 32]) == Chunking(context_cost(spec), (16, 32))
    assert make_chunking(SchedulerConfig(chunk_by="tokens"), spec, [16, 32]) == Chunking()

"""Packing a schedule and taking it apart again, against a plain reading of the schedule."""

from __future__ import annotations

import itertools

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine.scheduling.schedule import RankSchedule, Schedule, ScheduledSequence
from jaxserve.engine.scheduling.sequence import Sequence
from jaxserve.engine.step.batch import FROM_CARRY, BatchBuilder, packed_batch
from jaxserve.engine.step.buckets import Bucket, Buckets, make_buckets
from jaxserve.engine.step.function import unpack
from jaxserve.engine.step.rows import OFF, ROW_FIELDS, records
from jaxserve.request import Request, SamplingParams

PAGE_SIZE, NUM_PAGES, MAX_SEQS, WIDTH = 4, 40, 6, 5
TENURES = itertools.count()
BUCKETS = make_buckets((8, 16), (2, 4), max_tokens=32, max_rows=MAX_SEQS, table_width=WIDTH)


def make_sequence(slot: int, length: int, pages: list[int], temperature: float = 0.5) -> Sequence:
    params = SamplingParams(temperature=temperature, top_k=slot, top_p=0.9, min_p=0.25, seed=slot)
    request = Request(request_id=str(slot), prompt_token_ids=range(100 * slot, 100 * slot + length), sampling_params=params)
    sequence = Sequence.of(request, seed=2**32 - 1 - slot, max_tokens=8)
    sequence.page_ids, sequence.slot, sequence.tenure = pages, slot, next(TENURES)
    return sequence


def rank_schedule(items: list[ScheduledSequence]) -> RankSchedule:
    return RankSchedule(tuple(items), sum(item.num_tokens == 1 for item in items), sum(item.num_tokens for item in items))


def make_schedule(parts: list[tuple[int, int]], pages: list[int]) -> Schedule:
    items = []
    for slot, (start, num_tokens) in enumerate(parts):
        num_pages = -(-(start + num_tokens) // PAGE_SIZE)
        sequence = make_sequence(MAX_SEQS - 1 - slot, start + num_tokens, [pages.pop() for _ in range(num_pages)])
        items.append(ScheduledSequence(sequence, start, num_tokens, True))
    items.sort(key=lambda item: item.num_tokens != 1)
    return Schedule((rank_schedule(items),))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.sampled_from([1, 1, 2, 3, 5])), min_size=1, max_size=MAX_SEQS), st.randoms(use_true_random=False))
def test_unpacking_gives_what_was_scheduled(parts: list[tuple[int, int]], random) -> None:
    pages = list(range(NUM_PAGES))
    random.shuffle(pages)
    schedule = make_schedule(parts, pages)
    bucket, packed, _ = BatchBuilder(BUCKETS, max_num_seqs=MAX_SEQS).build(schedule)
    assert bucket in BUCKETS.all()
    step_input = jax.tree.map(np.asarray, unpack(packed[0], bucket, page_size=PAGE_SIZE, num_pages=NUM_PAGES))
    ragged, sampling = step_input.ragged, step_input.sampling
    token = 0
    for row, item in enumerate(schedule.sequences):
        sequence, end = item.sequence, item.start + item.num_tokens
        assert ragged.context_lens_B[row] == end
        assert ragged.query_starts_B1[row] == token
        assert ragged.page_table_BM[row, : len(sequence.page_ids)].tolist() == sequence.page_ids
        assert step_input.slot_B[row] == sequence.slot
        assert step_input.last_token_B[row] == token + item.num_tokens - 1
        params = sequence.request.sampling_params
        assert sampling.temperature_B[row] == np.float32(params.temperature) and sampling.top_p_B[row] == np.float32(params.top_p)
        assert sampling.min_p_B[row] == np.float32(params.min_p) and sampling.top_k_B[row] == (params.top_k or OFF)
        assert sampling.seed_B[row] == sequence.seed and sampling.position_B[row] == end
        for position in range(item.start, end):
            assert step_input.row_T[token] == row
            assert step_input.token_ids_T[token] == sequence.token_ids[position]
            assert ragged.positions_T[token] == position
            assert ragged.entries_T[token] == sequence.page_ids[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
            token += 1
    assert ragged.counts_2.tolist() == [schedule.ranks[0].num_decodes, len(schedule.sequences)]
    assert (ragged.entries_T[token:] == NUM_PAGES * PAGE_SIZE).all(), "padding must write to no page"
    padding = slice(len(schedule.sequences), None)
    assert (step_input.slot_B[padding] >= MAX_SEQS).all() and (ragged.context_lens_B[padding] == 0).all()
    assert step_input.begins_B.tolist() == [True] * len(schedule.sequences) + [False] * (bucket.num_rows - len(schedule.sequences))
    rows = packed[:, 2 + bucket.num_tokens :].reshape(1, bucket.num_rows, -1)[0, padding]
    assert all((records(rows)[field.name] == field.default).all() for field in ROW_FIELDS)
    assert (ragged.query_starts_B1[len(schedule.sequences) :] == token).all()


def test_a_slot_forgets_its_last_owner() -> None:
    builder = BatchBuilder(BUCKETS, max_num_seqs=MAX_SEQS)

    def row_of(sequence: Sequence) -> np.ndarray:
        schedule = Schedule((rank_schedule([ScheduledSequence(sequence, len(sequence.token_ids) - 1, 1, True)]),))
        bucket, packed, _ = builder.build(schedule)
        return unpack(packed[0], bucket, page_size=PAGE_SIZE, num_pages=NUM_PAGES).ragged.page_table_BM[0]

    first = make_sequence(2, 8, [7, 8])
    assert row_of(first)[:2].tolist() == [7, 8]
    first.page_ids.append(9)
    assert row_of(first)[:3].tolist() == [7, 8, 9]
    # Preempted and back in the same slot with as many pages: other pages.
    first.page_ids, first.tenure = [1, 2, 3], next(TENURES)
    assert row_of(first)[:3].tolist() == [1, 2, 3]
    assert row_of(make_sequence(2, 8, [5, 6]))[:2].tolist() == [5, 6]


def test_a_slot_begins_in_the_first_step_of_each_owner() -> None:
    builder = BatchBuilder(BUCKETS, max_num_seqs=MAX_SEQS)

    def begins(*sequences: Sequence) -> list[bool]:
        items = [ScheduledSequence(sequence, len(sequence.token_ids) - 1, 1, True) for sequence in sequences]
        bucket, packed, fills = builder.build(Schedule((rank_schedule(items),)))
        assert len(fills) == 0, "an engine without wide state fills nothing"
        return unpack(packed[0], bucket, page_size=PAGE_SIZE, num_pages=NUM_PAGES).begins_B[: len(items)].tolist()

    first, second = make_sequence(2, 8, [7, 8]), make_sequence(3, 8, [1, 2])
    assert begins(first) == [True]
    assert begins(first, second) == [False, True]
    first.page_ids.append(9)
    assert begins(first, second) == [False, False], "more pages are no new owner"
    second.tenure = next(TENURES)
    assert begins(first, second) == [False, True]
    assert begins(make_sequence(2, 8, [5, 6]), second) == [True, False]


def test_a_token_comes_from_the_carry_if_the_row_before_sampled_it_for_the_same_owner() -> None:
    builder = BatchBuilder(BUCKETS, max_num_seqs=MAX_SEQS)

    def token_ids(*items: ScheduledSequence) -> list[int]:
        _, packed, _ = builder.build(Schedule((rank_schedule(list(items)),)))
        return packed[0, 2 : 2 + sum(item.num_tokens for item in items)].tolist()

    sequence, other = make_sequence(1, 4, [0, 1]), make_sequence(0, 6, [2, 3])
    assert token_ids(ScheduledSequence(sequence, 0, 3, 0)) == [100, 101, 102]
    assert token_ids(ScheduledSequence(sequence, 3, 1, 1)) == [103], "a prompt's last token, after a chunk that sampled nothing"
    assert token_ids(ScheduledSequence(sequence, 4, 1, 1), ScheduledSequence(other, 0, 5, 0)) == [FROM_CARRY, 0, 1, 2, 3, 4]
    sequence.token_ids += [7, 8]
    assert token_ids(ScheduledSequence(sequence, 5, 1, 1), ScheduledSequence(other, 5, 1, 1)) == [FROM_CARRY, 5], "known or not"
    sequence.tenure = next(TENURES)
    assert token_ids(ScheduledSequence(sequence, 5, 1, 1)) == [8], "the slot may have been another's meanwhile"
    sequence.token_ids.append(9)
    assert token_ids(ScheduledSequence(make_sequence(1, 4, [4]), 3, 1, 1)) == [103]
    assert token_ids(ScheduledSequence(sequence, 6, 1, 1)) == [9]


def test_the_host_takes_the_program_with_the_fewest_stages_that_serves_all_rows() -> None:
    buckets = make_buckets((8,), (4,), max_tokens=8, max_rows=4, table_width=WIDTH, sampling=("greedy", "plain", "filtered"))
    shapes = make_buckets((8,), (4,), max_tokens=8, max_rows=4, table_width=WIDTH).all()
    assert len(buckets.all()) == len(set(buckets.all())) == 3 * len(shapes)
    kinds = {
        "greedy": {"temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1},
        "plain": {"temperature": 0.3, "seed": 4},
        "top_k": {"top_k": 3},
        "top_p": {"top_p": 0.5},
        "min_p": {"min_p": 0.1},
    }

    def sampling(*names: str) -> str:
        items = []
        for slot, name in enumerate(names):
            request = Request(request_id=name, prompt_token_ids=[1], sampling_params=SamplingParams(**kinds[name]))
            sequence = Sequence.of(request, seed=9, max_tokens=8)
            sequence.page_ids, sequence.slot, sequence.tenure = [slot], slot, next(TENURES)
            items.append(ScheduledSequence(sequence, 0, 1, True))
        bucket, _, _ = BatchBuilder(buckets, max_num_seqs=4).build(Schedule((rank_schedule(items),)))
        assert bucket in buckets.all()
        return bucket.sampling

    assert sampling("greedy") == sampling("greedy", "greedy") == "greedy"
    assert sampling("plain") == sampling("greedy", "plain") == "plain"
    assert {sampling(name) for name in ("top_k", "top_p", "min_p")} == {"filtered"}
    assert sampling("greedy", "plain", "min_p") == "filtered"


def test_rows_that_draw_nothing_have_no_filters() -> None:
    """A filter of any row makes the sampler search for the thresholds of all."""
    greedy = ScheduledSequence(make_sequence(3, 1, [0], temperature=0.0), 0, 1, True)
    sampled = ScheduledSequence(make_sequence(2, 1, [1]), 0, 1, True)
    third = ScheduledSequence(make_sequence(1, 1, [2], temperature=0.0), 0, 1, True)
    bucket, packed, _ = BatchBuilder(BUCKETS, max_num_seqs=MAX_SEQS).build(Schedule((rank_schedule([greedy, sampled, third]),)))
    sampling = unpack(packed[0], bucket, page_size=PAGE_SIZE, num_pages=NUM_PAGES).sampling
    assert bucket.num_rows == 4, "one row is padding"
    assert sampling.top_k_B.tolist() == [OFF, 2, OFF, OFF]
    assert sampling.top_p_B.tolist() == [1.0, np.float32(0.9), 1.0, 1.0]
    assert sampling.min_p_B.tolist() == [0.0, 0.25, 0.0, 0.0]


def test_a_batch_for_measuring_is_one_that_the_engine_could_pack() -> None:
    decode = unpack(packed_batch(Bucket(4, 4, WIDTH, True), num_rows=3, query_len=1, context_len=6, page_size=PAGE_SIZE)[0],
                    Bucket(4, 4, WIDTH, True), page_size=PAGE_SIZE, num_pages=NUM_PAGES)  # fmt: skip
    assert decode.ragged.counts_2.tolist() == [3, 3] and decode.ragged.context_lens_B.tolist() == [6, 6, 6, 0]
    assert decode.ragged.entries_T.tolist() == [5, 13, 21, NUM_PAGES * PAGE_SIZE]
    bucket = Bucket(8, 2, WIDTH, False)
    packed = packed_batch(bucket, num_rows=1, query_len=7, context_len=7, page_size=PAGE_SIZE, num_ranks=2)
    for rank in packed:
        prefill = unpack(rank, bucket, page_size=PAGE_SIZE, num_pages=NUM_PAGES).ragged
        assert prefill.counts_2.tolist() == [0, 1] and prefill.query_starts_B1.tolist() == [0, 7, 7]
        assert prefill.entries_T.tolist() == [*range(7), NUM_PAGES * PAGE_SIZE]


def test_every_step_within_the_limits_has_a_bucket() -> None:
    for tokens, rows, max_tokens, max_rows in [((16, 64), (2, 8), 512, 32), ((), (), 7, 3), ((512,), (64,), 100, 100), ((1,), (1,), 1, 1)]:
        buckets: Buckets = make_buckets(tokens, rows, max_tokens=max_tokens, max_rows=max_rows, table_width=4)
        every = set(buckets.all())
        for num_rows in range(1, max_rows + 1):
            for num_tokens in range(num_rows, max_tokens + 1):
                rows = (ScheduledSequence(make_sequence(0, 1, [0]), 0, 1, True),) * num_rows  # only their number counts
                bucket = buckets.choose([RankSchedule(rows, num_rows, num_tokens)])
                assert bucket in every
                assert bucket.num_tokens >= max(2, num_tokens) and bucket.num_rows >= num_rows
                assert bucket.decode_only == (num_tokens == num_rows)

"""Both prefix caches against a naive one, and the promises one by one."""

from __future__ import annotations

import heapq
from collections.abc import Sequence as SequenceOf
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from jaxserve.config import SchedulerConfig
from jaxserve.engine.pages.pool import PagePool
from jaxserve.engine.pages.prefix_cache.choice import choose_prefix_cache
from jaxserve.engine.pages.prefix_cache.hashed import HashedPrefixCache
from jaxserve.engine.pages.prefix_cache.interface import CachePath, Match, PrefixCache, make_namespace
from jaxserve.engine.pages.prefix_cache.radix import RadixPrefixCache
from jaxserve.engine.scheduling.scheduler import Scheduler
from jaxserve.engine.scheduling.sequence import Sequence
from jaxserve.request import Request, RequestOptions, SamplingParams
from tests.engine_host.fakes import FakeRunner, plain_run

KINDS = pytest.mark.parametrize("kind", ["radix", "hash"])


def make_cache(kind: str, *, num_pages: int = 16, page_size: int = 4) -> tuple[PagePool, PrefixCache]:
    pool = PagePool(num_pages, page_size)
    return pool, choose_prefix_cache(kind)(pool)  # pyright: ignore[reportArgumentType]


def path(token_ids: SequenceOf[int], namespace: bytes = b"") -> CachePath:
    return CachePath(namespace, list(token_ids))


def store(
    pool: PagePool, cache: PrefixCache, token_ids: SequenceOf[int], *, now_s: float = 0.0, namespace: bytes = b"", keep_until_s: float = 0.0
) -> list[int]:
    """What a sequence leaves that ran alone: all its whole pages. Returns them."""
    own = path(token_ids, namespace)
    match = cache.match(own, len(token_ids))
    pool.share(match.page_ids)
    page_ids = [*match.page_ids, *(pool.allocate(len(token_ids) // pool.page_size - len(match.page_ids)) or ())]
    cache.insert(own, page_ids, now_s, release=True, keep_until_s=keep_until_s)
    pool.release(page_ids)
    check(pool, cache)
    return page_ids


def check(pool: PagePool, cache: PrefixCache, *held: SequenceOf[int]) -> None:
    cache.check_integrity()
    pool.check_integrity(held, cache.cached_page_ids())


@KINDS
class TestMatch:
    def test_whole_pages_are_shared(self, kind: str) -> None:
        pool, cache = make_cache(kind)
        page_ids = store(pool, cache, range(10))  # two whole pages
        assert cache.match(path(range(10)), 9) == Match(tuple(page_ids))
        assert cache.match(path([*range(4), 99, 98, 97, 96]), 7) == Match((page_ids[0],))
        assert cache.match(path([1, *range(9)]), 9) == Match()

    def test_a_prompt_cached_to_its_end_recomputes_one_token(self, kind: str) -> None:
        pool, cache = make_cache(kind)
        page_ids = store(pool, cache, range(8))
        assert cache.match(path(range(8)), 7) == Match((page_ids[0],), page_ids[1], 3)

    def test_namespaces_share_nothing(self, kind: str) -> None:
        pool, cache = make_cache(kind)
        store(pool, cache, range(8), namespace=b"a")
        assert cache.match(path(range(8), b"b"), 7) == cache.match(path(range(8)), 7) == Match()
        pages_b = store(pool, cache, range(8), namespace=b"b")
        assert cache.match(path(range(9), b"b"), 8) == Match(tuple(pages_b))

    def test_a_copy_made_meanwhile_stays_out(self, kind: str) -> None:
        """Two sequences computed the same prompt side by side. The second goes on: what it adds is cached once it releases its pages."""
        pool, cache = make_cache(kind)
        first, second = pool.allocate(2) or [], pool.allocate(3) or []
        one, two = path(range(8)), path(range(12))
        cache.insert(one, first, 0.0, release=False)
        cache.insert(two, second, 0.0, release=False)
        check(pool, cache, first, second)
        assert set(cache.cached_page_ids()) == set(first)
        cache.insert(two, second, 0.0, release=True)
        pool.release(second)
        check(pool, cache, first)
        assert cache.match(path(range(13)), 12) == Match((*first, second[2]))

    def test_clear_forgets_all_but_takes_nothing_from_holders(self, kind: str) -> None:
        pool, cache = make_cache(kind)
        (held, *_) = store(pool, cache, range(8))
        pool.share([held])
        cache.clear()
        check(pool, cache, [held])
        assert (pool.num_free, pool.num_idle, pool.num_cached) == (15, 0, 0)
        assert cache.match(path(range(9)), 8) == Match()


@KINDS
class TestEviction:
    def test_least_recently_used_first_and_ends_before_beginnings(self, kind: str) -> None:
        pool, cache = make_cache(kind, num_pages=8)
        old = store(pool, cache, range(12), now_s=1.0)
        new = store(pool, cache, [*range(4), *range(50, 58)], now_s=2.0)  # shares the first page
        left = [cache.match(path(range(13)), 12).page_ids]
        for _ in range(2):
            cache.evict(1)
            check(pool, cache)
            left.append(cache.match(path(range(13)), 12).page_ids)
        assert left == [tuple(old), tuple(old[:2]), tuple(old[:1])]
        cache.evict(1)
        assert cache.match(path([*range(4), *range(50, 58), 0]), 12).page_ids == tuple(new[:2])
        assert cache.num_evicted == 3

    def test_use_counts(self, kind: str) -> None:
        pool, cache = make_cache(kind)
        first, second = store(pool, cache, range(4), now_s=1.0), store(pool, cache, range(10, 14), now_s=2.0)
        cache.use(path(range(4)), 1, 3.0)
        cache.evict(1)
        assert set(cache.cached_page_ids()) == set(first) and second

    def test_held_pages_stay(self, kind: str) -> None:
        pool, cache = make_cache(kind)
        held = store(pool, cache, range(8), now_s=1.0)
        store(pool, cache, range(10, 18), now_s=2.0)
        pool.share(held)
        cache.evict(2)
        check(pool, cache, held)
        assert set(cache.cached_page_ids()) == set(held)
        pool.release(held[1:])
        cache.evict(1)
        check(pool, cache, held[:1])

    def test_kept_pages_outlast_others_but_not_for_ever(self, kind: str) -> None:
        pool, cache = make_cache(kind)
        kept = store(pool, cache, range(4), now_s=1.0, keep_until_s=10.0)
        other = store(pool, cache, range(20, 24), now_s=5.0)
        late = store(pool, cache, range(30, 34), now_s=11.0)
        cache.evict(1)
        assert set(cache.cached_page_ids()) == {*kept, *late}
        cache.evict(1)
        assert set(cache.cached_page_ids()) == set(late) and other

    def test_the_work_does_not_grow_with_the_pages_that_are_held(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        pool, cache = make_cache(kind, num_pages=2000)
        idle = [store(pool, cache, [1000 + i, *range(19)], now_s=2.0) for i in range(200)]
        held: list[list[int]] = []
        for i in range(200):  # older than all that is idle
            page_ids = pool.allocate(5) or []
            cache.insert(path([i, *range(19)]), page_ids, 1.0, release=False)
            held.append(page_ids)
        for page_ids in idle[:100]:
            pool.share(page_ids)  # these are held again, and stand first among those that were idle
        num_pops = 0

        def counted(heap: list[Any]) -> Any:
            nonlocal num_pops
            num_pops += 1
            return heapq.heappop(heap)

        monkeypatch.setattr("jaxserve.engine.pages.prefix_cache.lru.heappop", counted)
        for _ in range(300):
            cache.evict(1)
        assert num_pops <= 300 + 5 * 100
        check(pool, cache, *held, *idle[:100])
        for page_ids in held:
            pool.release(page_ids)
        cache.evict(5 * 200)  # those that are idle again are the oldest
        assert set(cache.cached_page_ids()).isdisjoint(page_id for page_ids in held for page_id in page_ids)
        check(pool, cache, *idle[:100])

    def test_no_trace_is_left_of_what_is_gone(self, kind: str) -> None:
        pool, cache = make_cache(kind)
        for salt in range(50):
            store(pool, cache, range(8), now_s=salt, namespace=bytes([salt]))
            cache.evict(2)
        assert pool.num_free == 16
        assert not (cache._roots if isinstance(cache, RadixPrefixCache) else cache._blocks)  # pyright: ignore[reportAttributeAccessIssue]


class TestRadix:
    def test_a_branch_within_a_page_is_copied_if_half_of_it_is_saved(self) -> None:
        pool, cache = make_cache("radix")
        page_ids = store(pool, cache, range(12))
        assert cache.match(path([0, 1, 2, 3, 4, 5, 99]), 6) == Match((page_ids[0],), page_ids[1], 2)
        assert cache.match(path([0, 1, 2, 3, 4, 99, 98]), 6) == Match((page_ids[0],))
        assert cache.match(path([0, 1, 2, 99, 98]), 4) == Match((), page_ids[0], 3)

    def test_of_many_branches_the_one_that_agrees_longest(self) -> None:
        pool, cache = make_cache("radix", num_pages=64, page_size=8)
        pages = {i: store(pool, cache, [1, 2, 3, 4, i, i, i, i])[0] for i in range(0, 40, 2)}
        assert cache.match(path([1, 2, 3, 4, 6, 6, 7, 0, 0]), 8) == Match((), pages[6], 6)
        assert cache.match(path([1, 2, 3, 4, 7, 0]), 5).num_copied == 4


class TestHashed:
    def test_digests_depend_on_the_secret_on_every_token_before_and_on_the_namespace(self) -> None:
        def digest(secret: bytes = b"s", namespace: bytes = b"n", tokens: SequenceOf[int] = range(8)) -> bytes:
            own = path(tokens, namespace)
            HashedPrefixCache(PagePool(4, 4), secret).match(own, len(tokens))
            return own.digests[-1]

        digests = [digest(), digest(secret=b"t"), digest(namespace=b"m"), digest(tokens=[9, *range(1, 8)]), digest(tokens=range(4))]
        assert len(set(digests)) == 5 and digest() == digests[0]
        assert all(len(value) == 32 for value in digests)

    def test_two_engines_do_not_agree(self) -> None:
        digests = set()
        for _ in range(2):
            own = path(range(4))
            choose_prefix_cache("hash")(PagePool(4, 4)).match(own, 4)
            digests.add(own.digests[0])
        assert len(digests) == 2

    def test_ranks_of_one_engine_agree(self) -> None:
        make = choose_prefix_cache("hash")
        pool_a, pool_b = PagePool(4, 4), PagePool(4, 4)
        a, b = make(pool_a), make(pool_b)
        own = path(range(5))
        a.match(own, 4)
        page_ids = store(pool_b, b, range(4))
        assert b.match(own, 4) == Match(tuple(page_ids))


def test_namespaces_differ_by_every_part() -> None:
    names = [("a", "b"), ("ab", ""), ("", "ab"), ("a", "b", ""), ("b", "a")]
    assert len({make_namespace(*parts) for parts in names}) == len(names)


@KINDS
@settings(max_examples=150, deadline=None)
@given(
    page_size=st.sampled_from([1, 2, 4]),
    events=st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=14), st.integers(0, 3), st.booleans()), max_size=25),
)
def test_against_a_naive_cache(kind: str, page_size: int, events: list[tuple[list[int], int, bool]]) -> None:
    """The longest run of whole pages that any stored sequence begins with; and a partial page only if its tokens are right."""
    pool, cache = make_cache(kind, num_pages=400, page_size=page_size)
    contents: dict[int, tuple[int, ...]] = {}  # page -> all tokens up to its end
    for now_s, (tokens, num_evicted, is_stored) in enumerate(events):
        if is_stored:
            for index, page_id in enumerate(store(pool, cache, tokens, now_s=now_s)):
                contents[page_id] = tuple(tokens[: (index + 1) * page_size])
        else:
            match = cache.match(path(tokens), len(tokens) - 1)
            cached = {contents[page_id] for page_id in cache.cached_page_ids()}
            longest = 0
            while (longest + 1) * page_size < len(tokens) and tuple(tokens[: (longest + 1) * page_size]) in cached:
                longest += 1
            assert [contents[page_id] for page_id in match.page_ids] == [tuple(tokens[: (i + 1) * page_size]) for i in range(longest)]
            if match.copy_page_id is not None:
                num_shared = longest * page_size + match.num_copied
                assert contents[match.copy_page_id][:num_shared] == tuple(tokens[:num_shared]) and num_shared < len(tokens)
        cache.evict(min(num_evicted, pool.num_idle))
        check(pool, cache)


class TestInTheScheduler:
    def run(self, scheduler: Scheduler, runner: FakeRunner, sequences: SequenceOf[Sequence]) -> int:
        """Runs sequences to their end. Returns the tokens computed."""
        num_tokens = 0
        for sequence in sequences:
            scheduler.add(sequence)
        while scheduler.has_work:
            schedule = scheduler.schedule()
            num_tokens += sum(rank.num_tokens for rank in schedule.ranks)
            for sequence, _ in scheduler.update(schedule, runner.dispatch(schedule).fetch()):
                if sequence.num_generated_tokens == sequence.max_tokens:
                    scheduler.finish(sequence, "length")
            scheduler.check_integrity()
        return num_tokens

    def scheduler(self, kind: str, *, num_ranks: int = 1, can_copy_pages: bool = True, num_pages: int = 64) -> tuple[Scheduler, FakeRunner]:
        runner = FakeRunner(num_pages=num_pages, page_size=4, max_num_seqs=4, num_ranks=num_ranks)
        config = SchedulerConfig(max_num_seqs=4, max_tokens_per_step=32)
        make = choose_prefix_cache(kind)  # pyright: ignore[reportArgumentType]
        return Scheduler(num_pages, 4, config, num_ranks=num_ranks, make_cache=make, can_copy_pages=can_copy_pages), runner

    def sequence(self, prompt: SequenceOf[int], max_tokens: int = 4, session_id: str | None = None) -> Sequence:
        request = Request(request_id="s", prompt_token_ids=list(prompt), sampling_params=SamplingParams(), options=RequestOptions(session_id=session_id))
        return Sequence.of(request, seed=1, max_tokens=max_tokens)

    @KINDS
    @pytest.mark.parametrize("can_copy_pages", [True, False])
    def test_a_second_wave_computes_hardly_anything(self, kind: str, can_copy_pages: bool) -> None:
        scheduler, runner = self.scheduler(kind, can_copy_pages=can_copy_pages)
        prompts = [[*range(20), *range(100 + i, 104 + i)] for i in range(4)]
        for wave, most in enumerate((32 * 4, 4 if can_copy_pages else 16)):
            sequences = [self.sequence(prompt) for prompt in prompts]
            num_tokens = self.run(scheduler, runner, sequences)
            assert num_tokens - 4 * 3 <= most  # decodes
            for sequence, prompt in zip(sequences, prompts, strict=True):
                assert sequence.token_ids[24:] == plain_run(prompt, 4, 1)
            if wave:
                assert [sequence.num_cached_tokens for sequence in sequences] == [23 if can_copy_pages else 20] * 4
                assert scheduler.num_hit_tokens >= sum(sequence.num_cached_tokens or 0 for sequence in sequences)
        assert scheduler.num_hit_tokens + scheduler.num_miss_tokens == 2 * 4 * 24
        assert (scheduler.num_page_copies > 0) == can_copy_pages

    @KINDS
    def test_turns_of_a_conversation_compute_new_tokens_only(self, kind: str) -> None:
        scheduler, runner = self.scheduler(kind)
        history: list[int] = [1, 2, 3]
        for turn in range(6):
            sequence = self.sequence([*history, 50 + turn, 51, 52], max_tokens=5)
            before = len(history)
            num_tokens = self.run(scheduler, runner, [sequence])
            assert num_tokens <= (3 + 5) + (4 if turn else 3)  # what is new, and a page at most
            assert sequence.token_ids[before + 3 :] == plain_run([*history, 50 + turn, 51, 52], 5, 1)
            history = sequence.token_ids

    @KINDS
    def test_a_prompt_that_fills_the_pool_runs_again_from_the_cache(self, kind: str) -> None:
        """There is no room for a copy of its last page, so that is recomputed."""
        scheduler, runner = self.scheduler(kind, num_pages=6)
        for _ in range(2):
            sequence = self.sequence(range(23), max_tokens=1)
            self.run(scheduler, runner, [sequence])
        assert sequence.num_cached_tokens in (20, 22)

    @KINDS
    def test_placement_prefers_the_longest_prefix_unless_load_says_otherwise(self, kind: str) -> None:
        scheduler, runner = self.scheduler(kind, num_ranks=2)
        self.run(scheduler, runner, [self.sequence(range(100, 130))])
        self.run(scheduler, runner, [self.sequence([9] * 9)])
        followers = [self.sequence([*range(100, 128), i]) for i in range(3)]
        assert self.run(scheduler, runner, followers[:1]) < 10
        assert followers[0].rank == 0
        busy = [self.sequence([*range(100, 128), 50 + i], max_tokens=30) for i in range(3)]
        for sequence in busy:
            scheduler.add(sequence)
        scheduler.schedule()
        assert {sequence.rank for sequence in busy} == {0, 1}

    @KINDS
    def test_forgotten_pools_are_not_used_again(self, kind: str) -> None:
        scheduler, runner = self.scheduler(kind)
        self.run(scheduler, runner, [self.sequence(range(20))])
        runner.lose_pools()
        scheduler.forget_pools()
        sequence = self.sequence(range(20))
        self.run(scheduler, runner, [sequence])
        assert sequence.num_cached_tokens == 0 and sequence.token_ids[20:] == plain_run(range(20), 4, 1)

    @KINDS
    def test_pages_of_a_failed_step_are_not_cached(self, kind: str) -> None:
        scheduler, _ = self.scheduler(kind)
        sequence = self.sequence(range(20))
        scheduler.add(sequence)
        scheduler.schedule()
        scheduler.finish(sequence, "error")
        scheduler.forget_pools()
        assert scheduler.num_cached_pages == 0
        scheduler.check_integrity()

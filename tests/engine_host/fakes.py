"""A runner without a device, whose next token can be computed by hand, and a byte-level tokenizer."""

from __future__ import annotations

import codecs
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxserve.config import CacheConfig, Config, EngineConfig, ModelConfig, SchedulerConfig, TenantsConfig
from jaxserve.engine.engine import Engine
from jaxserve.engine.scheduling.schedule import RunnerCosts, Schedule, SequenceResult
from jaxserve.errors import JaxserveError, from_data
from jaxserve.models.attention_kind import GroupedQueryAttention
from jaxserve.models.mlp_kind import GatedMlp
from jaxserve.models.spec import LayerGroup, LayerSpec, ModelSpec, RopeSpec
from jaxserve.request import RequestOutput

EOS = 256
SPECIAL = 257
VOCAB_SIZE = 258

NextToken = Callable[[Sequence[int], int], int]


def weighted_sum(token_ids: Sequence[int], seed: int) -> int:
    """The default next token: depends on every token, its position and the seed, and is a printable ASCII character."""
    return 32 + (seed + sum((position + 1) * token_id for position, token_id in enumerate(token_ids))) % 95


def plain_run(prompt: Sequence[int], num_tokens: int, seed: int, next_token: NextToken = weighted_sum) -> list[int]:
    """What a request alone in the world generates."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids, seed))
    return token_ids[len(prompt) :]


class FakeRunner:
    """Keeps each token in the entry of a page where a real pool keeps its keys and values, and reads a context only from there.

    So a page that is given away too early, or twice, changes the output. Steps run when they are fetched, from what they were dispatched with.
    """

    def __init__(
        self,
        *,
        num_pages: int = 64,
        page_size: int = 4,
        max_num_seqs: int = 8,
        next_token: NextToken = weighted_sum,
        num_ranks: int = 1,
        num_host_pages: int = 0,
    ) -> None:
        self.num_ranks = num_ranks
        self.num_pages = num_pages
        self.page_size = page_size
        self.max_num_seqs = max_num_seqs
        self.num_host_pages = num_host_pages
        self.token_buckets = (4, 8, 12, 16, 24, 32, 48, 64)
        self.can_copy_pages = True
        self.page_bytes = 100 * page_size
        self.costs: RunnerCosts | None = RunnerCosts(token_s=1e-3, page_swap_s=1e-3)
        self.num_programs = 0
        self.num_late_compiles = 0
        self.is_compiling = False
        self.next_token = next_token
        self.num_steps = 0
        self.host_pools = [[-1] * (num_host_pages * page_size) for _ in range(num_ranks)]
        self.carry = [[-1] * max_num_seqs for _ in range(num_ranks)]
        self.lose_pools()
        self.errors: list[Exception | None] = []  # of the steps to come

    def warmup(self) -> None:
        pass

    def lose_pools(self) -> None:
        self.pools = [[-1] * (self.num_pages * self.page_size) for _ in range(self.num_ranks)]

    def dispatch(self, schedule: Schedule) -> FakeStep:
        self.num_steps += 1
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            self.lose_pools()
            raise error
        check_schedule(schedule, self)
        return FakeStep(self, schedule)


class SlowRunner(FakeRunner):
    """Takes its time, like a device; or stands still until told, step by step.

    A test in which something must happen before a request ends holds the runner, or asks for more tokens than any stall of the test lets it generate.

    Attributes:
        step_s: Seconds a step.
        is_held: Whether a step has begun and waits for ``let`` or ``release``.
        skipped_s: How far :meth:`clock` is ahead: a test's way to let time pass.
    """

    def __init__(self, *, step_s: float = 0.001, **options: Any) -> None:
        super().__init__(**options)
        self.step_s = step_s
        self.is_held = False
        self.skipped_s = 0.0
        self._free_steps = math.inf
        self._changed = threading.Condition()

    def hold(self) -> None:
        """No step from here on."""
        with self._changed:
            self._free_steps = 0

    def let(self, num_steps: float = 1) -> None:
        """So many steps more."""
        with self._changed:
            self._free_steps += num_steps
            self.is_held = False
            self._changed.notify_all()

    def release(self) -> None:
        """All steps."""
        self.let(math.inf)

    def clock(self) -> float:
        """For the engine."""
        return time.monotonic() + self.skipped_s

    def dispatch(self, schedule: Schedule) -> FakeStep:
        time.sleep(self.step_s)
        with self._changed:
            self.is_held = not self._free_steps
            self._changed.wait_for(lambda: self._free_steps)
            self._free_steps -= 1
        return super().dispatch(schedule)


class FakeStep:
    def __init__(self, runner: FakeRunner, schedule: Schedule) -> None:
        self._runner = runner
        self._rows = [
            (index, row, row.sequence.token_ids[row.start : row.start + row.num_tokens], list(row.sequence.page_ids), row.sequence.slot)
            for index, rank in enumerate(schedule.ranks)
            for row in rank.sequences
        ]
        self._moves = [rank.moves for rank in schedule.ranks]
        self.num_bucket_tokens = sum(rank.num_tokens for rank in schedule.ranks)
        self.num_bucket_sequences = len(self._rows)

    def fetch(self) -> list[SequenceResult]:
        pools, carry = self._runner.pools, self._runner.carry
        for pool, host_pool, moves in zip(pools, self._runner.host_pools, self._moves, strict=True):
            self._move(pool, host_pool, moves.swap_outs)
            self._move(host_pool, pool, moves.swap_ins)
            self._move(pool, pool, moves.copies)
        for rank, row, token_ids, page_ids, slot in self._rows:
            if len(token_ids) < row.num_tokens:  # it was in flight when the step was dispatched
                token_ids.append(carry[rank][slot])
            assert len(token_ids) == row.num_tokens
            for position, token_id in enumerate(token_ids, row.start):
                pools[rank][self._entry(page_ids, position)] = token_id
        results = []
        for rank, row, token_ids, page_ids, slot in self._rows:
            context = [pools[rank][self._entry(page_ids, position)] for position in range(row.start + row.num_tokens)]
            assert context[row.start :] == token_ids, "two sequences of a step wrote to one entry"
            carry[rank][slot] = self._runner.next_token(context, row.sequence.seed)
            results.append(SequenceResult([carry[rank][slot]] if row.num_samples else []))
        return results

    def _move(self, source: list[int], destination: list[int], pairs: Sequence[tuple[int, int]]) -> None:
        size = self._runner.page_size
        pages = [source[page * size : (page + 1) * size] for page, _ in pairs]
        for (_, page), tokens in zip(pairs, pages, strict=True):
            destination[page * size : (page + 1) * size] = tokens

    def _entry(self, page_ids: Sequence[int], position: int) -> int:
        return page_ids[position // self._runner.page_size] * self._runner.page_size + position % self._runner.page_size


def results_of(schedule: Schedule, token_id: int = 0) -> list[SequenceResult]:
    """What a step gives if every sequence that samples gets the same token."""
    return [SequenceResult([token_id] if row.num_samples else []) for row in schedule.sequences]


def check_schedule(schedule: Schedule, runner: FakeRunner) -> None:
    """The promises of ``schedule.py``."""
    assert len(schedule.ranks) == runner.num_ranks
    assert schedule.sequences and len({row.sequence for row in schedule.sequences}) == len(schedule.sequences)
    for index, rank in enumerate(schedule.ranks):
        rows = rank.sequences
        assert len(rows) <= runner.max_num_seqs
        assert len({row.sequence.slot for row in rows}) == len(rows)
        assert all(row.sequence.rank == index and 0 <= row.sequence.slot < runner.max_num_seqs for row in rows)
        assert [row.num_tokens == 1 for row in rows] == [i < rank.num_decodes for i in range(len(rows))]
        assert rank.num_tokens == sum(row.num_tokens for row in rows)
        for pairs in (rank.moves.swap_outs, rank.moves.swap_ins, rank.moves.copies):
            destinations = [destination for _, destination in pairs]
            assert len(set(destinations)) == len(destinations)
        assert not {source for source, _ in rank.moves.copies} & {destination for _, destination in rank.moves.copies}
        for row in rows:
            assert row.num_tokens >= 1
            end = row.start + row.num_tokens
            sequence = row.sequence
            assert end == sequence.num_scheduled_tokens <= sequence.num_tokens - row.num_samples
            assert row.num_samples == (end == sequence.num_tokens - row.num_samples)
            assert end <= len(sequence.token_ids) or row.num_tokens == 1, "only the token of a decode may be unknown"
            assert sequence.num_generated_tokens + sequence.num_in_flight <= sequence.max_tokens, "it was known to end before"
            assert len(row.sequence.page_ids) * runner.page_size >= end


class FakeTokenizer:
    """Ids 0 to 255 are bytes; above them are two special tokens."""

    vocab_size = VOCAB_SIZE
    bos_token_id = None
    eos_token_ids = (EOS,)
    chat_template = "fake"
    template_source = "fake"
    source = "fake"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        detokenizer = self.detokenizer((), skip_special_tokens=skip_special_tokens)
        return detokenizer.push(token_ids) + detokenizer.finish()

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        return "".join(f"{message['role']}: {message['content']}\n" for message in messages)

    def detokenizer(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> FakeDetokenizer:
        return FakeDetokenizer(skip_special_tokens)


class FakeDetokenizer:
    def __init__(self, skip_special_tokens: bool) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._specials = {} if skip_special_tokens else {EOS: "<eos>", SPECIAL: "<special>"}

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(self._decoder.decode(bytes([i])) if i < 256 else self._specials.get(i, "") for i in token_ids)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


def refusal_of(output: RequestOutput) -> JaxserveError | None:
    """The error that the client of an ended request gets, if it gets one."""
    return None if output.error is None else from_data(output.error)


def scripted(*outputs: Sequence[int], prompt_len: int = 1) -> NextToken:
    """Next tokens from a script: the prompt's first id says which one."""
    return lambda token_ids, seed: outputs[token_ids[0]][len(token_ids) - prompt_len]


def fake_spec(max_position: int = 128) -> ModelSpec:
    attention = GroupedQueryAttention(num_heads=1, num_kv_heads=1, head_dim=2, scale=1.0)
    return ModelSpec(
        family="fake",
        vocab_size=VOCAB_SIZE,
        width=2,
        groups=(LayerGroup.uniform(attention, GatedMlp(width=2, activation="silu"), (LayerSpec(),)),),
        max_position=max_position,
        norm_eps=1e-5,
        ropes=(RopeSpec(inv_freq=(1.0,)),),
        eos_token_ids=(EOS,),
    )


LONG = 60_000
"""Tokens that take a minute at least: a request that must not have ended when something is done to it."""
LONG_POSITION = 65_536
"""The context of a model that generates them."""


def long_runner(*, max_num_seqs: int = 16) -> SlowRunner:
    """One whose pool holds such a request."""
    return SlowRunner(num_pages=LONG_POSITION // 64, page_size=64, max_num_seqs=max_num_seqs)


def fake_engine(
    runner: FakeRunner | None = None,
    *,
    max_position: int = 128,
    max_tokens_per_step: int = 16,
    seed: int = 0,
    scheduler: SchedulerConfig | None = None,
    engine: EngineConfig | None = None,
    tenants: TenantsConfig | None = None,
    overlap: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> Engine:
    runner = runner or FakeRunner()
    config = Config(
        model=ModelConfig(source="fake"),
        cache=CacheConfig(page_size=runner.page_size, num_pages=runner.num_pages),
        scheduler=scheduler or SchedulerConfig(max_num_seqs=runner.max_num_seqs, max_tokens_per_step=max_tokens_per_step),
        engine=engine or EngineConfig(),
        tenants=tenants or TenantsConfig(),
    )
    return Engine(runner, FakeTokenizer(), fake_spec(max_position), config, model_name="fake", seed=seed, overlap=overlap, clock=clock)  # pyright: ignore[reportArgumentType]

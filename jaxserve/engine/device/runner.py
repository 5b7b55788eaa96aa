"""The runner: it compiles the step for every bucket, owns parameters, pool and carry, and starts steps on the devices without waiting for them."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.engine.device.page_mover import PAGES_A_CALL, PageMover
from jaxserve.engine.device.slot_filler import SlotFiller
from jaxserve.engine.programs.compiled_folder import CompileProgram, compile_program
from jaxserve.engine.programs.plan import compile_all, lower_bucket
from jaxserve.engine.programs.pool_plan import PoolPlan
from jaxserve.engine.scheduling.schedule import PageMoves, RunnerCosts, Schedule, SequenceResult
from jaxserve.engine.step.batch import BatchBuilder, StepMessage, packed_batch
from jaxserve.engine.step.buckets import Bucket, Buckets
from jaxserve.engine.step.function import abstract_carry
from jaxserve.engine.step.slot_state import SlotState
from jaxserve.errors import EngineDeadError
from jaxserve.mesh import EACH_RANK
from jaxserve.models.model import Model
from jaxserve.models.params import Params

logger = logging.getLogger(__name__)


class DeviceStep:
    """A step in flight on the device. It owns only its sampled tokens, which are being copied to the host; pool and carry go on to the next step."""

    def __init__(self, token_ids_RB: jax.Array, bucket: Bucket, schedule: Schedule, on_failure: Callable[[Exception], None]) -> None:
        self._token_ids_RB = token_ids_RB
        self._schedule = schedule
        self.num_bucket_tokens = bucket.num_tokens * len(schedule.ranks)
        self.num_bucket_sequences = bucket.num_rows * len(schedule.ranks)
        self._on_failure = on_failure
        token_ids_RB.copy_to_host_async()

    def fetch(self) -> list[SequenceResult]:
        """Waits for the step. Returns one result for each scheduled sequence, rank by rank."""
        ranks = self._schedule.ranks
        try:
            token_ids_RB = np.asarray(self._token_ids_RB).reshape(len(ranks), -1).tolist()
        except Exception as error:
            self._on_failure(error)
            raise
        return [
            SequenceResult([token_id] if scheduled.num_samples else [])
            for rank, token_ids_B in zip(ranks, token_ids_RB, strict=True)
            for scheduled, token_id in zip(rank.sequences, token_ids_B, strict=False)  # the rest of the bucket is padding
        ]


class DeviceRunner:
    """The runner on jax devices; see ``schedule.Runner`` for its interface.

    Args:
        model: The model to run.
        params: Its parameters, on the devices of the pool's mesh.
        pool_plan: The plan of the KV pool to allocate, which also has the mesh.
        buckets: The shapes to compile for.
        max_num_seqs: Sequence slots of a data rank.
        num_host_pages: Pages of host memory for each data rank's swapped pages; 0 for no swapping.
        compile_program: Compiles a bucket's step, or loads it already compiled.
        on_step: Called with each step before it runs, to send it to the other processes.
        states: The kinds of wide state that each sequence slot has.

    Attributes:
        num_late_compiles: Number of compiles after warm-up. Each holds up all running requests; there should be none.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        pool_plan: PoolPlan,
        buckets: Buckets,
        *,
        max_num_seqs: int,
        num_host_pages: int = 0,
        compile_program: CompileProgram = compile_program,
        on_step: Callable[[StepMessage], None] | None = None,
        states: Sequence[SlotState] = (),
    ) -> None:
        self.num_ranks = pool_plan.layout.shape.data
        self.num_pages = pool_plan.shape.num_pages
        self.page_size = pool_plan.shape.page_size
        self.max_num_seqs = max_num_seqs
        self.num_host_pages = num_host_pages
        self.token_buckets = buckets.mixed_tokens
        self.can_copy_pages = True
        self.page_bytes = pool_plan.page_bytes
        self.costs: RunnerCosts | None = None
        self.is_compiling = False
        self.num_late_compiles = 0
        self.buckets = buckets
        self._bucket_index = {bucket: index for index, bucket in enumerate(buckets.all())}
        self._model = model
        self.layout = pool_plan.layout
        self._params = params
        self._pool_plan = pool_plan
        self._states = states
        self._builder = BatchBuilder(buckets, max_num_seqs=max_num_seqs, num_ranks=self.num_ranks, fills=bool(states))
        self._mover = PageMover(pool_plan, num_host_pages)
        self._filler = SlotFiller(states, self.layout, max_num_seqs)
        self._compile_program = compile_program
        self._on_step = on_step
        self._compiled: dict[Bucket, jax.stages.Compiled] = {}
        self._warm = False
        self._reset()

    @property
    def num_programs(self) -> int:
        """See ``schedule.Runner``."""
        return len(self._compiled)

    def warmup(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compiles the programs of every bucket, and measures times if there is host memory to swap to.

        Args:
            progress: Called with the number of buckets done and the number of all.
        """
        started = time.monotonic()
        compile_all(self.buckets, self._compile, progress)
        self._mover.warmup()
        self._filler.warmup()
        if self.num_host_pages:
            self.costs = self._measure_costs()
        self._warm = True
        logger.info("compiled %d buckets in %.1f s", self.num_programs, time.monotonic() - started)

    def dispatch(self, schedule: Schedule) -> DeviceStep:
        """Starts one step. If it fails, here or in ``fetch``, the pool's content is lost and an empty pool takes its place."""
        bucket, packed, fills = self._builder.build(schedule)
        moves = [rank.moves for rank in schedule.ranks]
        if self._on_step is not None:
            self._on_step(StepMessage(self._bucket_index[bucket], packed, moves, fills))
        token_ids_RB = self.execute(bucket, packed, moves, fills)
        return DeviceStep(token_ids_RB, bucket, schedule, self._fail)

    def execute(self, bucket: Bucket, packed_RX: np.ndarray, moves: Sequence[PageMoves], fills_FRX: np.ndarray) -> jax.Array:
        """Starts one step from its packed batch. Every process of an engine calls it with the same arguments.

        Args:
            bucket: Bucket of the step.
            packed_RX: The packed batch of each data rank.
            moves: Page moves of each data rank.
            fills_FRX: Fills of slots; see ``batch.Batch``.

        Returns:
            The sampled token ids ``[ranks * B]``, which may not be computed yet.

        Raises:
            EngineDeadError: The step failed and the engine has several processes, whose pools cannot be reset together.
        """
        compiled = self._compiled.get(bucket)
        if compiled is None:
            if self._warm:
                self.num_late_compiles += 1
                logger.warning("compiling %s in the middle of serving: warm-up missed it", bucket)
            self.is_compiling = True
            try:
                compiled = self._compile(bucket)
            finally:
                self.is_compiling = False
        try:
            if any(moves):
                self._pool = self._mover.apply(self._pool, moves)
            self._carry = self._filler.apply(self._carry, fills_FRX)
            packed = self.layout.from_host(packed_RX, EACH_RANK)
            self._pool, self._carry, token_ids_RB = compiled(self._params, self._pool, self._carry, packed)
        except Exception as error:
            self._fail(error)
            raise
        return token_ids_RB

    def temp_bytes(self) -> dict[Bucket, int]:
        """Bytes of temporary device memory that each compiled bucket needs."""
        analyses = {bucket: compiled.memory_analysis() for bucket, compiled in self._compiled.items()}
        return {bucket: analysis.temp_size_in_bytes for bucket, analysis in analyses.items() if analysis is not None}

    def programs_sha256(self) -> str:
        """The SHA-256 of the text of all compiled steps; equal for two runners that run the same programs."""
        texts = [f"{bucket}\n{self._compiled[bucket].as_text()}" for bucket in sorted(self._compiled)]
        return hashlib.sha256("\n".join(texts).encode()).hexdigest()

    def _compile(self, bucket: Bucket) -> jax.stages.Compiled:
        lowered = lower_bucket(self._model, self._params, self._pool_plan, bucket, max_num_seqs=self.max_num_seqs, states=self._states)
        compiled = self._compile_program(lowered, bucket)
        self._compiled[bucket] = compiled
        return compiled

    def _measure_costs(self) -> RunnerCosts:
        """The times of a full prefill step and of page swaps, measured on a pool that holds nothing yet. Each is the fastest of three."""
        largest = max((bucket for bucket in self.buckets.all() if not bucket.decode_only), key=lambda bucket: bucket.num_tokens)
        bucket = self.buckets.narrow(largest, ())
        num_tokens = min(bucket.num_tokens, self.num_pages * self.page_size, bucket.table_width * self.page_size)
        packed = packed_batch(bucket, num_rows=1, query_len=num_tokens, context_len=num_tokens, page_size=self.page_size, num_ranks=self.num_ranks)
        pages = [(page, page) for page in range(min(PAGES_A_CALL, self.num_pages, self.num_host_pages))]
        moves = [PageMoves(swap_outs=tuple(pages), swap_ins=tuple(pages))] * self.num_ranks

        def prefill() -> None:
            self._pool, self._carry, token_ids_RB = self._compiled[bucket](self._params, self._pool, self._carry, packed)
            token_ids_RB.block_until_ready()

        def swap() -> None:
            self._pool = jax.block_until_ready(self._mover.apply(self._pool, moves))

        def fastest(run: Callable[[], None]) -> float:
            seconds: list[float] = []
            for _ in range(3):
                started = time.perf_counter()
                run()
                seconds.append(time.perf_counter() - started)
            return min(seconds)

        return RunnerCosts(token_s=fastest(prefill) / num_tokens, page_swap_s=fastest(swap) / (2 * len(pages)))

    def _fail(self, error: Exception) -> None:
        if self.layout.is_multi_process:
            raise EngineDeadError(f"a step failed on one of several processes: {error}") from error
        self._reset()

    def _reset(self) -> None:
        self._pool: Any = None  # Before the new one is made: there may be no room for two.
        self._pool = self._pool_plan.allocate()
        carry = abstract_carry(self.max_num_seqs, self.layout, self._states)
        shardings = jax.tree.map(lambda array: array.sharding, carry)
        self._carry = jax.jit(lambda: jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), carry), out_shardings=shardings)()

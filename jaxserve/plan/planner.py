"""Plans layouts: each step compiled in a process of its own, two at a time, and what the compilers say joined with the predictions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any, Literal

import jax.numpy as jnp

from jaxserve.child_process import rows_of
from jaxserve.config import Config
from jaxserve.dims import ceil_div
from jaxserve.engine.programs.plan import fit_model
from jaxserve.engine.programs.pool_plan import ACCELERATOR_MEMORY_FRACTION
from jaxserve.engine.step.execution import choose_execution
from jaxserve.errors import ConfigError
from jaxserve.kernels_pallas.proof import targets
from jaxserve.mesh_shape import MeshShape
from jaxserve.models.spec import ModelSpec
from jaxserve.plan.request import STEPS, LayoutRequest, Load, StepKind
from jaxserve.plan.roofline import Prediction, Split, predict, step_work, with_batch
from jaxserve.plan.topology import Topology
from jaxserve.plan.traffic import Collective, Traffic

MAX_PROCESSES = 2
"""A compile takes one to two cores and gigabytes."""
TIME_LIMIT_S = 900.0
"""Of one compile."""

Status = Literal["fits", "too large", "refused", "failed"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What compiling one step gave.

    Args:
        compile_s: Lowering and compiling, in a process that shares the machine with another.
        temp_bytes: Device memory beyond arguments and results, as the compiler says.
        total_bytes: Arguments, results and temporaries together.
        traffic: What the compiled program moves.
        predicted: Its time, predicted.
        program_sha256: Of the compiled program's text.
    """

    compile_s: float
    temp_bytes: int
    total_bytes: int
    traffic: Traffic
    predicted: Prediction
    program_sha256: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Room:
    """What a device's memory holds beside the weights: the pool that an engine would make there, all data ranks together.

    Args:
        tokens: That the pool holds.
        sequences: Of the planned context.
        predicted: A decode step of all of them; ``None`` where not one fits.
    """

    tokens: int
    sequences: int
    predicted: Prediction | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutPlan:
    """One layout on one target.

    Args:
        target: The chips.
        mesh: The layout.
        status: ``fits``; ``too large`` for the memory; ``refused``: the model cannot be split so; ``failed``: the compiler gave up.
        reason: Of all but ``fits``, in the words of who said it.
        weight_bytes: On each device.
        kv_bytes: The pool that the load needs, on each device.
        steps: By kind; without those that did not compile.
        room: What remains; ``None`` unless it fits.
        attention: Implementation that the steps use; empty where none compiled.
    """

    target: Topology
    mesh: MeshShape
    status: Status
    reason: str = ""
    weight_bytes: int = 0
    kv_bytes: int = 0
    steps: Mapping[StepKind, StepPlan] = dataclasses.field(default_factory=dict[StepKind, StepPlan])
    room: Room | None = None
    attention: str = ""

    @property
    def fits(self) -> bool:
        return self.status == "fits"

    @property
    def temp_bytes(self) -> int | None:
        """Of the step that needs most; ``None`` where none compiled."""
        return max((step.temp_bytes for step in self.steps.values()), default=None)

    @property
    def missing_bytes(self) -> int:
        """By how much weights, pool and temporaries exceed a device's memory; 0 where they fit."""
        return max(0, self.weight_bytes + self.kv_bytes + (self.temp_bytes or 0) - self.target.chip.usable_bytes)

    @property
    def full_rate(self) -> float:
        """Tokens a second and chip, predicted, of decode steps with the memory full; 0 where nothing fits."""
        return self.room.predicted.tokens_per_s_per_chip if self.room is not None and self.room.predicted is not None else 0.0

    @property
    def compile_s(self) -> float:
        return sum(step.compile_s for step in self.steps.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """What is planned.

    Args:
        source: MODEL, as ``open_spec`` finds it.
        name: What to call it.
        spec: What it is.
        config: Dtypes, page size, sharding rules.
        settings: The words that ``config`` came from.
        load: What runs at once.
    """

    source: str
    name: str
    spec: ModelSpec
    config: Config
    settings: tuple[str, ...]
    load: Load

    def split(self, target: Topology, mesh: MeshShape) -> Split:
        """The model as one device holds it.

        Raises:
            ConfigError: It cannot be split so.
        """
        spec = fit_model(self.spec, self.config, mesh)
        kv_dtype = choose_execution(self.config, target.chip.platform).kv_dtype
        return Split(
            spec=spec, mesh=mesh, rules=self.config.sharding, weight_bytes=jnp.dtype(self.config.model.dtype).itemsize, kv_bytes=jnp.dtype(kv_dtype).itemsize
        )

    def pool_bytes(self, split: Split) -> int:
        """Of the pool that the load needs, on one device."""
        page_size = self.config.cache.page_size
        tokens = ceil_div(self.load.context, page_size) * page_size
        return self.load.sequences(split.mesh.data) * tokens * split.kv_token_bytes()


def plan_layouts(
    question: Question, layouts: Sequence[tuple[Topology, MeshShape]], *, progress: Callable[[str, int, int], None] | None = None
) -> list[LayoutPlan]:
    """Compiles every layout and predicts its steps.

    A layout whose weights and pool alone exceed the memory is compiled too, its decode step only: the compiler's word counts.

    Args:
        question: What is planned.
        layouts: Topology and mesh of each; the order of the result.
        progress: Told how many steps are done, of how many.

    Raises:
        ConfigError: A target's compiler is not installed.
    """
    for chip in dict.fromkeys(target.chip.name for target, _ in layouts):
        absent = targets.missing(chip)
        if absent is not None:
            raise ConfigError(f"cannot compile for {chip}: {absent}")
    splits: dict[int, Split] = {}
    plans: dict[int, LayoutPlan] = {}
    for index, (target, mesh) in enumerate(layouts):
        try:
            splits[index] = question.split(target, mesh)
        except ConfigError as error:
            plans[index] = LayoutPlan(target=target, mesh=mesh, status="refused", reason=str(error))

    def needs(index: int) -> int:
        return sum(splits[index].parameter_bytes().values()) + question.pool_bytes(splits[index])

    def is_hopeless(index: int) -> bool:
        return needs(index) > layouts[index][0].chip.usable_bytes

    # Those that fit first: their steps take longest.
    order = sorted(splits, key=lambda index: (is_hopeless(index), index))
    jobs: list[tuple[int, StepKind]] = [(index, step) for index in order for step in STEPS if step == "decode" or not is_hopeless(index)]
    rows: dict[int, dict[StepKind, dict[str, Any]]] = {index: {} for index in splits}
    with ThreadPoolExecutor(max_workers=MAX_PROCESSES) as executor:
        futures: dict[Future[dict[str, Any]], tuple[int, StepKind]] = {
            executor.submit(_compile, question, *layouts[index], step): (index, step) for index, step in jobs
        }
        try:
            for done, future in enumerate(as_completed(futures), start=1):
                index, step = futures[future]
                rows[index][step] = future.result()
                if progress is not None:
                    progress(f"compiled {len(layouts)} layouts" if done == len(jobs) else "compiling", done, len(jobs))
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise
    for index, split in splits.items():
        plans[index] = _join(question, layouts[index][0], split, rows[index])
    return [plans[index] for index in range(len(layouts))]


def _compile(question: Question, target: Topology, mesh: MeshShape, step: StepKind) -> dict[str, Any]:
    """All that the process of one step printed, as one mapping."""
    request = LayoutRequest(source=question.source, settings=question.settings, target=str(target), mesh=mesh, load=question.load, step=step)
    merged: dict[str, Any] = {}
    environment = targets.environment(target.chip.name)
    for row, failure in rows_of("jaxserve.plan.compile_layout", [request.to_json()], environment, time_limit_s=TIME_LIMIT_S):
        merged |= row if row is not None else {"error": failure, "kind": "failed"}
    return merged


def _join(question: Question, target: Topology, split: Split, rows: Mapping[StepKind, dict[str, Any]]) -> LayoutPlan:
    """One layout's plan from what its compiles printed."""
    steps: dict[StepKind, StepPlan] = {}
    arrays: dict[str, int] = {"weights": sum(split.parameter_bytes().values()), "kv": question.pool_bytes(split)}
    status: Status = "fits"
    reason = attention = ""
    for step in STEPS:
        row = rows.get(step)
        if row is None:
            continue
        arrays, attention = row.get("arrays", arrays), row.get("attention", attention)
        if "error" in row:
            status = "too large" if row["kind"] == "memory" else row["kind"]
            reason = f"{step} step: {row['error']}"
            break
        traffic = _traffic(row["traffic"])
        work = step_work(split, question.load, step, weight_copy_bytes=traffic.weight_copy_bytes, collectives=traffic.collectives)
        steps[step] = StepPlan(
            compile_s=row["compile_s"],
            temp_bytes=row["temp"],
            total_bytes=row["total"],
            traffic=traffic,
            predicted=_predict(question, target, split, work),
            program_sha256=row.get("program_sha256", ""),
        )
        usable = target.chip.usable_bytes
        if row["total"] > usable:
            status = "too large"
            reason = f"{step} step: the compiled program takes {row['total'] / 2**30:.2f} GiB of {usable / 2**30:.2f} GiB"
    plan = LayoutPlan(
        target=target, mesh=split.mesh, status=status, reason=reason, weight_bytes=arrays["weights"], kv_bytes=arrays["kv"], steps=steps, attention=attention
    )
    return dataclasses.replace(plan, room=_room(question, plan, split)) if plan.fits else plan


def _room(question: Question, plan: LayoutPlan, split: Split) -> Room:
    load, ranks, usable = question.load, plan.mesh.data, plan.target.chip.usable_bytes
    free = usable - plan.weight_bytes
    pool_bytes = min(ACCELERATOR_MEMORY_FRACTION * free, free - (plan.temp_bytes or 0))
    token_bytes = plan.kv_bytes / (question.pool_bytes(split) / split.kv_token_bytes())
    sequences = int(pool_bytes / token_bytes) // load.context
    if not sequences:
        return Room(tokens=int(pool_bytes / token_bytes) * ranks, sequences=0, predicted=None)
    full = dataclasses.replace(load, batch=sequences * ranks)
    traffic = plan.steps["decode"].traffic
    collectives = with_batch(traffic.collectives, full.rows(ranks) / load.rows(ranks))
    work = step_work(split, full, "decode", weight_copy_bytes=traffic.weight_copy_bytes, collectives=collectives)
    return Room(tokens=int(pool_bytes / token_bytes) * ranks, sequences=full.batch, predicted=_predict(question, plan.target, split, work))


def _predict(question: Question, target: Topology, split: Split, work: Any) -> Prediction:
    return predict(work, target.chip, num_chips=target.chips_of(split.mesh), dtype=question.config.model.dtype)


def _traffic(fields: dict[str, Any]) -> Traffic:
    lists: dict[str, Any] = {name: tuple(Collective(**item) for item in fields[name]) for name in ("collectives", "sometimes")}
    return Traffic(**(fields | lists))

"""What the proof harness needs of this op: its cases, its reference, what it refuses, what is checked for races and what is compiled."""

from __future__ import annotations

from jaxserve.kernels_pallas.proof.op import OpProof
from jaxserve.kernels_pallas.ragged_paged_attention.api import IMPLEMENTATIONS
from jaxserve.kernels_pallas.ragged_paged_attention.proof.combinations import CORE, MORE, QUICK, Combination, compile_combination, kernels_for
from jaxserve.kernels_pallas.ragged_paged_attention.proof.comparison import compare, compare_checked
from jaxserve.kernels_pallas.ragged_paged_attention.proof.refusals import REFUSALS
from jaxserve.kernels_pallas.ragged_paged_attention.shapes import CASES, Case

PROOF: OpProof[Case, Combination] = OpProof(
    name="ragged_paged_attention",
    implementations=tuple(name for name in IMPLEMENTATIONS if name != "reference"),
    quick_implementations=("pallas_gpu",),
    cases=CASES,
    refusal=lambda implementation, case: IMPLEMENTATIONS[implementation].refusal(case.problem()),
    compare=lambda implementation, case: compare(IMPLEMENTATIONS[implementation], case),
    refusals=REFUSALS,
    checked_implementation="pallas_tpu",
    checked_cases=tuple(case for case in CASES if case.is_small),
    quick_checked_cases=("decode_only", "mixed", "window_skips_pages", "page_8_bf16", "int8_scaled"),
    compare_checked=compare_checked,
    combinations={"quick": QUICK, "core": CORE, "all": CORE + MORE},
    compiled_implementation=kernels_for,
    compile=compile_combination,
)

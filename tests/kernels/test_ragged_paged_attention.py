"""Every implementation on every shared shape against the reference, in the fast interpreter where it is a kernel."""

import numpy as np
import pytest

from jaxserve.kernels_pallas.ragged_paged_attention.api import IMPLEMENTATIONS
from jaxserve.kernels_pallas.ragged_paged_attention.proof import comparison
from jaxserve.kernels_pallas.ragged_paged_attention.shapes import CASES, make_inputs

NAMES = [name for name in IMPLEMENTATIONS if name != "reference"]
FAST = {
    "decode_only", "long_among_short", "gqa_3", "head_dim_80", "head_dim_256", "llama_8b_decode", "page_128", "page_8_bf16", "window_soft_cap_sinks",
    "smollm2_mixed", "fp8_scaled", "int8_decode",
}  # fmt: skip
"""Beside the cases that share the edges' bucket, and so one program. The rest costs seconds of compiling each: ``--slow``, and ``jaxserve kernels check``."""


def parameter(case):
    shares_program = case.bucket is not None and case.pool_shape() == CASES[0].pool_shape() and not (case.sinks or case.soft_cap)
    marks = () if case.name in FAST or (shares_program and case.q_dtype == "float32" and case.heads == CASES[0].heads) else (pytest.mark.slow,)
    return pytest.param(case, id=case.name, marks=marks)


@pytest.mark.parametrize("case", [parameter(case) for case in CASES])
@pytest.mark.parametrize("name", NAMES)
def test_matches_the_reference(name, case):
    implementation = IMPLEMENTATIONS[name]
    found = comparison.compare(implementation, case)
    assert found.held, found


def test_the_list_is_long_and_its_names_are_unique():
    assert len({case.name for case in CASES}) == len(CASES) >= 40


def test_the_reference_agrees_with_numpy():
    case = next(case for case in CASES if case.name == "window_soft_cap_sinks")
    inputs = make_inputs(case)
    out, (k, v) = comparison.run(IMPLEMENTATIONS["reference"], case, inputs)
    pages = case.pool_shape().num_pages
    q = np.asarray(inputs.q_TNH, np.float64)
    for row, (new, length) in enumerate(zip(case.queries, case.contexts, strict=True)):
        table = inputs.batch.page_table_BM[row] + inputs.layer * pages
        keys, values = (np.asarray(array[table], np.float64).reshape(-1, *array.shape[2:])[:length] for array in (k, v))
        start = inputs.batch.query_starts_B1[row]
        for i in range(new):
            position = length - new + i
            seen = slice(max(position - case.window + 1, 0), position + 1)
            for head in range(case.heads[0]):
                kv_head = head // (case.heads[0] // case.heads[1])
                logits = keys[seen, kv_head] @ q[start + i, head] * inputs.scale
                logits = case.soft_cap * np.tanh(logits / case.soft_cap)
                weights = np.exp(np.append(logits, inputs.sinks_N[head]))
                want = weights[:-1] @ values[seen, kv_head] / weights.sum()
                np.testing.assert_allclose(out[start + i, head].astype(np.float64), want, rtol=2e-2, atol=2e-3)

"""Every family computes what transformers computes, all parameters random: against stored outputs, and live where torch is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jaxserve.models.model import build_model
from tests.models.cases import CASES, SEQUENCE_LENGTH, Case
from tests.models.runs import full_forward
from tests.models.seeded import checkpoint, checkpoint_digest, params_from, token_ids

FIXTURES = Path(__file__).parent / "fixtures"
TOLERANCE = 1e-4


def our_logits(case: Case) -> np.ndarray:
    model = build_model(case.spec, dtype="float32", layers="scan")
    return full_forward(model, params_from(model, checkpoint(case.spec)), token_ids(case.spec, SEQUENCE_LENGTH))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_match_stored_outputs_of_transformers(case: Case) -> None:
    with np.load(FIXTURES / f"{case.name}.npz", allow_pickle=False) as stored:
        assert json.loads(str(stored["config"])) == case.config, "write the fixtures anew: the case has changed"
        assert str(stored["weights"]) == checkpoint_digest(case.spec), "write the fixtures anew: the seeded weights have changed"
        assert np.array_equal(stored["token_ids"], token_ids(case.spec, SEQUENCE_LENGTH))
        np.testing.assert_allclose(our_logits(case)[stored["rows"]], stored["logits"], atol=TOLERANCE, rtol=0)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")  # torch's and transformers' own
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_match_transformers(case: Case) -> None:
    pytest.importorskip("torch", reason="torch has a CPU build for Python 3.11 only")
    from tests.models.reference import reference_logits

    np.testing.assert_allclose(our_logits(case), reference_logits(case), atol=TOLERANCE, rtol=0)


def test_cases_cover_what_is_claimed() -> None:
    specs = [case.spec for case in CASES]
    assert {spec.attention.head_dim for spec in specs} >= {64, 128, 256}
    assert {spec.tied for spec in specs} == {True, False}
    heads = {(kind.num_kv_heads == 1, kind.num_kv_heads == kind.num_heads) for kind in (spec.attention for spec in specs)}
    assert heads == {(True, False), (False, True), (False, False)}
    windows = [layer.window for spec in specs for layer in spec.layers if layer.window is not None]
    assert windows and max(windows) < SEQUENCE_LENGTH // 2
    assert {spec.family for spec in specs} == {"llama", "mistral", "qwen2", "qwen3", "gemma3"}

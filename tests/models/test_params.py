"""The declaration of parameters: checkpoint tensors fill each parameter exactly once, in order."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.models.param_spec import ParamSpec
from jaxserve.models.params import build_params, param_specs
from tests.models.cases import CASES, Case


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_pieces_cover_every_parameter_exactly_once(case: Case) -> None:
    names: list[str] = []
    for path, param in param_specs(case.spec).items():
        assert len(param.axes) == len(param.shape)
        assert param.per_layer == path.startswith("layers.") == all("{layer}" in piece.name for piece in param.pieces)
        filled = np.zeros(param.shape, np.int32)
        for piece in param.pieces:
            target = filled[piece.into]
            assert target.size == np.prod(piece.shape), piece.name
            target += 1
            names.append(piece.name)
        assert (filled == 1).all(), path
    assert len(names) == len(set(names))


def test_leading_rows_of_a_tensor_are_leading_rows_of_its_place() -> None:
    """So that loaders may fill a parameter by row blocks."""
    spec = next(case.spec for case in CASES if case.name == "llama3_gqa_tied")
    for param in param_specs(spec).values():
        for piece in param.pieces:
            values = np.zeros(param.shape, np.int64)
            values[piece.into] = np.arange(np.prod(piece.shape)).reshape(values[piece.into].shape)
            flat = values[piece.into].reshape(piece.shape)
            assert np.array_equal(flat.ravel(), np.arange(flat.size))


def test_build_params_gives_each_form_its_layer_indices() -> None:
    spec = CASES[0].spec
    calls: list[tuple[str, int | None]] = []

    def make(path: str, param: ParamSpec, layer: int | None) -> str:
        calls.append((path, layer))
        return path

    stacked = build_params(spec, "scan", make)
    (layers,) = stacked["layers"]
    assert layers["qkv"] == {"values": "layers.qkv"} and {layer for _, layer in calls} == {None}
    calls.clear()
    unrolled = build_params(spec, "unroll", make)
    assert len(unrolled["layers"]) == spec.num_layers
    assert {layer for path, layer in calls if path.startswith("layers.")} == set(range(spec.num_layers))
    assert unrolled["embed"] == {"values": "embed"} and "head" in unrolled

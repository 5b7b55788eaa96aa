"""The engine on layers in groups: pages, steps and sampling do not notice how layers are grouped."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import pytest

from jaxserve.mesh_shape import MeshShape
from jaxserve.models.spec import LayerGroup
from jaxserve.request import SamplingParams
from tests.engine.tiny import run, tiny_engine, tiny_spec


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
@pytest.mark.parametrize(("layers", "mesh"), [("scan", MeshShape()), ("unroll", MeshShape()), ("scan", MeshShape(2, 2))], ids=str)
def test_tokens_do_not_depend_on_the_grouping(layers: Literal["scan", "unroll"], mesh: MeshShape) -> None:
    """Parameters do not either, so three layers as one group give the tokens of one layer and then a unit of two."""
    spec = tiny_spec(vocab_size=320)
    (group,) = spec.groups
    pair = LayerGroup(unit=group.unit * 2, layers=group.layers[1:])
    regrouped = dataclasses.replace(spec, groups=(dataclasses.replace(group, layers=group.layers[:1]), pair))
    greedy, drawn = (SamplingParams(max_tokens=12, temperature=temperature, seed=4, ignore_eos=True) for temperature in (0.0, 1.0))
    requests = [(list(range(5, 25)), greedy), ([7, 3], drawn)]
    plain, grouped = (run(tiny_engine(spec=one, layers=layers, mesh=mesh), requests) for one in (spec, regrouped))
    assert grouped == plain and all(len(tokens) == 12 for tokens in plain)

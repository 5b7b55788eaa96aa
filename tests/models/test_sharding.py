"""Which models can be split over which meshes, and what is said about those that cannot."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jaxserve.config import ShardingConfig
from jaxserve.errors import ConfigError
from jaxserve.mesh_shape import MeshShape
from jaxserve.models.loading.specs import open_spec
from jaxserve.models.sharding import check_layout, fit_kv_heads
from jaxserve.models.spec import ModelSpec
from jaxserve.sharding_rules import ShardingRules

RULES = ShardingConfig()


def fit(name: str, data: int, model: int, *, replicate: bool = False, rules: ShardingConfig = RULES, **changes: Any) -> ModelSpec:
    """The checks in the order in which an engine makes them."""
    spec = dataclasses.replace(open_spec(name)[1], **changes)
    on_mesh = ShardingRules(rules, MeshShape(data, model))
    fitted = fit_kv_heads(spec, on_mesh, replicate=replicate)
    check_layout(fitted, on_mesh)
    return fitted


@pytest.mark.parametrize(
    ("name", "meshes"),
    [
        ("smollm2-135m", [(1, 1), (1, 3), (3, 1), (2, 3), (8, 1)]),
        ("llama-3.1-70b", [(1, 8), (2, 4), (4, 2), (8, 1)]),
        ("qwen2.5-7b", [(1, 4), (7, 2)]),
        ("gemma3-27b", [(1, 16), (1, 8)]),
    ],
)
def test_what_fits_is_left_as_it_is(name: str, meshes: list[tuple[int, int]]) -> None:
    for data, model in meshes:
        assert fit(name, data, model) == open_spec(name)[1]


def test_kv_heads_are_repeated_where_that_is_allowed_and_comes_out_even() -> None:
    fitted = fit("llama-3.1-8b", 1, 32, replicate=True)
    assert (fitted.attention.num_kv_heads, fitted.attention.kv_repeat, fitted.attention.group_size) == (32, 4, 1)
    assert fit("llama-3.1-8b", 1, 8, replicate=True).attention.kv_repeat == 1


def test_heads_that_are_not_split_need_no_repeating() -> None:
    rules = ShardingConfig(kv_heads=None)
    assert fit("llama-3.1-8b", 1, 16, rules=rules).attention.kv_repeat == 1


@pytest.mark.parametrize(
    ("name", "mesh", "replicate", "message"),
    [
        (
            "llama-3.1-8b", (1, 16), False,
            ("mesh data=1,model=16: 8 KV heads are fewer than 16 model ranks (sharding.kv_heads); mesh.replicate_kv_heads=true holds each on 2 ranks, "
            "at 2 times the memory of keys and values, or use model=8"),
        ),
        (
            "qwen2.5-7b", (1, 8), True,
            ("mesh data=1,model=8: 28 heads on 4 KV heads cannot be split over 8 model ranks (sharding.kv_heads), not even with KV heads repeated; "
            "the nearest that fit: model=4"),
        ),
        (  # Repeating the heads would not help: 9 ranks do not divide the vocabulary either.
            "smollm2-135m", (1, 9), False,
            "mesh data=1,model=9: the vocabulary is 49152 and does not divide over model=9 (sharding.vocab splits embed); the nearest that fit: model=3",
        ),
        (
            "smollm2-135m", (1, 2), False,
            ("mesh data=1,model=2: the number of KV heads is 3 and does not divide over model=2 (sharding.kv_heads splits layers.qkv); "
            "the nearest that fit: model=1 or model=3"),
        ),
        (
            "llama-3.1-8b", (2, 12), True,
            ("mesh data=2,model=12: 32 heads on 8 KV heads cannot be split over 12 model ranks (sharding.kv_heads), not even with KV heads repeated; "
            "the nearest that fit: model=8 or model=16 with mesh.replicate_kv_heads=true"),
        ),
    ],
)  # fmt: skip
def test_misfits_say_what_and_offer_the_nearest(name: str, mesh: tuple[int, int], replicate: bool, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fit(name, *mesh, replicate=replicate)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("rules", "mesh", "message"),
    [
        (
            ShardingConfig(vocab=None, kv_heads=None), (1, 6),
            "the MLP width is 14336 and does not divide over model=6 (sharding.mlp splits layers.gate_up); the nearest that fit: model=4 or model=7",
        ),
        (
            ShardingConfig(vocab=None, kv_heads=None, mlp=None, width=("model",)), (1, 5),
            "the width is 4096 and does not divide over model=5 (sharding.width splits embed); the nearest that fit: model=4 or model=8",
        ),
        (
            ShardingConfig(mlp=("data", "model")), (3, 2),
            ("the MLP width is 14336 and does not divide over data=3 x model=2 (sharding.mlp splits layers.gate_up); no number of model ranks fits; "
            "change the rule or the other axis"),
        ),
        (
            ShardingConfig(mlp=("data",)), (3, 1),
            "the MLP width is 14336 and does not divide over data=3 (sharding.mlp splits layers.gate_up); the nearest that fit: data=2 or data=4",
        ),
    ],
)  # fmt: skip
def test_the_rules_at_hand_decide_what_fits(rules: ShardingConfig, mesh: tuple[int, int], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fit("llama-3.1-8b", *mesh, rules=rules)
    assert str(caught.value) == f"mesh {MeshShape(*mesh)}: {message}"


@pytest.mark.parametrize(
    ("rules", "both", "mesh"),
    [
        (ShardingConfig(width=("model",)), "sharding.vocab and sharding.width both split embed [128256, 4096] over the mesh axis 'model'", (1, 1)),
        (
            ShardingConfig(mlp=("model", "data"), width=("data",)),
            "sharding.mlp and sharding.width both split layers.gate_up [2, 14336, 4096] over the mesh axis 'data'",
            (2, 4),
        ),
    ],
)
def test_an_array_is_split_once_over_an_axis(rules: ShardingConfig, both: str, mesh: tuple[int, int]) -> None:
    """Also on a mesh where it would do no harm: the rule is wrong, not the mesh."""
    with pytest.raises(ConfigError) as caught:
        fit("llama-3.1-8b", *mesh, rules=rules)
    assert str(caught.value).startswith(both)

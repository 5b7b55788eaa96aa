"""A weight is applied as its declaration says, whatever the number of its axes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.models.param_spec import ParamSpec, whole
from jaxserve.models.weight import Weight, bind

RNG = np.random.default_rng(0)


def declared(shape: tuple[int, ...], axes: tuple[str | None, ...], num_in_axes: int) -> ParamSpec:
    return ParamSpec(shape=shape, axes=axes, init="normal", pieces=whole("w", shape), num_in_axes=num_in_axes)


@pytest.mark.parametrize(
    ("shape", "axes", "num_in_axes", "keeps_axes"),
    [
        ((6, 5), ("mlp", "width"), 1, False),
        ((2, 3, 4, 5), ("kv_heads", None, None, "width"), 1, False),
        ((5, 2, 3), ("width", "kv_heads", None), 2, False),
        ((2, 6, 5), (None, "mlp", "width"), 1, True),
    ],
    ids=["matrix", "heads out", "heads in", "halves"],
)
@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_apply_is_a_product(shape: tuple[int, ...], axes: tuple[str | None, ...], num_in_axes: int, keeps_axes: bool, is_split: bool, dtype: jnp.dtype) -> None:
    """Only outputs behind the first axis that devices share keep their axes, and those only where there are several devices."""
    out_shape, in_size = shape[:-num_in_axes], int(np.prod(shape[-num_in_axes:]))
    values, bias = (RNG.standard_normal(size).astype(np.float32) for size in (shape, out_shape))
    weight = Weight({"values": jnp.asarray(values)}, declared(shape, axes, num_in_axes), is_split=is_split)
    x_TI = RNG.standard_normal((3, in_size)).astype(np.float32)
    product = x_TI @ values.reshape(-1, in_size).T
    got = weight.apply(jnp.asarray(x_TI), nnx.Param(jnp.asarray(bias)), dtype=dtype)
    assert got.dtype == jnp.float32
    assert got.shape == ((3, *out_shape) if keeps_axes and is_split else (3, int(np.prod(out_shape))))
    rounded = np.asarray(jnp.asarray(product).astype(dtype).astype(jnp.float32))  # before the bias, which is not rounded
    np.testing.assert_allclose(np.asarray(got).reshape(3, -1), rounded + bias.reshape(-1), atol=1e-5 if dtype == jnp.float32 else 0.05)


def test_bind_tells_weights_from_vectors() -> None:
    table = declared((7, 5), ("vocab", "width"), 1)
    norm = ParamSpec(shape=(5,), axes=(None,), init="ones", pieces=whole("n", (5,)))
    values = jnp.arange(35.0).reshape(7, 5)
    bound = bind({"embed": {"values": values}, "norm": jnp.ones(5)}, {"embed": table, "norm": norm}, is_split=False)
    embed = bound["embed"]
    assert isinstance(embed, Weight) and isinstance(bound["norm"], nnx.Param)
    np.testing.assert_array_equal(embed.rows(jnp.asarray([6, 0, 9])), values[jnp.asarray([6, 0, 6])])


def test_a_declaration_counts_itself() -> None:
    qkv = declared((4, 3, 16, 64), ("kv_heads", None, None, "width"), 1)
    halved = {"kv_heads": 2, "width": 1}.__getitem__
    assert (qkv.fan_in, qkv.num_values(), qkv.flops(), qkv.row_values()) == (64, 12288, 24576.0, 64 + 192)
    assert (qkv.part(halved), qkv.num_values(halved), qkv.row_values(halved)) == ((2, 3, 16, 64), 6144, 64 + 96)
    assert (qkv.array_shape(None), qkv.array_shape(2), list(qkv.indices)) == ((4, 3, 16, 64), (4, 3, 16, 64), [0])

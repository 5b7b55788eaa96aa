"""The weight of a product: how it is stored and applied. Code that multiplies with a weight calls :meth:`Weight.apply` and need not know how it is stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.models.param_spec import ParamSpec


class Weight(nnx.Module):
    """A weight, stored as its values in the model's dtype.

    Args:
        stored: The arrays of one layer's weight, by the names that ``build_params`` gives.
        param: The declaration of the weight.
        is_split: Whether parameters are split over several devices.
    """

    values: nnx.Param[Array]

    def __init__(self, stored: Mapping[str, Array], param: ParamSpec, *, is_split: bool) -> None:
        self.values = nnx.Param(stored["values"])
        self.num_in_axes = param.num_in_axes
        # An output axis behind the first may be split over devices, and flattening would mix it with those in front of it.
        self.keeps_axes = is_split and any(param.axes[1 : -param.num_in_axes])

    def apply(self, x_TI: Float[Array, "T I"], bias: nnx.Param[Array] | None = None, *, dtype: Any = jnp.float32) -> Float32[Array, "T *out"]:
        """The product ``x @ weight.T + bias`` in float32.

        The output axes are flattened to one, unless ``keeps_axes`` is set. Flattening costs nothing; for a product that keeps the axes, XLA:CPU would transpose
        the whole weight.

        Args:
            x_TI: Rows, with the weight's input axes flattened to one.
            bias: Bias with the weight's output axes; ``None`` for none.
            dtype: Dtype to which the product is rounded before the bias is added. If the inputs are split over devices, their parts are summed in this dtype.
        """
        values = self.values[...]
        out = values.shape[: values.ndim - self.num_in_axes] if self.keeps_axes else (-1,)
        values = values.reshape(*out, x_TI.shape[1])
        y = jax.lax.dot_general(x_TI, values, (((1,), (values.ndim - 1,)), ((), ())), preferred_element_type=dtype).astype(jnp.float32)
        return y if bias is None else y + bias[...].reshape(out).astype(jnp.float32)

    def rows(self, index_T: Int32[Array, "T"]) -> Float[Array, "T I"]:
        """The rows of a table ``[V, I]`` at some indices, in the model's dtype. An index out of range is clipped."""
        return jnp.take(self.values[...], index_T, axis=0, mode="clip")


def bind(values: Mapping[str, Any], declared: Mapping[str, ParamSpec], *, is_split: bool) -> dict[str, Weight | nnx.Param[Array]]:
    """The parameters in the form with which modules compute: a :class:`Weight` for each weight, a ``Param`` for each vector.

    Args:
        values: The parameters of one layer by name, from ``build_params``.
        declared: Their declarations by name.
        is_split: Whether parameters are split over several devices.
    """
    return {name: Weight(stored, declared[name], is_split=is_split) if declared[name].is_weight else nnx.Param(stored) for name, stored in values.items()}

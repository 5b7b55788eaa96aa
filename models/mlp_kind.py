"""The kinds of MLP, described by plain numbers: the parameters of a layer. The computation is in ``models/layers.py``. No arrays here."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxserve.models.param_spec import FULL, ParamSpec, Piece, vector, whole

_NAME = "model.layers.{layer}.mlp."


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedMlp:
    """The gated MLP ``down(activation(gate(x)) * up(x))``.

    Args:
        width: F, the width of the MLP.
        activation: Activation function of the gate.
        bias: Whether the three projections have biases.
    """

    width: int
    activation: Literal["silu", "gelu_tanh"]
    bias: bool = False

    def params(self, width: int) -> dict[str, ParamSpec]:
        """The parameters of a layer, by name, for a residual stream of width D, here ``width``."""
        D, F = width, self.width
        halves = {"gate": slice(0, 1), "up": slice(1, 2)}

        def gate_up(kind: str, *inner: int) -> tuple[Piece, ...]:
            return tuple(
                Piece(name=f"{_NAME}{x}_proj.{kind}", shape=(F, *inner), into=(index, FULL, *[FULL] * len(inner))) for x, index in halves.items()
            )  # fmt: skip

        params = {
            "gate_up": ParamSpec(shape=(2, F, D), axes=(None, "mlp", "width"), init="normal", pieces=gate_up("weight", D), num_in_axes=1),
            "down": ParamSpec(shape=(D, F), axes=("width", "mlp"), init="normal", pieces=whole(_NAME + "down_proj.weight", (D, F)), num_in_axes=1),
        }
        if self.bias:
            params["gate_up_bias"] = ParamSpec(shape=(2, F), axes=(None, "mlp"), init="zeros", pieces=gate_up("bias"))
            params["down_bias"] = vector(_NAME + "down_proj.bias", D, "zeros")
        return params


MlpKind = GatedMlp
"""Every kind of MLP. A new kind is added here with ``|``, and in ``models.layers.MLP_BLOCKS``."""

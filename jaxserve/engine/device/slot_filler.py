"""The filling of the slots' wide state, before a step, with tokens that no step will run; see ``step.slot_state``."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxserve.engine.step.batch import FILL_TOKENS
from jaxserve.engine.step.function import Carry, abstract_carry
from jaxserve.engine.step.slot_state import SlotState, States, fill
from jaxserve.mesh import EACH_RANK, Layout


class SlotFiller:
    """Fills the wide state of all data ranks with one program. If there is no wide state, it compiles and fills nothing.

    Args:
        kinds: The kinds of wide state.
        layout: The mesh and the sharding rules.
        max_num_seqs: Sequence slots of a data rank.
    """

    def __init__(self, kinds: Sequence[SlotState], layout: Layout, max_num_seqs: int) -> None:
        self._kinds = kinds
        self._layout = layout
        self._max_num_seqs = max_num_seqs

    def warmup(self) -> None:
        """Compiles the program that ``apply`` runs."""
        if self._kinds:
            _ = self._program

    def apply(self, carry: Carry, fills_FRX: np.ndarray) -> Carry:
        """The carry after the fills of a batch, run one after the other. The states of ``carry`` are donated."""
        for fill_RX in fills_FRX:
            carry = carry._replace(states=self._program(carry.states, self._layout.from_host(fill_RX, EACH_RANK)))
        return carry

    @functools.cached_property
    def _program(self) -> jax.stages.Compiled:
        def fill_one(states: States, fill_1X: Array) -> States:
            return fill(states, self._kinds, fill_1X[0])

        layout = self._layout
        states = abstract_carry(self._max_num_seqs, layout, self._kinds).states
        packed = jax.ShapeDtypeStruct((layout.shape.data, 2 + FILL_TOKENS), jnp.int32, sharding=layout.sharding(EACH_RANK))
        with layout.tracing():
            return jax.jit(layout.map_devices(fill_one, EACH_RANK, EACH_RANK), donate_argnums=0).lower(states, packed).compile()

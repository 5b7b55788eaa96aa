"""Wide state of sequence slots: arrays on the device with several numbers for each slot, and how they follow the tokens of the slot's owner. Pure functions.

A slot *begins* when it gets a new owner, which may be a sequence that comes back after a preemption: the state that the last owner left is reset. The
owner's tokens that no step will run, because their keys and values are cached or come from host memory, are then *filled* in from the host. Afterwards
every step adds the tokens that it runs. Nothing happens when the owner leaves; the slot is reset when it begins again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32, Shaped

from jaxserve.engine.step.batch import NO_TOKEN
from jaxserve.engine.step.rows import OFF
from jaxserve.kernels_pallas.target import current_target


class SlotTokens(NamedTuple):
    """New tokens of the sequences that own slots, in order for each sequence."""

    token_ids_N: Int32[Array, "N"]
    positions_N: Int32[Array, "N"]
    """Position of each token in its sequence."""
    slots_N: Int32[Array, "N"]
    """Slot of each token; out of range for padding."""


@dataclasses.dataclass(frozen=True)
class SlotState:
    """One kind of wide state. When a step samples a row's next token, the state includes all tokens of the row, also those that this step runs.

    Args:
        name: Name, unique among the kinds.
        shape: Shape of one slot's state.
        dtype: Dtype of its elements.
        begin: Value of every element before the first token.
        update: Function ``update(state, tokens)`` that returns the state ``[slots, *shape]`` of a rank's slots after some tokens. The tokens of a slot may come
            in portions of any size. Every model rank computes the same.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    begin: float
    update: Callable[[Shaped[Array, "slots ..."], SlotTokens], Shaped[Array, "slots ..."]]


States = Mapping[str, Array]
"""The state of all slots, ``[slots, *shape]``, by the name of its kind."""


def advance(states: States, kinds: Sequence[SlotState], slot_B: Int32[Array, "B"], begins_B: Bool[Array, "B"], tokens: SlotTokens) -> dict[str, Array]:
    """The states after some tokens. The states of slots that begin are reset first.

    Args:
        states: The states before.
        kinds: The kinds of state.
        slot_B: Slots of the rows; out of range for an empty row.
        begins_B: Whether each of these slots begins.
        tokens: The new tokens.
    """
    return {kind.name: kind.update(_reset(states[kind.name], kind, slot_B, begins_B), tokens) for kind in kinds}


def fill(states: States, kinds: Sequence[SlotState], fill_X: Int32[Array, "X"]) -> dict[str, Array]:
    """The states after a rank's fill, whose form ``batch.Batch.fills`` describes."""
    slot, first, token_ids_N = fill_X[0], fill_X[1], fill_X[2:]
    is_token_N = token_ids_N != NO_TOKEN
    tokens = SlotTokens(jnp.where(is_token_N, token_ids_N, 0), first + jnp.arange(len(token_ids_N)), jnp.where(is_token_N, slot, OFF))
    return advance(states, kinds, slot[None], (first == 0)[None], tokens)


def _reset(state: Array, kind: SlotState, slot_B: Array, begins_B: Array) -> Array:
    def reset() -> Array:
        return state.at[jnp.where(begins_B, slot_B, OFF)].set(jnp.asarray(kind.begin, state.dtype), mode="drop")

    if current_target().platform == "gpu":  # a conditional makes its host wait
        return reset()
    return lax.cond(jnp.any(begins_B), reset, lambda: state)

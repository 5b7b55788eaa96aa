"""Wide state of sequence slots that lives on the device: how it is declared, and how it begins and follows the tokens of the slot's owner. Pure functions.

A slot *begins* when it has a new owner, also one that comes back after a preemption, from host memory or from another rank: whatever the last owner left is
reset. Tokens that the owner has and no step will run, because their keys and values are cached or come from host memory, are *filled* from the host. Then
every step adds the tokens that it runs. Nothing happens when a slot *ends*: it is reset when it begins again.
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
    """Tokens that their slots' sequences have gained, each sequence's in order."""

    token_ids_N: Int32[Array, "N"]
    positions_N: Int32[Array, "N"]
    """Position of each in its sequence."""
    slots_N: Int32[Array, "N"]
    """Out of range for padding."""


@dataclasses.dataclass(frozen=True)
class SlotState:
    """One kind of state. A step has seen all tokens of a row, those that it runs included, when it chooses the next one.

    Args:
        name: Unique.
        shape: Of one slot's state.
        dtype: Its type.
        begin: Value of every element before the first token.
        update: ``update(state, tokens)``: the state ``[slots, *shape]`` of a rank's slots after some tokens. Tokens of a slot come in any portions. Every
            model rank does the same.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    begin: float
    update: Callable[[Shaped[Array, "slots ..."], SlotTokens], Shaped[Array, "slots ..."]]


States = Mapping[str, Array]
"""Of each kind of state by name, ``[slots, *shape]``."""


def advance(states: States, kinds: Sequence[SlotState], slot_B: Int32[Array, "B"], begins_B: Bool[Array, "B"], tokens: SlotTokens) -> dict[str, Array]:
    """The states after some tokens; those of slots that begin are reset before.

    Args:
        states: Before.
        kinds: What there is.
        slot_B: Slots, out of range for none.
        begins_B: Which of these begin.
        tokens: What their sequences gain.
    """
    return {kind.name: kind.update(_reset(states[kind.name], kind, slot_B, begins_B), tokens) for kind in kinds}


def fill(states: States, kinds: Sequence[SlotState], fill_X: Int32[Array, "X"]) -> dict[str, Array]:
    """The states after a rank's fill; see ``batch.Batch``."""
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

"""Pools of states [P, ...]: rows of a batch read and write the slots that they name; -1 names none.

A serving engine keeps the states of its running sequences in one array and hands the ops the slots of a step. What is
written is written in place where the caller donates the pool, and no other slot is touched.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Integer, Shaped

IDLE = -1


def named_slots(state_slots: Integer[Array, " B"], num_slots: int) -> Int[Array, " B"]:
    """The slots as int32, IDLE in the place of what is no slot of the pool."""
    if state_slots.dtype.itemsize < 4:
        # num_slots may not fit in a narrower one
        state_slots = state_slots.astype(jnp.int32)
    exists = (state_slots >= 0) & (state_slots < num_slots)
    return jnp.where(exists, state_slots.astype(jnp.int32), IDLE)


def read_slots(
    pool: Shaped[Array, "P *state"],
    slots: Int[Array, " B"],
) -> Shaped[Array, "B *state"]:
    """pool[slots[b]] in row b; zeros in an idle row."""
    named = (slots >= 0).reshape(slots.shape + (1,) * (pool.ndim - 1))
    return jnp.where(named, pool[jnp.maximum(slots, 0)], 0)


def write_slots(
    pool: Shaped[Array, "P *state"],
    slots: Int[Array, " B"],
    rows: Shaped[Array, "B *state"],
) -> Shaped[Array, "P *state"]:
    """The pool with row b in slot slots[b]; an idle row is written nowhere."""
    nowhere = pool.shape[0]
    target = jnp.where(slots >= 0, slots, nowhere)
    return pool.at[target].set(rows.astype(pool.dtype), mode="drop")


def accept(
    pool: Float[Array, "P HV K V"],
    states: Float[Array, "B T HV K V"],
    state_slots: Integer[Array, " B"],
    num_accepted: Integer[Array, " B"],
) -> Float[Array, "P HV K V"]:
    """Puts back into a pool the states behind the accepted tokens of a draft.

        pool[state_slots[b]] = states[b, num_accepted[b] - 1]          where num_accepted[b] > 0

    A call of `jfla.recurrent_*` with `state_slots` and `return_states` leaves the pool as it is and returns the state
    after every drafted token; this writes the one that decoding goes on from. Donate the pool, and it is written in
    place.

    **Arguments:**

    - `pool`: `[P, HV, K, V]`, float32 or bfloat16.
    - `states`: `[B, T, HV, K, V]`, what `return_states` gave.
    - `state_slots`: `[B]` integers, those of that call; an idle row (-1) is written nowhere.
    - `num_accepted`: `[B]` integers in 0 .. T; with 0 the slot keeps the state from before the draft.

    **Returns:** the pool, in its dtype.

    **Raises:** `ValueError` for shapes that do not fit, and, where the values are known, for slots outside of
    -1 .. P - 1, a slot that two rows name, or a number outside of 0 .. T. Under a transformation such a row is written
    nowhere, or with the nearest number.

    >>> import jax.numpy as jnp
    >>> pool, states = jnp.zeros((4, 1, 1, 1)), jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(2, 2, 1, 1, 1)
    >>> print(accept(pool, states, jnp.array([2, 0]), jnp.array([1, 2]))[:, 0, 0, 0])
    [4. 0. 1. 0.]
    """
    state_slots = jnp.asarray(state_slots)
    num_accepted = jnp.asarray(num_accepted)
    if states.ndim != pool.ndim + 1 or states.shape[2:] != pool.shape[1:]:
        raise ValueError(
            f"states must be [B, T, ...] with the pool's {list(pool.shape[1:])}, got {list(states.shape)}"
        )
    batch, time = states.shape[:2]
    for name, x in (("state_slots", state_slots), ("num_accepted", num_accepted)):
        if x.shape != (batch,) or not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(
                f"{name} must be integers [B] = [{batch}], got {x.dtype}{list(x.shape)}"
            )
    check_slots(state_slots, pool.shape[0])
    if is_known(num_accepted):
        for n in np.asarray(num_accepted):
            if not 0 <= n <= time:
                raise ValueError(f"num_accepted must be in 0 .. T = {time}, got {n}")
    slots = jnp.where(num_accepted > 0, named_slots(state_slots, pool.shape[0]), IDLE)
    last = jnp.clip(num_accepted.astype(jnp.int32) - 1, 0, time - 1)
    pick = last.reshape((batch,) + (1,) * (states.ndim - 1))
    rows = jnp.take_along_axis(states, pick, axis=1)[:, 0]
    return write_slots(pool, slots, rows)


def check_slots(state_slots: Array, num_slots: int) -> None:
    """Refuses slots that there are not, or that two rows name, where the values are known."""
    if not is_known(state_slots):
        return
    slots = np.asarray(state_slots).astype(np.int64)
    outside = (slots < IDLE) | (slots >= num_slots)
    if outside.any():
        raise ValueError(
            f"state_slots must be in 0 .. P - 1 = {num_slots - 1}, or -1, got {slots[outside][0]}"
        )
    named, rows = np.unique(slots[slots >= 0], return_counts=True)
    if (rows > 1).any():
        raise ValueError(
            f"state_slots must name a slot at most once, got {named[rows > 1][0]} twice"
        )


def is_known(x: Array) -> bool:
    """Whether an array has values that can be looked at here: not under a transformation, nor merely described."""
    return not isinstance(x, Tracer) and getattr(x, "is_fully_addressable", False)


def row_tokens(
    slots: Int[Array, " B"],
    segment_ids: Int[Array, "B T"] | None,
    time: int,
) -> Int[Array, "B T"]:
    """1 on the tokens of a row, 0 on its padding and everywhere in an idle one."""
    named = (slots >= 0).astype(jnp.int32)[:, None]
    if segment_ids is None:
        return jnp.broadcast_to(named, (slots.shape[0], time))
    return lax.min(segment_ids, jnp.broadcast_to(named, segment_ids.shape))

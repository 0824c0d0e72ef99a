"""Kernels: the states from chunk to chunk, with the output or for the backward, and their cotangents in reverse.

    e = v - k_in S,    v_new = X_beta e,    o = q_in S + A_qk v_new,    S <- decay * S + k_out^T v_new

and with dS at a chunk's end

    dv_new = A_qk^T do + k_out dS,    dv = X_beta^T dv_new,    dS <- decay * dS + q_in^T do - k_in^T dv

Everything is transposed, [V, C] and [V, K]: see _walk.py.
"""

from collections.abc import Callable
from typing import Any

import jax

from jfla._types import CHUNK
from jfla.pallas._operands import K_IN, K_OUT, Q_IN, Operands, Pairs
from jfla.pallas._tile import BF16, F32, dot, dots, load, transposed, zeros
from jfla.pallas._walk import BLOCK, Emit, Pair, Tiles, Walk, WalkConfig, arrays, walk


def _written(values: jax.Array, known: jax.Array, x: Tiles) -> jax.Array:
    """v_new^T, what the chunk's tokens write; `known` is S^T k_in^T."""
    error = values.astype(F32) - x.decays.tokens(known, K_IN)
    return dot(zeros(BLOCK, CHUNK), (error.astype(BF16), transposed(x.inverse)))


def _outgoing(v_new: jax.Array, x: Tiles) -> jax.Array:
    return x.decays.tokens(v_new, K_OUT).astype(BF16)


def output_scan(
    op: Operands, pairs: Pairs, v: jax.Array, initial: jax.Array, config: WalkConfig
) -> tuple[jax.Array, jax.Array]:
    """o [B, T, HV, V] and the states after each part of time, transposed, [B, HV, P, V, K]."""

    def step(state: jax.Array, x: Tiles, emit: Emit) -> jax.Array:
        state16, zero, values = state.astype(BF16), zeros(BLOCK, CHUNK), load(transposed(x.values))
        known, read = dots((zero, (state16, transposed(x.k_in))), (zero, (state16, transposed(x.q_in))))
        v_new = _written(values, known, x)
        state, out = dots(
            (x.decays.state(state), (_outgoing(v_new, x), x.k_out)),
            (x.decays.tokens(read, Q_IN), (v_new.astype(BF16), transposed(x.a_qk))),
        )
        emit(0, out)
        return state

    def lead(state: jax.Array, x: Tiles, hand: Emit) -> jax.Array:
        state16, values = state.astype(BF16), load(transposed(x.values))
        hand(0, state16)
        v_new = _written(values, dot(zeros(BLOCK, CHUNK), (state16, transposed(x.k_in))), x)
        hand(1, v_new.astype(BF16))
        return dot(x.decays.state(state), (_outgoing(v_new, x), x.k_out))

    def follow(x: Tiles, taken: Callable[[int], Any], emit: Emit) -> None:
        read = dot(zeros(BLOCK, CHUNK), (taken(0), transposed(x.q_in)))
        emit(0, dot(x.decays.tokens(read, Q_IN), (taken(1), transposed(x.a_qk))))

    emits = (jax.ShapeDtypeStruct(v.shape, BF16),)
    alone = Walk(step, arrays(op, v, initial, *pairs), emits, pair=Pair(lead, follow))
    ((out, last),) = walk((alone,), config=config, name="jfla_output_scan")
    return out, last


def states_walk(op: Operands, pairs: Pairs, v: jax.Array, initial: jax.Array) -> Walk:
    """S^T at each chunk's start [B, HV, N, V, K] and v_new [B, T, HV, V]: what the backward reads of the forward."""

    def step(state: jax.Array, x: Tiles, emit: Emit) -> jax.Array:
        state16, values = state.astype(BF16), load(transposed(x.values))
        emit(0, state16)
        v_new = _written(values, dot(zeros(BLOCK, CHUNK), (state16, transposed(x.k_in))), x)
        emit(1, v_new)
        return dot(x.decays.state(state), (_outgoing(v_new, x), x.k_out))

    reads = arrays(op, v, initial, None, pairs.inverse, queries=False)
    return Walk(step, reads, _states_and_values(initial, v))


def adjoints_walk(op: Operands, pairs: Pairs, do: jax.Array, dfinal: jax.Array) -> Walk:
    """dS^T at each chunk's end [B, HV, N, V, K], dv [B, T, HV, V], and dS^T before the first chunk [B, HV, P, V, K]."""

    def step(dstate: jax.Array, x: Tiles, emit: Emit) -> jax.Array:
        dstate16 = dstate.astype(BF16)
        emit(0, dstate16)
        do = load(transposed(x.values))
        read, zero = x.decays.tokens(do.astype(F32), Q_IN).astype(BF16), zeros(BLOCK, CHUNK)
        ahead, dv_new, dstate = dots(
            (zero, (dstate16, transposed(x.k_out))), (zero, (do, x.a_qk)), (x.decays.state(dstate), (read, x.q_in))
        )
        dv_new = dv_new + x.decays.tokens(ahead, K_OUT)
        dv = dot(zero, (dv_new.astype(BF16), x.inverse))
        emit(1, dv)
        return dot(dstate, (x.decays.tokens(-dv, K_IN).astype(BF16), x.k_in))

    return Walk(step, arrays(op, do, dfinal, *pairs), _states_and_values(dfinal, do), reverse=True)


def backward_scans(
    op: Operands, pairs: Pairs, v: jax.Array, do: jax.Array, ends: tuple[jax.Array, jax.Array], config: WalkConfig
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """States and v_new, dS and dv, and dS before the first chunk. `ends`: the first states, and the last of dS."""
    initial, dfinal = ends
    walks = adjoints_walk(op, pairs, do, dfinal), states_walk(op, pairs, v, initial)
    (dends, dv, dfirst), (states, v_new, _) = walk(walks, config=config, name="jfla_backward_scans")
    return states, v_new, dends, dv, dfirst


def _states_and_values(initial: jax.Array, v: jax.Array) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    batch, heads, _, value_dim, key_dim = initial.shape
    states = jax.ShapeDtypeStruct((batch, heads, v.shape[1] // CHUNK, value_dim, key_dim), BF16)
    return states, jax.ShapeDtypeStruct(v.shape, BF16)

"""Kernels: the states from chunk to chunk, with the output or for the backward, and their cotangents in reverse.

    e = v - k_in S,    v_new = X_beta e,    o = q_in S + A_qk v_new,    S <- decay * S + k_out^T v_new

and with dS at a chunk's end

    dv_new = A_qk^T do + k_out dS,    dv = X_beta^T dv_new,    dS <- decay * dS + q_in^T do - k_in^T dv

Everything is transposed, [V, C] and [V, K]: see _walk.py.
"""

import jax

from jfla._types import CHUNK
from jfla.pallas._operands import K_IN, K_OUT, Q_IN, Operands, Pairs
from jfla.pallas._tile import BF16, F32, dot, dots, load, transposed, zeros
from jfla.pallas._walk import BLOCK, Emit, Reads, Tiles, WalkConfig, walk


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

    reads = Reads(True, True, pairs.a_qk, pairs.inverse, v)
    emits = (jax.ShapeDtypeStruct(v.shape, BF16),)
    out, last = walk(step, op, reads, initial, emits, config=config, reverse=False, name="jfla_output_scan")
    return out, last


def state_scan(
    op: Operands, pairs: Pairs, v: jax.Array, initial: jax.Array, config: WalkConfig
) -> tuple[jax.Array, jax.Array]:
    """S^T at each chunk's start [B, HV, N, V, K] and v_new [B, T, HV, V]: what the backward reads of the forward."""

    def step(state: jax.Array, x: Tiles, emit: Emit) -> jax.Array:
        state16, values = state.astype(BF16), load(transposed(x.values))
        emit(0, state16)
        v_new = _written(values, dot(zeros(BLOCK, CHUNK), (state16, transposed(x.k_in))), x)
        emit(1, v_new)
        return dot(x.decays.state(state), (_outgoing(v_new, x), x.k_out))

    reads = Reads(False, True, None, pairs.inverse, v)
    emits = (_states(initial, v), jax.ShapeDtypeStruct(v.shape, BF16))
    states, v_new, _ = walk(step, op, reads, initial, emits, config=config, reverse=False, name="jfla_state_scan")
    return states, v_new


def adjoint_scan(
    op: Operands, pairs: Pairs, do: jax.Array, dfinal: jax.Array, config: WalkConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
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

    reads = Reads(True, True, pairs.a_qk, pairs.inverse, do)
    emits = (_states(dfinal, do), jax.ShapeDtypeStruct(do.shape, BF16))
    dends, dv, dfirst = walk(step, op, reads, dfinal, emits, config=config, reverse=True, name="jfla_adjoint_scan")
    return dends, dv, dfirst


def _states(initial: jax.Array, v: jax.Array) -> jax.ShapeDtypeStruct:
    batch, heads, _, value_dim, key_dim = initial.shape
    return jax.ShapeDtypeStruct((batch, heads, v.shape[1] // CHUNK, value_dim, key_dim), BF16)

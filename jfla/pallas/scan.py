"""Kernels: the states from chunk to chunk, with the output or for the backward, and their cotangents in reverse.

    e = v - k_in S,    v_new = X_beta e,    o = q_in S + A_qk v_new,    S <- decay * S + k_out^T v_new

and with dS at a chunk's end

    dv_new = A_qk^T do + k_out dS,    dv = X_beta^T dv_new,    dS <- decay * dS + q_in^T do - k_in^T dv

Everything is transposed, [V, C] and [V, K]: see _walk.py.
"""

import jax

from jfla._types import CHUNK
from jfla.pallas._operands import K_IN, K_OUT, Q_IN, Operands, Pairs
from jfla.pallas._tile import BF16, F32, dot, load, transposed, zeros
from jfla.pallas._walk import BLOCK, Emit, Reads, Tiles, WalkConfig, walk


def _written(state16: jax.Array, x: Tiles) -> jax.Array:
    """v_new^T, what the chunk's tokens write."""
    known = x.decays.tokens(dot(zeros(BLOCK, CHUNK), (state16, transposed(x.k_in))), K_IN)
    error = load(transposed(x.values)).astype(F32) - known
    return dot(zeros(BLOCK, CHUNK), (error.astype(BF16), transposed(x.inverse)))


def _next_state(state: jax.Array, v_new: jax.Array, x: Tiles) -> jax.Array:
    return dot(x.decays.state(state), (x.decays.tokens(v_new, K_OUT).astype(BF16), x.k_out))


def output_scan(
    op: Operands, pairs: Pairs, v: jax.Array, initial: jax.Array, config: WalkConfig
) -> tuple[jax.Array, jax.Array]:
    """o [B, T, HV, V] and the states after each part of time, transposed, [B, HV, P, V, K]."""

    def step(state: jax.Array, x: Tiles, emit: Emit) -> jax.Array:
        state16 = state.astype(BF16)
        v_new = _written(state16, x)
        out = x.decays.tokens(dot(zeros(BLOCK, CHUNK), (state16, transposed(x.q_in))), Q_IN)
        out = dot(out, (v_new.astype(BF16), transposed(x.a_qk)))
        state = _next_state(state, v_new, x)
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
        state16 = state.astype(BF16)
        emit(0, state16)
        v_new = _written(state16, x)
        emit(1, v_new)
        return _next_state(state, v_new, x)

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
        dv_new = x.decays.tokens(dot(zeros(BLOCK, CHUNK), (dstate16, transposed(x.k_out))), K_OUT)
        dv_new = dot(dv_new, (do, x.a_qk))
        dv = dot(zeros(BLOCK, CHUNK), (dv_new.astype(BF16), x.inverse))
        emit(1, dv)
        read = x.decays.tokens(do.astype(F32), Q_IN).astype(BF16)
        erased = x.decays.tokens(-dv, K_IN).astype(BF16)
        return dot(x.decays.state(dstate), (read, x.q_in), (erased, x.k_in))

    reads = Reads(True, True, pairs.a_qk, pairs.inverse, do)
    emits = (_states(dfinal, do), jax.ShapeDtypeStruct(do.shape, BF16))
    dends, dv, dfirst = walk(step, op, reads, dfinal, emits, config=config, reverse=True, name="jfla_adjoint_scan")
    return dends, dv, dfirst


def _states(initial: jax.Array, v: jax.Array) -> jax.ShapeDtypeStruct:
    batch, heads, _, value_dim, key_dim = initial.shape
    return jax.ShapeDtypeStruct((batch, heads, v.shape[1] // CHUNK, value_dim, key_dim), BF16)

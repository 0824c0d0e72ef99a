"""Kernels: the states from chunk to chunk, with the output or for the backward, and their cotangents in reverse.

    e = v - k_in S,    v_new = X_beta e,    o = q_in S + A_qk v_new,    S <- decay * S + k_out^T v_new

and with dS at a chunk's end

    dv_new = A_qk^T do + k_out dS,    dv = X_beta^T dv_new,    dS <- decay * dS + q_in^T do - k_in^T dv

Everything is transposed, [V, C] and [V, K]: see _walk.py.
"""

import jax

from jfla._types import CHUNK
from jfla.pallas._operands import K_IN, K_OUT, Q_IN, Operands, Pairs, times
from jfla.pallas._tile import BF16, F32, dots, dots_while, load, transposed
from jfla.pallas._walk import Emit, Tiles, Walk, WalkConfig, arrays, walk


def _values(x: Tiles) -> tuple[jax.Array, jax.Array | None]:
    """v^T and what the states of k are multiplied with."""
    return load(transposed(x.values)).astype(F32), x.decays.factor(K_IN)


def output_scan(
    op: Operands, pairs: Pairs, v: jax.Array, initial: jax.Array, config: WalkConfig
) -> tuple[jax.Array, jax.Array]:
    """o [B, T, HV, V] and the states after each part of time, transposed, [B, HV, P, V, K]."""

    def step(state: jax.Array, x: Tiles, emit: Emit) -> jax.Array:
        state16 = state.astype(BF16)
        (known, read), (values, k_in) = dots_while(
            lambda: _values(x), [(state16, transposed(x.k_in))], [(state16, transposed(x.q_in))]
        )
        error = (values - times(known, k_in)).astype(BF16)
        (v_new,), (state, read, k_out) = dots_while(
            lambda: (x.decays.state(state), x.decays.tokens(read, Q_IN), x.decays.factor(K_OUT)),
            [(error, transposed(x.inverse))],
        )
        state, out = dots(
            (state, (times(v_new, k_out).astype(BF16), x.k_out)), (read, (v_new.astype(BF16), transposed(x.a_qk)))
        )
        emit(0, out)
        return state

    alone = Walk(step, arrays(op, v, initial, *pairs), (jax.ShapeDtypeStruct(v.shape, BF16),))
    ((out, last),) = walk((alone,), config=config, name="jfla_output_scan")
    return out, last


def states_walk(op: Operands, pairs: Pairs, v: jax.Array, initial: jax.Array) -> Walk:
    """S^T at each chunk's start [B, HV, N, V, K] and v_new [B, T, HV, V]: what the backward reads of the forward."""

    def step(state: jax.Array, x: Tiles, emit: Emit) -> jax.Array:
        state16 = state.astype(BF16)

        def meanwhile() -> tuple[jax.Array, jax.Array | None]:
            emit(0, state16)
            return _values(x)

        (known,), (values, k_in) = dots_while(meanwhile, [(state16, transposed(x.k_in))])
        error = (values - times(known, k_in)).astype(BF16)
        (v_new,), (state, k_out) = dots_while(
            lambda: (x.decays.state(state), x.decays.factor(K_OUT)), [(error, transposed(x.inverse))]
        )
        emit(1, v_new)
        return dots((state, (times(v_new, k_out).astype(BF16), x.k_out)))[0]

    reads = arrays(op, v, initial, None, pairs.inverse, queries=False)
    return Walk(step, reads, _states_and_values(initial, v))


def adjoints_walk(op: Operands, pairs: Pairs, do: jax.Array, dfinal: jax.Array) -> Walk:
    """dS^T at each chunk's end [B, HV, N, V, K], dv [B, T, HV, V], and dS^T before the first chunk [B, HV, P, V, K]."""

    def step(dstate: jax.Array, x: Tiles, emit: Emit) -> jax.Array:
        dstate16, do = dstate.astype(BF16), load(transposed(x.values))

        def meanwhile() -> tuple[jax.Array, jax.Array | None]:
            emit(0, dstate16)
            return x.decays.tokens(do.astype(F32), Q_IN).astype(BF16), x.decays.factor(K_OUT)

        (ahead, dv_new), (read, k_out) = dots_while(meanwhile, [(dstate16, transposed(x.k_out))], [(do, x.a_qk)])
        dv_new = (dv_new + times(ahead, k_out)).astype(BF16)
        (dv,), (dstate, k_in) = dots_while(
            lambda: (x.decays.state(dstate), x.decays.factor(K_IN)), [(dv_new, x.inverse)]
        )
        emit(1, dv)
        return dots((dstate, (read, x.q_in), (times(-dv, k_in).astype(BF16), x.k_in)))[0]

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

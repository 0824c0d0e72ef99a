"""Kernels: the states from chunk to chunk, with the output or for the backward, and their cotangents in reverse.

    e = v - k_in S,    v_new = X_beta e,    o = q_in S + A_qk v_new,    S <- decay * S + k_out^T v_new

and with dS at a chunk's end

    dv_new = A_qk^T do + k_out dS,    dv = X_beta^T dv_new,    dS <- decay * dS + q_in^T do - k_in^T dv

Everything is transposed, [V, C] and [V, K]: see _walk.py.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla._types import CHUNK
from jfla.pallas._jobs import Promise, run
from jfla.pallas._operands import K_IN, K_OUT, Q_IN, Operands, Pairs, Stretch, times
from jfla.pallas._tile import BF16, F32, dots, dots_while, load, transposed, zeros
from jfla.pallas._walk import Emit, Tiles, Walk, WalkConfig, arrays, walk

BothEnds = tuple[Any, Any]  # the states before time, the cotangents after it, or a reference to them; None is 0


def _values(x: Tiles) -> tuple[jax.Array, jax.Array | None]:
    """v^T and what the states of k are multiplied with."""
    return load(transposed(x.values)).astype(F32), x.decays.factor(K_IN)


def _left(state: jax.Array, x: Tiles, emit: Emit | None = None) -> tuple[Any, Callable[[], None]]:
    """The state as left operand; and what is left to do for `emit` to have it, best while the tensor cores work."""
    state16 = state.astype(BF16)
    if x.state is None:
        return state16, lambda: None if emit is None else emit(0, state16)
    if emit is None:
        x.state[...] = state16
    else:
        emit(0, state16)
    plgpu.commit_smem()
    return x.state, lambda: None


class Kept(NamedTuple):
    """The states that a scan leaves in memory: the last ones; those at the start of so many stretches of time."""

    last: bool
    stops: int = 0


def output_scan(
    op: Operands, pairs: Pairs, v: jax.Array, initial: jax.Array | None, config: WalkConfig, kept: Kept
) -> Promise:
    """o [B, T, HV, V]; states at stops, [B, HV, stops, V, K]; and the last ones as the caller has them.

    Here as everywhere `initial` is what each part begins from, [B, HV, P, V, K], or None: one part, from zeros. States
    are transposed.
    """

    def step(state: jax.Array, x: Tiles, emit: Emit) -> jax.Array:
        left, _ = _left(state, x)
        (known, read), (values, k_in) = dots_while(
            lambda: _values(x), [(left, transposed(x.k_in))], [(left, transposed(x.q_in))]
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

    reads, emits = arrays(op, v, initial, *pairs), (jax.ShapeDtypeStruct(v.shape, BF16),)
    last = "final" if kept.last else None
    alone = Walk(step, reads, emits, parts=_parts(initial), last=last, stops=kept.stops)
    promise = walk((alone,), config=config, name="jfla_output_scan")
    return promise._replace(value=tuple(promise.value[0]))


def _parts(initial: Any) -> int:
    return 1 if initial is None else initial.shape[2]


def states_walk(
    op: Operands, pairs: Pairs, v: jax.Array, initial: jax.Array | None, n_chunks: int, stretch: Stretch | None
) -> Walk:
    """S^T at each chunk's start [B, HV, N, V, K] and v_new [B, T, HV, V]: what the backward reads of the forward."""
    reads, parts = arrays(op, v, initial, None, pairs.inverse, queries=False), _parts(initial)
    if stretch is not None:
        reads, parts = reads._replace(stretch=stretch._replace(results=None)), 1
    return Walk(_advance, reads, _states_and_values(op, v, n_chunks), parts=parts, last=None)


def _advance(state: jax.Array, x: Tiles, emit: Emit | None, writing: bool = True) -> jax.Array:
    """One chunk: the next state. Not `writing`, the tokens only erase: v = 0."""
    left, emit_state = _left(state, x, emit)

    def meanwhile() -> tuple[jax.Array, jax.Array | None]:
        emit_state()
        values, k_in = _values(x)
        return (values if writing else zeros(*values.shape)), k_in

    (known,), (values, k_in) = dots_while(meanwhile, [(left, transposed(x.k_in))])
    error = (values - times(known, k_in)).astype(BF16)
    (v_new,), (state, k_out) = dots_while(
        lambda: (x.decays.state(state), x.decays.factor(K_OUT)), [(error, transposed(x.inverse))]
    )
    if emit is not None:
        emit(1, v_new)
    return dots((state, (times(v_new, k_out).astype(BF16), x.k_out)))[0]


def adjoints_walk(
    op: Operands, pairs: Pairs, do: jax.Array, dfinal: Any, n_chunks: int, keeps_first: bool, stretch: Stretch | None
) -> Walk:
    """dS^T at each chunk's end [B, HV, N, V, K], dv [B, T, HV, V], and dS^T before the first chunk [B, HV, P, V, K]."""
    reads, emits = arrays(op, do, dfinal, *pairs)._replace(stretch=stretch), _states_and_values(op, do, n_chunks)
    last = "of parts" if keeps_first else None
    return Walk(_retreat, reads, emits, reverse=True, parts=_parts(dfinal), last=last)


def _retreat(dstate: jax.Array, x: Tiles, emit: Emit | None) -> jax.Array:
    """One chunk in reverse: the cotangent of the state before it."""
    (left, emit_state), do = _left(dstate, x, emit), load(transposed(x.values))
    few_registers = x.state is not None

    def meanwhile() -> tuple[jax.Array, jax.Array | None]:
        emit_state()
        read = x.decays.tokens(do.astype(F32), Q_IN).astype(BF16)
        return read, None if few_registers else x.decays.factor(K_OUT)

    (ahead, dv_new), (read, k_out) = dots_while(meanwhile, [(left, transposed(x.k_out))], [(do, x.a_qk)])
    k_out = x.decays.factor(K_OUT) if few_registers else k_out
    dv_new = (dv_new + times(ahead, k_out)).astype(BF16)
    (dv,), (dstate, k_in) = dots_while(lambda: (x.decays.state(dstate), x.decays.factor(K_IN)), [(dv_new, x.inverse)])
    if emit is not None:
        emit(1, dv)
    return dots((dstate, (read, x.q_in), (times(-dv, k_in).astype(BF16), x.k_in)))[0]


def backward_scans(
    op: Operands,
    pairs: Pairs,
    v: jax.Array,
    do: jax.Array,
    ends: BothEnds,
    config: WalkConfig,
    *,
    keeps_first: bool,
    stretch: Stretch | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """States and v_new, dS and dv, and dS before the first chunk, if it is kept; None for a stretch's references.

    The states before time are then those before every stretch, [B, HV, stretches, V, K], the cotangent after it a
    reference, which takes the one before; and the stretch's results are dv.
    """
    initial, dfinal = ends
    n_chunks = v.shape[1] // CHUNK // (1 if stretch is None else initial.shape[2])
    back = adjoints_walk(op, pairs, do, dfinal, n_chunks, keeps_first, stretch)
    walks = back, states_walk(op, pairs, v, initial, n_chunks, stretch)
    (dends, dv, _, dfirst), (states, v_new, *_) = run(walk(walks, config=config, name="jfla_backward_scans"))
    return states, v_new, dends, dv, dfirst


def _states_and_values(op: Operands, v: jax.Array, n_chunks: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    batch, _, heads, value_dim = v.shape
    states = jax.ShapeDtypeStruct((batch, heads, n_chunks, value_dim, op.k_in.shape[-1]), BF16)
    return states, jax.ShapeDtypeStruct((batch, n_chunks * CHUNK, heads, value_dim), BF16)


def split_states(
    op: Operands, pairs: Pairs, v: jax.Array, initial: jax.Array | None, config: WalkConfig, parts: int
) -> jax.Array:
    """S^T before each of P parts of time, [B, HV, P, V, K], from that before the first: exact, for any gate.

    Over a part the state goes through an affine map, S^T <- S^T R + C. C is where the part leads from no state, and R
    where it leads from the identity when its tokens write nothing; both are walked for all parts at once.
    """
    return _chained(initial, *_maps(op, pairs, v, config, parts), parts, reverse=False)


def split_ends(
    op: Operands, pairs: Pairs, v: jax.Array, do: jax.Array, ends: BothEnds, config: WalkConfig, parts: int
) -> tuple[jax.Array, jax.Array]:
    """The same, and dS^T after each part, from that after the last: dS^T <- dS^T R^T + D in reverse."""
    initial, dfinal = ends
    reads = arrays(op, do, None, *pairs)
    back = Walk(lambda dstate, x, _: _retreat(dstate, x, None), reads, (), reverse=True, parts=parts)
    ((_, d),) = run(walk((back,), config=config, name="jfla_split_adjoints"))
    r, c = _maps(op, pairs, v, config, parts)
    return _chained(initial, r, c, parts, reverse=False), _chained(dfinal, r.mT, d, parts, reverse=True)


def _maps(op: Operands, pairs: Pairs, v: jax.Array, config: WalkConfig, parts: int) -> tuple[jax.Array, jax.Array]:
    """R and C of every part, [B, HV, P, V, K] (V = K)."""
    batch, _, heads, dim = v.shape
    identity = jnp.broadcast_to(jnp.eye(dim, dtype=F32), (batch, heads, parts, dim, dim))
    reads = lambda first: arrays(op, v, first, None, pairs.inverse, queries=False)
    walks = (
        Walk(lambda state, x, _: _advance(state, x, None, writing=False), reads(identity), (), parts=parts),
        Walk(lambda state, x, _: _advance(state, x, None), reads(None), (), parts=parts),
    )
    (_, r), (_, c) = run(walk(walks, config=config, name="jfla_split_states"))
    return r, c


def _chained(state: jax.Array | None, r: jax.Array, c: jax.Array, parts: int, reverse: bool) -> jax.Array:
    """The states where the parts begin: `state` [B, HV, 1, V, K], or 0, at the first, or in reverse at the last."""
    states = [jnp.zeros_like(c[:, :, 0]) if state is None else state[:, :, 0]]
    for i in reversed(range(1, parts)) if reverse else range(parts - 1):
        states.append(jnp.matmul(states[-1], r[:, :, i], precision="highest") + c[:, :, i])
    return jnp.stack(states[::-1] if reverse else states, axis=2)

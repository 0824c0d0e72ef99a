"""The backward stages of "xla" on chunks [N, B, HV, ...], in closed form, and the backward as a list of them.

    y   = X^T (a_qk^T do + k_to_end dS),      dv = beta y
    dS <- chunk_decay dS + q_from_start^T do - k_from_start^T dv
    W_q = tril(do v_new^T),    dL = -stril(y v_new^T)

and the gate's gradient is closed: where x meets exp(a sum of decays), the cotangent of that sum is x * dx
(docs/math.md, equations 10 to 14).
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jfla._inputs.chunking import ChunkInputs
from jfla.stages import DecayedQK
from jfla.xla.chain import Maps, chain_by_pairs
from jfla.xla.decay_sums import (
    decay_from_start,
    decay_sums,
    decay_to_end,
    exclusive_running_sum,
    reverse_running_sum,
)
from jfla.xla.decayed_dot import decayed_dot_adjoint, rowwise_dot
from jfla.xla.forward import (
    Carried,
    Pairs,
    States,
    Values,
    by_pairs,
    decayed_qk,
    erased_by_chunks,
    over_chunks,
    read_state,
    state_scan,
    write_state,
)


class DstatesAndValues(NamedTuple):
    """What the reverse scan leaves: dS at every chunk's end, y = X^T dv_new, and dS at the start of time."""

    dstates: States
    y: Values
    d_initial: Carried


def dstate_scan(
    x: ChunkInputs,
    d_final: Carried,
    qk: DecayedQK,
    pairs: Pairs,
    do: Values,
) -> DstatesAndValues:
    """In reverse, by pairs of chunks or one chunk after another. Needs no forward state."""
    dv_local = pairs.a_qk.mT @ do
    if by_pairs(x):
        dv = x.beta[..., None] * (pairs.inverse.mT @ dv_local)
        sent = qk.q_from_start.mT @ do - qk.k_from_start.mT @ dv
        maps = Maps(qk.chunk_decay, erased_by_chunks(x, qk, pairs), sent)
        dstates, start = chain_by_pairs(d_final[:, 0], maps, adjoint=True)
        y = pairs.inverse.mT @ (dv_local + qk.k_to_end @ dstates)
        return DstatesAndValues(dstates, y, start[:, None])

    def chunk(
        carried: Carried, xs: tuple[Any, ...]
    ) -> tuple[Carried, tuple[Array, Array]]:
        (
            q_from_start,
            k_from_start,
            k_to_end,
            chunk_decay,
            beta,
            inverse,
            do,
            dv_local,
        ) = xs[:8]
        slot, source = xs[8:]
        dstate = read_state(carried, slot)
        y = inverse.mT @ (dv_local + k_to_end @ dstate)
        dv = beta[..., None] * y
        start = (
            chunk_decay[..., None] * dstate
            + q_from_start.mT @ do
            - k_from_start.mT @ dv
        )
        # The state was read from the slot `source`, from which it may have been returned, too.
        if source is not None:
            carried = write_state(carried, slot, jnp.zeros_like(start))
            start = start + read_state(carried, source)
            slot = source
        return write_state(carried, slot, start), (dstate, y)

    xs = (*qk, x.beta, pairs.inverse, do, dv_local, x.slot, x.source)
    d_initial, (dstates, y) = lax.scan(chunk, d_final, xs, reverse=True)
    return DstatesAndValues(dstates, y, d_initial)


def dstate_at_start(
    x: ChunkInputs,
    d_final: Carried,
    pairs: Pairs,
    do: Values,
    chunk_at_a_time: bool,
) -> Carried:
    """dS at the start of time alone."""

    def stages(
        dstate: Carried, xs: tuple[ChunkInputs, Pairs, Values]
    ) -> tuple[Carried, None]:
        x, pairs, do = xs
        return dstate_scan(x, dstate, decayed_qk(x), pairs, do).d_initial, None

    return over_chunks(stages, d_final, (x, pairs, do), chunk_at_a_time, reverse=True)[
        0
    ]


class TokenGrads(NamedTuple):
    """Cotangents of q (scaled), k, v, g and beta of every chunk, as `ChunkInputs` has them."""

    dq: Float[Array, "N B HV C K"]
    dk: Float[Array, "N B HV C K"]
    dv: Float[Array, "N B HV C V"]
    dg: Float[Array, "N B HV C G"]
    dbeta: Float[Array, "N B HV C"]


def chunk_grads(
    x: ChunkInputs,
    scalar_gate: bool,
    states: States,
    dstates: States,
    error: Values,
    v_new: Values,
    do: Values,
    y: Values,
) -> TokenGrads:
    """From the states and their cotangents at a chunk's two ends.

    The inverse's adjoint needs no product with X: dL = -stril(X^T dX X^T) = -stril(y v_new^T).
    """
    dv = x.beta[..., None] * y
    w_q = jnp.tril(do @ v_new.mT)
    d_lower = -jnp.tril(y @ v_new.mT, -1)
    rows = jnp.stack([x.q, x.beta[..., None] * x.k], axis=-3)
    weights = jnp.stack([w_q, d_lower], axis=-3)
    sums = decay_sums(x.g)
    drows, dk_pairs, dg_pairs = decayed_dot_adjoint(
        rows, x.k, sums, weights, scalar_gate
    )

    # Each of these is the cotangent of q or k times the decay that it was multiplied with.
    from_start = decay_from_start(sums)
    to_end = decay_to_end(sums)
    dq_state = from_start * (do @ states.mT)
    dk_state = -from_start * (dv @ states.mT)
    dk_to_end = to_end * (v_new @ dstates.mT)

    # dg: what every sum of decays gets, given back to the decays that it added up.
    gate_sum = functools.partial(_sum_channels, scalar_gate=scalar_gate)
    chunk_decay = from_start[..., -1, :]
    dg_from_start = reverse_running_sum(gate_sum(x.q * dq_state + x.k * dk_state))
    dg_to_end = exclusive_running_sum(gate_sum(x.k * dk_to_end))
    dg_chunk = (chunk_decay * gate_sum(rowwise_dot(states, dstates)))[..., None, :]
    d_beta_k = drows[..., 1, :, :]
    return TokenGrads(
        dq=drows[..., 0, :, :] + dq_state,
        dk=x.beta[..., None] * d_beta_k + dk_pairs + dk_state + dk_to_end,
        dv=dv,
        dg=dg_pairs + dg_from_start + dg_to_end + dg_chunk,
        dbeta=rowwise_dot(d_beta_k, x.k) + rowwise_dot(y, error),
    )


def _sum_channels(
    x: Float[Array, "*batch K"], scalar_gate: bool
) -> Float[Array, "*batch G"]:
    """Onto the gate's axis: every key channel has its decay, or all of them share one."""
    return jnp.sum(x, axis=-1, keepdims=True) if scalar_gate else x


def backward(
    x: ChunkInputs,
    initial: Carried,
    pairs: Pairs,
    do: Values,
    d_final: Carried,
    scalar_gate: bool,
    chunk_at_a_time: bool,
) -> tuple[ChunkInputs, Carried]:
    """Cotangents of the chunks and of the initial states: states once more, then everything in reverse."""

    def forward_again(
        state: Carried, xs: tuple[Any, ...]
    ) -> tuple[Carried, tuple[Array, ...]]:
        x, pairs = xs
        *scanned, state = state_scan(x, state, decayed_qk(x), pairs)
        return state, tuple(scanned)

    def reverse(dstate: Carried, xs: tuple[Any, ...]) -> tuple[Carried, TokenGrads]:
        x, pairs, do, (states, error, v_new) = xs
        dstates, y, dstate = dstate_scan(x, dstate, decayed_qk(x), pairs, do)
        return dstate, chunk_grads(x, scalar_gate, states, dstates, error, v_new, do, y)

    _, scanned = over_chunks(forward_again, initial, (x, pairs), chunk_at_a_time)
    # Behind a barrier: XLA would compose the maps of both directions at once, and keep all of them.
    do, scanned = lax.optimization_barrier((do, scanned))
    xs = (x, pairs, do, scanned)
    d_initial, grads = over_chunks(reverse, d_final, xs, chunk_at_a_time, reverse=True)
    return ChunkInputs(*grads, slot=None), d_initial

"""The forward stages of "xla" on chunks [N, B, HV, ...], and the forward as a list of them.

    a_qk  = decayed dot of (scale q, k)           X = (I + L)^-1,  L = strictly lower decayed dot of (beta k, k)
    v_new = X (beta (v - k_from_start S))         o = q_from_start S + a_qk v_new
    S    <- chunk_decay S + k_to_end^T v_new

Every exponent is a sum of decays (docs/math.md, equations 2 to 6). Other than in `jfla.stages.IntraChunk`, beta is not
folded into the inverse: a beta of 0 then writes exactly nothing, and has a gradient.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jfla._inputs.chunking import ChunkInputs
from jfla.packing import read_slot, write_slot
from jfla.parallel.varying import vary_with
from jfla.stages import DecayedQK
from jfla.xla.chain import Maps, chain_by_pairs
from jfla.xla.decay_sums import decay_from_start, decay_sums, decay_to_end
from jfla.xla.decayed_dot import decayed_dot
from jfla.xla.triangular import unit_lower_inverse

Values = Float[Array, "N B HV C V"]
States = Float[Array, "N B HV K V"]
Carried = Float[Array, "B S HV K V"]


class Pairs(NamedTuple):
    """What a chunk knows about its pairs of tokens: all that the backward keeps beside the inputs."""

    a_qk: Float[Array, "N B HV C C"]
    inverse: Float[Array, "N B HV C C"]


def intra(x: ChunkInputs, scalar_gate: bool) -> Pairs:
    """a_qk and the inverse of every chunk."""
    rows = jnp.stack([x.q, x.beta[..., None] * x.k], axis=-3)
    # Behind a barrier: XLA would compute the dots anew for every part of them that the inverse reads.
    dots = lax.optimization_barrier(
        decayed_dot(rows, x.k, decay_sums(x.g), scalar_gate)
    )
    lower = jnp.tril(dots[..., 1, :, :], -1)
    return Pairs(dots[..., 0, :, :], unit_lower_inverse(lower))


def decayed_qk(x: ChunkInputs) -> DecayedQK:
    """q and k of every chunk, decayed from its start or to its end."""
    sums = decay_sums(x.g)
    from_start = decay_from_start(sums)
    chunk_decay = from_start[..., -1, :]
    return DecayedQK(
        x.q * from_start, x.k * from_start, x.k * decay_to_end(sums), chunk_decay
    )


class StatesAndValues(NamedTuple):
    """What the state scan leaves.

    The state at every chunk's start, error = v - k_from_start S, v_new, and the states at the end.
    """

    states: States
    error: Values
    v_new: Values
    final: Carried


def state_scan(
    x: ChunkInputs, initial: Carried, qk: DecayedQK, pairs: Pairs
) -> StatesAndValues:
    """From the states at the start of time: by pairs of chunks, or one chunk after another."""
    if by_pairs(x):
        written = qk.k_to_end.mT @ (pairs.inverse @ (x.beta[..., None] * x.v))
        maps = Maps(qk.chunk_decay, erased_by_chunks(x, qk, pairs), written)
        states, end = chain_by_pairs(initial[:, 0], maps)
        error = x.v - qk.k_from_start @ states
        v_new = pairs.inverse @ (x.beta[..., None] * error)
        return StatesAndValues(states, error, v_new, end[:, None])

    def chunk(
        carried: Carried, xs: tuple[Any, ...]
    ) -> tuple[Carried, tuple[Array, ...]]:
        k_from_start, k_to_end, chunk_decay, v, beta, inverse, slot, source = xs
        state = read_state(carried, slot if source is None else source)
        error = v - k_from_start @ state
        v_new = inverse @ (beta[..., None] * error)
        end = chunk_decay[..., None] * state + k_to_end.mT @ v_new
        return write_state(carried, slot, end), (state, error, v_new)

    xs = (qk.k_from_start, qk.k_to_end, qk.chunk_decay, x.v, x.beta, pairs.inverse)
    xs += (x.slot, x.source)
    final, (states, error, v_new) = lax.scan(chunk, initial, xs)
    return StatesAndValues(states, error, v_new, final)


def by_pairs(x: ChunkInputs) -> bool:
    """Whether all chunks are here at once, and each sequence has one state.

    Where `over_chunks` takes one at a time, this sees a single chunk. States of slots go through the loop.
    """
    return x.slot is None and x.v.shape[0] > 1


def erased_by_chunks(
    x: ChunkInputs, qk: DecayedQK, pairs: Pairs
) -> Float[Array, "N B HV K K"]:
    """k_to_end^T X diag(beta) k_from_start: R = diag(chunk_decay) minus this (docs/math.md, equation 9)."""
    return qk.k_to_end.mT @ (pairs.inverse @ (x.beta[..., None] * qk.k_from_start))


def state_map(
    x: ChunkInputs,
    initial: Carried,
    slots: tuple[Int[Array, " B"], Int[Array, " B"]],
    pairs: Pairs,
    chunk_at_a_time: bool,
) -> tuple[Float[Array, "B HV K K"], Float[Array, "B HV K V"]]:
    """R and C of all chunks: what the first slot becomes in the last one, and what is there from these states.

    R is what the tokens make of the identity when they write no values, so it is columns of the same scan.
    """
    first_slot, last_slot = slots
    key_dim = initial.shape[-2]
    unwritten = jnp.zeros((*initial.shape[:-1], key_dim), initial.dtype)
    identity = jnp.broadcast_to(
        jnp.eye(key_dim, dtype=initial.dtype), unwritten[:, 0].shape
    )
    both = jnp.concatenate(
        [write_slot(unwritten, first_slot, identity), initial], axis=-1
    )
    both = vary_with(both, x.k)

    def stages(states: Carried, xs: tuple[ChunkInputs, Pairs]) -> tuple[Carried, None]:
        x, pairs = xs
        values = jnp.pad(x.v, [(0, 0)] * (x.v.ndim - 1) + [(key_dim, 0)])
        *_, states = state_scan(x._replace(v=values), states, decayed_qk(x), pairs)
        return states, None

    states, _ = over_chunks(stages, both, (x, pairs), chunk_at_a_time)
    last = read_slot(states, last_slot)
    return last[..., :key_dim], last[..., key_dim:]


def outputs(qk: DecayedQK, pairs: Pairs, states: States, v_new: Values) -> Values:
    """o of every chunk."""
    return qk.q_from_start @ states + pairs.a_qk @ v_new


def output_scan(
    x: ChunkInputs,
    initial: Carried,
    pairs: Pairs,
    chunk_at_a_time: bool,
) -> tuple[Values, Carried]:
    """The output and the states at the end."""

    def stages(state: Carried, xs: tuple[Any, ...]) -> tuple[Carried, Array]:
        x, pairs = xs
        qk = decayed_qk(x)
        states, _, v_new, state = state_scan(x, state, qk, pairs)
        return state, outputs(qk, pairs, states, v_new)

    final, output = over_chunks(stages, initial, (x, pairs), chunk_at_a_time)
    return output, final


def intra_over_chunks(
    x: ChunkInputs, scalar_gate: bool, chunk_at_a_time: bool
) -> Pairs:
    """`intra`, with the temporaries of one chunk only where chunks go one at a time."""
    _, pairs = over_chunks(
        lambda _, x: (None, intra(x, scalar_gate)), None, x, chunk_at_a_time
    )
    return pairs


def over_chunks(
    stages: Callable,
    carry: Any,
    xs: Any,
    chunk_at_a_time: bool,
    reverse: bool = False,
) -> tuple[Any, Any]:
    """(carry, ys) of `stages` on all chunks at once, or on one after the other, from state to state."""
    if not chunk_at_a_time:
        return stages(carry, xs)
    one_chunk = jax.tree.map(lambda a: a[:, None], xs)
    carry, ys = lax.scan(stages, carry, one_chunk, reverse=reverse)
    return carry, jax.tree.map(lambda a: a[:, 0], ys)


# One state per sequence, or one per segment.


def read_state(
    states: Carried, slot: Int[Array, " B"] | None
) -> Float[Array, "B HV K V"]:
    """The state that a chunk begins from."""
    return states[:, 0] if slot is None else read_slot(states, slot)


def write_state(
    states: Carried,
    slot: Int[Array, " B"] | None,
    state: Float[Array, "B HV K V"],
) -> Carried:
    """The states with the one that a chunk ends with."""
    return state[:, None] if slot is None else write_slot(states, slot, state)

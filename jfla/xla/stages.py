"""The stages of "xla" one by one, in the layouts of `jfla.stages`: for tests and benchmarks."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jfla._inputs.canonicalize import without_padding
from jfla._inputs.chunking import ChunkInputs, prepare_chunks, to_chunks, to_tokens
from jfla.gates import NORM_EPSILON, at_least_f32, l2norm
from jfla.stages import QK, ChunkGrads, FactoredQK, IntraChunk, JoinedQK, ScanResults
from jfla.types import CHUNK, Inputs, Options
from jfla.xla import backward, forward


def intra(inputs: Inputs, options: Options) -> tuple[QK, IntraChunk]:
    """q and k as they meet the state, a_qk and a_inv of every chunk."""
    x, _ = prepare_chunks(inputs, options)
    a_qk, inverse = forward.intra(x, options.op.scalar_gate)
    pairs = IntraChunk(
        _chunks_third(a_qk), _chunks_third(inverse * x.beta[..., None, :])
    )
    if options.op.scalar_gate:
        return _factored_qk(inputs, options, x), pairs
    return JoinedQK.join(_chunks_third(forward.decayed_qk(x))), pairs


def _factored_qk(inputs: Inputs, options: Options, x: ChunkInputs) -> FactoredQK:
    """What multiplies every row of q and k as the caller passed them: decay, scale and 1 / norm."""
    q, k = (_whole_chunks(a, inputs) for a in (inputs.q, inputs.k))
    ones = x._replace(q=jnp.full_like(x.q, options.scale), k=jnp.ones_like(x.k))
    decays = forward.decayed_qk(ones)
    q_from_start = decays.q_from_start[..., 0]
    k_from_start = decays.k_from_start[..., 0]
    k_to_end = decays.k_to_end[..., 0]
    if options.qk_norm:
        q_norm = _inverse_norms(q, x.q.shape[2])
        k_norm = _inverse_norms(k, x.q.shape[2])
        q_from_start = q_from_start * q_norm
        k_from_start = k_from_start * k_norm
        k_to_end = k_to_end * k_norm
    chunk_decay = jnp.broadcast_to(decays.chunk_decay, k_to_end.shape)
    factors = jnp.stack([q_from_start, k_from_start, k_to_end, chunk_decay], axis=-2)
    return FactoredQK(q, k, _chunks_third(factors))


def _inverse_norms(
    x: Float[Array, "B T H K"], value_heads: int
) -> Float[Array, "N B HV C"]:
    """1 / norm of every row, as `l2norm` has it."""
    x = at_least_f32(x)
    norms = lax.rsqrt(jnp.sum(x * x, axis=-1) + NORM_EPSILON)
    return to_chunks(jnp.repeat(norms, value_heads // x.shape[2], axis=2))


def output_scan(
    inputs: Inputs,
    options: Options,
    qk: QK,
    pairs: IntraChunk,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
    """The output and the final state."""
    x, initial = _folded_chunks(inputs, options)
    decayed = _chunks_first(qk.expanded())
    folded = _folded_pairs(pairs)
    states, _, v_new, final = forward.state_scan(x, initial, decayed, folded)
    return to_tokens(forward.outputs(decayed, folded, states, v_new)), final[:, 0]


def backward_scans(
    inputs: Inputs,
    options: Options,
    qk: QK,
    pairs: IntraChunk,
    do: Float[Array, "B T HV V"],
    d_final: Float[Array, "B HV K V"],
) -> tuple[ScanResults, Float[Array, "B HV K V"]]:
    """States, their cotangents, v_new and dv; and the cotangent of the initial state."""
    x, initial = _folded_chunks(inputs, options)
    decayed = _chunks_first(qk.expanded())
    folded = _folded_pairs(pairs)
    states, _, v_new, _ = forward.state_scan(x, initial, decayed, folded)
    reverse = backward.dstate_scan(x, d_final[:, None], decayed, folded, to_chunks(do))
    scans = ScanResults(
        states=_chunks_third(states).mT,
        dstates=_chunks_third(reverse.dstates).mT,
        v_new=to_tokens(v_new),
        do=do,
        dv=to_tokens(reverse.y),
    )
    return scans, reverse.d_initial[:, 0]


def chunk_grads(inputs: Inputs, options: Options, scans: ScanResults) -> ChunkGrads:
    """The gradients of every chunk, for q and k as the caller passed them."""
    x, _ = prepare_chunks(inputs, options)
    states = _chunks_first(scans.states.mT)
    v_new = to_chunks(scans.v_new)
    do = to_chunks(scans.do)
    dv = to_chunks(scans.dv)
    error = x.v - forward.decayed_qk(x).k_from_start @ states
    y = dv / jnp.where(x.beta == 0, 1, x.beta)[..., None]
    dstates = _chunks_first(scans.dstates.mT)
    scalar_gate = options.op.scalar_gate
    grads = backward.chunk_grads(x, scalar_gate, states, dstates, error, v_new, do, y)
    dq, dk = _through_norms(inputs, options, to_tokens(grads.dq), to_tokens(grads.dk))
    v_new_dot_dv = jnp.sum(scans.v_new * scans.dv, axis=-1)
    return ChunkGrads(dq, dk, to_tokens(grads.dg), v_new_dot_dv)


def _through_norms(
    inputs: Inputs, options: Options, dq: Array, dk: Array
) -> tuple[Array, Array]:
    """Cotangents of q and k as the caller passed them, for every value head."""
    group = inputs.v.shape[2] // inputs.q.shape[2]

    def elementwise(q: Array, k: Array) -> tuple[Array, Array]:
        if options.qk_norm:
            q, k = l2norm(q), l2norm(k)
        return q * options.scale, k

    q, k = (_whole_chunks(x, inputs).astype(dq.dtype) for x in (inputs.q, inputs.k))
    q, k = (jnp.repeat(x, group, axis=2) for x in (q, k))
    return jax.vjp(elementwise, q, k)[1]((dq, dk))


def _whole_chunks(
    x: Float[Array, "B T H K"], inputs: Inputs
) -> Float[Array, "B T_whole H K"]:
    """q or k as the caller passed it, 0 on padding and in the tail of the last chunk."""
    tail = -x.shape[1] % CHUNK
    return jnp.pad(
        without_padding(x, inputs.segment_ids), ((0, 0), (0, tail), (0, 0), (0, 0))
    )


def _folded_chunks(
    inputs: Inputs, options: Options
) -> tuple[ChunkInputs, forward.Carried]:
    """Chunks with a beta of 1: it is in a_inv."""
    x, initial = prepare_chunks(inputs, options)
    return x._replace(beta=jnp.ones_like(x.beta)), initial


def _folded_pairs(pairs: IntraChunk) -> forward.Pairs:
    return forward.Pairs(*_chunks_first(pairs))


def _chunks_third(tree: Any) -> Any:
    """[N, B, HV, ..] to [B, HV, N, ..]."""
    return jax.tree.map(lambda a: jnp.moveaxis(a, 0, 2), tree)


def _chunks_first(tree: Any) -> Any:
    """[B, HV, N, ..] to [N, B, HV, ..]."""
    return jax.tree.map(lambda a: jnp.moveaxis(a, 2, 0), tree)

"""The portable chunked delta rule: its stages as plain functions, forward and closed-form backward as lists of them.

Inside a chunk, with S the state at its start and every exponent a sum of decays (see decay.py):

    A_qk = decayed dot of (scale q, k)                 L = decayed dot of (beta k, k), strictly lower
    X    = (I + L)^-1
    v_new = X (beta (v - (k exp(g_cum)) S))            o = (scale q exp(g_cum)) S + A_qk v_new
    S    <- exp(g_last) S + (k exp(g_last - g_cum))^T v_new
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jfla._mesh import compiler_partitioned
from jfla._types import DeltaRuleOutput, Inputs, Options
from jfla.blocks import double, levels, squares
from jfla.decay import decayed_dot
from jfla.gradients import Operands, Pairs, States, Values, chunk_gradients, operands
from jfla.packing import read_slot, write_slot
from jfla.prepare import ChunkInputs, from_chunks, prepare_chunks


class Pairwise(NamedTuple):
    """What a chunk knows about its pairs of tokens: all that the backward keeps besides the inputs."""

    a_qk: Pairs
    inverse: Pairs


# Stages of the forward.


def unit_lower_inverse(lower: Float[Array, "*batch C C"]) -> Float[Array, "*batch C C"]:
    """(I + L)^-1 for strictly lower L, by doubling blocks: as stable as substitution, no power of L is formed."""
    inverse = jnp.ones((*lower.shape[:-1], 1, 1), lower.dtype)
    for size in levels(lower.shape[-1]):
        early, late = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        inverse = double(inverse, -late @ (squares(lower, size) @ early))
    return inverse[..., 0, :, :]


def pairwise(x: ChunkInputs) -> Pairwise:
    """A_qk and the inverse of every chunk."""
    rows = jnp.stack([x.q, x.beta[..., None] * x.k], axis=-3)
    dots = decayed_dot(rows, x.k, x.g)
    lower = jnp.tril(dots[..., 1, :, :], -1)
    return Pairwise(dots[..., 0, :, :], unit_lower_inverse(lower))


def state_scan(x: ChunkInputs, op: Operands, pair: Pairwise) -> tuple[States, Values, Float[Array, "B S HV K V"]]:
    """Chunk after chunk: the state at each chunk's start, v_new, and the states at the end."""

    def chunk(states, xs):
        k_in, k_out, decay, v, beta, inverse, slot = xs
        state = _read(states, slot)
        v_new = inverse @ (beta[..., None] * (v - k_in @ state))
        end = decay[..., None] * state + k_out.mT @ v_new
        return _write(states, slot, end), (state, v_new)

    xs = (op.k_in, op.k_out, op.decay, x.v, x.beta, pair.inverse)
    final, (states, v_new) = lax.scan(chunk, x.state, (*map(_chunks_first, xs), _slots_first(x.slot)))
    return _chunks_third(states), _chunks_third(v_new), final


def outputs(op: Operands, pair: Pairwise, states: States, v_new: Values) -> Values:
    """o = (scale q exp(g_cum)) S + A_qk v_new."""
    return op.q_in @ states + pair.a_qk @ v_new


# Stages of the backward.


def output_adjoint(pair: Pairwise, v_new: Values, do: Values) -> tuple[Pairs, Values]:
    """dA_qk, and what `do` sends to v_new through A_qk."""
    return jnp.tril(do @ v_new.mT), pair.a_qk.mT @ do


def state_adjoint_scan(
    x: ChunkInputs, op: Operands, pair: Pairwise, do: Values, dv_local: Values, dfinal: Float[Array, "B S HV K V"]
) -> tuple[States, Values, Float[Array, "B S HV K V"]]:
    """Chunks in reverse: dS at each chunk's end, y = X^T dv_new, and dS at the start. Needs no forward state."""

    def chunk(dstates, xs):
        q_in, k_in, k_out, decay, beta, inverse, do, dv_local, slot = xs
        dend = _read(dstates, slot)
        y = inverse.mT @ (dv_local + k_out @ dend)
        dstart = decay[..., None] * dend + q_in.mT @ do - k_in.mT @ (beta[..., None] * y)
        return _write(dstates, slot, dstart), (dend, y)

    xs = (op.q_in, op.k_in, op.k_out, op.decay, x.beta, pair.inverse, do, dv_local)
    xs = (*map(_chunks_first, xs), _slots_first(x.slot))
    dinitial, (dends, y) = lax.scan(chunk, dfinal, xs, reverse=True)
    return _chunks_third(dends), _chunks_third(y), dinitial


# The forward and the backward.


def _forward(x: ChunkInputs) -> tuple[Values, Float[Array, "B S HV K V"], Pairwise]:
    pair = Pairwise(*(checkpoint_name(a, name) for a, name in zip(pairwise(x), ("jfla_a_qk", "jfla_inverse"))))
    op = operands(x)
    states, v_new, final = state_scan(x, op, pair)
    return outputs(op, pair, states, v_new), final, pair


def _backward(x: ChunkInputs, pair: Pairwise, do: Values, dfinal: Float[Array, "B S HV K V"]) -> ChunkInputs:
    op = operands(x)
    states, v_new, _ = state_scan(x, op, pair)
    d_a_qk, dv_local = output_adjoint(pair, v_new, do)
    dends, y, dinitial = state_adjoint_scan(x, op, pair, do, dv_local, dfinal)
    dq, dk, dv, dg, dbeta = chunk_gradients(x, op, states, v_new, do, d_a_qk, dends, y)
    return ChunkInputs(dq, dk, dv, dg, dbeta, dinitial, None)


def forward(inputs: Inputs, options: Options) -> tuple[DeltaRuleOutput, Pairwise]:
    """The chunked op without a derivative rule: JAX differentiates it in either mode and to any order."""
    with jax.named_scope("jfla_chunked_forward"), jax.default_matmul_precision("highest"):
        output, final, pair = _forward(prepare_chunks(inputs, options))
        final = final if options.per_segment_state else final[:, 0]
        output = DeltaRuleOutput(from_chunks(output, inputs, options), final if options.return_final_state else None)
        return output, pair


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _chunked(inputs: Inputs, options: Options) -> DeltaRuleOutput:
    return forward(inputs, options)[0]


def _chunked_fwd(inputs: Inputs, options: Options):
    output, pair = forward(inputs, options)
    return output, (inputs, pair)


def _chunked_bwd(options: Options, residuals: tuple[Inputs, Pairwise], d_output: DeltaRuleOutput):
    inputs, pair = residuals

    def prepared(differentiable: Inputs):
        x = prepare_chunks(differentiable._replace(segment_ids=inputs.segment_ids), options)
        return x._replace(slot=None), x.slot

    with jax.named_scope("jfla_chunked_backward"), jax.default_matmul_precision("highest"):
        x, prepare_adjoint, slot = jax.vjp(prepared, inputs._replace(segment_ids=None), has_aux=True)
        x = x._replace(slot=slot)
        (do,) = jax.linear_transpose(lambda o: from_chunks(o, inputs, options), x.v)(d_output.output)
        dfinal = jnp.zeros_like(x.state)
        if d_output.final_state is not None:
            dfinal = dfinal + d_output.final_state.reshape(x.state.shape)
        return (prepare_adjoint(_backward(x, pair, do, dfinal))[0],)


_chunked.defvjp(_chunked_fwd, _chunked_bwd)


def _plain(inputs: Inputs, options: Options) -> DeltaRuleOutput:
    return forward(inputs, options)[0]


apply = compiler_partitioned(jax.jit(_chunked, static_argnames="options"))
plain = compiler_partitioned(jax.jit(_plain, static_argnames="options"))


# Helpers: chunk axes for lax.scan, one state per sequence or one per segment.


def _chunks_first(x: Float[Array, "B HV N *rest"]) -> Float[Array, "N B HV *rest"]:
    return jnp.moveaxis(x, 2, 0)


def _chunks_third(x: Float[Array, "N B HV *rest"]) -> Float[Array, "B HV N *rest"]:
    return jnp.moveaxis(x, 0, 2)


def _slots_first(slot: Int[Array, "B N"] | None) -> Int[Array, "N B"] | None:
    return None if slot is None else slot.T


def _read(states: Float[Array, "B S HV K V"], slot: Int[Array, " B"] | None) -> Float[Array, "B HV K V"]:
    return states[:, 0] if slot is None else read_slot(states, slot)


def _write(
    states: Float[Array, "B S HV K V"], slot: Int[Array, " B"] | None, state: Float[Array, "B HV K V"]
) -> Float[Array, "B S HV K V"]:
    return state[:, None] if slot is None else write_slot(states, slot, state)

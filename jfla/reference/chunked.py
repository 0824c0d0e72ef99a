"""The portable chunked delta rule: its stages as plain functions, forward and closed-form backward as lists of them.

Inside a chunk, with S the state at its start and every exponent a sum of decays (see decay.py):

    A_qk = decayed dot of (scale q, k)                 L = decayed dot of (beta k, k), strictly lower
    X    = (I + L)^-1
    v_new = X (beta (v - (k exp(g_cum)) S))            o = (scale q exp(g_cum)) S + A_qk v_new
    S    <- exp(g_last) S + (k exp(g_last - g_cum))^T v_new
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

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

Carried = Float[Array, "B S HV K V"]


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


def state_scan(x: ChunkInputs, state: Carried, op: Operands, pair: Pairwise) -> tuple[States, Values, Values, Carried]:
    """Chunk after chunk: the state at each chunk's start, v_new, and the states at the end."""

    def chunk(states, xs):
        k_in, k_out, decay, v, beta, inverse, slot = xs
        state = _read(states, slot)
        error = v - k_in @ state
        v_new = inverse @ (beta[..., None] * error)
        end = decay[..., None] * state + k_out.mT @ v_new
        return _write(states, slot, end), (state, error, v_new)

    xs = (op.k_in, op.k_out, op.decay, x.v, x.beta, pair.inverse, x.slot)
    final, (states, error, v_new) = lax.scan(chunk, state, xs)
    return states, error, v_new, final


def outputs(op: Operands, pair: Pairwise, states: States, v_new: Values) -> Values:
    """o = (scale q exp(g_cum)) S + A_qk v_new."""
    return op.q_in @ states + pair.a_qk @ v_new


# Stages of the backward.


def output_adjoint(pair: Pairwise, v_new: Values, do: Values) -> tuple[Pairs, Values]:
    """dA_qk, and what `do` sends to v_new through A_qk."""
    return jnp.tril(do @ v_new.mT), pair.a_qk.mT @ do


def state_adjoint_scan(
    x: ChunkInputs, op: Operands, pair: Pairwise, do: Values, dv_local: Values, dfinal: Carried
) -> tuple[States, Values, Carried]:
    """Chunks in reverse: dS at each chunk's end, y = X^T dv_new, and dS at the start. Needs no forward state."""

    def chunk(dstates, xs):
        q_in, k_in, k_out, decay, beta, inverse, do, dv_local, slot = xs
        dend = _read(dstates, slot)
        y = inverse.mT @ (dv_local + k_out @ dend)
        dstart = decay[..., None] * dend + q_in.mT @ do - k_in.mT @ (beta[..., None] * y)
        return _write(dstates, slot, dstart), (dend, y)

    xs = (op.q_in, op.k_in, op.k_out, op.decay, x.beta, pair.inverse, do, dv_local, x.slot)
    dinitial, (dends, y) = lax.scan(chunk, dfinal, xs, reverse=True)
    return dends, y, dinitial


# The forward and the backward.


def _pairs(x: ChunkInputs, one_by_one: bool) -> Pairwise:
    return _through(lambda _, x: (None, pairwise(x)), None, x, one_by_one)[1]


def _forward(x: ChunkInputs, initial: Carried, pair: Pairwise, one_by_one: bool) -> tuple[Values, Carried]:
    def stages(state, xs):
        x, pair = xs
        op = operands(x)
        states, _, v_new, state = state_scan(x, state, op, pair)
        return state, outputs(op, pair, states, v_new)

    final, output = _through(stages, initial, (x, pair), one_by_one)
    return output, final


def _backward(
    x: ChunkInputs, initial: Carried, pair: Pairwise, do: Values, dfinal: Carried, one_by_one: bool
) -> tuple[ChunkInputs, Carried]:
    def again(state, xs):
        x, pair = xs
        states, error, v_new, state = state_scan(x, state, operands(x), pair)
        return state, (states, error, v_new)

    def stages(dstate, xs):
        x, pair, do, (states, error, v_new) = xs
        op = operands(x)
        d_a_qk, dv_local = output_adjoint(pair, v_new, do)
        dends, y, dstate = state_adjoint_scan(x, op, pair, do, dv_local, dstate)
        return dstate, chunk_gradients(x, op, states, error, v_new, do, d_a_qk, dends, y)

    _, scanned = _through(again, initial, (x, pair), one_by_one)
    dinitial, gradients = _through(stages, dfinal, (x, pair, do, scanned), one_by_one, reverse=True)
    return ChunkInputs(*gradients, slot=None), dinitial


def _through(stages: Callable, carry: Any, xs: Any, one_by_one: bool, reverse: bool = False) -> tuple[Any, Any]:
    """(carry, ys) of `stages` on all chunks at once, or on one after the other, from state to state."""
    if not one_by_one:
        return stages(carry, xs)
    carry, ys = lax.scan(stages, carry, jax.tree.map(lambda a: a[:, None], xs), reverse=reverse)
    return carry, jax.tree.map(lambda a: a[:, 0], ys)


def _by_platform(stages: Callable, *args: Any) -> Any:
    """One by one on a CPU, where what lies between the stages then stays in the cache; all at once elsewhere."""
    one_by_one, at_once = (functools.partial(stages, one_by_one=choice) for choice in (True, False))
    return lax.platform_dependent(*args, cpu=one_by_one, default=at_once)


def _at_once(stages: Callable, *args: Any) -> Any:
    """On any platform: a choice would be differentiated whole, and keep what both of its sides need."""
    return stages(*args, one_by_one=False)


def forward(inputs: Inputs, options: Options, run: Callable) -> tuple[DeltaRuleOutput, Pairwise]:
    """The chunked op without a derivative rule. `run` says whether chunks go one by one or at once."""
    with jax.named_scope("jfla_chunked_forward"), jax.default_matmul_precision("highest"):
        x, initial = prepare_chunks(inputs, options)
        pair = run(_pairs, x)
        pair = Pairwise(*(checkpoint_name(a, name) for a, name in zip(pair, ("jfla_a_qk", "jfla_inverse"))))
        output, final = run(_forward, x, initial, pair)
        final = final if options.per_segment_state else final[:, 0]
        output = DeltaRuleOutput(from_chunks(output, inputs, options), final if options.return_final_state else None)
        return output, pair


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _chunked(inputs: Inputs, options: Options) -> DeltaRuleOutput:
    return forward(inputs, options, _by_platform)[0]


def _chunked_fwd(inputs: Inputs, options: Options):
    output, pair = forward(inputs, options, _by_platform)
    return output, (inputs, pair)


def _chunked_bwd(options: Options, residuals: tuple[Inputs, Pairwise], d_output: DeltaRuleOutput):
    inputs, pair = residuals

    def prepared(differentiable: Inputs):
        x, initial = prepare_chunks(differentiable._replace(segment_ids=inputs.segment_ids), options)
        return (x._replace(slot=None), initial), x.slot

    with jax.named_scope("jfla_chunked_backward"), jax.default_matmul_precision("highest"):
        (x, initial), prepare_adjoint, slot = jax.vjp(prepared, inputs._replace(segment_ids=None), has_aux=True)
        x = x._replace(slot=slot)
        (do,) = jax.linear_transpose(lambda o: from_chunks(o, inputs, options), x.v)(d_output.output)
        dfinal = jnp.zeros_like(initial)
        if d_output.final_state is not None:
            dfinal = dfinal + d_output.final_state.reshape(initial.shape)
        return prepare_adjoint(_by_platform(_backward, x, initial, pair, do, dfinal))


_chunked.defvjp(_chunked_fwd, _chunked_bwd)


def _plain(inputs: Inputs, options: Options) -> DeltaRuleOutput:
    return forward(inputs, options, _at_once)[0]


apply = compiler_partitioned(jax.jit(_chunked, static_argnames="options"))
plain = compiler_partitioned(jax.jit(_plain, static_argnames="options"))


# Helpers: one state per sequence or one per segment.


def _read(states: Carried, slot: Int[Array, " B"] | None) -> Float[Array, "B HV K V"]:
    return states[:, 0] if slot is None else read_slot(states, slot)


def _write(states: Carried, slot: Int[Array, " B"] | None, state: Float[Array, "B HV K V"]) -> Carried:
    return state[:, None] if slot is None else write_slot(states, slot, state)

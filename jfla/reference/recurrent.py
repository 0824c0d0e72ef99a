"""The definition: one `step` of the delta rule and its `lax.scan`, the oracle of every implementation and the decoder.

    S  <- exp(g_t) * S
    e   = beta_t (v_t - S^T k_t)
    S  <- S + k_t e^T
    o_t = S^T (scale q_t)

KDA decays every key channel (g_t [K]), GDN the whole state (g_t [1]); nothing else differs.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jfla._inputs.canonicalize import TokenInputs, canonicalize, without_padding
from jfla._inputs.pooled import on_pool
from jfla.packing import read_slot, write_slot
from jfla.parallel.sharding import compiler_partitioned
from jfla.types import DeltaRuleOutput, Inputs, Options


def step(
    state: Float[Array, "B HV K V"],
    q: Float[Array, "B HV K"],
    k: Float[Array, "B HV K"],
    v: Float[Array, "B HV V"],
    g: Float[Array, "B HV G"],
    beta: Float[Array, "B HV"],
) -> tuple[Float[Array, "B HV K V"], Float[Array, "B HV V"]]:
    """One token: decay, correct, write, read. q is already scaled."""
    state = state * jnp.exp(g)[..., None]
    error = beta[..., None] * (v - jnp.einsum("bhkv,bhk->bhv", state, k))
    state = state + k[..., None] * error[..., None, :]
    return state, jnp.einsum("bhkv,bhk->bhv", state, q)


def scan(
    tokens: TokenInputs,
    every_state: bool = False,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B S_or_T HV K V"]]:
    """The recurrence over time. `tokens.state` holds one state per slot; each token reads and writes its own slot.

    With `every_state`, for one slot, the states after every token come back instead of the last one of every slot.
    """

    def token(states, x):
        slot, *arrays = x
        # Without a gather, for which the state would travel at every token on several devices.
        if states.shape[1] == 1:
            state, output = step(states[:, 0], *arrays)
            return state[:, None], (output, state if every_state else None)
        state, output = step(read_slot(states, slot), *arrays)
        return write_slot(states, slot, state), (output, None)

    by_time = [
        jnp.moveaxis(x, 1, 0)
        for x in (tokens.slot, tokens.q, tokens.k, tokens.v, tokens.g, tokens.beta)
    ]
    last, (outputs, states) = lax.scan(token, tokens.state, tuple(by_time))
    return jnp.moveaxis(outputs, 0, 1), last if states is None else jnp.moveaxis(
        states, 0, 1
    )


@compiler_partitioned
@functools.partial(jax.jit, static_argnames="options")
def run(inputs: Inputs, options: Options) -> DeltaRuleOutput:
    """Runs the definition on validated inputs: any float dtype, differentiable in every mode and to any order."""
    if inputs.state_slots is not None:
        return on_pool(_run_rows, inputs, options)
    return _run_rows(inputs, options)


def _run_rows(inputs: Inputs, options: Options) -> DeltaRuleOutput:
    with jax.named_scope("jfla_recurrent"), jax.default_matmul_precision("highest"):
        tokens = canonicalize(inputs, options)
        output, states = scan(tokens, options.return_states)
        final = None
        if options.return_final_state:
            final = (
                states
                if options.per_segment_state or options.return_states
                else states[:, 0]
            )
            final = options.as_final_state(final)
        output = without_padding(output, inputs.segment_ids)
        return DeltaRuleOutput(output.astype(inputs.v.dtype), final)

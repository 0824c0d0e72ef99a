"""From what a caller passes to what the recurrence reads: norms, gate, beta, scale, grouped heads, packing."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jfla.gates import at_least_f32, l2norm, log_decay, write_strength
from jfla.packing import starts
from jfla.parallel.varying import vary_with
from jfla.types import Inputs, Options


class TokenInputs(NamedTuple):
    """One row per token and value head, in the dtype of computation; q is scaled, padding writes nothing.

    `slot` says which of the states in `state` a token reads and writes: its segment when segments have states of their
    own. Otherwise there is one slot, and a decay of -inf on the first token of a segment empties it.
    """

    q: Float[Array, "B T HV K"]
    k: Float[Array, "B T HV K"]
    v: Float[Array, "B T HV V"]
    g: Float[Array, "B T HV G"]
    beta: Float[Array, "B T HV"]
    state: Float[Array, "B S HV K V"]
    slot: Int[Array, "B T"]


def canonicalize(inputs: Inputs, options: Options) -> TokenInputs:
    """Applies every elementwise transform of the call; NaN in padding goes no further than here."""
    q, k, v, g, beta, gate, state, segment_ids, _ = inputs
    batch, time, heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    q, k, v, g, beta = (without_padding(x, segment_ids) for x in (q, k, v, g, beta))

    norm = l2norm if options.qk_norm else at_least_f32
    group = value_heads // heads
    q = jnp.repeat(norm(q) * options.scale, group, axis=2)
    k = jnp.repeat(norm(k), group, axis=2)
    v = at_least_f32(v)
    g = log_decay(g, gate)
    beta = write_strength(beta, options.beta_max)
    dtype = jnp.result_type(q, k, v, g, beta, *([] if state is None else [state]))

    slot = jnp.zeros((batch, time), jnp.int32)
    if segment_ids is not None:
        g = without_padding(g, segment_ids)
        beta = without_padding(beta, segment_ids)
        if options.per_segment_state:
            slot = jnp.maximum(segment_ids - 1, 0)
        else:
            g = jnp.where(starts(segment_ids)[:, :, None, None], -jnp.inf, g)
    if state is None:
        num_states = options.num_states or 1
        state = jnp.zeros((batch, num_states, value_heads, key_dim, value_dim), dtype)
    elif not options.per_segment_state:
        state = state[:, None]
    arrays = [x.astype(dtype) for x in (q, k, v, g, beta, state)]
    q, k, v, g, beta, state = vary_with(arrays, *arrays)
    return TokenInputs(q, k, v, g, beta, state, slot)


def without_padding(
    x: Shaped[Array, "B T *rest"],
    segment_ids: Int[Array, "B T"] | None,
) -> Shaped[Array, "B T *rest"]:
    """x with 0 on padding, whatever was there, and no cotangent to it."""
    if segment_ids is None:
        return x
    keep = (segment_ids > 0).reshape(segment_ids.shape + (1,) * (x.ndim - 2))
    return jnp.where(keep, x, 0)

"""From what a caller passes to what the recurrence reads: norms, gate, beta, scale, grouped heads, packing."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from jfla._types import CHUNK, Inputs, Options
from jfla.gates import l2norm, log_decay, wide, write_strength
from jfla.packing import Aligned, align, starts, take_rows


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


class ChunkInputs(NamedTuple):
    """The tokens of TokenInputs in chunks, which come first. `slot` is None when there is one state per sequence."""

    q: Float[Array, "N B HV C K"]
    k: Float[Array, "N B HV C K"]
    v: Float[Array, "N B HV C V"]
    g: Float[Array, "N B HV C G"]
    beta: Float[Array, "N B HV C"]
    slot: Int[Array, "N B"] | None


def prepare(inputs: Inputs, options: Options) -> TokenInputs:
    """Applies every elementwise transform of the call; NaN in padding goes no further than here."""
    q, k, v, g, beta, gate, state, segment_ids = inputs
    batch, time, heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    q, k, v, g, beta = (without_padding(x, segment_ids) for x in (q, k, v, g, beta))

    q, k = (l2norm(x) if options.qk_norm else wide(x) for x in (q, k))
    q, k = (jnp.repeat(x, value_heads // heads, axis=2) for x in (q * options.scale, k))
    v, g, beta = wide(v), log_decay(g, gate), write_strength(beta, options.beta_max)
    dtype = jnp.result_type(q, k, v, g, beta, *([] if state is None else [state]))

    slot = jnp.zeros((batch, time), jnp.int32)
    if segment_ids is not None:
        g, beta = without_padding(g, segment_ids), without_padding(beta, segment_ids)
        if options.per_segment_state:
            slot = jnp.maximum(segment_ids - 1, 0)
        else:
            g = jnp.where(starts(segment_ids)[:, :, None, None], -jnp.inf, g)
    if state is None:
        state = jnp.zeros((batch, options.num_segments or 1, value_heads, key_dim, value_dim), dtype)
    elif not options.per_segment_state:
        state = state[:, None]
    q, k, v, g, beta, state = _varying_together(*(x.astype(dtype) for x in (q, k, v, g, beta, state)))
    return TokenInputs(q, k, v, g, beta, state, slot)


def without_padding(x: Shaped[Array, "B T *rest"], segment_ids: Int[Array, "B T"] | None) -> Shaped[Array, "B T *rest"]:
    """x with 0 on padding, whatever was there, and no cotangent to it."""
    if segment_ids is None:
        return x
    return jnp.where((segment_ids > 0).reshape(segment_ids.shape + (1,) * (x.ndim - 2)), x, 0)


def _varying_together(*arrays: Array) -> list[Array]:
    """The same arrays. Inside shard_map each varies over every mesh axis over which one of them does.

    The carry of a scan must vary as what it meets does, also when it begins as zeros; and gradients of arrays that do
    not vary over an axis are then summed over it.
    """
    parts = sum(lax.stop_gradient(x[(0,) * x.ndim]) for x in arrays)
    return [jnp.where(True, x, parts) for x in arrays]


def prepare_chunks(inputs: Inputs, options: Options) -> tuple[ChunkInputs, Float[Array, "B S HV K V"]]:
    """`prepare`, then chunks of 64 tokens: on the packed grid, or aligned when every segment has a state of its own.

    The states that the first chunks read come beside.
    """
    tokens = prepare(inputs, options)
    arrays = (tokens.q, tokens.k, tokens.v, tokens.g, tokens.beta)
    slot = None
    if options.per_segment_state:
        grid = _grid(inputs, options)
        arrays, slot = (take_rows(x, grid.source) for x in arrays), grid.segment.T
    return ChunkInputs(*(_to_chunks(x) for x in arrays), slot), tokens.state


def from_chunks(output: Float[Array, "N B HV C V"], inputs: Inputs, options: Options) -> Float[Array, "B T HV V"]:
    """The way back: chunks to [B, T, HV, V] in the dtype of v. Linear, so its transpose takes the cotangent there."""
    n_chunks, batch, heads, chunk, value_dim = output.shape
    output = output.transpose(1, 0, 3, 2, 4).reshape(batch, n_chunks * chunk, heads, value_dim)
    if options.per_segment_state:
        output = take_rows(output, _grid(inputs, options).target)
    return without_padding(output[:, : inputs.v.shape[1]], inputs.segment_ids).astype(inputs.v.dtype)


def _grid(inputs: Inputs, options: Options) -> Aligned:
    # What `per_segment_state` means.
    assert inputs.segment_ids is not None
    assert options.num_segments is not None
    return align(inputs.segment_ids, options.num_segments)


def _to_chunks(x: Array) -> Array:
    """[B, T, HV, ...] -> [N, B, HV, C, ...]; rows past T are zero: no decay, nothing written."""
    batch, time, heads, *rest = x.shape
    n_chunks = -(-time // CHUNK)
    x = jnp.pad(x, [(0, 0), (0, n_chunks * CHUNK - time)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(batch, n_chunks, CHUNK, heads, *rest), (1, 3), (0, 2))

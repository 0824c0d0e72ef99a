"""Tokens to chunks of 64 and back: on the packed grid, or aligned where every segment has a state of its own."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jfla._inputs.canonicalize import canonicalize, without_padding
from jfla.packing import Aligned, align, take_rows
from jfla.types import CHUNK, Inputs, Options


class ChunkInputs(NamedTuple):
    """The tokens of TokenInputs in chunks, which come first.

    `slot` says which of the states a chunk ends with, None when there is one per sequence. It begins from the same, or
    from that of `source`, where states are returned along time.
    """

    q: Float[Array, "N B HV C K"]
    k: Float[Array, "N B HV C K"]
    v: Float[Array, "N B HV C V"]
    g: Float[Array, "N B HV C G"]
    beta: Float[Array, "N B HV C"]
    slot: Int[Array, "N B"] | None
    source: Int[Array, "N B"] | None = None


def prepare_chunks(
    inputs: Inputs,
    options: Options,
) -> tuple[ChunkInputs, Float[Array, "B S HV K V"]]:
    """The call's chunks, and the states that the first chunks read."""
    tokens = canonicalize(inputs, options)
    arrays = (tokens.q, tokens.k, tokens.v, tokens.g, tokens.beta)
    slot = None
    source = None
    state = tokens.state
    if options.chunks_per_state is not None:
        slot, source = _slots_along_time(inputs, options.chunks_per_state)
        num_later = -(-inputs.q.shape[1] // (options.chunks_per_state * CHUNK)) - 1
        state = jnp.pad(state, [(0, 0), (0, num_later)] + [(0, 0)] * 3)
    if options.per_segment_state:
        grid = _aligned_grid(inputs, options)
        arrays = tuple(take_rows(x, grid.source) for x in arrays)
        slot = grid.segment.T
    q, k, v, g, beta = (to_chunks(x) for x in arrays)
    return ChunkInputs(q, k, v, g, beta, slot, source), state


def _slots_along_time(
    inputs: Inputs,
    chunks_per_state: int,
) -> tuple[Int[Array, "N B"], Int[Array, "N B"]]:
    """Of every chunk the state that it ends with, and that which it begins from: at first the one before the other."""
    batch, time = inputs.q.shape[:2]
    chunk = jnp.arange(-(-time // CHUNK))[:, None]
    before = jnp.maximum(chunk - 1, 0)
    slots = jnp.broadcast_to(chunk // chunks_per_state, (chunk.shape[0], batch))
    return slots, jnp.broadcast_to(before // chunks_per_state, slots.shape)


def from_chunks(
    output: Float[Array, "N B HV C V"],
    inputs: Inputs,
    options: Options,
) -> Float[Array, "B T HV V"]:
    """[B, T, HV, V] in the dtype of v. Linear, so its transpose takes the cotangent to chunks."""
    output = to_tokens(output)
    if options.per_segment_state:
        output = take_rows(output, _aligned_grid(inputs, options).target)
    output = output[:, : inputs.v.shape[1]]
    return without_padding(output, inputs.segment_ids).astype(inputs.v.dtype)


def _aligned_grid(inputs: Inputs, options: Options) -> Aligned:
    # What `per_segment_state` means.
    assert inputs.segment_ids is not None
    assert options.num_segments is not None
    return align(inputs.segment_ids, options.num_segments)


def to_chunks(x: Array) -> Array:
    """[B, T, HV, ...] -> [N, B, HV, C, ...]; rows past T are zero: no decay, nothing written."""
    batch, time, heads, *rest = x.shape
    n_chunks = -(-time // CHUNK)
    x = jnp.pad(x, [(0, 0), (0, n_chunks * CHUNK - time)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(batch, n_chunks, CHUNK, heads, *rest), (1, 3), (0, 2))


def to_tokens(x: Array) -> Array:
    """[N, B, HV, C, ...] -> [B, T, HV, ...], T a multiple of the chunk."""
    n_chunks, batch, heads, chunk, *rest = x.shape
    x = jnp.moveaxis(x, (0, 2), (1, 3))
    return x.reshape(batch, n_chunks * chunk, heads, *rest)

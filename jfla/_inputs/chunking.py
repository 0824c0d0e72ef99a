"""Tokens to chunks of 64 and back: on the packed grid, or aligned where every segment has a state of its own."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jfla._inputs.canonicalize import canonicalize, without_padding
from jfla.packing import Aligned, align, take_rows
from jfla.types import CHUNK, Inputs, Options


class ChunkInputs(NamedTuple):
    """The tokens of TokenInputs in chunks, which come first. `slot` is None when there is one state per sequence."""

    q: Float[Array, "N B HV C K"]
    k: Float[Array, "N B HV C K"]
    v: Float[Array, "N B HV C V"]
    g: Float[Array, "N B HV C G"]
    beta: Float[Array, "N B HV C"]
    slot: Int[Array, "N B"] | None


def prepare_chunks(
    inputs: Inputs,
    options: Options,
) -> tuple[ChunkInputs, Float[Array, "B S HV K V"]]:
    """The call's chunks, and the states that the first chunks read."""
    tokens = canonicalize(inputs, options)
    arrays = (tokens.q, tokens.k, tokens.v, tokens.g, tokens.beta)
    slot = None
    if options.per_segment_state:
        grid = _aligned_grid(inputs, options)
        arrays = tuple(take_rows(x, grid.source) for x in arrays)
        slot = grid.segment.T
    q, k, v, g, beta = (to_chunks(x) for x in arrays)
    return ChunkInputs(q, k, v, g, beta, slot), tokens.state


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

"""What attention layers keep of earlier tokens: buffers of fixed length, positions, masks."""

from typing import Protocol

import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jaxtyping import Bool, Float, Int

from jfla.types import SegmentIds

Positions = Int[Array, "B T"]
Sequence = Int[Array, "B T"]


class TokenBuffer(Protocol):
    """A cache with the sequence number of each token, 0 where there is none, and row lengths."""

    @property
    def sequence(self) -> Int[Array, "B L"]: ...
    @property
    def length(self) -> Int[Array, " B"]: ...


def positions(cache: TokenBuffer | None, batch: int, time: int) -> Positions:
    """Where in its row each of a call's tokens stands, counted on from the cache."""
    first = jnp.zeros(batch, jnp.int32) if cache is None else cache.length
    return first[:, None] + jnp.arange(time)[None]


def sequence_numbers(
    cache: TokenBuffer, segment_ids: SegmentIds | None, batch: int, time: int
) -> Sequence:
    """The sequence number of each of the call's tokens, counted on from the cache; 0 on padding."""
    if segment_ids is None:
        segment_ids = jnp.ones((batch, time), jnp.int32)
    changed = jnp.diff(segment_ids, axis=1, prepend=segment_ids[:, :1]) != 0
    last_token = jnp.maximum(cache.length - 1, 0)[:, None]
    latest = jnp.take_along_axis(cache.sequence, last_token, axis=1)
    number = jnp.maximum(latest, 1) + jnp.cumsum(changed, axis=1)
    return jnp.where(segment_ids > 0, number, 0)


def lengthened(cache: TokenBuffer, sequence: Sequence) -> Int[Array, " B"]:
    """The tokens in each row behind a call; a `ValueError` where the buffer is known to be full."""
    capacity = cache.sequence.shape[1]
    length = cache.length + jnp.sum(sequence > 0, axis=1)
    longest = 0 if isinstance(length, Tracer) else int(length.max())
    if longest > capacity:
        raise ValueError(
            f"the cache must have room for {longest} tokens, its max_len is {capacity}"
        )
    return length


def stored(
    buffer: Float[Array, "B L *rest"] | Int[Array, "B L"],
    new: Float[Array, "B T *rest"] | Sequence,
    position: Positions,
    sequence: Sequence,
) -> Array:
    """The buffer with the call's tokens at their positions; padding is dropped."""
    rows = jnp.arange(position.shape[0])[:, None]
    # An index out of range: padding is dropped.
    target = jnp.where(sequence > 0, position, buffer.shape[1])
    return buffer.at[rows, target].set(new.astype(buffer.dtype), mode="drop")


def visible(
    own: Sequence, others: Int[Array, "B S"], position: Positions
) -> Bool[Array, "B 1 T S"]:
    """True where a query sees a key: the same sequence, not later. Padding (0) sees everything."""
    not_later = jnp.arange(others.shape[1])[None, None] <= position[:, :, None]
    same_sequence = own[:, :, None] == others[:, None]
    # A softmax over nothing is not a number.
    padding = (own == 0)[:, :, None]
    return ((same_sequence & not_later) | padding)[:, None]

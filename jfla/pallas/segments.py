"""The chunks of packed segments as kernels find them: in place among the tokens, but for those that are not whole."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from jfla.packing import num_aligned_chunks, segment_bounds, take_rows
from jfla.pallas.common.packed_rows import READ, PackedRows
from jfla.types import CHUNK


class SegmentChunks(NamedTuple):
    """The chunks of `jfla.packing.align`, with padding as one more segment behind the others.

    A place is the packed position of the first of 64 rows, or -1 - slot of a chunk among the ends, which are copies.
    Slots 0 .. S-1 have the last chunk of each segment where it is not whole, slot S zeros, which padding reads, and
    slot S + 1 takes what chunks without tokens write. What padding writes goes to its place, the last of it to slot S.
    """

    places: Int[Array, "B N 2"]  # READ and WRITTEN
    end_rows: Int[Array, "B S_plus_1 C"]  # packed positions of slots 0 .. S; T and more: none
    table: Int[Array, "B S_plus_1 3"]  # see `segment_table`
    most_chunks: Int[Array, "1"]  # with tokens, of the row that has most


def segment_chunks(segment_ids: Int[Array, "B T"], num_segments: int) -> SegmentChunks:
    """Of 0-based segments 0 .. S-1, and S for padding."""
    time = segment_ids.shape[1]
    n_chunks = num_aligned_chunks(time, num_segments)
    bounds = segment_bounds(segment_ids, num_segments)
    first_token = bounds
    end_token = jnp.pad(bounds[:, 1:], ((0, 0), (0, 1)), constant_values=time)
    end_chunk = jnp.cumsum(-((first_token - end_token) // CHUNK), axis=1)
    first_chunk = end_chunk + (first_token - end_token) // CHUNK

    number = jnp.arange(n_chunks)[None]
    slot = jnp.sum(number[:, :, None] >= end_chunk[:, None], axis=-1)  # S + 1: no tokens
    segment = jnp.minimum(slot, num_segments)
    of_chunk = lambda x: jnp.take_along_axis(x, segment, axis=1)
    place = of_chunk(first_token) + (number - of_chunk(first_chunk)) * CHUNK
    whole = (slot <= num_segments) & (place + CHUNK <= of_chunk(end_token))
    read = jnp.where(whole & (slot < num_segments), place, -1 - segment)
    written = jnp.where(whole, place, -1 - slot)
    # Not stacked: XLA would make a kernel of that alone.
    is_read = jnp.arange(2)[None, None] == READ
    places = jnp.where(is_read, read[..., None], written[..., None])

    rest = (end_token - first_token) % CHUNK
    in_end = jnp.arange(CHUNK)[None, None]
    end_rows = jnp.where(
        in_end < rest[..., None],
        (end_token - rest)[..., None] + in_end,
        time + jnp.arange((num_segments + 1) * CHUNK).reshape(1, -1, CHUNK),
    )
    return SegmentChunks(
        places.astype(jnp.int32),
        end_rows,
        segment_table(first_chunk, end_chunk),
        jnp.max(end_chunk[:, -1:], axis=0).astype(jnp.int32),
    )


def segment_table(
    first_chunk: Int[Array, "B S_plus_1"], end_chunk: Int[Array, "B S_plus_1"]
) -> Int[Array, "B S_plus_1 3"]:
    """(segment, its first chunk, the chunk behind its last) in the order in which CTAs take packed segments.

    The longest come first: a long one that starts last would run alone at the end.
    """
    length = end_chunk - first_chunk
    number = jnp.arange(length.shape[1])
    segment = number[None, None, :]
    other = length[:, None, :]
    own = length[:, :, None]
    before = (other > own) | ((other == own) & (segment < number[None, :, None]))
    rank = jnp.sum(before, axis=-1)
    # A row for each rank, as sums of one number: a sort and three gathers would be kernels of their own.
    numbers = jnp.broadcast_to(number[None], length.shape)
    columns = jnp.stack([numbers, first_chunk, end_chunk], axis=-1)
    has_rank = rank[:, None, :] == number[None, :, None]
    return jnp.sum(jnp.where(has_rank[..., None], columns[:, None], 0), axis=2).astype(jnp.int32)


def in_place(x: Shaped[Array, "B T heads D"], chunks: SegmentChunks) -> PackedRows:
    """Rows that kernels read: the ends are copied, zeros where there is no token."""
    batch, time, *rest = x.shape
    segments = chunks.end_rows[:, :-1]
    index = jnp.pad(segments, ((0, 0), (0, 2), (0, 0)), constant_values=time)
    ends = take_rows(x, index.reshape(batch, -1)).reshape(*index.shape, *rest)
    return PackedRows(x, ends, chunks.places, chunks.most_chunks)


def with_ends(x: PackedRows, chunks: SegmentChunks) -> Shaped[Array, "B T heads D"]:
    """What kernels have written, with its ends."""
    batch, time, *rest = x.tokens.shape
    row = jnp.arange(batch)[:, None, None]
    # Of a flat array: checkify fails at a scatter with a batch axis. Rows without a token are behind all others, each
    # at an index of its own.
    num_rows = chunks.end_rows[0].size
    none = batch * time + row * num_rows + chunks.end_rows - time
    index = jnp.where(chunks.end_rows < time, row * time + chunks.end_rows, none)
    flat = x.tokens.reshape(batch * time, *rest)
    ends = x.ends[:, :-1].reshape(-1, *rest)
    flat = flat.at[index.reshape(-1)].set(ends, mode="drop", unique_indices=True)
    return flat.reshape(x.tokens.shape)

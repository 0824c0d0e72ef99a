"""The chunks of packed segments as kernels find them: in place among the tokens, but for those that are not whole."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from jfla.packing import num_aligned_chunks, segment_bounds
from jfla.pallas.common.end_copies import copy_ends
from jfla.pallas.common.packed_rows import INPUTS, PackedRows, SegmentTable
from jfla.types import CHUNK

CHUNK_BITS = CHUNK.bit_length() - 1  # a power of two, and so is the next
CTA_CHUNKS = 16  # of the segments that one CTA scans; a longer one has a CTA to itself
CTA_BITS = CTA_CHUNKS.bit_length() - 1


class SegmentChunks(NamedTuple):
    """A grid in which every segment begins with a chunk: the longest first, padding as one more behind the others.

    The longest is scanned first: it would run alone at the end. A kernel that makes the scan's operands takes chunks
    in the grid's order.

    A place is the packed position of the first of 64 rows, or -1 - slot of a chunk among the ends, which are copies.
    Slots 0 .. S-1 have the last chunk of each segment where it is not whole, slot S zeros, which padding reads, and
    slot S + 1 takes what chunks without tokens write. What padding writes goes to its place, the last of it to slot S.
    """

    places: Int[Array, "B N 2"]  # of INPUTS and of RESULTS
    source: Int[Array, "B N_C"]  # packed position that a row of the grid reads; T: none
    target: Int[
        Array, "B T"
    ]  # row of the grid of each packed token; N C: none, padding
    ends: Int[
        Array, "B S_plus_1 2"
    ]  # of slots 0 .. S: first token, number of tokens; 0: none
    table: SegmentTable
    most_chunks: Int[Array, "1"]  # with tokens, of the row that has most


class _Segments(NamedTuple):
    """Of segments 0 .. S-1 and of padding, which is segment S."""

    first_token: Int[Array, "B S_plus_1"]
    end_token: Int[Array, "B S_plus_1"]
    rank: Int[Array, "B S_plus_1"]  # in the grid's order
    first_chunk: Int[Array, "B S_plus_1"]
    end_chunk: Int[Array, "B S_plus_1"]


class _ByChunk(NamedTuple):
    """Of every chunk of the grid; those without tokens belong to padding."""

    has_tokens: Bool[Array, "B N"]
    segment: Int[Array, "B N"]
    first_token: Int[Array, "B N"]
    end_token: Int[Array, "B N"]  # of its segment


def segment_chunks(segment_ids: Int[Array, "B T"], num_segments: int) -> SegmentChunks:
    """Of 0-based segments 0 .. S-1, and S for padding."""
    time = segment_ids.shape[1]
    n_chunks = num_aligned_chunks(time, num_segments)
    segments = _segments(segment_ids, num_segments)
    chunks = _by_chunk(segments, n_chunks)
    slot = jnp.where(chunks.has_tokens, chunks.segment, num_segments + 1)
    whole = chunks.has_tokens & (chunks.first_token + CHUNK <= chunks.end_token)
    of_segment = chunks.segment < num_segments
    read = jnp.where(whole & of_segment, chunks.first_token, -1 - chunks.segment)
    written = jnp.where(whole, chunks.first_token, -1 - slot)
    # Not stacked: XLA would make a kernel of that alone.
    of_inputs = jnp.arange(2)[None, None] == INPUTS
    places = jnp.where(of_inputs, read[..., None], written[..., None])

    token = chunks.first_token[..., None] + jnp.arange(CHUNK)[None, None]
    in_segment = of_segment[..., None] & (token < chunks.end_token[..., None])
    source = jnp.where(in_segment, token, time).reshape(segment_ids.shape[0], -1)
    shift = segments.first_chunk * CHUNK - segments.first_token
    own_shift = jnp.take_along_axis(shift, jnp.maximum(segment_ids - 1, 0), axis=1)
    valid = (segment_ids > 0) & (segment_ids <= num_segments)
    target = jnp.where(valid, jnp.arange(time)[None] + own_shift, n_chunks * CHUNK)
    return SegmentChunks(
        places.astype(jnp.int32),
        source,
        target,
        _ends(segments),
        segment_table(
            segments.rank, segments.first_chunk, segments.end_chunk, n_chunks
        ),
        jnp.max(segments.end_chunk[:, -1:], axis=0).astype(jnp.int32),
    )


def _segments(segment_ids: Int[Array, "B T"], num_segments: int) -> _Segments:
    time = segment_ids.shape[1]
    first_token = segment_bounds(segment_ids, num_segments)
    end_token = jnp.pad(first_token[:, 1:], ((0, 0), (0, 1)), constant_values=time)
    # Shifts and masks: with a division XLA makes a kernel of its own of every quotient.
    length = (end_token - first_token + CHUNK - 1) >> CHUNK_BITS
    number = jnp.arange(num_segments + 1)
    # [B, own, other]: sums over other segments, because a sort would be a kernel of its own.
    own = number[None, :, None]
    other = number[None, None, :]
    own_length = length[:, :, None]
    other_length = length[:, None, :]
    longer = (other_length > own_length) | (
        (other_length == own_length) & (other < own)
    )
    before = jnp.where(
        own == num_segments, other < own, (other < num_segments) & longer
    )
    rank = jnp.sum(before, axis=-1)
    first_chunk = jnp.sum(jnp.where(before, other_length, 0), axis=-1)
    return _Segments(first_token, end_token, rank, first_chunk, first_chunk + length)


def _by_chunk(segments: _Segments, n_chunks: int) -> _ByChunk:
    padding = segments.rank.shape[1] - 1
    number = jnp.arange(n_chunks)[None, :, None]
    first_chunk = segments.first_chunk[:, None]
    inside = (number >= first_chunk) & (number < segments.end_chunk[:, None])
    of_chunk = lambda x: jnp.sum(jnp.where(inside, x, 0), axis=-1)
    has_tokens = jnp.any(inside, axis=-1)
    segment = of_chunk(jnp.arange(padding + 1)[None, None])
    return _ByChunk(
        has_tokens,
        jnp.where(has_tokens, segment, padding),
        of_chunk(segments.first_token[:, None] + (number - first_chunk) * CHUNK),
        of_chunk(segments.end_token[:, None]),
    )


def _ends(segments: _Segments) -> Int[Array, "B S_plus_1 2"]:
    rest = (segments.end_token - segments.first_token) & (CHUNK - 1)
    return jnp.stack([segments.end_token - rest, rest], axis=-1).astype(jnp.int32)


def segment_table(
    rank: Int[Array, "B S_plus_1"],
    first_chunk: Int[Array, "B S_plus_1"],
    end_chunk: Int[Array, "B S_plus_1"],
    n_chunks: int,
) -> SegmentTable:
    """Which segments, neighbours in the grid, each CTA of a scan takes.

    To begin a segment costs as much as one or two chunks, so that one more chunk is counted for each.
    """
    num_segments = rank.shape[1]
    number = jnp.arange(num_segments)
    numbers = jnp.broadcast_to(number[None], rank.shape)
    cta = (first_chunk + rank) >> CTA_BITS
    columns = jnp.stack([numbers, first_chunk, end_chunk, cta], axis=-1)
    # A row for each rank, as sums of one number: gathers would be kernels of their own.
    has_rank = rank[:, None, :] == number[None, :, None]
    of_rank = jnp.sum(jnp.where(has_rank[..., None], columns[:, None], 0), axis=2)
    of_cta = jnp.pad(of_rank[..., 3], ((0, 0), (1, 1)), constant_values=-1)
    after = jnp.where(of_cta[:, 2:] == of_cta[:, 1:-1], number[None] + 1, -1)
    before = jnp.where(of_cta[:, :-2] == of_cta[:, 1:-1], number[None] - 1, -1)
    segments = jnp.concatenate(
        [of_rank[..., :3], after[..., None], before[..., None]], axis=-1
    )

    each = jnp.arange(num_scan_ctas(n_chunks, num_segments))[None, :, None]
    earlier = cta[:, None] < each
    num_earlier = jnp.sum(earlier, axis=-1)
    own = cta[:, None] == each
    num_own = jnp.sum(own, axis=-1)
    first_segment = jnp.where(num_own > 0, num_earlier, -1)
    last_segment = jnp.where(num_own > 0, num_earlier + num_own - 1, -1)
    first = jnp.max(jnp.where(earlier, end_chunk[:, None], 0), axis=-1)
    end = jnp.max(jnp.where(earlier | own, end_chunk[:, None], 0), axis=-1)
    ctas = jnp.stack([first_segment, last_segment, first, end], axis=-1)
    return SegmentTable(segments.astype(jnp.int32), ctas.astype(jnp.int32))


def num_scan_ctas(n_chunks: int, num_segments: int) -> int:
    """CTAs that suffice for segments of so many chunks in all."""
    return -(-(n_chunks + num_segments) // CTA_CHUNKS)


def in_place(
    rows: list[Shaped[Array, "B T _ _"]], chunks: SegmentChunks
) -> list[PackedRows]:
    """Rows that kernels read: the ends are copied, zeros where there is no token."""
    ends = copy_ends(rows, chunks.ends)
    return [
        PackedRows(*of_array, chunks.places, chunks.most_chunks)
        for of_array in zip(rows, ends)
    ]

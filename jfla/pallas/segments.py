"""The chunks of packed segments as kernels find them: in place among the tokens, but for those that are not whole."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int, Shaped

from jfla.packing import num_aligned_chunks, segment_bounds
from jfla.pallas.common.end_copies import copy_ends
from jfla.pallas.common.packed_rows import PackedRows, SegmentTable
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
    # row of the grid of each packed token; N C: none, padding
    target: Int[Array, "B T"]
    # the chunk is the first of a segment, where decay is what keeps segments apart; else None
    is_first_chunk: Bool[Array, "B N"] | None
    bounds: Int[Array, "B S_plus_2"]  # first token of slots 0 .. S, and T
    table: SegmentTable
    most_chunks: Int[Array, "1"]  # with tokens, of the row that has most


class _Segments(NamedTuple):
    """Of segments 0 .. S-1 and of padding, which is segment S."""

    bounds: Int[Array, "B S_plus_2"]
    rank: Int[Array, "B S_plus_1"]  # in the grid's order
    first_chunk: Int[Array, "B S_plus_1"]

    @property
    def first_token(self) -> Int[Array, "B S_plus_1"]:
        return self.bounds[:, :-1]

    @property
    def end_token(self) -> Int[Array, "B S_plus_1"]:
        return self.bounds[:, 1:]

    @property
    def num_chunks(self) -> Int[Array, "B S_plus_1"]:
        return _num_chunks(self.bounds)

    @property
    def end_chunk(self) -> Int[Array, "B S_plus_1"]:
        return self.first_chunk + self.num_chunks

    @property
    def cta(self) -> Int[Array, "B S_plus_1"]:
        """Of a scan. To begin a segment costs as much as one or two chunks: one more chunk is counted for each."""
        return (self.first_chunk + self.rank) >> CTA_BITS

    @property
    def after(self) -> Int[Array, "B S_plus_1"]:
        """The rank of the CTA's next segment, or -1."""
        next_rank = self.rank + 1
        next_cta = (self.end_chunk + next_rank) >> CTA_BITS
        has_next = (next_rank < self.rank.shape[1]) & (next_cta == self.cta)
        return jnp.where(has_next, next_rank, -1)

    def as_one(self) -> "_Segments":
        """One segment of all chunks of segments, and padding behind it."""
        padding_chunk = self.first_chunk[:, -1:]
        end_chunk = self.end_chunk[:, -1:]
        number = jnp.arange(3, dtype=jnp.int32)[None]
        bounds = jnp.where(number == 1, padding_chunk, end_chunk) * CHUNK
        bounds = jnp.where(number == 0, 0, bounds)
        rank = jnp.arange(2, dtype=jnp.int32)[None]
        return _Segments(bounds, rank, rank * padding_chunk)


def segment_chunks(
    segment_ids: Int[Array, "B T"], num_segments: int, *, in_turn: bool = False
) -> SegmentChunks:
    """Of 0-based segments 0 .. S-1, and S for padding; to a scan those `in_turn` are one segment."""
    batch, time = segment_ids.shape
    n_chunks = num_aligned_chunks(time, num_segments)
    segments = _segments(segment_ids, num_segments)
    places = _places(segments, n_chunks)

    first_token, end_token = jnp.split(_tokens(segments, n_chunks), 2, axis=-1)
    token = first_token + jnp.arange(CHUNK)[None, None]
    is_token = token < end_token
    source = jnp.where(is_token, token, time).reshape(batch, -1)
    shift = segments.first_chunk * CHUNK - segments.first_token
    own_shift = jnp.take_along_axis(shift, jnp.maximum(segment_ids - 1, 0), axis=1)
    valid = (segment_ids > 0) & (segment_ids <= num_segments)
    target = jnp.where(valid, jnp.arange(time)[None] + own_shift, n_chunks * CHUNK)
    is_first_chunk = _is_first_chunk(segments, n_chunks) if in_turn else None
    scanned = segments.as_one() if in_turn else segments
    table = SegmentTable(_table(scanned), _scan_ctas(scanned, n_chunks))
    most_chunks = jnp.max(segments.end_chunk[:, -1:], axis=0)
    return SegmentChunks(
        places=places,
        source=source,
        target=target,
        is_first_chunk=is_first_chunk,
        bounds=segments.bounds,
        table=table,
        most_chunks=most_chunks,
    )


def _segments(segment_ids: Int[Array, "B T"], num_segments: int) -> _Segments:
    number = jnp.arange(num_segments + 1)[None, None]
    is_token = (segment_ids > 0) & (segment_ids <= num_segments)
    with_padding = jnp.where(is_token, segment_ids, num_segments + 1)
    bounds = segment_bounds(with_padding, num_segments + 1).astype(jnp.int32)
    num_chunks = _num_chunks(bounds)
    # [B, own, other]: sums over other segments, because a sort would be a kernel of its own.
    own = number.mT
    other = number
    own_length = num_chunks[:, :, None]
    other_length = num_chunks[:, None, :]
    longer = (other_length > own_length) | (
        (other_length == own_length) & (other < own)
    )
    before = jnp.where(
        own == num_segments, other < own, (other < num_segments) & longer
    )
    rank = jnp.sum(before, axis=-1, dtype=jnp.int32)
    first_chunk = jnp.sum(jnp.where(before, other_length, 0), axis=-1, dtype=jnp.int32)
    return _Segments(bounds, rank, first_chunk)


def _num_chunks(bounds: Int[Array, "B S_plus_2"]) -> Int[Array, "B S_plus_1"]:
    # Shifts and masks: with a division XLA makes a kernel of its own of every quotient.
    return (bounds[:, 1:] - bounds[:, :-1] + CHUNK - 1) >> CHUNK_BITS


# Tables are sums over segments, one of which a row of the table belongs to, with the columns behind: each is one kernel
# of XLA, where columns that are stacked, gathered or selected afterwards are one more.


def _by_segment(x: Int[Array, "B S"]) -> Int[Array, "B 1 S 1"]:
    return x[:, None, :, None]


def _sum_over_segments(
    x: Int[Array, "B rows S columns"],
) -> Int[Array, "B rows columns"]:
    return jnp.sum(x, axis=2, dtype=jnp.int32)


def _numbers(count: int, axis: int) -> Int[Array, "_ _ _ _"]:
    """0, 1, .. along an axis of [B, rows, segments, columns]; int32, also with x64: kernels read int32."""
    return lax.broadcasted_iota(
        jnp.int32, [count if i == axis else 1 for i in range(4)], axis
    )


def _places(segments: _Segments, n_chunks: int) -> Int[Array, "B N 2"]:
    """`SegmentChunks.places`."""
    chunks = _chunks(segments, n_chunks)
    padding = segments.rank.shape[1] - 1
    column = _numbers(2, axis=3)
    is_whole = chunks.first_token + CHUNK <= chunks.end_token
    at_end = -1 - chunks.segment
    read = jnp.where(is_whole & (chunks.segment < padding), chunks.first_token, at_end)
    written = jnp.where(is_whole, chunks.first_token, at_end)
    own = _columns(column, read, written)
    # Added with padding, which is behind all: what chunks without tokens read, and where they write.
    none = _columns(column, -1 - padding, -2 - padding)
    has_none = (chunks.segment == padding) & (chunks.number >= chunks.end_chunk)
    other = jnp.where(has_none, none, 0)
    return _sum_over_segments(jnp.where(chunks.is_own, own, other))


def _is_first_chunk(segments: _Segments, n_chunks: int) -> Bool[Array, "B N"]:
    """Whether a chunk is the first of a segment that has tokens."""
    chunks = _chunks(segments, n_chunks)
    padding = segments.rank.shape[1] - 1
    is_first = chunks.number == _by_segment(segments.first_chunk)
    has_tokens = chunks.is_own & (chunks.segment < padding)
    return jnp.any((is_first & has_tokens)[..., 0], axis=2)


def _tokens(segments: _Segments, n_chunks: int) -> Int[Array, "B N 2"]:
    """Of each chunk the first token and the end of its segment; 0 and 0 of padding and of chunks without tokens."""
    chunks = _chunks(segments, n_chunks)
    padding = segments.rank.shape[1] - 1
    column = _numbers(2, axis=3)
    own = _columns(column, chunks.first_token, chunks.end_token)
    is_own = chunks.is_own & (chunks.segment < padding)
    return _sum_over_segments(jnp.where(is_own, own, 0))


class _Chunks(NamedTuple):
    """Every chunk as a part of every segment: [B, N, S + 1, 1]."""

    number: Array
    segment: Array
    end_chunk: Array  # of the segment
    is_own: Array  # the chunk is one of the segment's
    first_token: Array
    end_token: Array  # of the segment


def _chunks(segments: _Segments, n_chunks: int) -> _Chunks:
    number = _numbers(n_chunks, axis=1)
    segment = _numbers(segments.rank.shape[1], axis=2)
    first_chunk = _by_segment(segments.first_chunk)
    end_chunk = _by_segment(segments.end_chunk)
    is_own = (number >= first_chunk) & (number < end_chunk)
    first_token = _by_segment(segments.first_token) + (number - first_chunk) * CHUNK
    end_token = _by_segment(segments.end_token)
    return _Chunks(number, segment, end_chunk, is_own, first_token, end_token)


def _table(segments: _Segments) -> Int[Array, "B S_plus_1 5"]:
    """`SegmentTable.segments`: a row for each rank."""
    num_segments = segments.rank.shape[1]
    row = _numbers(num_segments, axis=1)
    segment = _numbers(num_segments, axis=2)
    column = _numbers(5, axis=3)
    rank = _by_segment(segments.rank)
    after = _by_segment(segments.after)
    first_chunk = _by_segment(segments.first_chunk)
    end_chunk = _by_segment(segments.end_chunk)
    own = _columns(column, segment, first_chunk, end_chunk, after, -1)
    # The segment before adds its rank + 1 to that -1, if it is of the same CTA.
    of_next = _columns(column, 0, 0, 0, 0, rank + 1)
    is_before = (rank == row - 1) & (after >= 0)
    own_or_next = jnp.where(rank == row, own, jnp.where(is_before, of_next, 0))
    return _sum_over_segments(own_or_next)


def _scan_ctas(segments: _Segments, n_chunks: int) -> Int[Array, "B ctas 4"]:
    """`SegmentTable.ctas`: which segments, neighbours in the grid, each CTA of a scan takes."""
    num_segments = segments.rank.shape[1]
    row = _numbers(num_scan_ctas(n_chunks, num_segments), axis=1)
    column = _numbers(4, axis=3)
    rank = _by_segment(segments.rank)
    cta = _by_segment(segments.cta)
    num_chunks = _by_segment(segments.num_chunks)
    is_own = cta == row
    is_earlier = cta < row
    # The last of a CTA's segments has no next one; the first is as many before it as the CTA has. Padding, which is in
    # every row's sum, makes -1 of none.
    is_padding = rank == num_segments - 1
    is_last = _by_segment(segments.after) < 0
    last_plus_1 = jnp.where(is_own & is_last, rank + 1, 0)
    first_plus_1 = last_plus_1 + (is_own & is_last) - is_own
    first_chunk = jnp.where(is_earlier, num_chunks, 0)
    end_chunk = jnp.where(is_own | is_earlier, num_chunks, 0)
    first = first_plus_1 - is_padding
    last = last_plus_1 - is_padding
    return _sum_over_segments(_columns(column, first, last, first_chunk, end_chunk))


def _columns(column: Int[Array, "1 1 1 columns"], *values: ArrayLike) -> Array:
    """values[column], which broadcast."""
    x = jnp.asarray(values[-1], jnp.int32)
    for i, value in enumerate(values[:-1]):
        x = jnp.where(column == i, value, x)
    return x


def num_scan_ctas(n_chunks: int, num_segments: int) -> int:
    """CTAs that suffice for segments of so many chunks in all."""
    return -(-(n_chunks + num_segments) // CTA_CHUNKS)


def in_place(
    rows: list[Shaped[Array, "B T _ _"]], chunks: SegmentChunks
) -> list[PackedRows]:
    """Rows that kernels read: the ends are copied, zeros where there is no token."""
    ends = copy_ends(rows, chunks.bounds)
    return [
        PackedRows(*of_array, chunks.places, chunks.most_chunks)
        for of_array in zip(rows, ends)
    ]

"""Which chunk a CTA works on, and where its rows and tiles lie in global memory."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jfla.pallas.common.packed_rows import INPUTS, RESULTS, PackedRows, Rows
from jfla.pallas.mgpu.branches import cond
from jfla.pallas.mgpu.types import Gmem, Index
from jfla.types import CHUNK

TILE_K = 64  # key channels of one tile
TILE_V = 64  # columns of V of one tile, and of one consumer warpgroup
# Channels of K, and of V for KDA, that one CTA of the gradient kernels takes.
CHANNEL_BLOCK = 128


def joined_k_columns(columns: Index, key_dim: int) -> Index:
    """Where these columns of k_from_start lie in `JoinedQK.qk_from_start`; those of q_from_start keep their places."""
    return pl.ds(columns.start + key_dim, columns.size)


class ChunkIndex(NamedTuple):
    """A chunk of one value head."""

    batch: Index
    head: Index
    chunk: Index
    places: Gmem = None  # `places_of` rows that the kernel reads
    n_chunks: int | None = None  # N, static, where an array may be a ring
    # its place among inputs, or among results, where that was read ahead
    place_ahead: Callable[[], Index] | None = None
    # Where groups of sequences take turns in a ring: the place in its group, and the number of the chunk among those of
    # all sequences that have this place.
    turn: tuple[Index, Index] | None = None

    @property
    def flag(self) -> tuple[Index, Index, Index]:
        """Its place among `ReadyFlags`: in [B, HV, N], or in [1, sequences of a group, chunks of all groups]."""
        if self.turn is not None:
            return jnp.int32(0), *self.turn
        return self.batch, self.head, self.chunk

    def recompute_addresses(self, zero: Index) -> "ChunkIndex":
        """The same chunk, of which addresses are computed anew from an opaque zero."""
        turn = None
        if self.turn is not None:
            place, number = self.turn
            turn = place, number + zero
        return self._replace(chunk=self.chunk + zero, turn=turn)

    @property
    def tokens(self) -> Index:
        return pl.ds(pl.multiple_of(self.chunk * CHUNK, CHUNK), CHUNK)

    def tile(self, ref_gmem: Gmem) -> Gmem:
        """Its part of an array [B, HV, N, ...], or of a ring of R chunks, [B, HV, R, ...], in which chunks take turns.

        Groups of sequences take turns in a ring, too, which is [1, sequences of a group, R, ...].
        """
        size = ref_gmem.shape[2]
        if self.turn is not None and self.n_chunks is not None and size < self.n_chunks:
            place, number = self.turn
            return ref_gmem.at[0, place, lax.rem(number, jnp.int32(size))]
        return ref_gmem.at[self.batch, self.head, self.in_ring(size).chunk]

    def in_ring(self, size: int) -> "ChunkIndex":
        """Its place where an array has so many chunks, in which all chunks take turns."""
        if self.n_chunks is None or size >= self.n_chunks:
            return self
        return self._replace(chunk=lax.rem(self.chunk, jnp.int32(size)))

    def place(self, column: int) -> Index:
        """`SegmentChunks.places` of the chunk: an access to global memory, unless it was read ahead."""
        if self.place_ahead is not None:
            return self.place_ahead()
        return self.places[self.batch, self.chunk, column]

    def read_place(self, column: int) -> Index | None:
        """The same, to be read ahead; None where all chunks are whole."""
        return None if self.places is None else self.place(column)

    def at_place(self, place: Index | None) -> "ChunkIndex":
        """The chunk with its place as `read_place` gave it, for rows of one kind."""
        return self if place is None else self._replace(place_ahead=lambda: place)

    def for_rows(
        self,
        ref_gmem: Rows,
        value_heads: int,
        columns: Index,
        use: Callable[[Gmem], Any],
    ) -> Any:
        """`use` of its rows of [B, T, heads, D], which may be `PackedRows`, of inputs or of results.

        With fewer heads than value heads, a group of value heads shares one.
        """
        head = lax.div(self.head, jnp.int32(value_heads // ref_gmem.shape[2]))
        if not isinstance(ref_gmem, PackedRows):
            return use(ref_gmem.at[self.batch, self.tokens, head, columns])
        place = self.place(INPUTS if ref_gmem.is_input else RESULTS)

        def in_place() -> Any:
            return use(
                ref_gmem.tokens.at[self.batch, pl.ds(place, CHUNK), head, columns]
            )

        def at_end() -> Any:
            return use(ref_gmem.ends.at[self.batch, -1 - place, :, head, columns])

        return cond(place >= 0, in_place, at_end)


class ChunkGrid(NamedTuple):
    """All chunks of a call, numbered for a tile scheduler.

    Heads are fastest, because they lie side by side in memory; chunks are slowest, because a scan that overlaps reads
    them in this order. With `sequences_per_group` all chunks of a group of sequences come before those of the next
    group, as a scan reads them that has CTAs for one group at a time.
    """

    batch: int
    heads: int
    n_chunks: int
    sequences_per_group: int = 0  # the last group has the rest; 0: all
    descending: bool = False  # the last chunks come first

    @property
    def shape(self) -> tuple[int, int, int]:
        """[B, HV, N]."""
        return self.batch, self.heads, self.n_chunks

    @property
    def num_tiles(self) -> int:
        return self.batch * self.heads * self.n_chunks

    def used_tiles(self, x: Rows) -> Index | None:
        """Tiles up to the last chunk with tokens of rows that the kernel reads; None: all."""
        if not isinstance(x, PackedRows):
            return None
        return x.most_chunks[0] * (self.batch * self.heads)

    def __call__(self, tile_index: Index, places: Gmem = None) -> ChunkIndex:
        heads = jnp.int32(self.heads)
        batch = jnp.int32(self.batch)
        turn = None
        if self.sequences_per_group:
            place, number = self._turn(tile_index)
            n_chunks = jnp.int32(self.n_chunks)
            chunk = lax.rem(number, n_chunks)
            sequence = lax.div(number, n_chunks) * self.sequences_per_group + place
            turn = None if self.descending else (place, number)
            row = lax.div(sequence, heads)
            head = lax.rem(sequence, heads)
        else:
            rest = lax.div(tile_index, heads)
            head = lax.rem(tile_index, heads)
            chunk = lax.div(rest, batch)
            row = lax.rem(rest, batch)
        if self.descending:
            chunk = self.n_chunks - 1 - chunk
        return ChunkIndex(row, head, chunk, places, self.n_chunks, turn=turn)

    def _turn(self, tile_index: Index) -> tuple[Index, Index]:
        """`ChunkIndex.turn` of a tile."""
        group_size = jnp.int32(self.sequences_per_group)
        place = lax.rem(tile_index, group_size)
        number = lax.div(tile_index, group_size)
        full_groups, rest = divmod(self.batch * self.heads, self.sequences_per_group)
        if not rest:
            return place, number
        numbers_before = full_groups * self.n_chunks
        in_last = tile_index - numbers_before * group_size
        place_in_last = lax.rem(in_last, jnp.int32(rest))
        number_in_last = numbers_before + lax.div(in_last, jnp.int32(rest))
        is_in_last = in_last >= 0
        place = jnp.where(is_in_last, place_in_last, place)
        return place, jnp.where(is_in_last, number_in_last, number)

    def ring_shape(self, ring_chunks: int) -> tuple[int, int, int]:
        """The leading axes of what is kept of so many chunks of each sequence, 0: of all; see `ChunkIndex.tile`."""
        if not ring_chunks:
            return self.shape
        if self.sequences_per_group:
            return 1, self.sequences_per_group, ring_chunks
        return self.batch, self.heads, ring_chunks

    @property
    def flags_shape(self) -> tuple[int, int, int]:
        """Of `ReadyFlags`: see `ChunkIndex.flag`."""
        if not self.sequences_per_group or self.descending:
            return self.shape
        num_groups = -(-self.batch * self.heads // self.sequences_per_group)
        return 1, self.sequences_per_group, num_groups * self.n_chunks


class ChunkPart(NamedTuple):
    """A channel block of a chunk: the tiles of 64 channels from `first_tile` on."""

    index: ChunkIndex
    first_tile: Index

    def columns(self, tile: Index) -> Index:
        """Where a tile of the block lies among all channels."""
        return pl.ds((self.first_tile + tile) * TILE_K, TILE_K)


class PartGrid(NamedTuple):
    """All channel blocks of all chunks, numbered for a tile scheduler; the blocks of a chunk side by side."""

    chunks: ChunkGrid
    num_blocks: int
    tiles_per_block: int

    @property
    def num_parts(self) -> int:
        return self.chunks.num_tiles * self.num_blocks

    def used_parts(self, x: Rows) -> Index | None:
        """As `ChunkGrid.used_tiles`."""
        used = self.chunks.used_tiles(x)
        return None if used is None else used * self.num_blocks

    def __call__(self, tile_index: Index, places: Gmem = None) -> ChunkPart:
        if self.num_blocks == 1:
            return ChunkPart(self.chunks(tile_index, places), 0)
        num_blocks = jnp.int32(self.num_blocks)
        block = lax.rem(tile_index, num_blocks)
        index = self.chunks(lax.div(tile_index, num_blocks), places)
        return ChunkPart(index, block * self.tiles_per_block)


class EqualSpans(NamedTuple):
    """Spans of time of one length, of which the first may be shorter: they are counted from the end of time."""

    n_chunks: int
    num_spans: int

    @property
    def length(self) -> int:
        """In chunks."""
        return -(-self.n_chunks // self.num_spans)

    def span_after(self, spans_after: Index) -> tuple[Index, Index]:
        """The first chunk of the span that so many follow, and the first behind it."""
        end = self.n_chunks - spans_after * self.length
        return jnp.maximum(end - self.length, 0), end

    def last_span_first(self, i: Index) -> Index:
        """The i-th chunk where spans go from the last to the first, and chunks within each in order."""
        spans_after = lax.div(i, jnp.int32(self.length))
        first, _ = self.span_after(spans_after)
        return first + lax.rem(i, jnp.int32(self.length))


class TimeSpan(NamedTuple):
    """A kernel that runs on one span of time: span-local arrays have its chunks only, inputs and results have all.

    `spans_after` [1] int32 is how many spans of the same length follow in time. `results`, where given, are references
    to results of all chunks, into which the kernel writes those of the span.
    """

    spans_after: Gmem
    results: Gmem = None

    def offset(self, all_chunks: int, span_chunks: int) -> Index:
        """The number of the span's first chunk among all chunks."""
        return all_chunks - (self.spans_after[0] + 1) * span_chunks

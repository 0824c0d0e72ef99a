"""Rows of packed tokens that kernels read and write where the caller has them, whichever row a chunk begins with.

TMA copies whole chunks. The last chunk of a segment may not be whole: it is copied, before and after the kernels, so
that no kernel reads a neighbour's rows, writes over them, or masks any (`jfla.pallas.segments`).
"""

from typing import Any, NamedTuple

import jax
from jax.typing import DTypeLike

from jfla.packing import num_aligned_chunks
from jfla.pallas.mgpu.types import Gmem
from jfla.types import CHUNK

# Columns of `PackedRows.places`: padding is read elsewhere than it is written.
INPUTS, RESULTS = range(2)

Rows = Any  # [B, T, heads, D]: an array of whole chunks, or `PackedRows`


class PackedRows(NamedTuple):
    """Rows of packed tokens where the caller has them, and copies of chunks that are not whole: see `SegmentChunks`.

    In a kernel all are references.
    """

    tokens: Gmem  # [B, T, heads, D]
    ends: Gmem  # [B, slots, C, heads, D]
    # [B, N, 2] int32: `SegmentChunks.places`; None of results of kernels
    places: Gmem = None
    # [1] int32: chunks with tokens, of the row that has most; not of results
    most_chunks: Gmem = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[B, T, heads, D] of the aligned grid."""
        batch, time, heads, columns = self.tokens.shape
        n_chunks = num_aligned_chunks(time, self.ends.shape[1] - 2)
        return batch, n_chunks * CHUNK, heads, columns

    @property
    def dtype(self) -> DTypeLike:
        return self.tokens.dtype

    @property
    def is_input(self) -> bool:
        """Whether it is the caller's, and not what a kernel wrote, which another one may read again."""
        return self.places is not None


class SegmentTable(NamedTuple):
    """Packed segments in the order of their chunks, in which the CTAs of a scan take them.

    With padding as one more segment, the last. Segments of a CTA are given by their places in that order; -1: none. In
    a kernel both are references.
    """

    # [B, S + 1, 5] int32: segment, its first chunk, the chunk behind its last; the CTA's segment after it and before it
    segments: Gmem
    ctas: Gmem  # [B, ctas, 4] int32: first and last segment of a CTA, first chunk, the chunk behind the last


def places_of(x: Rows) -> Gmem:
    """Of `PackedRows`; None of an array of whole chunks."""
    return x.places if isinstance(x, PackedRows) else None


def rows_like(x: Rows, shape: tuple[int, ...], dtype: DTypeLike) -> Rows:
    """`jax.ShapeDtypeStruct`s of rows [.., heads, D] that lie as x does; `shape` is that of the whole chunks."""
    if not isinstance(x, PackedRows):
        return jax.ShapeDtypeStruct(shape, dtype)
    lead = (x.tokens.shape[:2], x.ends.shape[:3])
    return PackedRows(
        *[jax.ShapeDtypeStruct((*first, *shape[2:]), dtype) for first in lead]
    )

"""Tiles and lines that gradient kernels have in shared memory, by number; and the copies of what the scans left."""

import functools

from jax.experimental import pallas as pl

from jfla.pallas.common.chunk_index import TILE_V, ChunkIndex
from jfla.pallas.mgpu.copies import Copies
from jfla.pallas.mgpu.types import Index, Smem
from jfla.stages import ScanResults
from jfla.types import CHUNK

DO, DV, V_NEW = range(3)  # tiles of values
STATE, DSTATE = range(2)  # tiles of states
# GDN's lines of x . dx, by the span of the decay that x meets.
G_UP_TO, G_AFTER, G_CHUNK = range(3)


def load_values(
    copies: Copies,
    scans: ScanResults,
    index: ChunkIndex,
    heads: int,
    v_tile: Index,
    values_smem: Smem,
    v_new_index: ChunkIndex | None = None,
) -> None:
    """Starts the copies of 64 columns of V of a chunk's do, dv and v_new to three tiles.

    Of a span of time v_new alone is in memory: its place is then `v_new_index`.
    """
    columns = pl.ds(v_tile * TILE_V, TILE_V)
    values = (
        (DO, index, scans.do),
        (DV, index, scans.dv),
        (V_NEW, index if v_new_index is None else v_new_index, scans.v_new),
    )
    for which, own_index, source in values:
        start = functools.partial(copies.start, target_smem=values_smem.at[which])
        in_ring = own_index.in_ring(source.shape[1] // CHUNK)
        in_ring.for_rows(source, heads, columns, start)

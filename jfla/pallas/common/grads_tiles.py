"""What gradient kernels read of the scans, 64 columns of V at a time: its tiles in shared memory, and their copies."""

import functools

from jax.experimental import pallas as pl

from jfla.pallas.common.chunk_index import TILE_V, ChunkIndex
from jfla.pallas.mgpu.copies import Copies
from jfla.pallas.mgpu.types import Index, Smem
from jfla.stages import ScanResults
from jfla.types import CHUNK

DO, DV, V_NEW = range(3)  # tiles of values
STATE, DSTATE = range(2)  # tiles of states
# GDN's lines of x . dx, by the span of the decay that x meets
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
    """Starts the copies of a chunk's do, dv and v_new, which may have a place of its own, to three tiles."""
    columns = pl.ds(v_tile * TILE_V, TILE_V)
    values = (
        (DO, index, scans.do),
        (DV, index, scans.dv),
        (V_NEW, v_new_index or index, scans.v_new),
    )
    for which, own_index, source in values:
        start = functools.partial(copies.start, target_smem=values_smem.at[which])
        in_ring = own_index.in_ring(source.shape[1] // CHUNK)
        in_ring.for_rows(source, heads, columns, start)

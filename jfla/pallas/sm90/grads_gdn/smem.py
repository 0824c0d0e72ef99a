"""What the warpgroups of jfla_grads_gdn share: operands, shared memory, barriers; and their view.

Who writes what, and until when it is read:

    buffer                      written by              ready at            free at
    states, values              producer, per V tile    v_full[stage]       v_empty[stage]
    qk, factors, token_scalars  producer, per chunk     qk_full             chunk_done
    weights, diagonals          consumers               sync_consumers      next qk_full
    g_terms, norm_dots          consumers               sync_consumers      next qk_full
    qk, now dq and dk           consumers, own tile     their TMA store     chunk_done

The next `qk_full` frees what the consumers write, because the producer issues those copies only
after `chunk_done`, at which every thread of both consumers arrives by itself when it has read all
of the chunk. So what they write then needs no barrier before it.

A consumer stages dq and dk in its tiles of q and k, which the other one does not read. With K = 64
the two share a tile; the one that stages, number 0, does so alone.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jfla.pallas.common.chunk_index import (
    TILE_K,
    TILE_V,
    ChunkGrid,
    ChunkIndex,
    TimeSpan,
)
from jfla.pallas.common.intra_gdn.smem import INV_NORMS
from jfla.pallas.common.qk_tiles import QkOptions
from jfla.pallas.mgpu.copies import load_with_layout
from jfla.pallas.mgpu.iota import per_row
from jfla.pallas.mgpu.layouts import ROWS
from jfla.pallas.mgpu.scheduler import WorkTile
from jfla.pallas.mgpu.smem import F32, tile_smem
from jfla.pallas.mgpu.types import Gmem, Index, MemorySpec, Reg, Smem
from jfla.pallas.sm90.grads_pipeline import (
    NUM_CONSUMERS,
    GradsBarriers,
    ValuePipeline,
    with_most_stages,
)
from jfla.stages import ScanResults
from jfla.types import CHUNK


class GradsGdnInputs(NamedTuple):
    """Global memory that the kernel reads; and the results of a `TimeSpan`, which it writes."""

    q: Gmem  # [B, T, H, K] bfloat16 or float16
    k: Gmem  # [B, T, H, K] the same
    scans: ScanResults
    factors: Gmem  # [B, HV, N, 4, C] float32: see `FactoredQK`
    token_scalars: Gmem  # [B, HV, N, 1 or 3, C] float32: see `intra_gdn.LOG2_CUM`
    span: TimeSpan | None


class GradsGdnSpec(NamedTuple):
    """Static. In `grid`, of which CTAs take the tiles, every block of 128 channels is a head."""

    options: QkOptions
    grid: ChunkGrid  # heads are HV * channel_blocks
    heads: int  # HV
    channel_blocks: int
    num_tiles: int  # of 64 channels, in a channel block: 1 (K = 64) or 2
    v_tiles: int  # of 64 columns of V
    num_token_scalars: int  # 1, or 3 under qk_norm
    dtype: DTypeLike  # of all tiles: bfloat16 or float16

    @property
    def beside_scans(self) -> bool:
        """Whether a chunk follows the scans, which leave the last one first, and is read from rings."""
        return self.grid.descending


class SharedStorage(NamedTuple):
    """Shared memory of a CTA: tiles are [C, 64] of 16 bits, vectors [C] float32."""

    states: Smem  # [stages, 2, num_tiles] tiles: 64 rows of S^T and of dS^T
    values: Smem  # [stages, 3] tiles: do, dv, v_new
    qk: Smem  # [2, num_tiles] tiles: q and k; then dq and dk
    weights: Smem  # [2] tiles: W_q without its diagonal, and W_k
    factors: Smem  # [4] vectors
    token_scalars: Smem  # [1 or 3] vectors
    diagonals: Smem  # [2] vectors: do . v_new and dv . v_new of every token
    # [2, num_tiles] vectors: q . dq and k . dk, of the VJP of the norms
    norm_dots: Smem
    g_terms: Smem  # [3, num_tiles] vectors: x . dx by the span of the decay that x meets, see G_UP_TO


class GradsGdnWarpgroup(NamedTuple):
    """What one warpgroup sees of the chunk and the channel block that its CTA works on.

    Consumers are numbered like Q and K: number 0 makes W_q, number 1 W_k.
    """

    wg: Index
    work: WorkTile
    grid_index: ChunkIndex  # in the grid, where every channel block is a head
    spec: GradsGdnSpec
    gmem: GradsGdnInputs
    smem: SharedStorage
    pipeline: ValuePipeline

    @property
    def barriers(self) -> GradsBarriers:
        return self.pipeline.barriers

    @property
    def span_chunk(self) -> ChunkIndex:
        """Index within the span: of the states and v_new."""
        index = self.grid_index
        return index._replace(
            head=lax.div(index.head, jnp.int32(self.spec.channel_blocks))
        )

    @property
    def global_chunk(self) -> ChunkIndex:
        """Index within the whole sequence: of everything else."""
        span_chunk = self.span_chunk
        if self.gmem.span is None:
            return span_chunk
        all_chunks = self.gmem.factors.shape[2]
        offset = self.gmem.span.offset(all_chunks, self.gmem.scans.states.shape[2])
        return span_chunk._replace(chunk=span_chunk.chunk + offset)

    @property
    def channel_block(self) -> Index:
        return lax.rem(self.grid_index.head, jnp.int32(self.spec.channel_blocks))

    def columns(self, tile: Index) -> Index:
        """Where a tile of the channel block lies among all channels."""
        return pl.ds((self.channel_block * self.spec.num_tiles + tile) * TILE_K, TILE_K)

    @property
    def own_tile(self) -> Index:
        """This consumer's tile of channels; with K = 64 there is one, which number 0 stores."""
        return self.wg if self.spec.num_tiles == NUM_CONSUMERS else self.work.zero

    def opaque_index(self, n: int) -> Index:
        """n, as a traced value: `dots` cannot close over a reference that a Python int indexed."""
        return self.work.zero + n

    def value_tile(self, stage: Index, which: int) -> Smem:
        """Of DO, DV, V_NEW."""
        return self.smem.values.at[stage, self.opaque_index(which)]

    def state_tile(self, stage: Index, which: int) -> Smem:
        """Of STATE, DSTATE, for this consumer's channels."""
        return self.smem.states.at[stage, self.opaque_index(which), self.own_tile]

    def qk_tile(self, which: int) -> Smem:
        """Of Q, K, for this consumer's channels."""
        return self.smem.qk.at[self.opaque_index(which), self.own_tile]

    def weights_tile(self, which: int) -> Smem:
        """W_q (Q) or W_k (K)."""
        return self.smem.weights.at[self.opaque_index(which)]

    def row_factor(self, row: int) -> Reg:
        """[C, 64]: a row of `FactoredQK.factors`, the factor of every token."""
        return per_row(load_with_layout(self.smem.factors.at[row], ROWS), TILE_K)

    def inv_norm(self, which: Index) -> Reg:
        """[C]: 1 / norm of every token's q or k."""
        return load_with_layout(self.smem.token_scalars.at[INV_NORMS + which], ROWS)


def grads_gdn_storage(spec: GradsGdnSpec) -> SharedStorage:
    """On the host: shared memory, with as many stages of V as there is room for."""
    return with_most_stages(functools.partial(_storage, spec))


def _storage(spec: GradsGdnSpec, stages: int) -> SharedStorage:
    def vectors(*lead: int) -> MemorySpec:
        return plgpu.SMEM((*lead, CHUNK), F32)

    def tiles(*shape: int) -> MemorySpec:
        return tile_smem(*shape, dtype=spec.dtype)

    return SharedStorage(
        states=tiles(stages, 2, spec.num_tiles, TILE_V, TILE_K),
        values=tiles(stages, 3, CHUNK, TILE_V),
        qk=tiles(2, spec.num_tiles, CHUNK, TILE_K),
        weights=tiles(2, CHUNK, CHUNK),
        factors=vectors(4),
        token_scalars=vectors(spec.num_token_scalars),
        diagonals=vectors(2),
        norm_dots=vectors(2, spec.num_tiles),
        g_terms=vectors(3, spec.num_tiles),
    )

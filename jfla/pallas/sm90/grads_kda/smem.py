"""What the warpgroups of jfla_grads_kda share: operands, shared memory, barriers; and their view.

Who writes what, and until when it is read:

    buffer                      written by              ready at            free at
    states, values              producer, per V tile    v_full[stage]       v_empty[stage]
    q, k, and vectors           producer, per chunk     qk_full             chunk_done
    q, k, now normalised        consumers, own tile     sync_consumers      chunk_done
    weights, diagonals          consumers               sync_consumers      chunk_done
    q, k, now dq and dk         consumers, own tile     their TMA store     chunk_done
    weights, now x . dx         consumers               sync_consumers      chunk_done
    the others                  consumers, own tile     at once             with the next write

A consumer stages dq and dk in its tiles of q and k, which the other one does not read.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jfla.pallas.common.chunk_index import (
    TILE_K,
    TILE_V,
    ChunkIndex,
    ChunkPart,
    PartGrid,
)
from jfla.pallas.common.decay_sums import NUM_BLOCK_SPANS, ROW_SUMS, SUM_MATRICES
from jfla.pallas.common.pair_passes import BLOCK, SHIFT
from jfla.pallas.common.qk_tiles import QkgOperands, QkOptions, QkTiles
from jfla.pallas.common.results import KernelGrads
from jfla.pallas.mgpu.copies import load_with_layout
from jfla.pallas.mgpu.iota import per_row
from jfla.pallas.mgpu.layouts import ROWS
from jfla.pallas.mgpu.mma import dot, dots, filled, zeros
from jfla.pallas.mgpu.opaque import opaque_zero
from jfla.pallas.mgpu.scheduler import WorkTile
from jfla.pallas.mgpu.smem import BF16, F16, F32, tile_smem, transposed
from jfla.pallas.mgpu.types import (
    Barrier,
    Gmem,
    Index,
    Layout,
    MemorySpec,
    Reg,
    Smem,
)
from jfla.pallas.sm90.grads_pipeline import (
    NUM_CONSUMERS,
    GradsBarriers,
    ValuePipeline,
    grads_barriers,
    with_most_stages,
)
from jfla.stages import ScanResults
from jfla.types import CHUNK


class GradsKdaOperands(NamedTuple):
    """What the kernel reads; and the results, where they are references."""

    qkg: QkgOperands
    scans: ScanResults
    sum_matrices: Gmem  # SUM_MATRICES, float16
    block_spans: Gmem  # [NUM_BLOCK_SPANS, C] float16: see `decay_sums.block_spans`
    after: Gmem  # `decay_sums.AFTER`, bfloat16
    inv_norms: Gmem  # [B, HV, N, 2, C] float32 of q and k, under qk_norm
    results: KernelGrads | None = None


class GradsKdaSpec(NamedTuple):
    """Static. A CTA takes a block of up to 128 channels of a chunk."""

    options: QkOptions
    grid: PartGrid
    v_tiles: int  # of 64 columns of V

    @property
    def num_tiles(self) -> int:
        """Of 64 channels: 1 (K = 64) or 2."""
        return self.grid.tiles_per_block

    @property
    def heads(self) -> int:
        """HV."""
        return self.grid.chunks.heads


class SharedStorage(NamedTuple):
    """Shared memory of a CTA: tiles are [C, 64] in the dtype of q unless said otherwise, vectors [64] float32."""

    states: Smem  # [stages, 2, tiles] tiles: 64 rows of S^T and of dS^T
    values: Smem  # [stages, 3] tiles: do, dv, v_new
    q: Smem  # [tiles] tiles; then dq
    k: Smem  # [tiles] tiles; then dk
    # [2] bf16 tiles: W_q and W_k, strictly lower; then x dx of the norms' VJP, a tile of each consumer
    weights: Smem
    log2_decay: Smem  # [tiles] float16 tiles, times GATE_SCALE
    sum_matrices: Smem  # [2] float16 tiles: SUM_MATRICES
    block_spans: Smem  # [1, NUM_BLOCK_SPANS, C] float16
    after: Smem  # [1] bf16 tile
    block_decay: Smem  # [tiles, NUM_BLOCK_SPANS] vectors, by channels: the decays over `block_spans`
    least: Smem  # [tiles] vectors, by channels: the least sum within a block
    diagonals: Smem  # [2] vectors: do . v_new and dv . v_new of every token
    inv_norms: Smem  # [2] vectors: 1 / norm of every token's q and k, under qk_norm
    log2_bias: Smem  # [tiles] vectors, by channels, where there is a gate
    resets: Smem  # vector, where sequences are packed


class Barriers(NamedTuple):
    """Mbarriers of a CTA: see the table at the top of this file."""

    matrices_full: Barrier
    pipeline: GradsBarriers


class GradsKdaWarpgroup(NamedTuple):
    """What one warpgroup sees of the chunk and the channel block that its CTA works on.

    Consumers are numbered like Q and K: number 0 makes W_q, number 1 W_k.
    """

    wg: Index
    work: WorkTile
    part: ChunkPart  # the chunk, without an opaque zero (see `index`), and the channel block
    spec: GradsKdaSpec
    gmem: GradsKdaOperands
    cta: Index  # its number
    scratch_gmem: Gmem  # [CTAs, tiles, 64, C] float32, where dg has 16 bits; else None
    smem: SharedStorage
    pipeline: ValuePipeline

    @property
    def barriers(self) -> GradsBarriers:
        return self.pipeline.barriers

    @property
    def zero(self) -> Index:
        """A new opaque zero."""
        return opaque_zero()

    def recompute_addresses(self) -> "GradsKdaWarpgroup":
        """The same with addresses that depend on another opaque zero."""
        return self._replace(wg=self.wg + self.zero)

    def for_scratch(self, dg_gmem: Gmem, use: Callable[[Gmem], Any]) -> Any:
        """`use` of [64, 64] float32 of this consumer in global memory: in the memory of dg where that has room."""
        if self.scratch_gmem is None:
            return self.for_own_rows(dg_gmem, use)
        # With an opaque zero: ptxas would spill an address that is kept from chunk to chunk.
        return use(self.scratch_gmem.at[self.cta + self.zero, self.own_tile])

    @property
    def index(self) -> ChunkIndex:
        index = self.part.index
        return index._replace(chunk=index.chunk + self.zero)

    @property
    def has_all_channels(self) -> bool:
        """Whether K has no other block."""
        return self.spec.grid.num_blocks == 1

    @property
    def own_tile(self) -> Index:
        """This consumer's tile of channels; with K = 64 there is one, which both read and number 0 stores."""
        # Of the warpgroup's number in both cases: with an opaque zero for each access ptxas spilled 48 bytes.
        return self.wg if self.spec.num_tiles == NUM_CONSUMERS else self.wg >> 1

    @property
    def qk(self) -> QkTiles:
        """q, k and the gate of the chunk, while they are there."""
        smem = self.smem
        return QkTiles(
            options=self.spec.options,
            index=self.index,
            value_heads=self.spec.heads,
            num_tiles=self.spec.num_tiles,
            q=smem.q,
            k=smem.k,
            square_norms=None,
            first=self.part.first_tile,
        )

    def for_own_rows(self, ref_gmem: Gmem, use: Callable[[Gmem], Any]) -> Any:
        """`use` of this consumer's channels of an array [B, T, heads, K] that the kernel writes."""
        columns = self.part.columns(self.own_tile)
        return self.index.for_rows(ref_gmem, self.spec.heads, columns, use)

    def value_tile(self, stage: Index, which: Index) -> Smem:
        """Of DO, DV, V_NEW; by a traced number: `dots` cannot close over a reference that a Python int indexed."""
        return self.smem.values.at[stage, self.zero + which]

    def state_tile(self, stage: Index, which: int) -> Smem:
        """Of STATE, DSTATE, for this consumer's channels."""
        return self.smem.states.at[stage, self.zero + which, self.own_tile]

    def inv_norm(self, which: int, layout: Layout) -> Reg:
        """[C]: 1 / norm of every token's q or k, under qk_norm."""
        return load_with_layout(self.smem.inv_norms.at[which], layout)

    def own_qk_tile(self, which: int) -> Smem:
        """q or k of this consumer's channels, and then dq or dk."""
        return (self.smem.q, self.smem.k)[which].at[self.own_tile]

    def weights_rows(self, which: int, block: int) -> Smem:
        """[BLOCK, C]: the rows of a block of W_q or W_k."""
        return self.smem.weights.at[self.zero + which].at[pl.ds(block * BLOCK, BLOCK)]

    def decay_sums(self, which: int) -> Reg:
        """[64, C]: of every channel and token the sum of log2 decays by one of SUM_MATRICES, shifted."""
        decay = transposed(self.smem.log2_decay.at[self.own_tile])
        matrix = transposed(self.smem.sum_matrices.at[self.zero + which])
        return dot(filled(TILE_K, CHUNK, _shift(which)), (decay, matrix))

    def block_decay_sums(self, *blocks: tuple[int, int]) -> list[Reg]:
        """[64, BLOCK]: the same of the tokens of a block, for every (one of SUM_MATRICES, block)."""
        decay = transposed(self.smem.log2_decay.at[self.own_tile])

        def sums(which: int, block: int) -> tuple[Reg, Any]:
            rows = self.smem.sum_matrices.at[self.zero + which]
            matrix = transposed(rows.at[pl.ds(block * BLOCK, BLOCK)])
            return filled(TILE_K, BLOCK, _shift(which)), (decay, matrix)

        return dots(*[sums(*block) for block in blocks])

    def block_sums(self) -> Reg:
        """[64, NUM_BLOCK_SPANS]: the sums of log2 decays over whole blocks, of every channel."""
        decay = transposed(self.smem.log2_decay.at[self.own_tile])
        return dot(
            zeros(TILE_K, NUM_BLOCK_SPANS),
            (decay, transposed(self.smem.block_spans.at[self.zero])),
        )

    def block_decay(self, span: int) -> Reg:
        """[64, BLOCK]: of every channel the decay over one of `block_spans`."""
        decay = load_with_layout(self.smem.block_decay.at[self.own_tile, span], ROWS)
        return per_row(decay, BLOCK)


def _shift(which: int) -> float:
    """Of the sums of rows, or of columns: see `pair_passes.py`."""
    return SHIFT if which == ROW_SUMS else -SHIFT


def grads_kda_storage(spec: GradsKdaSpec, operands: QkgOperands) -> SharedStorage:
    """On the host: shared memory, with as many stages of V as there is room for."""
    return with_most_stages(functools.partial(_storage, spec, operands))


def _storage(spec: GradsKdaSpec, operands: QkgOperands, stages: int) -> SharedStorage:
    num_tiles = spec.num_tiles
    own = operands.q.dtype

    def tiles(*lead: int, rows: int = CHUNK, dtype: DTypeLike = own) -> MemorySpec:
        return tile_smem(*lead, rows, TILE_K, dtype=dtype)

    def vectors(*lead: int) -> MemorySpec:
        return plgpu.SMEM((*lead, TILE_K), F32)

    return SharedStorage(
        states=tiles(stages, 2, num_tiles, rows=TILE_V),
        values=tiles(stages, 3),
        q=tiles(num_tiles),
        k=tiles(num_tiles),
        weights=tiles(2, dtype=BF16),
        log2_decay=tiles(num_tiles, dtype=F16),
        sum_matrices=tiles(len(SUM_MATRICES), dtype=F16),
        block_spans=tiles(1, rows=NUM_BLOCK_SPANS, dtype=F16),
        after=tiles(1, dtype=BF16),
        block_decay=vectors(num_tiles, NUM_BLOCK_SPANS),
        least=vectors(num_tiles),
        diagonals=vectors(2),
        inv_norms=vectors(2) if spec.options.qk_norm else None,
        log2_bias=None if spec.options.no_gate else vectors(num_tiles),
        resets=None if operands.resets is None else vectors(),
    )


def grads_kda_barriers(
    spec: GradsKdaSpec, operands: QkgOperands, stages: int
) -> Barriers:
    """On the host."""
    has_bias = not spec.options.no_gate
    has_resets = operands.resets is not None
    copies_of_qk = spec.num_tiles * (2 + has_bias) + has_resets + spec.options.qk_norm
    return Barriers(
        matrices_full=plgpu.Barrier(num_arrivals=2 + len(SUM_MATRICES)),
        pipeline=grads_barriers(spec.num_tiles, copies_of_qk, stages),
    )

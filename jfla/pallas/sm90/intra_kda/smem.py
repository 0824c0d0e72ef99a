"""What a warpgroup of KDA's intra-chunk kernel sees: operands, shared memory, barriers, copies.

A channel warpgroup owns a tile of 64 channels of the chunk; the warpgroup behind them, the pairs
warpgroup, owns what sums over channels: A_qk, and A_inv through the inverse.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jfla.pallas.common.beta_scaling import BETA_LINE
from jfla.pallas.common.chunk_index import TILE_K, ChunkPart, PartGrid
from jfla.pallas.common.decay_sums import NUM_BLOCK_SPANS, ROW_SUMS, SUM_MATRICES
from jfla.pallas.common.packed_rows import INPUTS, places_of
from jfla.pallas.common.pair_passes import BLOCK, NUM_BLOCKS, SHIFT, passes_of
from jfla.pallas.common.qk_tiles import QkgOperands, QkOptions, QkTiles
from jfla.pallas.mgpu.branches import when
from jfla.pallas.mgpu.columns import join_columns, split_columns, widened
from jfla.pallas.mgpu.copies import (
    Copies,
    load_with_layout,
    prefetch_to_l2,
)
from jfla.pallas.mgpu.layouts import COLS
from jfla.pallas.mgpu.mma import dot, filled, zeros
from jfla.pallas.mgpu.opaque import opaque_zero
from jfla.pallas.mgpu.overlap import ReadyFlags
from jfla.pallas.mgpu.scheduler import WorkTile
from jfla.pallas.mgpu.smem import (
    BF16,
    F16,
    F32,
    in_one_place,
    tile_smem,
    transposed,
)
from jfla.pallas.mgpu.types import Barrier, Gmem, Index, MemorySpec, Reg, Smem
from jfla.types import CHUNK

# k as the columns of A, [C, 64] for each block of rows, of which only the blocks up to it count: those of block b begin
# at COLUMN_BLOCKS[b] in blocks of 16 rows, and what lies behind them there belongs to the next.
COLUMN_BLOCKS = (0, 1, 3, 6)
NUM_COLUMN_BLOCKS = 10


def column_positions(distance: int) -> tuple[int, int, int, int]:
    """Where the column blocks go that meet the rows so many blocks on; see `store_blocks`.

    Those for which there are no such rows go where the same warp writes at distance 0, which has to come last.
    """
    first, second, third, last = (
        COLUMN_BLOCKS[block + distance] + block
        if block + distance < NUM_BLOCKS
        else COLUMN_BLOCKS[block] + block
        for block in range(NUM_BLOCKS)
    )
    return first, second, third, last


def in_two_parts(pairs: Reg) -> Reg:
    """[C, 64] bf16, for a tile of shared memory: float32 [C, 2 BLOCK] rounded, and beside it what rounding took."""
    high = pairs.astype(BF16)
    return join_columns([high, (pairs - high.astype(F32)).astype(BF16)])


def of_two_parts(parts: Reg) -> Reg:
    """What `in_two_parts` was given, [C, 2 BLOCK]."""
    high, low = split_columns(widened(parts), 2 * BLOCK)
    return high + low


class IntraKdaOperands(NamedTuple):
    """What the kernel reads."""

    qkg: QkgOperands
    beta: Gmem  # [B, HV, N, 1, C], or None where the kernel inverts nothing
    qk_dots: Gmem  # the same of the diagonal of a_qk, where the caller has it
    sum_matrices: Gmem  # SUM_MATRICES, float16
    block_spans: Gmem  # [NUM_BLOCK_SPANS, C] float16: see `decay_sums.block_spans`


class IntraKdaOutputs(NamedTuple):
    """What the kernel writes: `JoinedQK`, and what it has of `IntraChunk`."""

    qk_from_start: Gmem
    k_to_end: Gmem
    chunk_decay: Gmem
    a_qk: Gmem  # None where the caller has it, or K has several channel blocks
    a_inv: Gmem  # the same
    # [B, HV, N, blocks, 2, C, C] float32, with several blocks: what each adds to (q D k^T)^T and (k D k^T)^T.
    block_sums: Gmem
    inv_norms: Gmem  # [B, HV, N, 2, C] float32 of q and k, under qk_norm without pairs: for the gradients

    @property
    def with_pairs(self) -> bool:
        """Whether pairs of tokens are computed."""
        return self.a_qk is not None or self.block_sums is not None


class SharedStorage(NamedTuple):
    """Tiles are [C, 64] in the dtype of q unless said otherwise; `tiles` counts those of 64 channels, a warpgroup's."""

    sum_matrices: Smem  # [2] float16 tiles: SUM_MATRICES
    block_spans: Smem  # [NUM_BLOCK_SPANS, C] float16
    q: Smem  # [2 chunks, tiles], raw, then q_from_start
    k: Smem  # [2 chunks, tiles], raw, then k_from_start
    k_to_end: Smem  # [tiles]
    square_norms: Smem  # [2 chunks, 2, tiles, C]
    decay_union: Smem  # a pair: see `_decay_smem`
    block_decay: Smem  # [tiles, NUM_BLOCK_SPANS, 64]: the decays over `block_spans`
    log2_bias: Smem  # [2 chunks, tiles, 64], where there is a gate
    resets: Smem  # [2 chunks, tiles, C], where sequences are packed
    # None of these where the caller has the A matrices.
    least: Smem  # [2 chunks, tiles, C]: by channels, the least sum within a block
    rows: Smem  # [tiles, 2 C, 64] bf16: q and k as the rows of A, a block of q and then the same of k
    columns: Smem  # [tiles, 16 NUM_COLUMN_BLOCKS, 64] bf16: k as the columns of A
    # None of these where the kernel inverts nothing.
    a_qk: Smem  # tile
    inverse: Smem  # a pair: see `_inverse_smem`
    beta_scaling: Smem  # [3, C]: its scaling, and beta
    qk_dots: Smem  # [1, C]: the diagonal of a_qk, where the caller has it

    @classmethod
    def specs(
        cls,
        operands: IntraKdaOperands,
        options: QkOptions,
        num_tiles: int,
        with_pairs: bool,
    ) -> "SharedStorage":
        """On the host: what a CTA asks for, as it computes pairs of tokens and, given beta, inverts; or not."""

        own = operands.qkg.q.dtype
        inverts = operands.beta is not None
        has_resets = operands.qkg.resets is not None

        def tiles(*lead: int, rows: int = CHUNK, dtype: DTypeLike = own) -> MemorySpec:
            return tile_smem(*lead, rows, TILE_K, dtype=dtype)

        def vectors(*lead: int) -> MemorySpec:
            return plgpu.SMEM((*lead, CHUNK), F32)

        return cls(
            sum_matrices=tiles(len(SUM_MATRICES), dtype=F16),
            block_spans=tiles(rows=NUM_BLOCK_SPANS, dtype=F16),
            q=tiles(2, num_tiles),
            k=tiles(2, num_tiles),
            k_to_end=tiles(num_tiles),
            square_norms=vectors(2, 2, num_tiles) if options.qk_norm else None,
            decay_union=_decay_smem(num_tiles),
            block_decay=vectors(num_tiles, NUM_BLOCK_SPANS),
            log2_bias=None if options.no_gate else vectors(2, num_tiles),
            resets=vectors(2, num_tiles) if has_resets else None,
            least=vectors(2, num_tiles) if with_pairs else None,
            rows=tiles(num_tiles, rows=2 * CHUNK, dtype=BF16) if with_pairs else None,
            columns=tiles(num_tiles, rows=BLOCK * NUM_COLUMN_BLOCKS, dtype=BF16)
            if with_pairs
            else None,
            a_qk=tiles() if inverts else None,
            inverse=_inverse_smem(own) if inverts else None,
            beta_scaling=vectors(3) if inverts else None,
            qk_dots=None if operands.qk_dots is None else vectors(1),
        )

    @property
    def log2_decay(self) -> Smem:
        """[tiles] float16 tiles, times GATE_SCALE."""
        return self.decay_union[0]

    @property
    def further_pairs(self) -> Smem:
        """[tiles]: see `in_two_parts`."""
        return self.decay_union[1]


def _decay_smem(num_tiles: int) -> MemorySpec:
    """log2 decays; and further pairs, which are made when the decays have been summed."""
    decays = tile_smem(num_tiles, CHUNK, TILE_K, dtype=F16)
    return in_one_place(decays, tile_smem(num_tiles, CHUNK, TILE_K))


def _inverse_smem(dtype: DTypeLike) -> MemorySpec:
    """A tile for a_inv, which comes last; and [2] float16 tiles: what is inverted, and scratch."""
    a_inv = tile_smem(CHUNK, CHUNK, dtype=dtype)
    return in_one_place(a_inv, tile_smem(2, CHUNK, CHUNK, dtype=F16))


class Barriers(NamedTuple):
    """`full`: the copies, or the writes, have arrived. `empty`: the reads are done."""

    matrices_full: Barrier
    qk_full: Barrier  # [2 chunks * tiles]
    norms: Barrier  # the square norms of all channel warpgroups are in shared memory
    pairs_full: Barrier  # [tiles]: rows, columns and further pairs
    pairs_empty: Barrier  # [tiles]
    further_empty: Barrier  # [tiles], of chunks that have further pairs
    beta_full: Barrier  # beta and qk_dots
    stores_ended: Barrier  # of the channel warpgroups, of the chunk before; where a scan waits for it

    @classmethod
    def specs(
        cls, operands: IntraKdaOperands, options: QkOptions, num_tiles: int
    ) -> "Barriers":
        """On the host: arrivals are copies that a phase waits for, or warpgroups that meet."""
        has_bias = not options.no_gate
        has_resets = operands.qkg.resets is not None
        has_dots = operands.qk_dots is not None
        return cls(
            matrices_full=plgpu.Barrier(num_arrivals=1 + len(SUM_MATRICES)),
            qk_full=plgpu.Barrier(
                num_arrivals=2 + has_bias + has_resets, num_barriers=2 * num_tiles
            ),
            norms=plgpu.Barrier(num_arrivals=num_tiles),
            pairs_full=plgpu.Barrier(num_barriers=num_tiles),
            pairs_empty=plgpu.Barrier(num_barriers=num_tiles),
            further_empty=plgpu.Barrier(num_barriers=num_tiles),
            beta_full=plgpu.Barrier(num_arrivals=1 + has_dots),
            stores_ended=plgpu.Barrier(num_arrivals=num_tiles),
        )


class IntraKdaWarpgroup(NamedTuple):
    """One warpgroup at one chunk."""

    wg: Index
    work_tile: WorkTile
    grid: PartGrid
    part: ChunkPart
    qk: QkTiles
    gmem: IntraKdaOperands
    smem: SharedStorage
    barriers: Barriers
    ready_flags: ReadyFlags

    @property
    def zero(self) -> Index:
        """A new opaque zero."""
        return opaque_zero()

    @property
    def slot(self) -> Index:
        """Which half of what is there for two chunks belongs to this one."""
        return self.work_tile.iteration & 1

    @property
    def has_all_channels(self) -> bool:
        """Whether K has no other block."""
        return self.grid.num_blocks == 1

    def recompute_addresses(self) -> "IntraKdaWarpgroup":
        """The same with addresses that depend on another opaque zero."""
        zero = self.zero
        index = self.qk.index
        qk = self.qk._replace(index=index.recompute_addresses(zero))
        return self._replace(wg=self.wg + zero, qk=qk)

    def decay_sums(self, which: int) -> Reg:
        """[C, 64]: every token's sum of log2 decays by one of SUM_MATRICES, shifted: see `pair_passes.py`."""
        matrix = self.smem.sum_matrices.at[self.zero + which]
        shift = filled(CHUNK, TILE_K, SHIFT if which == ROW_SUMS else -SHIFT)
        return dot(shift, (matrix, self.smem.log2_decay.at[self.wg]))

    def block_sums(self) -> Reg:
        """[64, NUM_BLOCK_SPANS]: the sums of log2 decays over whole blocks, of every channel."""
        decay = transposed(self.smem.log2_decay.at[self.wg])
        spans = transposed(self.smem.block_spans)
        return dot(zeros(TILE_K, NUM_BLOCK_SPANS), (decay, spans))

    def num_passes(self, tile: Index, first: int = 0, channels: int = TILE_K) -> Index:
        """How many passes the pairs take of a tile of channels, or of some of these from `first` on."""
        least = self.smem.least.at[self.slot, tile, pl.ds(first, channels)]
        return passes_of(jnp.min(load_with_layout(least, COLS)))

    def prefetch_qk(self, part: ChunkPart, iteration: Index) -> None:
        """Starts the copies of this warpgroup's channels of q and k, for that iteration.

        g is read into registers, none of which are free a chunk ahead: it is only prefetched into the L2 cache.
        """
        tile = self.wg
        slot = iteration & 1
        barrier = self.barriers.qk_full.at[2 * tile + slot]
        index = part.index
        columns = part.columns(tile)
        qkg = self.gmem.qkg
        copies = Copies(barrier)
        for source, target in ((qkg.q, self.smem.q), (qkg.k, self.smem.k)):
            start = functools.partial(copies.start, target_smem=target.at[slot, tile])
            index.for_rows(source, self.qk.value_heads, columns, start)
        index.for_rows(qkg.g, self.qk.value_heads, columns, prefetch_to_l2)
        if self.smem.log2_bias is not None:
            copies.start(
                qkg.log2_bias.at[index.head, columns],
                self.smem.log2_bias.at[slot, tile],
            )
        if self.smem.resets is not None:
            resets = qkg.resets.at[index.batch, index.tokens]
            copies.start(resets, self.smem.resets.at[slot, tile])

    def next_place(self) -> Index | None:
        """Of the next chunk of this CTA, among the inputs; of this one if it is the last."""
        places = places_of(self.gmem.qkg.q)
        part = self.grid(self.work_tile.next_or_last_index, places)
        return part.index.read_place(INPUTS)

    def prefetch_next_qk(self, place: Index | None) -> None:
        """The same for the next chunk of this CTA, if there is one, whose `next_place` is given."""

        @when(self.work_tile.has_next)
        def _():
            part = self.grid(self.work_tile.next_index, places_of(self.gmem.qkg.q))
            part = part._replace(index=part.index.at_place(place))
            self.prefetch_qk(part, self.work_tile.iteration + 1)

    def signal_previous(self) -> None:
        """Signals this CTA's chunk before this one, when all warpgroups' stores of it have ended."""
        if self.ready_flags.flags_gmem is None:
            return
        plgpu.barrier_wait(self.barriers.stores_ended)

        @when(self.work_tile.has_previous)
        def _():
            previous = self.grid(self.work_tile.previous_index)
            self.ready_flags.signal(previous.index.flag)

    def prefetch_beta(self) -> None:
        """Starts the copies of beta, and of the diagonal of a_qk where it is given."""
        source = self.qk.index.tile(self.gmem.beta)
        copies = Copies(self.barriers.beta_full)
        copies.start(source.at[0], self.smem.beta_scaling.at[BETA_LINE])
        if self.smem.qk_dots is not None:
            dots = self.qk.index.tile(self.gmem.qk_dots)
            copies.start(dots.at[0], self.smem.qk_dots.at[0])

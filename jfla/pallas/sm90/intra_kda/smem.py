"""What a warpgroup of KDA's intra-chunk kernel sees: operands, shared memory, barriers, copies.

Warpgroups 0 and 1, the q/k warpgroups, share a chunk: each owns a tile of 64 channels, then 0 the
rows of q and 1 the rows of k of the A matrices. With K = 64 only warpgroup 0 owns channels.
Warpgroup 2 inverts, unless K has several channel blocks.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jfla.pallas.common.beta_scaling import write_beta_scaling
from jfla.pallas.common.chunk_index import TILE_K, ChunkIndex, ChunkPart, PartGrid
from jfla.pallas.common.decay_sums import DECAY_STEPS, FROM_START, TO_END
from jfla.pallas.common.qk_tiles import K, Q, QkgOperands, QkOptions, QkTiles
from jfla.pallas.mgpu.copies import Copies
from jfla.pallas.mgpu.iota import iota_smem
from jfla.pallas.mgpu.mma import dot, zeros
from jfla.pallas.mgpu.overlap import ReadyFlags
from jfla.pallas.mgpu.scheduler import WorkTile
from jfla.pallas.mgpu.smem import BF16, F16, F32, tile_smem, transposed
from jfla.pallas.mgpu.types import Barrier, Gmem, Index, MemorySpec, Reg, Smem
from jfla.types import CHUNK

MAX_WGS = 3
SPAN_MATRICES = (FROM_START, TO_END)
# After the last of DECAY_STEPS a token with itself, which no decay separates.
STEP_MATRICES = (*DECAY_STEPS, np.zeros((CHUNK, CHUNK), bool))


class IntraKdaOperands(NamedTuple):
    """What the kernel reads."""

    qkg: QkgOperands
    beta: Gmem  # [B, HV, N, 1, C], or None where the caller has the A matrices
    matrices: Gmem  # SPAN_MATRICES; and with beta STEP_MATRICES
    zero: Gmem  # opaque zero


class IntraKdaOutputs(NamedTuple):
    """What the kernel writes: `DecayedQK`, and what it has of `IntraChunk`."""

    q_from_start: Gmem
    k_from_start: Gmem
    k_to_end: Gmem
    chunk_decay: Gmem
    a_qk: Gmem  # None where the caller has it, or K has several channel blocks
    a_inv: Gmem  # the same
    # [B, HV, N, blocks, 2, C, C] float32, with several blocks: what each adds to q D k^T and k D k^T.
    block_sums: Gmem

    @property
    def with_pairs(self) -> bool:
        """Whether pairs of tokens are computed."""
        return self.a_qk is not None or self.block_sums is not None


class SharedStorage(NamedTuple):
    """A tile is [C, 64] bf16 unless said otherwise; `tiles` counts those of 64 channels."""

    span_matrices: Smem  # [2] float16 tiles: SPAN_MATRICES
    qk: Smem  # [2 chunks, 2, tiles]: q and k, raw, then q_from_start and k_from_start
    raw_gate: Smem  # [tiles], g as the caller passed it
    square_norms: Smem  # [2, tiles, C]
    log2_decay: Smem  # [tiles] float16 tiles, times GATE_SCALE
    # [1, or 3 with the A matrices, tiles]: 0 is k_to_end, 1 is k as the columns of A, 2 has a_qk in
    # its first tile. While rows are recomputed for strong gates: 0 is q, 1 is k as the columns (of
    # a halving step: as both), 2 is k.
    decayed: Smem
    chunk_decay: Smem  # [tiles, 64]
    min_from_start: (
        Smem  # [tiles, C]: the least sum of log2 decays from the chunk's start to a token
    )
    min_from_block: Smem  # [tiles, C]: the same from the start of its block of 16 tokens
    bias: Smem  # [2 chunks, tiles, 64], where there is a gate
    resets: Smem  # [2 chunks, tiles, C], where sequences are packed
    step_matrix: Smem  # [1] float16 tile of STEP_MATRICES
    lower: Smem  # [1] float16 tile: what is inverted
    inverse_work: Smem  # [1] float16 tile
    a_inv: Smem  # [1] tile
    beta_scaling: Smem  # [2, 2, C]: beta, then its scaling, for warpgroups 1 and 2
    iota: Smem  # [3, C]: see `write_iota`

    @classmethod
    def specs(
        cls,
        gmem: QkgOperands,
        options: QkOptions,
        num_tiles: int,
        with_pairs: bool,
        inverts: bool,
    ) -> "SharedStorage":
        """On the host: what a CTA asks for, as it computes pairs of tokens and inverts, or not."""

        def tiles(*lead: int, dtype: DTypeLike = BF16) -> MemorySpec:
            return tile_smem(*lead, CHUNK, TILE_K, dtype=dtype)

        def vectors(*lead: int) -> MemorySpec:
            return plgpu.SMEM((*lead, CHUNK), F32)

        return cls(
            span_matrices=tiles(len(SPAN_MATRICES), dtype=F16),
            qk=tiles(2, 2, num_tiles),
            raw_gate=tiles(num_tiles, dtype=gmem.g.dtype),
            square_norms=vectors(2, num_tiles),
            log2_decay=tiles(num_tiles, dtype=F16),
            decayed=tiles(3 if with_pairs else 1, num_tiles),
            chunk_decay=vectors(num_tiles),
            min_from_start=vectors(num_tiles),
            min_from_block=vectors(num_tiles) if with_pairs else None,
            bias=None if options.no_gate else vectors(2, num_tiles),
            resets=None if gmem.resets is None else vectors(2, num_tiles),
            step_matrix=tiles(1, dtype=F16) if with_pairs else None,
            lower=tiles(1, dtype=F16) if inverts else None,
            inverse_work=tiles(1, dtype=F16) if inverts else None,
            a_inv=tiles(1) if inverts else None,
            beta_scaling=vectors(2, 2) if inverts else None,
            iota=iota_smem(MAX_WGS, CHUNK),
        )


class Barriers(NamedTuple):
    """`full`: the copies, or the writes, have arrived. `empty`: the reads are done."""

    span_matrices_full: Barrier
    qk_full: Barrier  # [2 warpgroups * 2 chunks]
    raw_gate_full: Barrier  # [2 warpgroups]
    beta_full: Barrier  # [2], warpgroups 1 and 2
    qk_wgs: Barrier  # warpgroups 0 and 1 wait for each other
    qk_reload: Barrier  # q and k once more, for strong gates
    step_matrix_full: Barrier
    lower_full: Barrier  # `lower` may be inverted
    lower_empty: Barrier  # `lower` may be written

    @classmethod
    def specs(cls, gmem: QkgOperands, options: QkOptions, num_tiles: int) -> "Barriers":
        """On the host: arrivals are copies that a phase waits for, or warpgroups that meet."""
        has_bias = not options.no_gate
        has_resets = gmem.resets is not None
        return cls(
            span_matrices_full=plgpu.Barrier(num_arrivals=len(SPAN_MATRICES)),
            qk_full=plgpu.Barrier(num_arrivals=2 + has_bias + has_resets, num_barriers=4),
            raw_gate_full=plgpu.Barrier(num_barriers=2),
            beta_full=plgpu.Barrier(num_barriers=2),
            qk_wgs=plgpu.Barrier(num_arrivals=2),
            qk_reload=plgpu.Barrier(num_arrivals=2 * num_tiles),
            step_matrix_full=plgpu.Barrier(),
            lower_full=plgpu.Barrier(),
            lower_empty=plgpu.Barrier(),
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
        """An opaque zero."""
        return self.work_tile.zero

    @property
    def next_part(self) -> ChunkPart:
        """What this CTA takes next."""
        return self.grid(self.work_tile.next_index)

    @property
    def previous_index(self) -> ChunkIndex:
        """This CTA's last chunk."""
        return self.grid(self.work_tile.previous_index).index

    @property
    def has_all_channels(self) -> bool:
        """Whether K has no other block."""
        return self.grid.num_blocks == 1

    @property
    def rows(self) -> Smem:
        """[tiles]: this warpgroup's rows of A, those of q or of k."""
        return self.smem.qk.at[self.work_tile.iteration & 1, self.wg]

    @property
    def columns(self) -> Smem:
        """[tiles]: k as the columns of A."""
        return self.smem.decayed.at[self.zero + 1]

    @property
    def iota(self) -> Smem:
        return self.smem.iota.at[self.wg]

    def tiles_of(self, ref_smem: Smem) -> list[Smem]:
        """The tiles of all channels.

        By traced numbers: `dot` cannot close over a reference that a Python int indexed.
        """
        return [ref_smem.at[self.zero + tile] for tile in range(self.qk.num_tiles)]

    def dot_over_channels(self, rows_smem: Smem, columns_smem: Smem) -> Reg:
        """[C, C]: rows @ columns^T, over all tiles of channels."""
        rows = self.tiles_of(rows_smem)
        columns = self.tiles_of(columns_smem)
        return dot(zeros(CHUNK, CHUNK), *[(a, transposed(b)) for a, b in zip(rows, columns)])

    def recompute_addresses(self, zero: Index) -> "IntraKdaWarpgroup":
        """The same with addresses that depend on another opaque zero.

        Without it LLVM computes what both stages need once, before a loop that few chunks enter,
        and keeps it in registers meanwhile.
        """
        chunk = self.qk.index.chunk + zero
        slot = self.work_tile.iteration & 1
        qk = self.qk._replace(
            index=self.qk.index._replace(chunk=chunk),
            q=self.smem.qk.at[slot, zero],
            k=self.smem.qk.at[slot, zero + 1],
        )
        work_tile = self.work_tile._replace(zero=zero)
        return self._replace(wg=self.wg + zero, work_tile=work_tile, qk=qk)

    def sync_warpgroups(self) -> None:
        """The q/k warpgroups wait for each other, and for each other's shared memory writes."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.barriers.qk_wgs)
        plgpu.barrier_wait(self.barriers.qk_wgs)

    def if_owns_channels(self, body: Callable[[], None]) -> None:
        """Runs `body` in the q/k warpgroups that own a tile of channels."""
        if self.qk.num_tiles == 2:
            body()
        else:
            pl.when(self.wg == 0)(body)

    def prefetch_qk(self, part: ChunkPart, iteration: Index) -> None:
        """Starts the copies of this warpgroup's channels of q and k, for that iteration."""
        tile = self.wg
        slot = iteration & 1
        barrier = self.barriers.qk_full.at[2 * tile + slot]
        index = part.index
        columns = part.columns(tile)
        qkg = self.gmem.qkg
        for which, source in ((Q, qkg.q), (K, qkg.k)):
            view = index.rows(source, self.qk.value_heads, columns)
            plgpu.copy_gmem_to_smem(view, self.smem.qk.at[slot, which, tile], barrier)
        if self.smem.bias is not None:
            bias = qkg.bias.at[index.head, columns]
            plgpu.copy_gmem_to_smem(bias, self.smem.bias.at[slot, tile], barrier)
        if self.smem.resets is not None:
            resets = qkg.resets.at[index.batch, index.tokens]
            plgpu.copy_gmem_to_smem(resets, self.smem.resets.at[slot, tile], barrier)

    def prefetch_raw_gate(self, part: ChunkPart) -> None:
        """Starts the copy of g, of this warpgroup's channels."""
        columns = part.columns(self.wg)
        view = part.index.rows(self.gmem.qkg.g, self.qk.value_heads, columns)
        barrier = self.barriers.raw_gate_full.at[self.wg]
        plgpu.copy_gmem_to_smem(view, self.smem.raw_gate.at[self.wg], barrier)

    def prefetch_step_matrix(self, step: Index) -> None:
        """Starts the copy of one of STEP_MATRICES; nothing may still read the last one."""
        source = self.gmem.matrices.at[len(SPAN_MATRICES) + step]
        target = self.smem.step_matrix.at[self.zero]
        plgpu.copy_gmem_to_smem(source, target, self.barriers.step_matrix_full)

    def prefetch_beta(self) -> None:
        """Starts the copy of beta; for warpgroups 1 and 2."""
        which = self.wg - 1
        source = self.qk.index.tile(self.gmem.beta)
        target = self.smem.beta_scaling.at[which]
        barrier = self.barriers.beta_full.at[which]
        plgpu.copy_gmem_to_smem(source.at[0], target.at[0], barrier)

    def reload_qk(self) -> None:
        """Loads q and k again, where q_from_start and k_from_start are.

        Also starts the copy of the first step matrix.
        """
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.sync_warpgroups()  # neither warpgroup reads the tiles any more

        @self.if_owns_channels
        def _():
            qkg = self.gmem.qkg
            self.qk.prefetch(self.wg, qkg.q, qkg.k, Copies(self.barriers.qk_reload))

        @pl.when(self.wg == 1)
        def _():
            self.prefetch_step_matrix(0)

        plgpu.barrier_wait(self.barriers.qk_reload)

    def wait_beta_scaling(self, which: int) -> Smem:
        """[2, C]: the scaling of `write_beta_scaling`, written over beta once it is there.

        `which` is 0 in warpgroup 1, and 1 in warpgroup 2: each has a copy.
        """
        plgpu.barrier_wait(self.barriers.beta_full.at[which])
        scaling_smem = self.smem.beta_scaling.at[self.zero + which]
        write_beta_scaling(scaling_smem.at[0], scaling_smem)
        return scaling_smem

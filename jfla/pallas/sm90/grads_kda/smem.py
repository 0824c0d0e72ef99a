"""What a warpgroup of KDA's gradient kernel sees: operands, shared memory, barriers, matrices.

A CTA has two warpgroups, one chunk of one value head, and a block of up to 128 channels of K and of
V. Each warpgroup owns a tile of 64 channels of K; with K = 64 only warpgroup 0 does.
"""

import enum
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jfla.pallas.common.chunk_index import TILE_K, TILE_V
from jfla.pallas.common.decay_sums import (
    FROM_START,
    GRAD_STEPS,
    TO_END,
    WHOLE_CHUNK,
    DecaySumMatrix,
)
from jfla.pallas.common.qk_tiles import QkgOperands, QkOptions, QkTiles
from jfla.pallas.mgpu.smem import BF16, F16, F32, tile_smem
from jfla.pallas.mgpu.types import Barrier, Gmem, Index, MemorySpec, Reg, Smem
from jfla.stages import ScanResults
from jfla.types import CHUNK


class Span(enum.IntEnum):
    """The first of GRAD_MATRICES: the spans of tokens over which q, k and the state decay."""

    WHOLE_CHUNK = 0
    FROM_START = 1
    TO_END = 2


GRAD_MATRICES = (WHOLE_CHUNK, FROM_START, TO_END, *GRAD_STEPS)
FIRST_STEP = len(Span)  # the first of GRAD_STEPS among GRAD_MATRICES


class Salt(enum.IntEnum):
    """Which bit of the opaque zero a stage computes its addresses with.

    See `GradsKdaWarpgroup.recompute_addresses`. Found by search, until no K and V spilled a register.
    """

    STEP = 0
    EPILOGUE = 2
    FROM_START_ADJOINT = 3
    WHOLE_CHUNK = 4
    FROM_START = 5
    TO_END = 6
    WEIGHTS = 7
    LOAD = 8
    STATES = 9


class GradsKdaOperands(NamedTuple):
    """What the kernel reads."""

    qkg: QkgOperands
    scans: ScanResults
    sum_matrices: Gmem  # GRAD_MATRICES in float16
    adjoint_matrices: Gmem  # the same in bfloat16
    zero: Gmem  # opaque zero


class SharedStorage(NamedTuple):
    """A tile is [C, 64] bf16, a vector [64] float32; `tiles` are of K, `v_tiles` of V."""

    q: Smem  # [tiles] tiles
    k: Smem  # [tiles] tiles
    square_norms: Smem  # [2, tiles] vectors
    states: Smem  # [tiles, 4] tiles: S^T, then from 2 on dS^T; afterwards scratch
    v_new: Smem  # [v_tiles] tiles
    do: Smem  # [v_tiles] tiles; afterwards scratch
    dv: Smem  # [v_tiles] tiles; afterwards scratch
    weights: Smem  # [2] tiles: W_q and W_k, strictly lower
    dg_chunk: Smem  # [tiles] vectors, by channels: the term of dg that is the same for every token
    norm_dot: Smem  # [2, tiles] vectors: x . dx of the l2norm's VJP, for q and k
    v_new_dot_dv: Smem  # vector
    diag_w_q: Smem  # vector
    min_sums: Smem  # [tiles] vectors: the least sum of log2 decays up to a token
    adjoint_matrix: Smem  # [2] tiles: one of `adjoint_matrices` for each warpgroup
    log2_decay: Smem  # [tiles] float16 tiles, times GATE_SCALE
    bias: Smem  # [tiles] vectors, by channels, where there is a gate
    resets: Smem  # vector, where sequences are packed
    sum_matrix: Smem  # [2] float16 tiles: one of `sum_matrices` for each warpgroup

    @classmethod
    def specs(
        cls,
        gmem: QkgOperands,
        options: QkOptions,
        num_tiles: int,
        num_v_tiles: int,
    ) -> "SharedStorage":
        """On the host: what a CTA asks for."""

        def tiles(*lead: int, dtype: DTypeLike = BF16) -> MemorySpec:
            return tile_smem(*lead, CHUNK, TILE_K, dtype=dtype)

        def vectors(*lead: int) -> MemorySpec:
            return plgpu.SMEM((*lead, TILE_K), F32)

        return cls(
            q=tiles(num_tiles),
            k=tiles(num_tiles),
            square_norms=vectors(2, num_tiles),
            states=tiles(num_tiles, 4),
            v_new=tiles(num_v_tiles),
            do=tiles(max(num_v_tiles, num_tiles)),
            dv=tiles(max(num_v_tiles, num_tiles)),
            weights=tiles(2),
            dg_chunk=vectors(num_tiles),
            norm_dot=vectors(2, num_tiles),
            v_new_dot_dv=vectors(),
            diag_w_q=vectors(),
            min_sums=vectors(num_tiles),
            adjoint_matrix=tiles(2),
            log2_decay=tiles(num_tiles, dtype=F16),
            bias=None if options.no_gate else vectors(num_tiles),
            resets=None if gmem.resets is None else vectors(),
            sum_matrix=tiles(2, dtype=F16),
        )


class Barriers(NamedTuple):
    """What was copied in is waited for in the order in which it is needed."""

    qk_full: Barrier
    v_full: Barrier
    states_full: Barrier
    wgs: Barrier  # the two warpgroups wait for each other
    sum_matrix_full: Barrier  # [2 warpgroups]
    adjoint_matrix_full: Barrier  # [2 warpgroups]

    @classmethod
    def specs(
        cls,
        gmem: QkgOperands,
        options: QkOptions,
        num_tiles: int,
        num_v_tiles: int,
    ) -> "Barriers":
        """On the host: arrivals are copies that a phase waits for, or warpgroups that meet."""
        has_bias = not options.no_gate
        has_resets = gmem.resets is not None
        return cls(
            qk_full=plgpu.Barrier(num_arrivals=num_tiles * (2 + has_bias) + has_resets),
            v_full=plgpu.Barrier(num_arrivals=3 * num_v_tiles),
            states_full=plgpu.Barrier(num_arrivals=2 * num_tiles * num_v_tiles),
            wgs=plgpu.Barrier(num_arrivals=2),
            sum_matrix_full=plgpu.Barrier(num_barriers=2),
            adjoint_matrix_full=plgpu.Barrier(num_barriers=2),
        )


class GradsKdaWarpgroup(NamedTuple):
    """One warpgroup at one chunk."""

    wg: Index
    zero: Index  # opaque zero
    salted_zero: Index  # opaque zero of one stage
    qk: QkTiles
    gmem: GradsKdaOperands
    smem: SharedStorage
    barriers: Barriers
    num_v_tiles: int

    def recompute_addresses(self, salt: Salt) -> "GradsKdaWarpgroup":
        """The same with addresses that depend on an opaque zero of this stage alone.

        LLVM would compute addresses and masks once and keep them in registers from the first stage
        to the last. From bit 5 on it still does so for tiles as wgmma descriptors, in whose
        addresses 14 bits count.
        """
        zero = self.zero & (1 << salt)
        index = self.qk.index
        qk = self.qk._replace(index=index._replace(chunk=index.chunk + zero))
        return self._replace(wg=self.wg + zero, qk=qk, salted_zero=zero)

    @property
    def owns_channels(self) -> Index:
        """Whether this warpgroup has a tile of K."""
        return self.wg < self.qk.num_tiles

    @property
    def has_all_channels(self) -> bool:
        """Whether K has no other block, that is, no other CTA."""
        return self.gmem.qkg.q.shape[-1] == self.qk.num_tiles * TILE_K

    @property
    def has_v_blocks(self) -> bool:
        """Whether other CTAs have blocks of V of the same head."""
        return self.qk.value_heads > self.gmem.scans.states.shape[1]

    def state_view(self, ref_gmem: Gmem, n: Index) -> Gmem:
        """Of an array [B, HV, N, V, K] what goes to one tile: 64 rows of this CTA's block of V.

        Where V has several blocks the heads of `qk.index` are value heads times blocks; the states
        keep their heads.
        """
        index = self.qk.index
        v_blocks = jnp.int32(self.qk.value_heads // ref_gmem.shape[1])
        first_row = (lax.rem(index.head, v_blocks) * self.num_v_tiles + n) * TILE_V
        index = index._replace(head=lax.div(index.head, v_blocks))
        return index.tile(ref_gmem).at[pl.ds(first_row, TILE_V), self.qk.columns(self.wg)]

    @property
    def sum_matrix(self) -> DecaySumMatrix:
        matrix_smem = self.smem.sum_matrix.at[self.wg]
        barrier = self.barriers.sum_matrix_full.at[self.wg]
        return DecaySumMatrix(self.gmem.sum_matrices, matrix_smem, barrier)

    @property
    def adjoint_matrix(self) -> DecaySumMatrix:
        matrix_smem = self.smem.adjoint_matrix.at[self.wg]
        barrier = self.barriers.adjoint_matrix_full.at[self.wg]
        return DecaySumMatrix(self.gmem.adjoint_matrices, matrix_smem, barrier)

    def traced(self, n: Index) -> Index:
        """n, traced: `dot` cannot close over a reference that a Python int indexed."""
        return self.salted_zero + n

    def v_tiles(self) -> list[Index]:
        return [self.traced(n) for n in range(self.num_v_tiles)]

    def segment_sum(self, step: Index, end: Index = FIRST_STEP, transpose: bool = False) -> Reg:
        """[C, 64]: every token's sum of log2 decays by one of GRAD_MATRICES.

        The next matrix is prefetched, if it is below `end`. Transposed, [64, C], for a
        matrix that is its own transpose.
        """
        sums = self.sum_matrix.segment_sum(self.smem.log2_decay.at[self.wg], transpose)
        self.prefetch_next(self.sum_matrix, step, end)
        return sums

    def segment_sum_adjoint(
        self,
        acc: Reg,
        step: Index,
        tiles_smem: list[Smem],
        end: Index = FIRST_STEP,
        transpose: bool = False,
    ) -> Reg:
        """acc + the tiles' sum, given back to every decay that `segment_sum` added up."""
        acc = self.adjoint_matrix.segment_sum_adjoint(acc, *tiles_smem, transpose=transpose)
        self.prefetch_next(self.adjoint_matrix, step, end)
        return acc

    def prefetch_next(self, matrix: DecaySumMatrix, step: Index, end: Index) -> None:
        plgpu.commit_smem()  # every warp is done with the matrix that the next one replaces

        @pl.when((step + 1 < end) & self.owns_channels)
        def _():
            matrix.prefetch(step + 1)

    def sync_warpgroups(self) -> None:
        """The two warpgroups wait for each other, and for each other's writes to shared memory."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.barriers.wgs)
        plgpu.barrier_wait(self.barriers.wgs)

    def sync_channel_owners(self) -> None:
        """The warpgroups that own channels wait for each other, if there are two."""
        if self.qk.num_tiles > 1:
            self.sync_warpgroups()
        else:
            plgpu.commit_smem()

    def state(self, n: Index) -> Smem:
        """Tile n of this warpgroup's channels of S^T (0, 1) and dS^T (2, 3)."""
        tile = lax.rem(self.wg, jnp.int32(self.qk.num_tiles))
        return self.smem.states.at[tile, self.traced(n)]

    def scratch(self, n: int) -> Smem:
        """A tile of this warpgroup for what comes after the states.

        n       tile            free once
        0, 1    S^T             this warpgroup has read S
        2, 3    do, dv          both warpgroups have read S
        4, 5    dS^T            this warpgroup has read dS
        """
        if n in (2, 3):
            return (self.smem.do, self.smem.dv)[n - 2].at[self.wg]
        return self.state({0: 0, 1: 1, 4: 2, 5: 3}[n])

    def split(self, z: Reg) -> list[Smem]:
        """z as the sum of two bf16 tiles, in scratch 0 and 1."""
        high = z.astype(BF16)
        tiles = [self.scratch(0), self.scratch(1)]
        tiles[0][...] = high
        tiles[1][...] = (z - high.astype(F32)).astype(BF16)
        plgpu.commit_smem()
        return tiles

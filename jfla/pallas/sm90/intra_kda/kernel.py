"""The intra-chunk kernel of KDA: q, k, g, beta of a chunk to `JoinedQK` and the A matrices.

CTAs are persistent. Channel warpgroups have 64 channels of a chunk each (`channels.py`); the pairs
warpgroup sums over channels and inverts (`pairs.py`), while they go on to the next chunk, whose q and
k are in shared memory by then. What strong gates leave to further passes the channel warpgroups sum
themselves.

A CTA has room for 128 channels. With K = 256 each takes a channel block of a chunk, and what the
blocks add to the A matrices is summed and inverted by `sum_blocks.py`.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla.pallas.common.chunk_index import CHANNEL_BLOCK, TILE_K, ChunkGrid, PartGrid
from jfla.pallas.common.decay_sums import SUM_MATRICES, block_spans, stack_matrices
from jfla.pallas.common.packed_rows import INPUTS, Rows, places_of
from jfla.pallas.common.qk_tiles import QkgOperands, QkOptions, QkTiles
from jfla.pallas.common.results import IntraResults, RingChunks
from jfla.pallas.mgpu.branches import when
from jfla.pallas.mgpu.overlap import Kernel, PendingResults, ReadyFlags
from jfla.pallas.mgpu.registers import leave_registers, take_registers
from jfla.pallas.mgpu.scheduler import TileScheduler, WorkTile
from jfla.pallas.mgpu.smem import F16, F32
from jfla.pallas.mgpu.types import Gmem, Index
from jfla.pallas.sm90.intra_kda.channels import channel_warpgroup, finish
from jfla.pallas.sm90.intra_kda.pairs import pairs_warpgroup
from jfla.pallas.sm90.intra_kda.smem import (
    Barriers,
    IntraKdaOperands,
    IntraKdaOutputs,
    IntraKdaWarpgroup,
    SharedStorage,
)
from jfla.pallas.sm90.intra_kda.sum_blocks import sum_blocks
from jfla.stages import IntraChunk, JoinedQK
from jfla.types import CHUNK

WarpgroupAt = Callable[..., IntraKdaWarpgroup]

# Of a thread. A launch of two channel warpgroups and the pairs warpgroup has 504 together, which the channel warpgroups
# need more of.
CHANNEL_REGISTERS = 176
PAIRS_REGISTERS = 152


def intra_kda(
    gmem: QkgOperands,
    beta: Gmem,
    qk_dots: Gmem,
    value_heads: int,
    options: QkOptions,
    num_ctas: int,
    ring: RingChunks,
) -> PendingResults:
    """On the host: the kernel that makes `IntraResults` of every chunk, not launched yet.

    `beta` is [B, HV, N, 1, C], or None where the caller has the A matrices: `intra` of the results is then None.
    `qk_dots` are the diagonal of a_qk, of the same shape, or None where the digits of the pairs suffice.
    """
    batch, time, _, key_dim = gmem.q.shape
    num_blocks = max(key_dim // CHANNEL_BLOCK, 1)
    num_tiles = key_dim // num_blocks // TILE_K
    chunks = ChunkGrid(batch, value_heads, time // CHUNK, ring.sequences_per_group)
    grid = PartGrid(chunks, num_blocks, num_tiles)
    scheduler = TileScheduler(grid.num_parts, num_ctas)
    with_pairs = beta is not None
    inverts = with_pairs and num_blocks == 1
    operands = _operands(gmem, *((beta, qk_dots) if inverts else (None, None)))
    num_warpgroups = num_tiles + with_pairs
    limits = _register_limits(num_warpgroups)

    def body(
        gmem: IntraKdaOperands,
        outputs: IntraKdaOutputs,
        smem: SharedStorage,
        barriers: Barriers,
        cta: Index,
        ready_flags: ReadyFlags,
    ) -> None:
        wg = lax.axis_index("wg")

        def ctx_at(
            work_tile: WorkTile, place: Index | None = None
        ) -> IntraKdaWarpgroup:
            slot = work_tile.iteration & 1
            part = grid(work_tile.tile_index, places_of(gmem.qkg.q))
            qk = QkTiles(
                options,
                part.index.at_place(place),
                value_heads,
                num_tiles,
                smem.q.at[slot],
                smem.k.at[slot],
                None if smem.square_norms is None else smem.square_norms.at[slot],
                part.first_tile,
            )
            return IntraKdaWarpgroup(
                wg + work_tile.zero,
                work_tile,
                grid,
                part,
                qk,
                gmem,
                smem,
                barriers,
                ready_flags,
            )

        tiles = scheduler.up_to(grid.used_parts(gmem.qkg.q))

        # Else a scan beside this kernel has brought a fourth warpgroup: see `_register_limits`.
        moves_registers = lax.axis_size("wg") == len(limits)

        def run_roles() -> None:
            @when(wg < num_tiles)
            def _channels():
                if moves_registers:
                    take_registers(CHANNEL_REGISTERS)
                _run_channel_warpgroup(ctx_at, tiles, cta, outputs)

            if with_pairs:

                @when(wg == num_tiles)
                def _pairs():
                    if moves_registers:
                        leave_registers(PAIRS_REGISTERS)
                    _run_pairs_warpgroup(ctx_at, tiles, cta, outputs)

        tiles.if_any(cta, 0, run_roles)
        plgpu.wait_smem_to_gmem(0)

    kernel = Kernel(
        name="jfla_intra_kda",
        inputs=operands,
        outputs=_output_shapes(gmem.q, grid, with_pairs, options.qk_norm, ring),
        num_ctas=scheduler.num_ctas,
        num_warpgroups=num_warpgroups,
        registers=limits,
        smem=SharedStorage.specs(operands, options, num_tiles, with_pairs),
        barriers=Barriers.specs(operands, options, num_tiles),
        body=body,
    )

    resolve = functools.partial(_intra_results, beta=beta, qk_dots=qk_dots)
    return PendingResults(kernel, resolve)


def _operands(gmem: QkgOperands, beta: Gmem, qk_dots: Gmem) -> IntraKdaOperands:
    """On the host: what the kernel reads, with the matrices of its sums."""
    sum_matrices = stack_matrices(F16, *SUM_MATRICES)
    spans = stack_matrices(F16, block_spans())[0]
    return IntraKdaOperands(gmem, beta, qk_dots, sum_matrices, spans)


def _register_limits(num_warpgroups: int) -> tuple[int, ...]:
    """On the host: of every warpgroup; none where there are fewer than three, which have registers enough.

    A launch of four warpgroups has fewer registers than the limits want together: the channel warpgroups must not take
    theirs there, for which they would wait for ever.
    """
    if num_warpgroups < 3:
        return ()
    return CHANNEL_REGISTERS, CHANNEL_REGISTERS, PAIRS_REGISTERS


def _intra_results(outputs: IntraKdaOutputs, beta: Gmem, qk_dots: Gmem) -> IntraResults:
    """On the host: the outputs by the names of `jfla.stages`."""
    qk = JoinedQK(outputs.qk_from_start, outputs.k_to_end, outputs.chunk_decay)
    intra = None
    if outputs.a_qk is not None:
        intra = IntraChunk(outputs.a_qk, outputs.a_inv)
    elif outputs.block_sums is not None:
        intra = sum_blocks(outputs.block_sums, beta, qk_dots, outputs.k_to_end.dtype)
    return IntraResults(qk, intra, outputs.inv_norms)


def _output_shapes(
    q: Rows, grid: PartGrid, with_pairs: bool, qk_norm: bool, ring: RingChunks
) -> IntraKdaOutputs:
    """On the host: a `jax.ShapeDtypeStruct` for each."""
    key_dim = q.shape[-1]
    of_qk = grid.chunks.ring_shape(ring.qk)
    of_intra = grid.chunks.ring_shape(ring.intra)
    qk_from_start = jax.ShapeDtypeStruct((*of_qk, CHUNK, 2 * key_dim), q.dtype)
    k_to_end = jax.ShapeDtypeStruct((*of_qk, CHUNK, key_dim), q.dtype)
    square = jax.ShapeDtypeStruct((*of_intra, CHUNK, CHUNK), q.dtype)
    decay = jax.ShapeDtypeStruct((*of_qk, key_dim), F32)
    one_block = grid.num_blocks == 1
    a = square if with_pairs and one_block else None
    block_sums = None
    if with_pairs and not one_block:
        block_sums = jax.ShapeDtypeStruct(
            (*grid.chunks.shape, grid.num_blocks, 2, CHUNK, CHUNK), F32
        )
    inv_norms = None
    if qk_norm and not with_pairs:
        inv_norms = jax.ShapeDtypeStruct((*grid.chunks.shape, 2, CHUNK), F32)
    return IntraKdaOutputs(qk_from_start, k_to_end, decay, a, a, block_sums, inv_norms)


def _run_channel_warpgroup(
    ctx_at: WarpgroupAt, scheduler: TileScheduler, cta: Index, outputs: IntraKdaOutputs
) -> None:
    """Copies ahead, then every chunk of the CTA."""
    first = ctx_at(scheduler.first(cta))
    gmem = first.gmem
    smem = first.smem
    matrices_full = first.barriers.matrices_full
    first.prefetch_qk(first.part, jnp.int32(0))

    @when(first.wg == 0)
    def _():
        for i in range(len(SUM_MATRICES)):
            target = smem.sum_matrices.at[i]
            plgpu.copy_gmem_to_smem(gmem.sum_matrices.at[i], target, matrices_full)
        plgpu.copy_gmem_to_smem(gmem.block_spans, smem.block_spans, matrices_full)

    plgpu.barrier_wait(matrices_full)

    def step(work_tile: WorkTile, place: Index | None = None) -> Index | None:
        return channel_warpgroup(ctx_at(work_tile, place), outputs)

    scheduler.for_each_tile(step, cta, 0, first.part.index.read_place(INPUTS))
    finish(first, outputs)


def _run_pairs_warpgroup(
    ctx_at: WarpgroupAt, scheduler: TileScheduler, cta: Index, outputs: IntraKdaOutputs
) -> None:
    """Every chunk of the CTA; then the last one is ready."""
    first = ctx_at(scheduler.first(cta))
    barriers = first.barriers
    for tile in range(first.qk.num_tiles):
        plgpu.barrier_arrive(barriers.pairs_empty.at[tile])

    def step(work_tile: WorkTile) -> None:
        pairs_warpgroup(ctx_at(work_tile), outputs)

    last = scheduler.for_each_tile(step, cta, 0)
    if first.ready_flags.flags_gmem is not None:
        plgpu.barrier_wait(barriers.stores_ended)
        first.ready_flags.signal(first.grid(last).index.flag)

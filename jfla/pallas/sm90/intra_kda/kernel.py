"""The intra-chunk kernel of KDA: q, k, g, beta of a chunk to `DecayedQK` and the A matrices.

CTAs are persistent. Warpgroups 0 and 1 share a chunk: each makes the decayed q and k of 64
channels, then 0 multiplies the rows of q, 1 those of k. Warpgroup 2 inverts, while the two go on to
the next chunk, which is in shared memory by then.

A CTA has room for 128 channels. With K = 256 each takes a channel block of a chunk, there is no
warpgroup 2, and what the blocks add to the A matrices is summed and inverted by `sum_blocks.py`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla.pallas.common.chunk_index import CHANNEL_BLOCK, TILE_K, ChunkGrid, PartGrid
from jfla.pallas.common.decay_sums import FAST_RANGE, stack_matrices
from jfla.pallas.common.qk_tiles import K, Q, QkgOperands, QkOptions, QkTiles
from jfla.pallas.common.results import IntraResults
from jfla.pallas.mgpu.iota import iota2d, write_iota
from jfla.pallas.mgpu.mma import dot, load, zeros
from jfla.pallas.mgpu.opaque import opaque_zero
from jfla.pallas.mgpu.overlap import Kernel, PendingResults, ReadyFlags
from jfla.pallas.mgpu.scheduler import TileScheduler, WorkTile
from jfla.pallas.mgpu.smem import BF16, F16, F32, transposed
from jfla.pallas.mgpu.types import Gmem, Index, Reg, Smem
from jfla.pallas.sm90.intra_kda.a_matrices import (
    compute_a_kda,
    inverse_warpgroup,
    pass_lower,
    store_a_qk,
    store_block_sum,
)
from jfla.pallas.sm90.intra_kda.smem import (
    SPAN_MATRICES,
    STEP_MATRICES,
    Barriers,
    IntraKdaOperands,
    IntraKdaOutputs,
    IntraKdaWarpgroup,
    SharedStorage,
)
from jfla.pallas.sm90.intra_kda.sum_blocks import sum_blocks
from jfla.stages import DecayedQK, IntraChunk
from jfla.types import CHUNK

WarpgroupAt = Callable[[WorkTile], IntraKdaWarpgroup]


def intra_kda(
    gmem: QkgOperands,
    beta: Gmem,
    value_heads: int,
    options: QkOptions,
    num_ctas: int,
) -> PendingResults:
    """On the host: the kernel that makes `IntraResults` of every chunk, not launched yet.

    `beta` is [B, HV, N, 1, C], or None where the caller has the A matrices: `intra` of the results
    is then None.
    """
    batch, time, _, key_dim = gmem.q.shape
    num_blocks = max(key_dim // CHANNEL_BLOCK, 1)
    num_tiles = key_dim // num_blocks // TILE_K
    chunks = ChunkGrid(batch, value_heads, time // CHUNK)
    grid = PartGrid(chunks, num_blocks, num_tiles)
    scheduler = TileScheduler(grid.num_parts, num_ctas)
    with_pairs = beta is not None
    inverts = with_pairs and num_blocks == 1
    matrices = (*SPAN_MATRICES, *(STEP_MATRICES if with_pairs else ()))

    def body(
        gmem: IntraKdaOperands,
        outputs: IntraKdaOutputs,
        smem: SharedStorage,
        barriers: Barriers,
        cta: Index,
        ready_flags: ReadyFlags,
    ) -> None:
        wg = lax.axis_index("wg")

        def ctx_at(work_tile: WorkTile) -> IntraKdaWarpgroup:
            zero = work_tile.zero
            slot = work_tile.iteration & 1
            part = grid(work_tile.tile_index)
            q, k = (smem.qk.at[slot, zero + which] for which in (Q, K))
            qk = QkTiles(
                options,
                part.index,
                value_heads,
                num_tiles,
                q,
                k,
                smem.square_norms,
                part.first_tile,
            )
            return IntraKdaWarpgroup(
                wg + zero, work_tile, grid, part, qk, gmem, smem, barriers, ready_flags
            )

        write_iota(smem.iota.at[wg])

        @pl.when(wg < 2)
        def _qk_wgs():
            _run_qk_warpgroup(ctx_at, scheduler, cta, wg, outputs)

        if inverts:

            @pl.when(wg == 2)
            def _inverse_wg():
                _run_inverse_warpgroup(ctx_at, scheduler, cta, outputs)

        plgpu.wait_smem_to_gmem(0)

    kernel = Kernel(
        name="jfla_intra_kda",
        inputs=IntraKdaOperands(
            gmem, beta if inverts else None, stack_matrices(F16, *matrices), opaque_zero()
        ),
        outputs=_intra_shapes(grid, key_dim, with_pairs),
        num_ctas=scheduler.num_ctas,
        num_warpgroups=3 if inverts else 2,
        smem=SharedStorage.specs(gmem, options, num_tiles, with_pairs, inverts),
        barriers=Barriers.specs(gmem, options, num_tiles),
        body=body,
    )

    def resolve(outputs: IntraKdaOutputs) -> IntraResults:
        return _intra_results(outputs, beta)

    return PendingResults(kernel, resolve)


def _intra_results(outputs: IntraKdaOutputs, beta: Gmem) -> IntraResults:
    """On the host: the outputs by the names of `jfla.stages`."""
    qk = DecayedQK(
        outputs.q_from_start,
        outputs.k_from_start,
        outputs.k_to_end,
        outputs.chunk_decay,
    )
    intra = None
    if outputs.a_qk is not None:
        intra = IntraChunk(outputs.a_qk, outputs.a_inv)
    elif outputs.block_sums is not None:
        intra = sum_blocks(outputs.block_sums, beta)
    return IntraResults(qk, intra, None)


def _intra_shapes(grid: PartGrid, key_dim: int, with_pairs: bool) -> IntraKdaOutputs:
    """On the host: a `jax.ShapeDtypeStruct` for each."""
    lead = tuple(grid.chunks)
    rows = jax.ShapeDtypeStruct((*lead, CHUNK, key_dim), BF16)
    square = jax.ShapeDtypeStruct((*lead, CHUNK, CHUNK), BF16)
    decay = jax.ShapeDtypeStruct((*lead, key_dim), F32)
    one_block = grid.num_blocks == 1
    a = square if with_pairs and one_block else None
    block_sums = None
    if with_pairs and not one_block:
        block_sums = jax.ShapeDtypeStruct((*lead, grid.num_blocks, 2, CHUNK, CHUNK), F32)
    return IntraKdaOutputs(rows, rows, rows, decay, a, a, block_sums)


def _run_qk_warpgroup(
    ctx_at: WarpgroupAt,
    scheduler: TileScheduler,
    cta: Index,
    wg: Index,
    outputs: IntraKdaOutputs,
) -> None:
    """Warpgroups 0 and 1: copies ahead, then every chunk of the CTA."""
    first = ctx_at(scheduler.first(cta))
    gmem = first.gmem
    smem = first.smem
    barriers = first.barriers

    @first.if_owns_channels
    def _():
        first.prefetch_qk(first.part, jnp.int32(0))
        first.prefetch_raw_gate(first.part)

    @pl.when(wg == 0)
    def _():
        for i in range(len(SPAN_MATRICES)):
            target = smem.span_matrices.at[i]
            plgpu.copy_gmem_to_smem(gmem.matrices.at[i], target, barriers.span_matrices_full)

    plgpu.barrier_wait(barriers.span_matrices_full)

    def step(work_tile: WorkTile) -> None:
        qk_warpgroup(ctx_at(work_tile), outputs)

    scheduler.for_each_tile(step, cta, 0, gmem.zero)
    plgpu.wait_smem_to_gmem(0)
    if outputs.a_qk is not None:
        first.sync_warpgroups()

        @pl.when(wg == 1)
        def _():
            # One more arrival tells warpgroup 2 that all stores of the last chunk are done. It
            # waits for `lower_empty` first: two arrivals on `lower_full` in one phase would count
            # once, and warpgroup 2 would wait for ever.
            plgpu.barrier_wait(barriers.lower_empty)
            plgpu.barrier_arrive(barriers.lower_full)


def _run_inverse_warpgroup(
    ctx_at: WarpgroupAt,
    scheduler: TileScheduler,
    cta: Index,
    outputs: IntraKdaOutputs,
) -> None:
    """Warpgroup 2: every chunk of the CTA."""
    first = ctx_at(scheduler.first(cta))
    plgpu.barrier_arrive(first.barriers.lower_empty)

    def step(work_tile: WorkTile) -> None:
        inverse_warpgroup(ctx_at(work_tile), outputs.a_inv)

    last = scheduler.for_each_tile(step, cta, 0, first.gmem.zero)
    plgpu.barrier_wait(first.barriers.lower_full)
    first.ready_flags.signal(first.grid(last).index)


def qk_warpgroup(ctx: IntraKdaWarpgroup, outputs: IntraKdaOutputs) -> None:
    """What warpgroups 0 and 1 do with a chunk."""
    if outputs.a_qk is not None:

        @pl.when(ctx.wg == 1)
        def _():
            ctx.prefetch_beta()

    @ctx.if_owns_channels
    def _load():
        _load_qkg(ctx)

    if ctx.ready_flags.flags_gmem is not None:
        plgpu.wait_smem_to_gmem(0)  # the stores of the previous chunk have arrived meanwhile
    share_norms = ctx.qk.options.qk_norm and ctx.qk.num_tiles > 1
    if share_norms:
        ctx.sync_warpgroups()

    @ctx.if_owns_channels
    def _decay():
        _write_decayed_qk(ctx, outputs)

    if not outputs.with_pairs:
        if share_norms:
            ctx.sync_warpgroups()  # the next chunk's norms replace these
        return
    ctx.sync_warpgroups()
    a = compute_a_kda(ctx)
    ctx.sync_warpgroups()  # from here on no warpgroup reads a tile of the other

    if outputs.block_sums is not None:
        store_block_sum(ctx, a, outputs.block_sums)
        return

    @pl.when(ctx.wg == 0)
    def _q_rows():
        store_a_qk(ctx, a, outputs.a_qk)

    @pl.when(ctx.wg == 1)
    def _k_rows():
        pass_lower(ctx, a)


def _load_qkg(ctx: IntraKdaWarpgroup) -> None:
    """This warpgroup's channels of q, k and g, the last to log2 decays; prefetches the next."""
    qk = ctx.qk
    smem = ctx.smem
    barriers = ctx.barriers
    work_tile = ctx.work_tile
    tile = ctx.wg
    slot = work_tile.iteration & 1
    # The previous chunk's stores read tiles that are written again from here on.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(work_tile.has_next)
    def _():
        ctx.prefetch_qk(ctx.next_part, work_tile.iteration + 1)

    plgpu.barrier_wait(barriers.raw_gate_full.at[tile])
    plgpu.barrier_wait(barriers.qk_full.at[2 * tile + slot])
    bias = None if smem.bias is None else smem.bias.at[slot, tile]
    resets = None if smem.resets is None else smem.resets.at[slot, tile]
    raw = load(smem.raw_gate.at[tile])
    smem.log2_decay.at[tile][...] = qk.scaled_log2_decay(raw, ctx.gmem.qkg, bias, resets)
    if qk.options.qk_norm:
        qk.write_square_norms(tile, None if ctx.has_all_channels else ctx.gmem.qkg)
    plgpu.commit_smem()

    @pl.when(work_tile.has_next)
    def _():
        ctx.prefetch_raw_gate(ctx.next_part)


def _write_decayed_qk(ctx: IntraKdaWarpgroup, outputs: IntraKdaOutputs) -> None:
    """`DecayedQK` of this warpgroup's channels to gmem; where A is made, also its columns."""
    tile = ctx.wg
    zero = ctx.zero
    smem = ctx.smem
    qk = ctx.qk.with_inv_norms()

    def decay_sums(matrix_smem: Smem) -> Reg:
        return dot(zeros(CHUNK, TILE_K), (matrix_smem, smem.log2_decay.at[tile]))

    def write_tile(target_smem: Smem, x: Reg) -> None:
        target_smem.at[tile][...] = x.astype(BF16)

    k = qk.scaled(K, tile)
    k_to_end = smem.decayed.at[zero]
    to_end = decay_sums(smem.span_matrices.at[zero + 1])
    write_tile(k_to_end, k * jnp.exp2(to_end))
    from_start = decay_sums(smem.span_matrices.at[zero])
    if outputs.with_pairs:
        min_sums = smem.min_from_start.at[tile]
        min_sums[...] = jnp.min(from_start, axis=1)
        growth = jnp.minimum(-from_start, FAST_RANGE)
        growth = jnp.exp2(growth)
        write_tile(ctx.columns, qk.scaled(K, tile) * growth)
    decay = jnp.exp2(from_start)
    write_tile(qk.k, qk.scaled(K, tile) * decay)
    write_tile(qk.q, qk.scaled(Q, tile) * decay)
    # Column 0 of FROM_START is all ones: the sums of all tokens with channels as rows, so that no
    # warp needs another.
    total = dot(
        zeros(TILE_K, CHUNK),
        (transposed(smem.log2_decay.at[tile]), smem.span_matrices.at[zero]),
    )
    first_column = jnp.where(iota2d(1, CHUNK, ctx.iota) == 0, total, zeros(TILE_K, CHUNK))
    smem.chunk_decay.at[tile][...] = jnp.exp2(jnp.sum(first_column, axis=1))
    plgpu.commit_smem()
    columns = ctx.part.columns(tile)
    for source, target in (
        (qk.q, outputs.q_from_start),
        (qk.k, outputs.k_from_start),
        (k_to_end, outputs.k_to_end),
    ):
        plgpu.copy_smem_to_gmem(source.at[tile], qk.index.tile(target).at[:, columns])
    chunk_decay = qk.index.tile(outputs.chunk_decay).at[columns]
    plgpu.copy_smem_to_gmem(smem.chunk_decay.at[tile], chunk_decay)

"""Launch and roles of jfla_grads_kda: q, k, g and `ScanResults` to `KernelGrads`.

The kernel is persistent and warp-specialised: CTAs take chunks of a block of 128 channels. A
producer warpgroup issues the copies, up to a chunk ahead, of 64 columns of V at a time; two
consumer warpgroups own 64 channels each (`consumer.py`).
"""

import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jfla.pallas.common.chunk_index import (
    CHANNEL_BLOCK,
    TILE_K,
    TILE_V,
    ChunkGrid,
    PartGrid,
)
from jfla.pallas.common.decay_sums import AFTER, block_spans, stack_matrices
from jfla.pallas.common.packed_rows import rows_like
from jfla.pallas.common.qk_tiles import QkgOperands, QkOptions
from jfla.pallas.common.results import KernelGrads
from jfla.pallas.mgpu.copies import Copies, prefetch_to_l2
from jfla.pallas.mgpu.in_place import write_in_place
from jfla.pallas.mgpu.launch import launch
from jfla.pallas.mgpu.registers import RegisterLimits, leave_registers, take_registers
from jfla.pallas.mgpu.scheduler import TileScheduler, WorkTile
from jfla.pallas.mgpu.smem import BF16, F16, F32
from jfla.pallas.mgpu.types import Gmem, Index
from jfla.pallas.sm90.grads_kda.consumer import run_consumer
from jfla.pallas.sm90.grads_kda.smem import (
    DO,
    DSTATE,
    DV,
    KDA_CONSUMERS,
    STATE,
    SUM_MATRICES,
    V_NEW,
    Barriers,
    GradsKdaOperands,
    GradsKdaSpec,
    GradsKdaWarpgroup,
    SharedStorage,
    grads_kda_barriers,
    grads_kda_storage,
)
from jfla.pallas.sm90.grads_producer import drain, produce_chunk
from jfla.stages import ScanResults
from jfla.types import CHUNK

REGISTERS = RegisterLimits(240, 24)


def load_v_tile(ctx: GradsKdaWarpgroup, v_tile: int, stage: Index) -> None:
    """Starts the copies of 64 columns of V of everything that the scans left, to one stage."""
    scans = ctx.gmem.scans
    index = ctx.index
    columns_of_v = pl.ds(v_tile * TILE_V, TILE_V)
    copies = Copies(ctx.barriers.v_full.at[stage])
    for which, source in ((DO, scans.do), (DV, scans.dv), (V_NEW, scans.v_new)):
        start = functools.partial(
            copies.start, target_smem=ctx.smem.values.at[stage, which]
        )
        index.for_rows(source, ctx.spec.heads, columns_of_v, start)
    for which, source in ((STATE, scans.states), (DSTATE, scans.dstates)):
        for tile in range(ctx.spec.num_tiles):
            source_tile = index.tile(source).at[columns_of_v, ctx.part.columns(tile)]
            copies.start(source_tile, ctx.smem.states.at[stage, which, tile])


def prefetch_qkg(ctx: GradsKdaWarpgroup) -> None:
    """Prefetches q, k and g into the second-level cache while the consumers work on the chunk before."""
    qkg = ctx.gmem.qkg
    for tile in range(ctx.spec.num_tiles):
        columns = ctx.part.columns(tile)
        for source in (qkg.q, qkg.k, qkg.g):
            ctx.index.for_rows(source, ctx.spec.heads, columns, prefetch_to_l2)


def load_qk(ctx: GradsKdaWarpgroup) -> None:
    """Starts the copies of a chunk's q, k and vectors."""
    index = ctx.index
    copies = Copies(ctx.barriers.qk_full)
    qkg = ctx.gmem.qkg
    smem = ctx.smem
    for tile in range(ctx.spec.num_tiles):
        columns = ctx.part.columns(tile)
        for source, target in ((qkg.q, smem.q), (qkg.k, smem.k)):
            start = functools.partial(copies.start, target_smem=target.at[tile])
            index.for_rows(source, ctx.spec.heads, columns, start)
        if smem.bias is not None:
            bias = qkg.bias.at[index.head, columns]
            copies.start(bias, smem.bias.at[tile])
    if smem.resets is not None:
        resets = qkg.resets.at[index.batch, index.tokens]
        copies.start(resets, smem.resets)


def load_matrices(gmem: GradsKdaOperands, smem: SharedStorage, full: Gmem) -> None:
    """Starts the copies of the matrices that sum over tokens, once."""
    for i in range(len(SUM_MATRICES)):
        plgpu.copy_gmem_to_smem(gmem.sum_matrices.at[i], smem.sum_matrices.at[i], full)
    plgpu.copy_gmem_to_smem(gmem.block_spans, smem.block_spans.at[0], full)
    plgpu.copy_gmem_to_smem(gmem.after, smem.after.at[0], full)


def grads_kda(
    operands: QkgOperands,
    scans: ScanResults,
    options: QkOptions,
    max_ctas: int,
    out_dtype: DTypeLike,
    *,
    in_place: bool = False,
) -> KernelGrads:
    """On the host: launches the kernel.

    dq and dk come in `out_dtype`, or in float32 where the caller has the VJP of the norms still to do. Under `in_place`
    dq takes the memory of v_new where it can.
    """
    batch, heads, n_chunks, value_dim, key_dim = scans.states.shape
    num_blocks = max(key_dim // CHANNEL_BLOCK, 1)
    if num_blocks > 1 and options.qk_norm:
        out_dtype = F32
    chunks = ChunkGrid(batch, heads, n_chunks)
    grid = PartGrid(chunks, num_blocks, key_dim // num_blocks // TILE_K)
    spec = GradsKdaSpec(options, grid, value_dim // TILE_V)
    smem_spec = grads_kda_storage(spec, operands)
    stages = smem_spec.values.shape[0]
    scheduler = TileScheduler(grid.num_parts, max_ctas)

    def body(
        gmem: GradsKdaOperands,
        outputs_gmem: KernelGrads | None,
        smem: SharedStorage,
        barriers: Barriers,
    ) -> None:
        out_gmem: Any = gmem.results if outputs_gmem is None else outputs_gmem
        cta = lax.axis_index("cta")
        wg = lax.axis_index("wg")

        def context(work: WorkTile) -> GradsKdaWarpgroup:
            return GradsKdaWarpgroup(wg + work.zero, work, spec, gmem, smem, barriers)

        used = chunks.used_tiles(gmem.qkg.q)
        tiles = scheduler.up_to(None if used is None else used * num_blocks)

        def run_roles() -> None:
            @pl.when(wg < KDA_CONSUMERS)
            def _():
                take_registers(REGISTERS.consumer)
                plgpu.barrier_wait(barriers.matrices_full)
                consume = lambda work: run_consumer(context(work), out_gmem)
                tiles.for_each_tile(consume, cta, 0)
                plgpu.wait_smem_to_gmem(0)

            @pl.when(wg == KDA_CONSUMERS)
            def _():
                leave_registers(REGISTERS.producer)
                load_matrices(gmem, smem, barriers.matrices_full)
                produce = lambda work: produce_chunk(
                    context(work), load_v_tile, load_qk, prefetch_qkg
                )
                tiles.for_each_tile(produce, cta, 0)
                drain(barriers, tiles.tile_count(cta), spec.v_tiles, stages)

        tiles.if_any(cta, 0, run_roles)

    per_channel = (batch, n_chunks * CHUNK, heads, key_dim)
    dx = rows_like(operands.q, per_channel, out_dtype)
    dg = rows_like(operands.q, per_channel, F32)
    shapes = KernelGrads(dx, dx, dg, jax.ShapeDtypeStruct((*chunks.shape, CHUNK), F32))
    launch_with = functools.partial(
        launch,
        body,
        grid={"cta": scheduler.num_ctas},
        num_warpgroups=KDA_CONSUMERS + 1,
        registers=REGISTERS.of(KDA_CONSUMERS),
        smem=smem_spec,
        barriers=grads_kda_barriers(spec, operands, stages),
        name="jfla_grads_kda",
    )
    gmem = GradsKdaOperands(
        operands,
        scans,
        stack_matrices(F16, *SUM_MATRICES),
        stack_matrices(F16, block_spans())[0],
        stack_matrices(BF16, AFTER)[0],
    )
    # A CTA has read all of a chunk's v_new before it stores the chunk's dq, and no other CTA reads it with one block.
    v_new = scans.v_new
    same = isinstance(dx, jax.ShapeDtypeStruct) and (v_new.shape, v_new.dtype) == (
        dx.shape,
        dx.dtype,
    )
    if not in_place or num_blocks > 1 or not same:
        return launch_with(inputs=gmem, outputs=shapes)

    def over_v_new(refs: KernelGrads, gmem: GradsKdaOperands) -> None:
        scans = gmem.scans._replace(v_new=refs.dq)
        launch_with(inputs=gmem._replace(scans=scans, results=refs), outputs=None)

    unwritten = jax.tree.map(lambda x: lax.empty(x.shape, x.dtype), shapes)
    written = unwritten._replace(dq=v_new)
    return write_in_place(
        over_v_new, written, gmem._replace(scans=scans._replace(v_new=None))
    )

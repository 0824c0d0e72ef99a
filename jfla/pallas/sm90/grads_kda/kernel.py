"""Launch and roles of jfla_grads_kda: q, k, g and `ScanResults` to `KernelGrads`.

The kernel is persistent and warp-specialised: CTAs take chunks of a block of 128 channels. A
producer warpgroup issues the copies, up to a chunk ahead, of 64 columns of V at a time; two
consumer warpgroups own 64 channels each (`consumer.py`).
"""

import functools
from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jfla.pallas.common.chunk_index import (
    CHANNEL_BLOCK,
    TILE_K,
    TILE_V,
    ChunkGrid,
    PartGrid,
)
from jfla.pallas.common.decay_sums import (
    AFTER,
    SUM_MATRICES,
    block_spans,
    stack_matrices,
)
from jfla.pallas.common.grads_tiles import load_values
from jfla.pallas.common.packed_rows import places_of, rows_like
from jfla.pallas.common.qk_tiles import QkgOperands, QkOptions
from jfla.pallas.common.results import KernelGrads
from jfla.pallas.mgpu.copies import Copies, prefetch_to_l2
from jfla.pallas.mgpu.in_place import write_in_place
from jfla.pallas.mgpu.overlap import Kernel, PendingResults, ReadyFlags, run
from jfla.pallas.mgpu.registers import RegisterLimits
from jfla.pallas.mgpu.scheduler import TileScheduler, WorkTile
from jfla.pallas.mgpu.smem import BF16, F16, F32
from jfla.pallas.mgpu.types import Gmem, Index
from jfla.pallas.sm90.grads_kda.consumer import run_consumer
from jfla.pallas.sm90.grads_kda.smem import (
    Barriers,
    GradsKdaOperands,
    GradsKdaSpec,
    GradsKdaWarpgroup,
    SharedStorage,
    grads_kda_barriers,
    grads_kda_storage,
)
from jfla.pallas.sm90.grads_pipeline import (
    NUM_CONSUMERS,
    ChunkCopies,
    Roles,
    ValuePipeline,
    load_states,
)
from jfla.stages import ScanResults
from jfla.types import CHUNK

REGISTERS = RegisterLimits(240, 24)


def load_v_tile(ctx: GradsKdaWarpgroup, v_tile: int, stage: Index) -> None:
    """Starts the copies of 64 columns of V of everything that the scans left, to one stage."""
    scans = ctx.gmem.scans
    index = ctx.index
    copies = Copies(ctx.barriers.v_full.at[stage])
    values = ctx.smem.values.at[stage]
    load_values(copies, scans, index, ctx.spec.heads, v_tile, values)
    columns = [ctx.part.columns(tile) for tile in range(ctx.spec.num_tiles)]
    load_states(copies, scans, index, v_tile, columns, ctx.smem.states.at[stage])


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
        if smem.log2_bias is not None:
            log2_bias = qkg.log2_bias.at[index.head, columns]
            copies.start(log2_bias, smem.log2_bias.at[tile])
    if smem.resets is not None:
        resets = qkg.resets.at[index.batch, index.tokens]
        copies.start(resets, smem.resets)
    if smem.inv_norms is not None:
        copies.start(index.tile(ctx.gmem.inv_norms), smem.inv_norms)


def chunk_copies(ctx: GradsKdaWarpgroup) -> ChunkCopies:
    """Of the producer's chunk."""
    return ChunkCopies(
        v_tile=functools.partial(load_v_tile, ctx),
        qk=functools.partial(load_qk, ctx),
        prefetch=functools.partial(prefetch_qkg, ctx),
    )


def load_matrices(gmem: GradsKdaOperands, smem: SharedStorage, full: Gmem) -> None:
    """Starts the copies of the matrices that sum over tokens, once."""
    for i in range(len(SUM_MATRICES)):
        plgpu.copy_gmem_to_smem(gmem.sum_matrices.at[i], smem.sum_matrices.at[i], full)
    plgpu.copy_gmem_to_smem(gmem.block_spans, smem.block_spans.at[0], full)
    plgpu.copy_gmem_to_smem(gmem.after, smem.after.at[0], full)


def grads_kda_operands(
    qkg: QkgOperands, scans: ScanResults, inv_norms: Gmem
) -> GradsKdaOperands:
    """On the host: with the matrices that sum over tokens. `inv_norms` are those of `intra_kda`, None without norms."""
    return GradsKdaOperands(
        qkg,
        scans,
        stack_matrices(F16, *SUM_MATRICES),
        stack_matrices(F16, block_spans())[0],
        stack_matrices(BF16, AFTER)[0],
        inv_norms,
    )


def grads_kda(
    operands: GradsKdaOperands,
    options: QkOptions,
    max_ctas: int,
    out_dtype: DTypeLike,
) -> KernelGrads:
    """On the host: launches the kernel. Shapes are those of `result_shapes`.

    Where `operands` have references for results, these are the results.
    """
    results = operands.results
    shapes = result_shapes(operands, options, out_dtype)
    spec = _spec(operands.scans, options)
    smem_spec = grads_kda_storage(spec, operands.qkg)
    stages = smem_spec.values.shape[0]
    scheduler = TileScheduler(spec.grid.num_parts, max_ctas)
    scratch = None
    if shapes.dg.dtype != F32:
        scratch_shape = (scheduler.num_ctas, spec.num_tiles, TILE_K, CHUNK)
        scratch = jax.ShapeDtypeStruct(scratch_shape, F32)

    def body(
        gmem: GradsKdaOperands,
        outputs_gmem: tuple[KernelGrads | None, Gmem | None],
        smem: SharedStorage,
        barriers: Barriers,
        cta: Index,
        ready_flags: ReadyFlags,
    ) -> None:
        del ready_flags
        new_results, scratch_gmem = outputs_gmem
        out_gmem: Any = gmem.results if new_results is None else new_results
        wg = lax.axis_index("wg")
        pipeline = ValuePipeline(barriers.pipeline, spec.v_tiles, stages)

        def context(work: WorkTile) -> GradsKdaWarpgroup:
            part = spec.grid(work.tile_index, places_of(gmem.qkg.q))
            return GradsKdaWarpgroup(
                wg + work.zero,
                work,
                part,
                spec,
                gmem,
                cta,
                scratch_gmem,
                smem,
                pipeline,
            )

        def consume(work: WorkTile) -> None:
            run_consumer(context(work), out_gmem)

        def produce(work: WorkTile) -> None:
            pipeline.produce_chunk(work, chunk_copies(context(work)))

        tiles = scheduler.up_to(spec.grid.used_parts(gmem.qkg.q))
        roles = Roles(
            consume,
            produce,
            begin_consumer=lambda: plgpu.barrier_wait(barriers.matrices_full),
            begin_producer=lambda: load_matrices(gmem, smem, barriers.matrices_full),
        )
        run_roles = lambda: pipeline.run(wg, cta, tiles, REGISTERS, roles)
        tiles.if_any(cta, 0, run_roles)

    kernel = Kernel(
        name="jfla_grads_kda",
        inputs=operands,
        outputs=(shapes if results is None else None, scratch),
        num_ctas=scheduler.num_ctas,
        num_warpgroups=NUM_CONSUMERS + 1,
        registers=REGISTERS.of(NUM_CONSUMERS),
        smem=smem_spec,
        barriers=grads_kda_barriers(spec, operands.qkg, stages),
        body=body,
    )
    new_results, _ = run(PendingResults(kernel, lambda outputs: outputs))
    return new_results if results is None else results


def grads_kda_over_v_new(
    operands: GradsKdaOperands,
    options: QkOptions,
    max_ctas: int,
    out_dtype: DTypeLike,
) -> KernelGrads:
    """On the host: launches the kernel; dq takes the memory of v_new where it can."""
    shapes = result_shapes(operands, options, out_dtype)
    scans = operands.scans
    v_new = scans.v_new
    one_block = _num_blocks(scans) == 1
    # A CTA has read all of a chunk's v_new before it stores the chunk's dq, and no other CTA reads it with one block.
    dq = shapes.dq
    same = isinstance(dq, jax.ShapeDtypeStruct) and (v_new.shape, v_new.dtype) == (
        dq.shape,
        dq.dtype,
    )
    if not one_block or not same:
        return grads_kda(operands, options, max_ctas, out_dtype)

    def write(results: KernelGrads, operands: GradsKdaOperands) -> None:
        scans = operands.scans._replace(v_new=results.dq)
        operands = operands._replace(scans=scans, results=results)
        grads_kda(operands, options, max_ctas, out_dtype)

    unwritten = jax.tree.map(lambda x: lax.empty(x.shape, x.dtype), shapes)
    written = unwritten._replace(dq=v_new)
    read = operands._replace(scans=scans._replace(v_new=None))
    return write_in_place(write, written, read)


def result_shapes(
    operands: GradsKdaOperands, options: QkOptions, dtype: DTypeLike
) -> KernelGrads:
    """On the host: what `grads_kda` returns, without values.

    dq and dk are in `dtype`, or in float32 where the caller has the VJP of the norms still to do. dg is in the dtype of
    the caller's decays; of a raw gate in float32, because the sums over tokens for its parameters cancel.
    """
    scans = operands.scans
    batch, time, heads, _ = scans.do.shape
    before_norm_vjp = options.qk_norm and _num_blocks(scans) > 1
    per_channel = (batch, time, heads, scans.states.shape[-1])
    rows = operands.qkg.q
    dx = rows_like(rows, per_channel, F32 if before_norm_vjp else dtype)
    dg_dtype = operands.qkg.g.dtype if options.no_gate else F32
    dg = rows_like(rows, per_channel, dg_dtype)
    v_new_dot_dv = jax.ShapeDtypeStruct((batch, heads, time // CHUNK, CHUNK), F32)
    return KernelGrads(dx, dx, dg, v_new_dot_dv)


def _spec(scans: ScanResults, options: QkOptions) -> GradsKdaSpec:
    batch, time, heads, value_dim = scans.do.shape
    key_dim = scans.states.shape[-1]
    chunks = ChunkGrid(batch, heads, time // CHUNK)
    num_blocks = _num_blocks(scans)
    grid = PartGrid(chunks, num_blocks, key_dim // num_blocks // TILE_K)
    return GradsKdaSpec(options, grid, value_dim // TILE_V)


def _num_blocks(scans: ScanResults) -> int:
    """Of 128 channels of K."""
    return max(scans.states.shape[-1] // CHANNEL_BLOCK, 1)

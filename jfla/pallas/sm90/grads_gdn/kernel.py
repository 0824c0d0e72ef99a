"""Launch and roles of jfla_grads_gdn: `FactoredQK`, token scalars, `ScanResults` to `KernelGrads`.

The kernel is persistent and warp-specialised: CTAs take chunks of a block of 128 channels. A
producer warpgroup issues the copies, up to a chunk ahead, of 64 columns of V at a time; two
consumer warpgroups own 64 channels each.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jfla.pallas.backward_overlap import BackwardOverlap
from jfla.pallas.common.chunk_index import (
    CHANNEL_BLOCK,
    TILE_K,
    TILE_V,
    ChunkGrid,
    TimeSpan,
)
from jfla.pallas.common.grads_tiles import load_values
from jfla.pallas.common.packed_rows import Rows, places_of, rows_like
from jfla.pallas.common.qk_tiles import K, Q, QkOptions
from jfla.pallas.common.results import KernelGrads
from jfla.pallas.mgpu.branches import when
from jfla.pallas.mgpu.copies import Copies, arrive_after_stores
from jfla.pallas.mgpu.overlap import Kernel, PendingResults, ReadyFlags
from jfla.pallas.mgpu.registers import RegisterLimits
from jfla.pallas.mgpu.scheduler import TileScheduler, WorkTile
from jfla.pallas.mgpu.smem import F32
from jfla.pallas.mgpu.types import Gmem, Index
from jfla.pallas.sm90.grads_gdn.dqkg import (
    SumsOverV,
    add_v_tile,
    constant_norm_grads,
    store_dg,
    store_dq_dk,
    write_pair_weights,
    zero_sums,
)
from jfla.pallas.sm90.grads_gdn.smem import (
    GradsGdnInputs,
    GradsGdnSpec,
    GradsGdnWarpgroup,
    SharedStorage,
    grads_gdn_storage,
)
from jfla.pallas.sm90.grads_pipeline import (
    NUM_CONSUMERS,
    ChunkCopies,
    GradsBarriers,
    Roles,
    ValuePipeline,
    grads_barriers,
    load_states,
)
from jfla.stages import FactoredQK, ScanResults
from jfla.types import CHUNK

REGISTERS = RegisterLimits(232, 40)


def run_consumer(
    ctx: GradsGdnWarpgroup, out_gmem: KernelGrads, ready_flags: ReadyFlags
) -> None:
    """What a consumer warpgroup does with a chunk."""

    def add(v_tile: Index, sums: SumsOverV) -> SumsOverV:
        return add_v_tile(ctx, v_tile, sums)

    sums = lax.fori_loop(0, ctx.spec.v_tiles, add, zero_sums())

    @when(ctx.wg == 0)
    def _():
        ready_flags.release(ctx.span_chunk.flag)

    plgpu.barrier_wait(ctx.barriers.qk_full)
    write_pair_weights(ctx, sums.weights)
    ctx.pipeline.sync_consumers()

    # With K = 64 there is one tile of channels, and consumer 1 was only needed for W_k.
    @when(ctx.wg < ctx.spec.num_tiles)
    def _():
        store_dq_dk(ctx, out_gmem, constant_norm_grads(ctx, sums))

    @when(ctx.wg == 0)
    def _():
        store_dg(ctx, out_gmem)

    # The producer copies the next q and k over the tiles from which dq and dk are stored.
    arrive_after_stores(ctx.barriers.chunk_done, read_only=True)


def load_v_tile(ctx: GradsGdnWarpgroup, v_tile: int, stage: Index) -> None:
    """Starts the copies of 64 columns of V of everything that the scans left, to one stage."""
    scans = ctx.gmem.scans
    index = ctx.global_chunk
    in_span = ctx.span_chunk
    copies = Copies(ctx.barriers.v_full.at[stage], evict_first=ctx.spec.beside_scans)
    values = ctx.smem.values.at[stage]
    load_values(copies, scans, index, ctx.spec.heads, v_tile, values, in_span)
    columns = [ctx.columns(tile) for tile in range(ctx.spec.num_tiles)]
    load_states(copies, scans, in_span, v_tile, columns, ctx.smem.states.at[stage])


def load_qk(ctx: GradsGdnWarpgroup) -> None:
    """Starts the copies of a chunk's q, k, factors and token scalars."""
    index = ctx.global_chunk
    # With fewer heads of q and k than of v several CTAs read the same, but at about the same time.
    copies = Copies(ctx.barriers.qk_full, evict_first=ctx.spec.beside_scans)
    copies.start(index.tile(ctx.gmem.factors), ctx.smem.factors)
    copies.start(index.tile(ctx.gmem.token_scalars), ctx.smem.token_scalars)
    for which, source in ((Q, ctx.gmem.q), (K, ctx.gmem.k)):
        for tile in range(ctx.spec.num_tiles):
            start = functools.partial(
                copies.start, target_smem=ctx.smem.qk.at[which, tile]
            )
            index.for_rows(source, ctx.spec.heads, ctx.columns(tile), start)


def chunk_copies(ctx: GradsGdnWarpgroup) -> ChunkCopies:
    """Of the producer's chunk."""
    return ChunkCopies(
        v_tile=functools.partial(load_v_tile, ctx),
        qk=functools.partial(load_qk, ctx),
    )


def grads_gdn(
    qk: FactoredQK,
    token_scalars: jax.Array,
    scans: ScanResults,
    options: QkOptions,
    max_ctas: int,
    out_dtype: DTypeLike,
    span: TimeSpan | None = None,
    beside_scans: BackwardOverlap | None = None,
) -> PendingResults:
    """On the host: the kernel, not launched yet. Shapes are those of `result_shapes`.

    `qk` and `token_scalars` are those of `intra_gdn`. With a span of time the results are its
    references. `beside_scans` it takes chunks in the order in which the scans are done with them.
    """
    spec = _spec(qk, scans, options, token_scalars.shape[3])
    if span is not None:
        spec = spec._replace(grid=spec.grid._replace(n_chunks=scans.states.shape[2]))
    if beside_scans is not None:
        group = beside_scans.sequences_per_group
        grid = spec.grid._replace(sequences_per_group=group, descending=True)
        spec = spec._replace(grid=grid)
    smem_spec = grads_gdn_storage(spec)
    stages = smem_spec.values.shape[0]
    copies_of_vectors = 2
    copies_of_qk = 2 * spec.num_tiles + copies_of_vectors
    scheduler = TileScheduler(spec.grid.num_tiles, max_ctas)

    def body(
        gmem: GradsGdnInputs,
        outputs_gmem: KernelGrads | None,
        smem: SharedStorage,
        barriers: GradsBarriers,
        cta: Index,
        ready_flags: ReadyFlags,
    ) -> None:
        wg = lax.axis_index("wg")
        out_gmem: Gmem = outputs_gmem if gmem.span is None else gmem.span.results
        pipeline = ValuePipeline(barriers, spec.v_tiles, stages)

        def context(work: WorkTile) -> GradsGdnWarpgroup:
            # Of an opaque zero: with two heads LLVM would have the head, which is the same in every turn, before the
            # roles part, and ptxas spill it.
            index = spec.grid(work.tile_index + work.zero, places_of(gmem.q))
            return GradsGdnWarpgroup(
                wg + work.zero, work, index, spec, gmem, smem, pipeline
            )

        def consume(work: WorkTile) -> None:
            run_consumer(context(work), out_gmem, ready_flags)

        def produce(work: WorkTile) -> None:
            ctx = context(work)
            ready_flags.wait(ctx.span_chunk.flag)
            pipeline.produce_chunk(work, chunk_copies(ctx))

        tiles = scheduler.up_to(spec.grid.used_tiles(gmem.q))
        roles = Roles(consume, produce)
        run_roles = lambda: pipeline.run(wg, cta, tiles, REGISTERS, roles)
        tiles.if_any(cta, 0, run_roles)

    batch, time, heads, _ = scans.do.shape
    key_dim = scans.states.shape[-1]
    shapes = result_shapes(qk.q, (batch, time, heads, key_dim), options, out_dtype)
    kernel = Kernel(
        name="jfla_grads_gdn",
        inputs=GradsGdnInputs(qk.q, qk.k, scans, qk.factors, token_scalars, span),
        outputs=shapes if span is None else None,
        num_ctas=scheduler.num_ctas,
        num_warpgroups=NUM_CONSUMERS + 1,
        registers=REGISTERS.of(NUM_CONSUMERS),
        smem=smem_spec,
        barriers=grads_barriers(spec.num_tiles, copies_of_qk, stages),
        body=body,
    )
    return PendingResults(
        kernel, lambda outputs: outputs if span is None else span.results
    )


def result_shapes(
    q: Rows,
    shape: tuple[int, int, int, int],
    options: QkOptions,
    dtype: DTypeLike,
) -> KernelGrads:
    """On the host: what `grads_gdn` returns, without values, for `shape` [B, T, HV, K] of dq, whose rows lie as q's.

    dq and dk are in `dtype`, or in float32 where the caller has the VJP of the norms still to do.
    dg is [B, HV * channel blocks, N, C]: see `sum_over_channel_blocks`.
    """
    batch, time, heads, key_dim = shape
    n_chunks = time // CHUNK
    channel_blocks = _channel_blocks(key_dim)
    before_norm_vjp = channel_blocks > 1 and options.qk_norm
    dx = rows_like(q, shape, F32 if before_norm_vjp else dtype)
    dg = jax.ShapeDtypeStruct((batch, heads * channel_blocks, n_chunks, CHUNK), F32)
    v_new_dot_dv = jax.ShapeDtypeStruct((batch, heads, n_chunks, CHUNK), F32)
    return KernelGrads(dx, dx, dg, v_new_dot_dv)


def sum_over_channel_blocks(grads: KernelGrads) -> KernelGrads:
    """On the host: the same with dg [B, HV, N, C]."""
    batch, heads, n_chunks, _ = grads.v_new_dot_dv.shape
    dg = grads.dg.reshape(batch, heads, -1, n_chunks, CHUNK)
    return grads._replace(dg=jnp.sum(dg, axis=2))


def _spec(
    qk: FactoredQK, scans: ScanResults, options: QkOptions, num_token_scalars: int
) -> GradsGdnSpec:
    batch, heads, n_chunks = qk.factors.shape[:3]
    value_dim, key_dim = scans.states.shape[3:]
    channel_blocks = _channel_blocks(key_dim)
    return GradsGdnSpec(
        options=options,
        grid=ChunkGrid(batch, heads * channel_blocks, n_chunks),
        heads=heads,
        channel_blocks=channel_blocks,
        num_tiles=min(key_dim, CHANNEL_BLOCK) // TILE_K,
        v_tiles=value_dim // TILE_V,
        num_token_scalars=num_token_scalars,
        dtype=scans.v_new.dtype,
    )


def _channel_blocks(key_dim: int) -> int:
    return max(key_dim // CHANNEL_BLOCK, 1)

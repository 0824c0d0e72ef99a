"""What a consumer warpgroup of jfla_grads_kda does with a chunk: sums over V, decays, dq dk dg, epilogue.

dq, dk and dg are derived in `dqkg.py`; dbeta = (v_new . dv) / beta^2 is docs/math.md, equation (14).
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla.pallas.common.chunk_index import TILE_K
from jfla.pallas.common.decay_sums import block_decays, least_within
from jfla.pallas.common.grads_tiles import DO, DSTATE, DV, STATE, V_NEW
from jfla.pallas.common.packed_rows import Rows
from jfla.pallas.common.pair_passes import NUM_BLOCKS
from jfla.pallas.common.qk_tiles import K, Q
from jfla.pallas.common.results import KernelGrads
from jfla.pallas.mgpu.branches import when
from jfla.pallas.mgpu.columns import join_columns, widened
from jfla.pallas.mgpu.copies import (
    arrive_after_stores,
    commit_smem,
    load_with_layout,
    store_tile,
    write,
    write_transposed,
)
from jfla.pallas.mgpu.folded_sums import fold, fold_selector, unfold
from jfla.pallas.mgpu.iota import iota, per_column, per_row
from jfla.pallas.mgpu.layouts import COLS, ROWS, WIDE
from jfla.pallas.mgpu.mma import MatmulQueue, Sum, dot, zeros
from jfla.pallas.mgpu.moves import load_scratch, store_rows_transposed
from jfla.pallas.mgpu.opaque import opaque_zero
from jfla.pallas.mgpu.row_dots import add_row_dots, no_blocks, row_dots
from jfla.pallas.mgpu.smem import BF16, F32, transposed
from jfla.pallas.mgpu.tile_moves import load_matrix, load_matrix_transposed
from jfla.pallas.mgpu.types import Reg
from jfla.pallas.mgpu.warp_blocks import store_columns
from jfla.pallas.sm90.grads_kda.dqkg import (
    Blocks,
    SumsOverV,
    add_pairs,
    finish_dg,
    grads_of_states,
    qk_block,
)
from jfla.pallas.sm90.grads_kda.smem import GradsKdaWarpgroup
from jfla.pallas.sm90.grads_pipeline import NUM_CONSUMERS
from jfla.types import CHUNK


def run_consumer(ctx: GradsKdaWarpgroup, out_gmem: KernelGrads) -> None:
    """Everything that a consumer does with a chunk."""
    sums, raw_gate = sums_over_v(ctx)

    @when(ctx.wg == 0)
    def _():
        # This branch computes nothing. Without a branch behind the sums over V ptxas spills up to 8 bytes more.
        for _ in range(4):
            opaque_zero()

    plgpu.barrier_wait(ctx.barriers.qk_full)
    write_weights(ctx, sums.weights)

    # With K = 64 there is one tile of channels, and consumer 1 was only needed for W_k.
    @when(ctx.wg < ctx.spec.num_tiles)
    def _():
        write_decays(ctx, raw_gate)
        if ctx.spec.options.qk_norm:
            normalise(ctx)

    ctx.pipeline.sync_consumers()

    @when(ctx.wg < ctx.spec.num_tiles)
    def _():
        # Addresses anew for each stage: else those that several need are kept in registers from the first to the last.
        grads = grads_of_states(ctx.recompute_addresses(), sums, out_gmem.dg)
        dq, dk, z = add_pairs(ctx, grads)
        store_grads(ctx.recompute_addresses(), dq, dk, z, out_gmem)

    store_v_new_dot_dv(ctx, out_gmem)
    # The producer copies the next q and k over the tiles from which dq and dk are stored.
    arrive_after_stores(ctx.barriers.chunk_done, read_only=True)


def sums_over_v(ctx: GradsKdaWarpgroup) -> tuple[SumsOverV, Reg]:
    """Sums over V, 64 columns at a time, and g as the caller passed it.

    The tensor cores have a tile's products while g is loaded, and the products of S with dS are issued.
    """
    queue = MatmulQueue()

    def add_v_tiles(
        dq: Sum, dk: Sum, dk_to_end: Sum, weights: Sum
    ) -> tuple[SumsOverV, Reg]:
        raw_gate: Any = None
        state_dot_dstate = no_blocks()
        for v_tile in range(ctx.spec.v_tiles):
            # With the same addresses in every tile LLVM would keep them from tile to tile, and ptxas spill them.
            tile_ctx = ctx.recompute_addresses()
            stage = ctx.pipeline.stage(ctx.work, v_tile)
            plgpu.barrier_wait(ctx.barriers.v_full.at[stage])
            do = ctx.value_tile(stage, DO)
            dv = ctx.value_tile(stage, DV)
            v_new = ctx.value_tile(stage, V_NEW)
            state = tile_ctx.state_tile(stage, STATE)
            dstate = tile_ctx.state_tile(stage, DSTATE)
            do_or_dv = ctx.smem.values.at[stage, tile_ctx.wg]
            dq.add((transposed(state), transposed(do)))
            dk.add((transposed(state), transposed(dv)))
            dk_to_end.add((transposed(dstate), transposed(v_new)))
            weights.add((do_or_dv, transposed(v_new)))
            if v_tile == 0:
                # g is loaded before the first stage is freed: behind the producer's next copies of 56 KiB to it the
                # loads would wait for some thousand cycles. And it is loaded behind the wait for that stage: the poll
                # of its barrier would wait in one queue with the loads. With eight neighbours a thread (WIDER), as the
                # intra-chunk kernel has them, ptxas spills registers here.
                raw_gate = ctx.qk.load_raw_gate(ctx.gmem.qkg, ctx.own_tile, WIDE)
            factors = [load_matrix_transposed(x) for x in (state, dstate)]
            state_dot_dstate = add_row_dots(state_dot_dstate, *factors)
            queue.wait()
            plgpu.barrier_arrive(ctx.barriers.v_empty.at[stage])
        sums = SumsOverV(
            dq.read(),
            dk.read(),
            dk_to_end.read(),
            weights.read(),
            row_dots(state_dot_dstate),
        )
        return sums, raw_gate

    per_channel = (TILE_K, CHUNK)
    shapes = (per_channel, per_channel, per_channel, (CHUNK, CHUNK))
    return queue.from_zero(add_v_tiles, *shapes)


def write_weights(ctx: GradsKdaWarpgroup, weights: Reg) -> None:
    """W_q by consumer 0 and W_k by consumer 1, strictly lower, and their diagonals: equation (13)."""
    zero = zeros(CHUNK, CHUNK)
    # Of an opaque zero, so that no element's number is kept from chunk to chunk. By `mgpu/diagonal.py` these are fewer
    # instructions, but the kernel was measured to be up to 8 % slower.
    row = per_row(iota(CHUNK, ROWS) + ctx.zero, CHUNK)
    column = per_column(iota(CHUNK, COLS) + ctx.zero, CHUNK)
    diagonal = jnp.where(row == column, weights, zero)
    write(ctx.smem.diagonals.at[ctx.wg], jnp.sum(diagonal, axis=1))
    weights = jnp.where(column < row, weights, zero) * jnp.where(ctx.wg == Q, 1.0, -1.0)
    write(ctx.smem.weights.at[ctx.wg], weights.astype(BF16))


def write_decays(ctx: GradsKdaWarpgroup, raw_gate: Reg) -> None:
    """log2 decays of the channels, the decays of whole blocks, and what the passes of pairs depend on."""
    smem = ctx.smem
    tile = ctx.own_tile
    qk = ctx.qk
    log2_bias = None if smem.log2_bias is None else smem.log2_bias.at[tile]
    log2_decay = qk.scaled_log2_decay(
        raw_gate, ctx.gmem.qkg, log2_bias, smem.resets, WIDE
    )
    write(smem.log2_decay.at[tile], log2_decay, WIDE)
    commit_smem()
    sums = ctx.block_sums()
    store_columns(block_decays(sums, ctx.zero), smem.block_decay.at[tile])
    write(smem.least.at[tile], least_within(sums, ctx.zero))


def normalise(ctx: GradsKdaWarpgroup) -> None:
    """q and k, in place, as the recurrence reads them: blocks of them are read some fifty times after this."""
    for which in (Q, K):
        tile = ctx.own_qk_tile(which)
        factor = ctx.inv_norm(which, ROWS) * ctx.spec.options.factor(which)
        x = widened(load_matrix(tile)) * per_row(factor, TILE_K)
        # A warp reads and writes the same rows.
        write(tile, x.astype(tile.dtype))


def store_grads(
    ctx: GradsKdaWarpgroup, dq: Blocks, dk: Blocks, z: Blocks, out_gmem: KernelGrads
) -> None:
    """Finishes dq, dk and dg, to which pairs of tokens have been added, and starts their stores."""
    targets = (out_gmem.dq, out_gmem.dk)
    grads = with_equal_pairs(ctx, dq, dk)
    if ctx.spec.options.qk_norm and ctx.has_all_channels:
        grads = norm_vjp(ctx, *grads)
    finish_dx(ctx, K, grads[K], targets[K])
    # While dq is finished, this load is in flight. Issued before dk is finished, it makes ptxas spill up to 150 bytes.
    dg_of_states = ctx.for_scratch(out_gmem.dg, load_scratch)
    finish_dx(ctx, Q, grads[Q], targets[Q])
    dg = finish_dg(ctx, dg_of_states, z)
    # The copy engine reads the tiles of dq and dk. And every thread has loaded its part of `dg_of_states`, which is not
    # in the order of dg, before any thread stores dg over it.
    commit_smem()
    for which, target in enumerate(targets):
        if target.dtype != F32:
            store = functools.partial(store_tile, ctx.own_qk_tile(which))
            ctx.for_own_rows(target, store)
    dg = dg.astype(out_gmem.dg.dtype)
    ctx.for_own_rows(out_gmem.dg, functools.partial(store_rows_transposed, dg))


def with_equal_pairs(ctx: GradsKdaWarpgroup, dq: Blocks, dk: Blocks) -> tuple[Reg, Reg]:
    """dq and dk [64, C] with pairs i = j and the VJP of the scale."""
    diagonal = per_column(load_with_layout(ctx.smem.diagonals.at[Q], COLS), TILE_K)
    q, k = (all_tokens(ctx, which) for which in (Q, K))
    dq_all = (join_columns(dq) + diagonal * k) * ctx.spec.options.scale
    dk_all = join_columns(dk) + diagonal * q
    return dq_all, dk_all


def finish_dx(ctx: GradsKdaWarpgroup, which: int, dx: Reg, target_gmem: Rows) -> None:
    """dq or dk to shared memory; float32 to global memory."""
    if target_gmem.dtype == F32:
        store = functools.partial(store_rows_transposed, dx)
        ctx.for_own_rows(target_gmem, store)
    else:
        write_transposed(ctx.own_qk_tile(which), dx.astype(target_gmem.dtype))


def all_tokens(ctx: GradsKdaWarpgroup, which: int) -> Reg:
    """[64, C] float32 of q or k as the recurrence reads it."""
    return join_columns([qk_block(ctx, which, block) for block in range(NUM_BLOCKS)])


def norm_vjp(ctx: GradsKdaWarpgroup, dq: Reg, dk: Reg) -> tuple[Reg, Reg]:
    """x = y / |y|, so dy = (dx - x (x . dx)) / |y|; x . dx takes all channels, of both consumers."""
    shared = ctx.spec.num_tiles == NUM_CONSUMERS
    sync = ctx.pipeline.sync_consumers if shared else commit_smem
    products = fold(all_tokens(ctx, Q) * dq, all_tokens(ctx, K) * dk)
    # The products take the place of the weights, which both consumers have read in `add_pairs` by now.
    sync()
    write(ctx.smem.weights.at[ctx.own_tile], products.astype(BF16))
    # The matmul reads the products of both.
    sync()
    left = fold_selector(ctx.zero + 1)
    tiles = [ctx.smem.weights.at[ctx.zero + n] for n in range(ctx.spec.num_tiles)]
    sums = dot(zeros(CHUNK, CHUNK), *[(left, tile) for tile in tiles])
    grads = []
    for which, dx, x_dot_dx in zip((Q, K), (dq, dk), unfold(sums)):
        # `all_tokens` of q are scaled, once in their products with dq and once here. With a scale of 0 dq is 0.
        factor = ctx.spec.options.factor(which)
        x_dot_dx = x_dot_dx * (factor**-2 if factor else 0.0)
        dx = dx - all_tokens(ctx, which) * x_dot_dx
        grads.append(dx * per_column(ctx.inv_norm(which, COLS), TILE_K))
    dq, dk = grads
    return dq, dk


def store_v_new_dot_dv(ctx: GradsKdaWarpgroup, out_gmem: KernelGrads) -> None:
    """v_new . dv, by the consumer that made W_k, of the first channel block."""

    @when((ctx.wg == K) & (ctx.part.first_tile == 0))
    def _():
        target = ctx.index.tile(out_gmem.v_new_dot_dv)
        target[...] = load_with_layout(ctx.smem.diagonals.at[K], ROWS)

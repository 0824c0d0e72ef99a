"""What a consumer warpgroup of jfla_grads_kda does with a chunk: sums over V, decays, dq dk dg, epilogue.

dq, dk and dg are derived in `dqkg.py`; dbeta = (v_new . dv) / beta^2 is docs/math.md, equation (14).
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla.gates import NORM_EPSILON
from jfla.pallas.common.chunk_index import TILE_K
from jfla.pallas.common.decay_sums import block_decays, least_within
from jfla.pallas.common.pair_passes import NUM_BLOCKS
from jfla.pallas.common.qk_tiles import K, Q
from jfla.pallas.common.results import KernelGrads
from jfla.pallas.mgpu.columns import join_columns, widened
from jfla.pallas.mgpu.copies import (
    commit_smem,
    load_with_layout,
    store_tile,
    wait_for_stores,
    write,
    write_transposed,
)
from jfla.pallas.mgpu.iota import iota, per_column, per_row
from jfla.pallas.mgpu.layouts import COLS, ROWS
from jfla.pallas.mgpu.mma import dot, dots, load, zeros
from jfla.pallas.mgpu.moves import store_transposed_f32
from jfla.pallas.mgpu.overlap import ReadyFlags
from jfla.pallas.mgpu.smem import BF16, F32, transposed
from jfla.pallas.mgpu.types import Index, Reg
from jfla.pallas.mgpu.warp_blocks import store_columns
from jfla.pallas.sm90.grads_kda.dqkg import (
    Blocks,
    add_pairs,
    finish_dg,
    grads_of_states,
    qk_block,
    write_dg_chunk,
)
from jfla.pallas.sm90.grads_kda.smem import (
    DO,
    DSTATE,
    DV,
    KDA_CONSUMERS,
    STATE,
    V_NEW,
    GradsKdaWarpgroup,
)
from jfla.types import CHUNK


class SumsOverV(NamedTuple):
    """Sums over the columns of V on one consumer: for its 64 channels, and for its weights."""

    dq: Reg  # [64, C]: (do S^T)^T
    dk: Reg  # [64, C]: (dv S^T)^T
    dk_to_end: Reg  # [64, C]: (v_new dS^T)^T
    weights: Reg  # [C, C]: do v_new^T on consumer 0, dv v_new^T on consumer 1
    state_dot_dstate: Reg  # [64]: rowsum_v(S * dS)


def run_consumer(
    ctx: GradsKdaWarpgroup, out_gmem: KernelGrads, ready_flags: ReadyFlags
) -> None:
    """Everything that a consumer does with a chunk."""
    # Issue the loads of g before a stage is freed: behind the producer's next copies of 56 KiB to it they would wait
    # for some thousand cycles.
    raw_gate = ctx.qk.load_raw_gate(ctx.gmem.qkg, ctx.own_tile)
    zero = zeros(TILE_K, CHUNK)
    none = SumsOverV(zero, zero, zero, zeros(CHUNK, CHUNK), _zero_rows())
    sums = lax.fori_loop(
        0, ctx.spec.v_tiles, lambda n, sums: add_v_tile(ctx, n, sums), none
    )

    @pl.when(ctx.wg == 0)
    def _():
        # Of opaque zeros: LLVM would have the flag's address before the loop, and ptxas spill it.
        flag = [x + ctx.zero for x in ctx.index.flag]
        ready_flags.release(tuple(flag))

    plgpu.barrier_wait(ctx.barriers.qk_full)
    write_weights(ctx, sums.weights)

    # With K = 64 there is one tile of channels, and consumer 1 was only needed for W_k.
    @pl.when(ctx.wg < ctx.spec.num_tiles)
    def _():
        write_decays(ctx, raw_gate)

    ctx.sync_consumers()

    @pl.when(ctx.wg < ctx.spec.num_tiles)
    def _():
        write_inv_norms(ctx)
        write_dg_chunk(ctx, sums.state_dot_dstate)
        commit_smem()
        grads = grads_of_states(ctx, sums.dq, sums.dk, sums.dk_to_end, out_gmem.dg)
        dq, dk, z = add_pairs(ctx, grads)
        later = ctx.recompute_addresses()
        finish_dg(later, z, out_gmem.dg)
        store_dq_dk(later, dq, dk, out_gmem)

    store_v_new_dot_dv(ctx, out_gmem)
    # The producer copies the next q and k over the tiles that these stores read.
    wait_for_stores(read_only=True)
    commit_smem()
    plgpu.barrier_arrive(ctx.barriers.chunk_done)


def add_v_tile(ctx: GradsKdaWarpgroup, v_tile: Index, sums: SumsOverV) -> SumsOverV:
    """Waits for 64 columns of V, adds what they give, and frees their stage."""
    stage = ctx.stage(v_tile)
    plgpu.barrier_wait(ctx.barriers.v_full.at[stage])
    do = ctx.value_tile(stage, DO)
    dv = ctx.value_tile(stage, DV)
    v_new = ctx.value_tile(stage, V_NEW)
    state = transposed(ctx.state_tile(stage, STATE))
    dstate = transposed(ctx.state_tile(stage, DSTATE))
    product = widened(load(state)) * widened(load(dstate))
    state_dot_dstate = sums.state_dot_dstate + jnp.sum(product, axis=1)
    do_or_dv = ctx.smem.values.at[stage, ctx.wg]
    dq, dk, dk_to_end, weights = dots(
        (sums.dq, (state, transposed(do))),
        (sums.dk, (state, transposed(dv))),
        (sums.dk_to_end, (dstate, transposed(v_new))),
        (sums.weights, (do_or_dv, transposed(v_new))),
    )
    commit_smem()  # orders these reads before the copies that reuse the stage
    plgpu.barrier_arrive(ctx.barriers.v_empty.at[stage])
    return SumsOverV(dq, dk, dk_to_end, weights, state_dot_dstate)


def write_weights(ctx: GradsKdaWarpgroup, weights: Reg) -> None:
    """W_q by consumer 0 and W_k by consumer 1, strictly lower, and their diagonals: equation (13)."""
    zero = zeros(CHUNK, CHUNK)
    # Of an opaque zero, so that no element's number is kept from chunk to chunk.
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
    bias = None if smem.bias is None else smem.bias.at[tile]
    log2_decay = qk.scaled_log2_decay(raw_gate, ctx.gmem.qkg, bias, smem.resets)
    write(smem.log2_decay.at[tile], log2_decay)
    if ctx.spec.options.qk_norm:
        qk.write_square_norms(tile, None if ctx.has_all_channels else ctx.gmem.qkg)
    commit_smem()
    sums = ctx.block_sums()
    store_columns(block_decays(sums, ctx.zero), smem.block_decay.at[tile])
    write(smem.least.at[tile], least_within(sums, ctx.zero))


def write_inv_norms(ctx: GradsKdaWarpgroup) -> None:
    """1 / norm of every token's q and k, over its square norms, where each consumer has a line of its own.

    Both read both lines first: one that were overwritten before would give the other consumer a wrong norm.
    """
    if not ctx.spec.options.qk_norm:
        return
    square_norms = ctx.smem.square_norms
    inverse = []
    for which in (Q, K):
        lines = [square_norms.at[which, tile] for tile in range(ctx.spec.num_tiles)]
        total: Any = sum(load_with_layout(line, ROWS) for line in lines)
        inverse.append(lax.rsqrt(total + NORM_EPSILON))
    if ctx.spec.num_tiles == KDA_CONSUMERS:
        ctx.sync_consumers()
    for which, x in zip((Q, K), inverse):
        square_norms.at[which, ctx.own_tile][...] = x


def store_dq_dk(
    ctx: GradsKdaWarpgroup, dq: Blocks, dk: Blocks, out_gmem: KernelGrads
) -> None:
    """Adds pairs i = j; VJPs of the scale and, where all channels are here, of the norms; starts the stores."""
    diagonal = per_column(load_with_layout(ctx.smem.diagonals.at[Q], COLS), TILE_K)
    q, k = (all_tokens(ctx, which) for which in (Q, K))
    dq_all = (join_columns(dq) + diagonal * k) * ctx.spec.options.scale
    dk_all = join_columns(dk) + diagonal * q
    for which, dx, target in ((Q, dq_all, out_gmem.dq), (K, dk_all, out_gmem.dk)):
        if ctx.spec.options.qk_norm and ctx.has_all_channels:
            dx = norm_vjp(ctx, which, dx)
        if target.dtype == F32:
            ctx.for_own_rows(target, functools.partial(store_transposed_f32, dx))
        else:
            tile = (ctx.smem.q, ctx.smem.k)[which].at[ctx.own_tile]
            write_transposed(tile, dx.astype(BF16))
            commit_smem()
            ctx.for_own_rows(target, functools.partial(store_tile, tile))


def all_tokens(ctx: GradsKdaWarpgroup, which: int) -> Reg:
    """[64, C] float32 of q or k as the recurrence reads it."""
    return join_columns([qk_block(ctx, which, block) for block in range(NUM_BLOCKS)])


def norm_vjp(ctx: GradsKdaWarpgroup, which: int, dx: Reg) -> Reg:
    """x = y / |y|, so dy = (dx - x (x . dx)) / |y|; x . dx takes all channels, of both consumers."""
    inv_norm = load_with_layout(ctx.smem.square_norms.at[which, ctx.own_tile], COLS)
    x = all_tokens(ctx, which)
    if which == Q:
        x = x * (1.0 / ctx.spec.options.scale)
    sync = ctx.sync_consumers if ctx.spec.num_tiles == KDA_CONSUMERS else commit_smem
    products = ctx.smem.weights
    sync()  # the weights, or the products of q, have been read
    products.at[ctx.own_tile][...] = (x * dx).astype(BF16)
    sync()
    # A runtime value: a matrix that is known when compiled would be made too late for the tensor cores.
    one = (ctx.zero + 1).astype(F32)
    ones = (zeros(CHUNK, CHUNK) + one).astype(BF16)
    tiles = [products.at[ctx.zero + n] for n in range(ctx.spec.num_tiles)]
    norm_dot = dot(zeros(CHUNK, CHUNK), *[(ones, tile) for tile in tiles])
    return (dx - x * norm_dot) * per_column(inv_norm, TILE_K)


def store_v_new_dot_dv(ctx: GradsKdaWarpgroup, out_gmem: KernelGrads) -> None:
    """v_new . dv, by the consumer that made W_k, of the first channel block."""

    @pl.when((ctx.wg == K) & (ctx.part.first_tile == 0))
    def _():
        target = ctx.index.tile(out_gmem.v_new_dot_dv)
        target[...] = load_with_layout(ctx.smem.diagonals.at[K], ROWS)


def _zero_rows() -> Reg:
    return plgpu.layout_cast(jnp.zeros(TILE_K, F32), ROWS)

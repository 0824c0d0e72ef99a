"""What the channel warpgroups of KDA's intra-chunk kernel make: `JoinedQK`, and the operands of pairs of tokens.

Within a block of 16 tokens log2 decays are summed from the block's first token to a row; from a
column they are summed to the next block's first token. What lies between is a decay of a whole
block, a number per channel. With f_b the first token of block b, token i in block b, token j in
block c < b, and the sums of log2 decays G(.., ..]:

    q_from_start_i = q_i 2^G(f_b, i] * 2^G[0, f_b]
    D_ij = 2^G(f_b, i] * 2^G(j, f_(c+1)] * 2^G(f_(c+1), f_b]
    D_ij = 2^G(f_b, i] * 2^-G(f_b, j]                        for j in block b too

No sum is the difference of two. Rows are shifted up, and columns down: the sums and `block_decays` are
(`pair_passes.py`). The rows of A are q and k with the first factor, rounded once; its
columns k with the others.

Where a channel loses more than one pass has room for, the pairs of further passes lie within blocks of
16 tokens, which are a warp's: it multiplies and sums them in its registers.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla.pallas.common.chunk_index import joined_k_columns
from jfla.pallas.common.decay_sums import (
    ALL_TOKENS,
    COLUMN_SUMS,
    FROM_CHUNK_START,
    ON_BY_ONE,
    ON_BY_TWO,
    ROW_SUMS,
    TO_CHUNK_END,
    block_decays,
    least_within,
)
from jfla.pallas.common.pair_passes import (
    BLOCK,
    NUM_BLOCKS,
    RANGE,
    growth,
    row_factor,
)
from jfla.pallas.common.qk_tiles import K, Q
from jfla.pallas.mgpu.branches import when
from jfla.pallas.mgpu.columns import split_columns, widened
from jfla.pallas.mgpu.copies import (
    commit_smem,
    store_from_layout,
    store_tile,
    wait_for_stores,
    write,
)
from jfla.pallas.mgpu.iota import per_row
from jfla.pallas.mgpu.layouts import WIDER
from jfla.pallas.mgpu.mma import zeros
from jfla.pallas.mgpu.opaque import pin
from jfla.pallas.mgpu.smem import BF16, F32
from jfla.pallas.mgpu.tile_moves import load_matrix
from jfla.pallas.mgpu.types import Index, Reg
from jfla.pallas.mgpu.warp_blocks import load_per_block, store_blocks, store_columns
from jfla.pallas.mgpu.warp_matmul import add_block_products
from jfla.pallas.sm90.intra_kda.smem import (
    IntraKdaOutputs,
    IntraKdaWarpgroup,
    column_positions,
    in_two_parts,
)
from jfla.types import CHUNK

STEP_CHANNELS = 16  # whose further pairs are summed at a time


def channel_warpgroup(ctx: IntraKdaWarpgroup, outputs: IntraKdaOutputs) -> Index | None:
    """Everything that a channel warpgroup does with its channels of a chunk; returns the place of the next."""
    load_decays(ctx)
    # Carried to the next chunk: read there, an access to global memory would come before those to its decays.
    next_place = ctx.next_place()
    # The stores of the chunk before read tiles that are written from here on, and slots of the next chunk.
    wait_for_stores(read_only=True)
    ctx.prefetch_next_qk(next_place)
    write_block_decays(ctx, outputs.with_pairs)
    if outputs.with_pairs:
        begin_pairs(ctx)
    tell_stores_ended(ctx)
    # For the pairs warpgroup, too, which stores behind `end_pairs`.
    ctx.ready_flags.wait_for_room(ctx.qk.index.flag)
    if ctx.qk.options.qk_norm:
        # The sums of the chunk after next take the place of these. They are written behind the next chunk's wait, for
        # which both warpgroups arrive when they have read these.
        plgpu.barrier_wait(ctx.barriers.norms)
        store_inv_norms(ctx, outputs)
    # Zeros of their own: else addresses that several stages need are kept in registers from the first to the last.
    write_later_columns(ctx.recompute_addresses(), outputs.with_pairs)
    num_passes = ctx.num_passes(ctx.wg) if outputs.with_pairs else None
    write_rows(ctx.recompute_addresses(), num_passes)
    if outputs.with_pairs:
        end_pairs(ctx)
    else:
        commit_smem()
    start_stores(ctx.recompute_addresses(), outputs)
    if outputs.with_pairs:
        wait_for_further_pairs(ctx, num_passes)
    return next_place


def load_decays(ctx: IntraKdaWarpgroup) -> None:
    """log2 decays of the channels into shared memory, and their share of the norms of q and k."""
    qk = ctx.qk
    smem = ctx.smem
    tile = ctx.wg
    slot = ctx.slot
    raw = qk.load_raw_gate(ctx.gmem.qkg, tile, WIDER)
    plgpu.barrier_wait(ctx.barriers.qk_full.at[2 * tile + slot])
    if qk.options.qk_norm:
        # While g is on its way. A fence would wait for it; the arrival of every thread orders its stores before the
        # other warpgroup's loads, which come behind `norms`.
        qk.write_square_norms(tile, None if ctx.has_all_channels else ctx.gmem.qkg)
        plgpu.barrier_arrive(ctx.barriers.norms)
    log2_bias = None if smem.log2_bias is None else smem.log2_bias.at[slot, tile]
    resets = None if smem.resets is None else smem.resets.at[slot, tile]
    log2_decay = qk.scaled_log2_decay(raw, ctx.gmem.qkg, log2_bias, resets, WIDER)
    write(smem.log2_decay.at[tile], log2_decay, WIDER)
    commit_smem()


def store_inv_norms(ctx: IntraKdaWarpgroup, outputs: IntraKdaOutputs) -> None:
    """1 / norm of every token's q and k for the gradients, by the warpgroup of the first channels."""
    if outputs.inv_norms is None:
        return

    @when(ctx.part.first_tile + ctx.wg == 0)
    def _():
        target = ctx.qk.index.tile(outputs.inv_norms)
        for which in (Q, K):
            store_from_layout(target.at[which], ctx.qk.inv_norm(which))


def write_block_decays(ctx: IntraKdaWarpgroup, with_pairs: bool) -> None:
    """The decays over `block_spans`; and what the passes of pairs depend on."""
    sums = ctx.block_sums()
    store_columns(block_decays(sums, ctx.zero), ctx.smem.block_decay.at[ctx.wg])
    if with_pairs:
        write(ctx.smem.least.at[ctx.slot, ctx.wg], least_within(sums, ctx.zero))
    commit_smem()


def write_later_columns(ctx: IntraKdaWarpgroup, with_pairs: bool) -> None:
    """k_to_end, and k as the columns that meet rows of later blocks."""
    block_decay = ctx.smem.block_decay.at[ctx.wg]
    column = scaled(ctx, K, load_matrix(ctx.qk.k.at[ctx.wg])) * jnp.exp2(
        ctx.decay_sums(COLUMN_SUMS)
    )
    k_to_end = column * load_per_block(block_decay, TO_CHUNK_END)
    target = ctx.smem.k_to_end.at[ctx.wg]
    write(target, k_to_end.astype(target.dtype))
    if with_pairs:
        store_later_columns(ctx, column)


def write_rows(ctx: IntraKdaWarpgroup, num_passes: Index | None) -> None:
    """q_from_start and k_from_start, where q and k were; and q and k as rows, and k as columns of their own block.

    `num_passes` of pairs is None where no pairs are computed.
    """
    sums = ctx.decay_sums(ROW_SUMS)
    with_pairs = num_passes is not None
    if with_pairs:
        further_pairs(ctx, sums, num_passes)
    factor = row_factor(sums)
    from_start = load_per_block(ctx.smem.block_decay.at[ctx.wg], FROM_CHUNK_START)
    k = load_matrix(ctx.qk.k.at[ctx.wg])
    for which, tiles in ((Q, ctx.qk.q), (K, ctx.qk.k)):
        row = scaled(ctx, which, load_matrix(tiles.at[ctx.wg])) * factor
        if with_pairs:
            store_rows(ctx, which, row)
        # In place: a warp reads and writes the same rows.
        write(tiles.at[ctx.wg], (row * from_start).astype(tiles.dtype))
    if with_pairs:
        store_columns_of(ctx, scaled(ctx, K, k) * growth(sums), distance=0)


def start_stores(ctx: IntraKdaWarpgroup, outputs: IntraKdaOutputs) -> None:
    """Starts the stores of `JoinedQK`."""
    columns = ctx.part.columns(ctx.wg)
    k_columns = joined_k_columns(columns, outputs.k_to_end.shape[-1])
    index = ctx.qk.index
    for source, target, target_columns in (
        (ctx.qk.q, outputs.qk_from_start, columns),
        (ctx.qk.k, outputs.qk_from_start, k_columns),
        (ctx.smem.k_to_end, outputs.k_to_end, columns),
    ):
        store_tile(source.at[ctx.wg], index.tile(target).at[:, target_columns])
    chunk_decay = index.tile(outputs.chunk_decay).at[columns]
    store_tile(ctx.smem.block_decay.at[ctx.wg, ALL_TOKENS], chunk_decay)


def further_pairs(ctx: IntraKdaWarpgroup, sums: Reg, num_passes: Index) -> None:
    """Writes the pairs of the passes behind the first, summed over this warpgroup's channels."""

    @when(num_passes > 1)
    def _():
        pairs = zeros(CHUNK, 2 * BLOCK)
        for step, of_step in enumerate(split_columns(sums, STEP_CHANNELS)):
            pairs = add_further_pairs(ctx, step, of_step, pairs)
        # In the place of the decays, which other warps may still be reading.
        commit_smem()
        write(ctx.smem.further_pairs.at[ctx.wg], in_two_parts(pairs))


def add_further_pairs(ctx: IntraKdaWarpgroup, step: int, sums: Reg, pairs: Reg) -> Reg:
    """Adds what a few channels give, which mostly take fewer passes than all 64 together."""
    first = step * STEP_CHANNELS
    q, k = (
        load_matrix(tiles.at[ctx.wg], first, STEP_CHANNELS)
        for tiles in (ctx.qk.q, ctx.qk.k)
    )

    def add_pass(which_pass: Index, pairs: Reg) -> Reg:
        # Pinned: LLVM would convert them ahead of the loop, and float32 takes twice the registers.
        q_here, k_here, sums_here = pin((q, k, sums))
        bits = which_pass.astype(F32) * RANGE
        factor = row_factor(sums_here, bits)
        q_rows = scaled(ctx, Q, q_here) * factor
        k_rows = scaled(ctx, K, k_here) * factor
        columns = scaled(ctx, K, k_here) * growth(sums_here, bits)
        rows = (q_rows.astype(BF16), k_rows.astype(BF16))
        return add_block_products(pairs, columns.astype(BF16), rows)

    num_passes = ctx.num_passes(ctx.wg, first, STEP_CHANNELS)
    return lax.fori_loop(1, num_passes, add_pass, pairs)


def scaled(ctx: IntraKdaWarpgroup, which: int, x: Reg) -> Reg:
    """Channels of q or k as they were loaded in float32: normalised under qk_norm, and q scaled."""
    x = widened(x)
    options = ctx.qk.options
    if options.qk_norm:
        factor = ctx.qk.inv_norm(which) * options.factor(which)
        return x * per_row(factor, x.shape[1])
    return x * options.scale if which == Q else x


def tell_stores_ended(ctx: IntraKdaWarpgroup) -> None:
    """Tells the pairs warpgroup, which signals the chunk before, that its stores by this warpgroup have ended.

    Behind `begin_pairs`, for which it has seen the last arrival: a second one in its phase would be lost.
    """
    if ctx.ready_flags.flags_gmem is not None:
        wait_for_stores()
        plgpu.barrier_arrive(ctx.barriers.stores_ended)


def begin_pairs(ctx: IntraKdaWarpgroup) -> None:
    """Waits until the pairs warpgroup has read the operands of the chunk before."""
    plgpu.barrier_wait(ctx.barriers.pairs_empty.at[ctx.wg])


def end_pairs(ctx: IntraKdaWarpgroup) -> None:
    """Hands the operands over."""
    commit_smem()
    plgpu.barrier_arrive(ctx.barriers.pairs_full.at[ctx.wg])


def wait_for_further_pairs(ctx: IntraKdaWarpgroup, num_passes: Index) -> None:
    """Until the pairs warpgroup has read them, before the next chunk's decays take their place."""

    @when(num_passes > 1)
    def _():
        plgpu.barrier_wait(ctx.barriers.further_empty.at[ctx.wg])


def store_rows(ctx: IntraKdaWarpgroup, which: int, row: Reg) -> None:
    """The rows of q or k, of every block those of q first."""
    first, second, third, last = (2 * block + which for block in range(NUM_BLOCKS))
    store_blocks(
        row.astype(BF16), ctx.smem.rows.at[ctx.wg], (first, second, third, last)
    )


def store_columns_of(ctx: IntraKdaWarpgroup, column: Reg, distance: int) -> None:
    """The columns that meet the rows so many blocks on."""
    target = ctx.smem.columns.at[ctx.wg]
    store_blocks(column.astype(BF16), target, column_positions(distance))


def store_later_columns(ctx: IntraKdaWarpgroup, column: Reg) -> None:
    """The columns that meet rows of later blocks, from those as they meet the next one."""
    block_decay = ctx.smem.block_decay.at[ctx.wg]
    store_columns_of(ctx, column, distance=1)
    column = column * load_per_block(block_decay, ON_BY_ONE)
    store_columns_of(ctx, column, distance=2)
    column = column * load_per_block(block_decay, ON_BY_TWO)
    store_columns_of(ctx, column, distance=3)


def finish(ctx: IntraKdaWarpgroup, outputs: IntraKdaOutputs) -> None:
    """Ends the last chunk, and observes the last arrival on `pairs_empty`."""
    if outputs.with_pairs:
        begin_pairs(ctx)
    tell_stores_ended(ctx)

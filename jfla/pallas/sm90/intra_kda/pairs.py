"""What the pairs warpgroup of KDA's intra-chunk kernel makes: a_qk, and a_inv through the inverse.

    a_qk = tril(q D k^T)                     docs/math.md, equation (4); q is scaled
    a_inv = (I + L)^-1 diag(beta)            equation (5), L = stril(diag(beta) k D k^T)

The pairs are kept transposed, A^T, by blocks of 16 rows: the left operand of a matmul is 64 columns
of A, of which those up to the block count. The operands of the first pass (`pair_passes.py`) come from
the channel warpgroups, a tile of 64 channels at a time; of further passes they hand over the sums.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla.pallas.common.beta_scaling import BETA_LINE, write_a_inv, write_beta_scaling
from jfla.pallas.common.pair_passes import BLOCK, NUM_BLOCKS
from jfla.pallas.common.qk_tiles import K, Q
from jfla.pallas.mgpu.branches import cond, int_of
from jfla.pallas.mgpu.copies import (
    commit_smem,
    load_with_layout,
    store_from_layout,
    store_tile,
    wait_for_stores,
    write_transposed,
)
from jfla.pallas.mgpu.iota import per_column, per_row
from jfla.pallas.mgpu.layouts import COLS, ROWS
from jfla.pallas.mgpu.mma import dots, load, zeros
from jfla.pallas.mgpu.smem import F16, transposed
from jfla.pallas.mgpu.triangular import TriangularInverse
from jfla.pallas.mgpu.types import Gmem, Index, Reg, Smem
from jfla.pallas.mgpu.warp_blocks import mask_behind, only_block, with_diagonal
from jfla.pallas.sm90.intra_kda.smem import (
    COLUMN_BLOCKS,
    IntraKdaOutputs,
    IntraKdaWarpgroup,
    of_two_parts,
)
from jfla.types import CHUNK

# [C, 2 BLOCK] of every block: its rows of q D k^T, then of k D k^T, transposed
Pairs = list[Reg]


def pairs_warpgroup(ctx: IntraKdaWarpgroup, outputs: IntraKdaOutputs) -> None:
    """Everything that the pairs warpgroup does with a chunk."""
    if outputs.a_inv is not None:
        commit_smem()
        ctx.prefetch_beta()
    # Before the sums: the scan waits for the chunk, and this warpgroup for operands of the next one.
    ctx.signal_previous()
    pairs = sum_over_channels(ctx)
    if outputs.block_sums is not None:
        store_block_sums(ctx, pairs, outputs.block_sums)
        return

    wait_for_stores(read_only=True)
    store_a(ctx, pairs, outputs)


def sum_over_channels(ctx: IntraKdaWarpgroup) -> Pairs:
    """The pairs of every block, of all tiles and passes."""
    num_tiles = ctx.qk.num_tiles

    def add_first(tile: Index, carry: tuple[Pairs, Index]) -> tuple[Pairs, Index]:
        pairs, with_further = carry
        plgpu.barrier_wait(ctx.barriers.pairs_full.at[tile])
        # Before the arrival: behind it the channel warpgroup could overwrite what the number follows from.
        has_further = int_of(ctx.num_passes(tile) > 1)
        pairs = add_products(ctx, tile + ctx.zero, pairs)
        plgpu.barrier_arrive(ctx.barriers.pairs_empty.at[tile])
        return pairs, with_further | (has_further << tile)

    none = [zeros(CHUNK, 2 * BLOCK) for _ in range(NUM_BLOCKS)]
    carry = (none, jnp.int32(0))  # a bit for each tile that has further passes
    pairs, with_further = lax.fori_loop(0, num_tiles, add_first, carry)
    for tile in range(num_tiles):
        add = functools.partial(add_further, ctx, tile)
        has_further = (with_further >> tile) & 1 == 1
        pairs = cond(has_further, add, lambda pairs: pairs, pairs)
    return pairs


def add_further(ctx: IntraKdaWarpgroup, tile: int, pairs: Pairs) -> Pairs:
    """Adds what a channel warpgroup has summed of further passes."""
    further = of_two_parts(load(ctx.smem.further_pairs.at[tile]))
    plgpu.barrier_arrive(ctx.barriers.further_empty.at[tile])
    return [acc + only_block(further, block) for block, acc in enumerate(pairs)]


def add_products(ctx: IntraKdaWarpgroup, tile: Index, pairs: Pairs) -> Pairs:
    """Adds the first pass of a tile of channels."""
    columns = ctx.smem.columns.at[tile]
    rows = ctx.smem.rows.at[tile]
    sums = []
    for block, acc in enumerate(pairs):
        left = columns.at[pl.ds(BLOCK * COLUMN_BLOCKS[block], CHUNK)]
        right = rows.at[pl.ds(2 * BLOCK * block, 2 * BLOCK)]
        sums.append((acc, (left, transposed(right))))
    return dots(*sums)


def store_a(ctx: IntraKdaWarpgroup, pairs: Pairs, outputs: IntraKdaOutputs) -> None:
    """a_qk, and a_inv through the inverse, to global memory."""
    a_inv, inverse_smem = ctx.smem.inverse
    index = ctx.qk.index
    scaling = ctx.smem.beta_scaling
    zero = ctx.zero
    a_qk = ctx.smem.a_qk
    qk_dots = ctx.smem.qk_dots
    if qk_dots is not None:
        # Here or below: a second wait in one chunk would be for the next chunk's copies, which begin later.
        plgpu.barrier_wait(ctx.barriers.beta_full)
    for block in range(NUM_BLOCKS):
        x = mask_behind(pairs[block], block, Q, strictly=False)
        if qk_dots is not None:
            diagonal = load_with_layout(qk_dots.at[0], ROWS)
            x = with_diagonal(x, diagonal, block)
        write_transposed(_rows(a_qk, block), x.astype(a_qk.dtype))
    commit_smem()
    store_tile(a_qk, index.tile(outputs.a_qk))
    if qk_dots is None:
        plgpu.barrier_wait(ctx.barriers.beta_full)
    write_beta_scaling(scaling.at[BETA_LINE], scaling)
    commit_smem()
    lower = inverse_smem.at[zero]
    for block in range(NUM_BLOCKS):
        x = -mask_behind(pairs[block], block, K, strictly=True)
        write_transposed(
            _rows(lower, block), scaled_block(x, block, scaling).astype(F16)
        )
    commit_smem()
    inverse = TriangularInverse(lower, inverse_smem.at[zero + 1])
    write_a_inv(inverse, scaling, a_inv, zero)
    store_tile(a_inv, index.tile(outputs.a_inv))


def scaled_block(x: Reg, block: int, scaling_smem: Smem) -> Reg:
    """x [C, BLOCK] of L^T with the scaling of beta on its rows and columns: see `beta_scaling.py`."""
    of_rows = load_with_layout(scaling_smem.at[0, pl.ds(block * BLOCK, BLOCK)], COLS)
    of_columns = load_with_layout(scaling_smem.at[1], ROWS)
    x = x * per_column(of_rows, CHUNK)
    return x * per_row(of_columns, BLOCK)


def store_block_sums(
    ctx: IntraKdaWarpgroup, pairs: Pairs, block_sums_gmem: Gmem
) -> None:
    """What this channel block adds to the pairs, to global memory."""
    block_of_channels = lax.div(ctx.part.first_tile, jnp.int32(ctx.qk.num_tiles))
    target = ctx.qk.index.tile(block_sums_gmem).at[block_of_channels]
    for which in (Q, K):
        for block in range(NUM_BLOCKS):
            x = mask_behind(pairs[block], block, which, strictly=False)
            store_from_layout(target.at[which, :, pl.ds(block * BLOCK, BLOCK)], x)


def _rows(tile_smem: Smem, block: int) -> Smem:
    return tile_smem.at[pl.ds(block * BLOCK, BLOCK)]

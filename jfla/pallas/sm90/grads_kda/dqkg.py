"""dq, dk and dg of 64 channels of a chunk of KDA, on one consumer warpgroup.

Derived in docs/math.md, equations (13) to (17). W_q = stril(do v_new^T) and W_k = -stril(dv
v_new^T) are the cotangents of the A matrices, D_ij is the decay from token j to token i, q is
scaled, and dv carries beta:

    dq_i = decay_from_start_i (do S^T)_i + sum_j W_q_ij D_ij k_j
    dk_i = - decay_from_start_i (dv S^T)_i + decay_to_end_i (v_new dS^T)_i
           + sum_j W_k_ij D_ij k_j + sum_j D_ji (W_q_ji q_j + W_k_ji k_j)

dg takes no matmul over pairs of its own. Where y = x exp(a sum of g), the cotangent of that sum is
y dy = x dx, and every g of the sum gets it:

    dg_m = chunk_decay sum_v(S dS) + sum_{i < m} k_i dk_end_i + sum_{i >= m} z_i

with dk_end the part of dk that decays to the chunk's end, and z = x dx over all other parts, with a
minus for what later tokens give to a key (17): a pair adds to z_i what it takes from z_j.

- No ln 2: the kernel computes exp2(log2 e * g), which is exp(g), and the rule speaks of the product
  x dx alone.
- Pairs i = j are not in W_q and W_k here: D_ii = 1 has no gate, and adding what (17) subtracts
  again would cost a small dg its digits. They join dq and dk when dg is done.
- z is float32, made of the rounded factors that the matmuls saw: what a pair gives to its two
  tokens then cancels. It goes to the tensor cores as two bf16 parts.

Everything is transposed, channels by tokens: q, k and their factors are then left operands in
registers, a block of 16 tokens is a block of columns, and what decays a whole block is a number per
row. The factors of pairs are those of `pair_passes.py`.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jfla.pallas.common.chunk_index import TILE_K
from jfla.pallas.common.decay_sums import (
    ALL_TOKENS,
    COLUMN_SUMS,
    FROM_CHUNK_START,
    ON_BY_ONE,
    ROW_SUMS,
    TO_CHUNK_END,
)
from jfla.pallas.common.pair_passes import (
    BLOCK,
    NUM_BLOCKS,
    RANGE,
    growth,
    passes_of,
    row_factor,
)
from jfla.pallas.common.qk_tiles import K, Q
from jfla.pallas.mgpu.branches import cond
from jfla.pallas.mgpu.columns import (
    join_columns,
    split_columns,
    widened,
)
from jfla.pallas.mgpu.copies import load_with_layout
from jfla.pallas.mgpu.iota import per_row
from jfla.pallas.mgpu.layouts import COLS, ROWS
from jfla.pallas.mgpu.mma import dots, short_dot, zeros
from jfla.pallas.mgpu.moves import store_scratch
from jfla.pallas.mgpu.opaque import pin
from jfla.pallas.mgpu.smem import BF16, F32, transposed
from jfla.pallas.mgpu.tile_moves import load_matrix_transposed
from jfla.pallas.mgpu.types import Gmem, Index, Reg, Smem
from jfla.pallas.sm90.grads_kda.smem import GradsKdaWarpgroup
from jfla.types import CHUNK

Blocks = list[Reg]  # [64, BLOCK] of every block of tokens
# rows of q and of k [64, BLOCK], and their weights [BLOCK, C]
Products = tuple[tuple[Reg, Smem], ...]


class SumsOverV(NamedTuple):
    """Sums over the columns of V on one consumer: for its 64 channels, and for its weights."""

    dq: Reg  # [64, C]: (do S^T)^T
    dk: Reg  # [64, C]: (dv S^T)^T
    dk_to_end: Reg  # [64, C]: (v_new dS^T)^T
    weights: Reg  # [C, C]: do v_new^T on consumer 0, dv v_new^T on consumer 1
    state_dot_dstate: Reg  # [64]: rowsum_v(S * dS)


class Grads(NamedTuple):
    """Of 64 channels, by blocks of tokens: sums that pairs of tokens still add to."""

    dq: Blocks
    dk: Blocks
    z: Blocks  # of dg


class Columns(NamedTuple):
    """Of a block of tokens as columns in a pass."""

    block: int
    factor: Reg  # [64, BLOCK] float32
    k: Reg  # [64, BLOCK] bf16: k with it


def qk_block(ctx: GradsKdaWarpgroup, which: int, block: int) -> Reg:
    """[64, BLOCK] float32 of q or k as the recurrence reads it."""
    options = ctx.spec.options
    tokens = pl.ds(block * BLOCK, BLOCK)
    x = widened(load_matrix_transposed(ctx.own_qk_tile(which).at[tokens]))
    # Under qk_norm the tiles have been normalised and scaled.
    return x if options.qk_norm else x * options.factor(which)


def grads_of_states(ctx: GradsKdaWarpgroup, sums: SumsOverV, dg_gmem: Gmem) -> Grads:
    """What the states give. Their part of dg goes to scratch in global memory."""
    to_next = split_columns(ctx.decay_sums(COLUMN_SUMS), BLOCK)
    dk_end_blocks = [
        x * jnp.exp2(to_next[block]) * ctx.block_decay(TO_CHUNK_END + block)
        for block, x in enumerate(split_columns(sums.dk_to_end, BLOCK))
    ]
    y = [qk_block(ctx, K, block) * x for block, x in enumerate(dk_end_blocks)]
    chunk_decay = load_with_layout(
        ctx.smem.block_decay.at[ctx.own_tile, ALL_TOKENS], ROWS
    )
    dg_chunk = sums.state_dot_dstate * chunk_decay
    before = transposed(ctx.smem.after.at[ctx.zero])  # of a sum over earlier tokens
    dg = sum_over_tokens(per_row(dg_chunk, CHUNK), join_columns(y), before)
    ctx.for_scratch(dg_gmem, functools.partial(store_scratch, dg))
    # Else ptxas begins what follows beside the sum over tokens, and there are too few registers for both.
    dk_end_blocks = pin(dk_end_blocks)
    in_block = split_columns(ctx.decay_sums(ROW_SUMS), BLOCK)
    grads = Grads([], [], [])
    blocks = zip(split_columns(sums.dq, BLOCK), split_columns(sums.dk, BLOCK))
    for block, (dq_block, dk_block) in enumerate(blocks):
        from_start = row_factor(in_block[block]) * ctx.block_decay(
            FROM_CHUNK_START + block
        )
        dq_block = dq_block * from_start
        dk_block = -dk_block * from_start
        z = qk_block(ctx, Q, block) * dq_block + qk_block(ctx, K, block) * dk_block
        grads.dq.append(dq_block)
        grads.dk.append(dk_block + dk_end_blocks[block])
        grads.z.append(z)
    return grads


def sum_over_tokens(acc: Reg, x: Reg, matrix_smem: Gmem) -> Reg:
    """acc + x @ matrix, [64, C] float32, x as two bf16 parts."""
    high = rounded(x)
    low = (x - high.astype(F32)).astype(BF16)
    (acc,) = dots((acc, (high, matrix_smem), (low, matrix_smem)))
    return acc


def add_pairs(ctx: GradsKdaWarpgroup, grads: Grads) -> Grads:
    """What pairs of tokens give, in as many passes as the block that loses most takes."""
    least = load_with_layout(ctx.smem.least.at[ctx.own_tile], COLS)

    def one_pass(which_pass: Index, grads: Grads) -> Grads:
        return add_pass(ctx.recompute_addresses(), which_pass, grads)

    return lax.fori_loop(0, passes_of(jnp.min(least)), one_pass, grads)


def add_pass(ctx: GradsKdaWarpgroup, which_pass: Index, grads: Grads) -> Grads:
    """What pairs give in a pass, block of rows by block of rows."""
    dq, dk, z = (list(blocks) for blocks in grads)
    bits = which_pass.astype(F32) * RANGE
    factors: Blocks = []  # of the columns before the block; 0 behind the first pass
    for block in range(NUM_BLOCKS):
        needed = [(ROW_SUMS, block)]
        if block > 0:
            needed.append((COLUMN_SUMS, block - 1))
        in_block, *to_next = ctx.block_decay_sums(*needed)
        if block > 1:
            on = ctx.block_decay(ON_BY_ONE + block - 2)
            factors = [factor * on for factor in factors]
        factors += [jnp.exp2(sums - bits) for sums in to_next]
        columns = [
            Columns(n, factor, rounded(qk_block(ctx, K, n) * factor))
            for n, factor in enumerate([*factors, growth(in_block, bits)])
        ]
        row = row_factor(in_block, bits)
        q_rows = rounded(qk_block(ctx, Q, block) * row)
        k_rows = rounded(qk_block(ctx, K, block) * row)
        w_q = ctx.weights_rows(Q, block)
        w_k = ctx.weights_rows(K, block)
        left = join_columns([x.k for x in columns], NUM_BLOCKS)
        none = zeros(TILE_K, BLOCK)
        dq_rows, dk_rows = dots(
            (none, (left, transposed(w_q))), (none, (left, transposed(w_k)))
        )
        dq[block] = dq[block] + row * dq_rows
        dk[block] = dk[block] + row * dk_rows
        z[block] = z[block] + widened(q_rows) * dq_rows + widened(k_rows) * dk_rows
        changed = pin((dq[block], dk[block], z[block]))
        dq[block], dk[block], z[block] = changed
        products = ((q_rows, w_q), (k_rows, w_k))
        dk, z = add_to_columns(columns[block:], products, dk, z)
        if block > 0:
            add_earlier = functools.partial(add_to_columns, columns[:block], products)
            dk, z = cond(which_pass == 0, add_earlier, lambda dk, z: (dk, z), dk, z)
    return Grads(dq, dk, z)


def add_to_columns(
    columns: list[Columns], products: Products, dk: Blocks, z: Blocks
) -> tuple[Blocks, Blocks]:
    """dk and z with what the rows of a block give to columns."""
    dk = list(dk)
    z = list(z)
    for x in columns:
        # A block of columns at a time: all at once are more than there are registers for.
        none = zeros(TILE_K, BLOCK)
        dk_columns = short_dot(none, *products, first_column=x.block * BLOCK)
        dk[x.block] = dk[x.block] + x.factor * dk_columns
        z[x.block] = z[x.block] - widened(x.k) * dk_columns
        dk[x.block], z[x.block] = pin((dk[x.block], z[x.block]))
    return dk, z


def rounded(x: Reg) -> Reg:
    """x in bf16; pinned, because LLVM would round element by element what is also read in float32."""
    return pin(x.astype(BF16))


def finish_dg(ctx: GradsKdaWarpgroup, dg_of_states: Reg, z: Blocks) -> Reg:
    """[64, C]: dg, of what `grads_of_states` has left and of z."""
    x = join_columns(z)
    return sum_over_tokens(dg_of_states + x, x, ctx.smem.after.at[ctx.zero])

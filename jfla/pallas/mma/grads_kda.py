"""Kernel jfla_grads_kda_mma: `QkgOperands` and `ScanResults` to `KernelGrads`.

A CTA, of one warpgroup, has 64 channels of a chunk.

Derived in docs/math.md, equations (13) to (17). W_q = stril(do v_new^T) and W_k = -stril(dv v_new^T) are the cotangents
of the A matrices, D_ij is the decay from token j to token i, q is scaled, and dv carries beta:

    dq_i = decay_from_start_i (do S^T)_i + sum_j W_q_ij D_ij k_j
    dk_i = - decay_from_start_i (dv S^T)_i + decay_to_end_i (v_new dS^T)_i
           + sum_j W_k_ij D_ij k_j + sum_j D_ji (W_q_ji q_j + W_k_ji k_j)
    dg_m = chunk_decay sum_v(S dS) + sum_{i < m} k_i dk_end_i + sum_{i >= m} z_i

with dk_end the part of dk that decays to the chunk's end, and z = x dx over all other parts, with a minus for what
later tokens give to a key. z is made of the rounded factors that the matmuls saw, so that what a pair gives to its two
tokens cancels. Pairs i = j have no decay and join dq and dk last. Pairs go in the blocks and passes of `kda_blocks.py`.
Of q and k under qk_norm the kernel leaves the cotangents after the norm.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from jfla.pallas.common.chunk_index import TILE_K, TILE_V, ChunkGrid, PartGrid
from jfla.pallas.common.grads_tiles import DO, DSTATE, DV, STATE, V_NEW, load_values
from jfla.pallas.common.packed_rows import places_of, rows_like
from jfla.pallas.common.pair_passes import (
    BLOCK,
    NUM_BLOCKS,
    RANGE,
    SHIFT,
    passes_of,
    row_factor,
)
from jfla.pallas.common.qk_tiles import K, Q, QkgOperands, QkOptions, QkTiles
from jfla.pallas.common.results import KernelGrads
from jfla.pallas.mgpu.branches import when
from jfla.pallas.mgpu.copies import (
    Copies,
    commit_smem,
    load_with_layout,
    store_from_layout,
)
from jfla.pallas.mgpu.iota import per_column, per_row, write_iota
from jfla.pallas.mgpu.launch import launch
from jfla.pallas.mgpu.layouts import COLS, ROWS, WGMMA
from jfla.pallas.mgpu.mma import dot, dots, load, zeros
from jfla.pallas.mgpu.opaque import zero_operand
from jfla.pallas.mgpu.row_dots import add_row_dots, no_blocks, row_dots
from jfla.pallas.mgpu.scheduler import TileScheduler
from jfla.pallas.mgpu.smem import BF16, F32, transposed
from jfla.pallas.mgpu.tile_moves import load_matrix_transposed
from jfla.pallas.mgpu.types import Gmem, Index, Reg
from jfla.pallas.mma import kda_blocks
from jfla.pallas.mma.grads_kda_cta import (
    DG_CHUNK,
    DIAGONALS,
    HIGH,
    LEAST,
    LEAST_OF_ALL,
    LOW,
    SQUARE_NORMS,
    GradsKdaCta,
    GradsKdaInputs,
    SharedStorage,
    shared_storage,
)
from jfla.pallas.mma.value_products import value_products
from jfla.stages import ScanResults
from jfla.types import CHUNK


class Grads(NamedTuple):
    """Of 64 channels: sums that pairs of tokens still add to."""

    dq: Reg  # [C, 64]
    dk: Reg  # [C, 64]


def load_qk(ctx: GradsKdaCta, copies: Copies) -> None:
    """Starts the copies of q, k and the gate's vectors."""
    qkg = ctx.gmem.qkg
    ctx.qk.prefetch(0, qkg.q, qkg.k, copies)
    if ctx.log2_bias is not None:
        copies.start(qkg.log2_bias.at[ctx.index.head, ctx.columns], ctx.log2_bias)
    if ctx.resets is not None:
        copies.start(qkg.resets.at[ctx.index.batch, ctx.index.tokens], ctx.resets)


def write_pair_weights(ctx: GradsKdaCta, num_v_tiles: int) -> None:
    """W_q and W_k, and their diagonals."""
    w_q, w_k = value_products(
        ctx.gmem.scans, ctx.index, ctx.qk.value_heads, num_v_tiles, ctx.values
    )
    zero = zeros(CHUNK, CHUNK)
    for which, weights in ((Q, w_q), (K, -w_k)):
        row, column = ctx.decays.tokens()
        diagonal = jnp.sum(jnp.where(row == column, weights, zero), axis=1)
        ctx.line(DIAGONALS + which)[...] = diagonal
        strictly_lower = jnp.where(column < row, weights, zero)
        for part, rounded in zip((HIGH, LOW), two_parts(strictly_lower)):
            ctx.smem.weights.at[which, part][...] = rounded
    commit_smem()


def grads_of_states(ctx: GradsKdaCta, num_v_tiles: int, dg_gmem: Gmem) -> Grads:
    """What the states give to dq, dk and z; and to dg, which goes to memory."""

    def add(
        v_tile: Index, sums: tuple[Reg, Reg, Reg, Reg]
    ) -> tuple[Reg, Reg, Reg, Reg]:
        dq, dk, dk_end, state_dot_dstate = sums
        commit_smem()  # the tiles before have been read
        copies = Copies(None)
        load_values(
            copies,
            ctx.gmem.scans,
            ctx.index,
            ctx.qk.value_heads,
            v_tile,
            ctx.values,
        )
        rows = pl.ds(v_tile * TILE_V, TILE_V)
        scans = ctx.gmem.scans
        for which, source in ((STATE, scans.states), (DSTATE, scans.dstates)):
            view = ctx.index.tile(source).at[rows, ctx.columns]
            copies.start(view, ctx.states.at[which])
        copies.wait()
        state = ctx.states.at[STATE]
        dstate = ctx.states.at[DSTATE]
        # With channels as rows, so that no warp needs another.
        factors = [load_matrix_transposed(x) for x in (state, dstate)]
        state_dot_dstate = add_row_dots(state_dot_dstate, *factors)
        commit_smem()  # keeps the compiler from loading this beside the operands of the matmuls
        dq, dk, dk_end = dots(
            (dq, (ctx.values.at[DO], state)),
            (dk, (ctx.values.at[DV], state)),
            (dk_end, (ctx.values.at[V_NEW], dstate)),
        )
        return dq, dk, dk_end, state_dot_dstate

    zero = zeros(CHUNK, TILE_K)
    # A loop also where there is one tile: beside what follows, its sums would be spilled.
    sums = lax.fori_loop(
        0, num_v_tiles + ctx.zero, add, (zero, zero, zero, no_blocks())
    )
    dq, dk, dk_end, state_dot_dstate = sums
    commit_smem()
    state_dot_dstate = row_dots(state_dot_dstate)
    ctx.line(DG_CHUNK)[...] = state_dot_dstate * jnp.exp2(ctx.decays.whole_chunk())
    dk_end = dk_end * jnp.exp2(ctx.decays.to_end())
    dg = per_column(load_with_layout(ctx.line(DG_CHUNK), COLS), CHUNK)
    after = sum_over_tokens(ctx, ctx.qk.scaled(K, ctx.zero) * dk_end, dg, up_to=False)
    ctx.for_own_rows(dg_gmem, lambda rows: store_from_layout(rows, after))
    from_start = jnp.exp2(ctx.decays.from_start())
    dq = dq * from_start
    dk = -dk * from_start
    z = ctx.qk.scaled(Q, ctx.zero) * dq + ctx.qk.scaled(K, ctx.zero) * dk
    store_from_layout(ctx.z, z)
    return Grads(dq, dk + dk_end)


def sum_over_tokens(ctx: GradsKdaCta, x: Reg, acc: Reg, up_to: bool) -> Reg:
    """acc_m + the sum of x_i over i >= m where a decay reaches up to i, else over i < m. x goes as two bf16 tiles."""
    high_smem, low_smem = ctx.parts
    commit_smem()  # what lay there has been read
    high_smem[...], low_smem[...] = two_parts(x)
    commit_smem()
    row, column = ctx.decays.tokens()
    chosen = column >= row if up_to else column < row
    zero = zeros(CHUNK, CHUNK)
    ones = jnp.where(chosen, zero + 1.0, zero).astype(BF16)
    return dot(acc, (ones, high_smem), (ones, low_smem))


def two_parts(x: Reg) -> tuple[Reg, Reg]:
    """x as a sum of two bf16 numbers, high and low."""
    high = x.astype(BF16)
    return high, (x - high.astype(F32)).astype(BF16)


def add_pairs(ctx: GradsKdaCta, grads: Grads) -> tuple[Grads, Index]:
    """What pairs of tokens give, in as many passes as the block that loses most takes; and a later opaque zero."""
    ctx.line(LEAST)[...] = jnp.min(ctx.decays.rows_in_block(), axis=1)
    commit_smem()
    # Every row finds the least of all: a reduction to a scalar would need shared memory of its own.
    all_rows = per_column(load_with_layout(ctx.line(LEAST), COLS), CHUNK)
    ctx.line(LEAST_OF_ALL)[...] = jnp.min(all_rows, axis=1)
    commit_smem()
    least = ctx.smem.lines[LEAST_OF_ALL, 0, 0]
    num_steps = passes_of(least) * NUM_BLOCKS

    def one_step(step: Index, grads: Grads) -> Grads:
        # One loop over passes and blocks: the counters of two would be spilled.
        of_step = ctx._replace(zero=ctx.zero & step)
        block = step & (NUM_BLOCKS - 1)
        which_pass = lax.div(step, jnp.int32(NUM_BLOCKS)).astype(F32)

        @when(block == 0)
        def _():
            write_rows(of_step, which_pass)

        return add_block(of_step, block, which_pass, grads)

    return lax.fori_loop(0, num_steps, one_step, grads), ctx.zero & num_steps


def write_rows(ctx: GradsKdaCta, which_pass: Index) -> None:
    """q and k with the factors of rows in a pass of their blocks."""
    factor = row_factor(ctx.decays.rows_in_block() + SHIFT, RANGE * which_pass)
    commit_smem()  # the pass before has read its rows
    for which, target in zip((Q, K), ctx.rows):
        target[...] = (ctx.qk.scaled(which, ctx.zero) * factor).astype(BF16)


def add_block(ctx: GradsKdaCta, block: Index, which_pass: Index, grads: Grads) -> Grads:
    """What the rows of a block give to dq, dk and z in a pass, and what they give to its columns."""
    dq, dk = grads
    q_rows, k_rows = ctx.rows
    w_q, w_k = (ctx.weights(which) for which in (Q, K))
    zero = zeros(CHUNK, TILE_K)
    factor = kda_blocks.column_factor(ctx.decays.columns_to_block(block), which_pass)
    commit_smem()  # the block before has read its columns
    ctx.k_columns[...] = (ctx.qk.scaled(K, ctx.zero) * factor).astype(BF16)
    products = [
        (
            transposed(kda_blocks.block_rows(w, block)),
            kda_blocks.block_rows(rows, block),
        )
        for parts, rows in ((w_q, q_rows), (w_k, k_rows))
        for w in parts
    ]
    from_rows = dot(zero, *products)
    dk = dk + factor * from_rows
    ctx.add_to_z(-load(ctx.k_columns).astype(F32) * from_rows)
    row, _ = ctx.decays.tokens()
    in_block = (row & ~(BLOCK - 1)) == block * BLOCK
    factor = row_factor(ctx.decays.rows_in_block() + SHIFT, RANGE * which_pass)

    def add_columns(which: Index, grads: tuple[Reg, Reg]) -> tuple[Reg, Reg]:
        # The other of dq and dk comes first in the next turn: side by side the two would be spilled.
        dx, other = grads
        products = [(w, ctx.k_columns) for w in ctx.weights(which)]
        from_columns = jnp.where(
            in_block, dot(zeros(CHUNK, TILE_K), *products), 0.0 * dx
        )
        ctx.add_to_z(load(ctx.rows_of(which)).astype(F32) * from_columns)
        return other, dx + factor * from_columns

    return Grads(*lax.fori_loop(0, 2 + ctx.zero, add_columns, (dq, dk)))


def store_grads(ctx: GradsKdaCta, grads: Grads, out_gmem: KernelGrads) -> None:
    """dq, dk and dg; pairs of a token with itself join here. And dv . v_new, by the first channels."""
    commit_smem()
    before = ctx.for_own_rows(out_gmem.dg, lambda rows: load_with_layout(rows, WGMMA))
    dg = sum_over_tokens(ctx, load(ctx.z), before, up_to=True)
    ctx.for_own_rows(out_gmem.dg, lambda rows: store_from_layout(rows, dg))
    diagonal = per_row(load_with_layout(ctx.line(DIAGONALS + Q), ROWS), TILE_K)
    dq = (grads.dq + diagonal * ctx.qk.scaled(K, ctx.zero)) * ctx.qk.options.scale
    dk = grads.dk + diagonal * ctx.qk.scaled(Q, ctx.zero)
    for dx, target in ((dq, out_gmem.dq), (dk, out_gmem.dk)):
        dx = dx.astype(target.dtype)
        ctx.for_own_rows(target, lambda rows, dx=dx: store_from_layout(rows, dx))

    @when(ctx.qk.first == 0)
    def _():
        v_new_dot_dv = -load_with_layout(ctx.line(DIAGONALS + K), ROWS)
        store_from_layout(ctx.index.tile(out_gmem.v_new_dot_dv), v_new_dot_dv)


def run_chunk(ctx: GradsKdaCta, out_gmem: KernelGrads) -> None:
    """Everything of a chunk."""
    write_iota(ctx.smem.iota.at[0])
    load_qk(ctx, Copies(None))
    num_v_tiles = ctx.gmem.scans.v_new.shape[-1] // TILE_V
    write_pair_weights(ctx, num_v_tiles)  # waits for these copies, too
    if ctx.qk.options.qk_norm:
        ctx.qk.write_square_norms(0, ctx.gmem.qkg)
        commit_smem()
    ctx.qk.write_decays(
        0, ctx.gmem.qkg, ctx.log2_bias, ctx.resets, ctx.smem.decay.at[0]
    )
    grads = grads_of_states(ctx, num_v_tiles, out_gmem.dg)
    grads, zero = add_pairs(ctx, grads)
    store_grads(ctx.with_later_zero(zero), grads, out_gmem)


def grads_kda(
    operands: QkgOperands,
    scans: ScanResults,
    options: QkOptions,
    out_dtype: DTypeLike,
) -> KernelGrads:
    """On the host: launches the kernel."""
    batch, heads, n_chunks, _, key_dim = scans.states.shape
    grid = ChunkGrid(batch, heads, n_chunks)
    parts = PartGrid(grid, num_blocks=key_dim // TILE_K, tiles_per_block=1)

    def body(
        gmem: GradsKdaInputs,
        out_gmem: KernelGrads,
        smem: SharedStorage,
        barriers: tuple,
    ) -> None:
        del barriers
        cta = lax.axis_index("cta")
        part = parts(cta, places_of(gmem.qkg.q))
        qk = QkTiles(
            options=options,
            index=part.index,
            value_heads=heads,
            num_tiles=1,
            q=smem.q,
            k=smem.k,
            square_norms=smem.lines.at[pl.ds(SQUARE_NORMS, 2)],
            first=part.first_tile,
        )
        ctx = GradsKdaCta(qk, gmem, smem, gmem.zero[0])
        tiles = TileScheduler.one_for_each_cta(parts.num_parts)
        tiles = tiles.up_to(parts.used_parts(gmem.qkg.q))
        tiles.if_any(cta, 0, lambda: run_chunk(ctx, out_gmem))

    per_channel = (batch, n_chunks * CHUNK, heads, key_dim)
    dx = rows_like(operands.q, per_channel, F32 if options.qk_norm else out_dtype)
    dg = rows_like(operands.q, per_channel, F32)
    of_tokens = jax.ShapeDtypeStruct((*grid.shape, CHUNK), F32)
    return launch(
        body,
        GradsKdaInputs(operands, scans, zero_operand()),
        KernelGrads(dx, dx, dg, of_tokens),
        grid={"cta": parts.num_parts},
        num_warpgroups=1,
        smem=shared_storage(operands.q.dtype),
        name="jfla_grads_kda_mma",
        reduces_across_warps=False,
    )

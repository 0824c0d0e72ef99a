"""Math of jfla_grads_gdn on one consumer: q, k and `ScanResults` to dq, dk, dg and dv . v_new.

D_ij is the decay from token j to token i; f_q and f_k are 1 / norm of q and k, f_q with the scale;
q, k are as the caller passed them; dv comes from the reverse scan and has the factor beta already.
With

    W_q = tril(f_q D f_k do v_new^T)        W_k = -stril(f_k D f_k dv v_new^T)

the cotangents of q and k while the norms are held constant are

    dq = W_q k + q_from_start (do S^T)
    dk = (W_k + W_k^T) k + W_q^T q - k_from_start (dv S^T) + k_to_end (v_new dS^T)

with the rows of `FactoredQK.factors`, so that no normalised q and k are needed. Where x meets exp(a
sum of log decays), the cotangent of that sum is x . dx, which gives dg; and dbeta = (dv . v_new) /
beta^2.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla.pallas.common.chunk_index import TILE_K
from jfla.pallas.common.grads_tiles import (
    DO,
    DSTATE,
    DV,
    G_AFTER,
    G_CHUNK,
    G_UP_TO,
    STATE,
    V_NEW,
)
from jfla.pallas.common.pair_weights import pair_weights
from jfla.pallas.common.qk_tiles import K, Q
from jfla.pallas.common.results import KernelGrads
from jfla.pallas.mgpu.branches import when
from jfla.pallas.mgpu.columns import widened
from jfla.pallas.mgpu.copies import commit_smem, load_with_layout, write
from jfla.pallas.mgpu.diagonal import below_diagonal, diagonal
from jfla.pallas.mgpu.iota import per_column, per_row
from jfla.pallas.mgpu.layouts import COLS, ROWS
from jfla.pallas.mgpu.mma import dots, zeros
from jfla.pallas.mgpu.row_dots import add_row_dots, no_blocks, row_dots
from jfla.pallas.mgpu.smem import F32, transposed
from jfla.pallas.mgpu.tile_moves import load_matrix
from jfla.pallas.mgpu.types import Gmem, Index, Layout, Reg, Smem
from jfla.pallas.sm90.grads_gdn.smem import GradsGdnWarpgroup
from jfla.pallas.sm90.grads_pipeline import NUM_CONSUMERS
from jfla.stages import CHUNK_DECAY, K_FROM_START, K_TO_END, Q_FROM_START
from jfla.types import CHUNK


class SumsOverV(NamedTuple):
    """Sums over the columns of V on one consumer: for its 64 channels, and for its weights."""

    dq: Reg  # [C, 64]: do S^T
    dk: Reg  # [C, 64]: dv S^T
    dk_to_end: Reg  # [C, 64]: v_new dS^T
    weights: Reg  # [C, C]: do v_new^T on consumer 0, dv v_new^T on consumer 1
    # [64, 16]: products of rows of S and of dS, see `row_dots.py`; all their row dots together belong to the chunk
    state_dot_dstate: Reg


def zero_sums() -> SumsOverV:
    zero = zeros(CHUNK, TILE_K)
    return SumsOverV(
        dq=zero,
        dk=zero,
        dk_to_end=zero,
        weights=zero,
        state_dot_dstate=no_blocks(),
    )


def add_v_tile(ctx: GradsGdnWarpgroup, v_tile: Index, sums: SumsOverV) -> SumsOverV:
    """Waits for 64 columns of V, adds what they give, and frees their stage."""
    stage = ctx.pipeline.stage(ctx.work, v_tile)
    plgpu.barrier_wait(ctx.barriers.v_full.at[stage])
    do = ctx.value_tile(stage, DO)
    dv = ctx.value_tile(stage, DV)
    v_new = ctx.value_tile(stage, V_NEW)
    state = ctx.state_tile(stage, STATE)
    dstate = ctx.state_tile(stage, DSTATE)
    state_dot_dstate = add_row_dots(
        sums.state_dot_dstate, load_matrix(state), load_matrix(dstate)
    )
    do_or_dv = ctx.smem.values.at[stage, ctx.wg]
    dq, dk, dk_to_end, weights = dots(
        (sums.dq, (do, state)),
        (sums.dk, (dv, state)),
        (sums.dk_to_end, (v_new, dstate)),
        (sums.weights, (do_or_dv, transposed(v_new))),
    )
    plgpu.barrier_arrive(ctx.barriers.v_empty.at[stage])
    return SumsOverV(
        dq=dq,
        dk=dk,
        dk_to_end=dk_to_end,
        weights=weights,
        state_dot_dstate=state_dot_dstate,
    )


def write_pair_weights(ctx: GradsGdnWarpgroup, weights: Reg) -> None:
    """W_q by consumer 0 and W_k by consumer 1, strictly lower, and their diagonals unscaled."""
    options = ctx.spec.options
    write(ctx.smem.diagonals.at[ctx.wg], diagonal(weights))
    scale = jnp.where(ctx.wg == Q, options.scale, -1.0)
    weights = pair_weights(
        weights, ctx.smem.token_scalars, ctx.wg, scale, options.qk_norm
    )
    weights_smem = ctx.smem.weights.at[ctx.wg]
    write(weights_smem, weights.astype(weights_smem.dtype))


def constant_norm_grads(ctx: GradsGdnWarpgroup, sums: SumsOverV) -> tuple[Reg, Reg]:
    """dq and dk [C, 64] while the norms are held constant; writes `g_terms` for dg, `norm_dots` for the norms.

    Both consumers must have written their weights.
    """
    options = ctx.spec.options
    g_terms = ctx.smem.g_terms
    tile = ctx.own_tile
    q_smem = ctx.qk_tile(Q)
    k_smem = ctx.qk_tile(K)
    w_q = ctx.weights_tile(Q)
    w_k = ctx.weights_tile(K)
    dq_state = ctx.row_factor(Q_FROM_START) * sums.dq
    dk_state = -ctx.row_factor(K_FROM_START) * sums.dk
    dq, dk_as_row, dk_as_column = dots(
        (dq_state, (w_q, k_smem)),
        (dk_state, (w_k, k_smem)),
        (
            zeros(CHUNK, TILE_K),
            (transposed(w_q), q_smem),
            (transposed(w_k), k_smem),
        ),
    )
    dk_to_end = ctx.row_factor(K_TO_END) * sums.dk_to_end
    write(g_terms.at[G_CHUNK, tile], row_dots(sums.state_dot_dstate))
    q = _load_f32(q_smem)
    k = _load_f32(k_smem)
    # The decay of a pair (i, j) spans the tokens j + 1 .. i. What the pair gives to i counts with a
    # plus for all tokens up to i, what it gives to j with a minus for all tokens up to j, where the
    # two cancel.
    q_dot_dq = _row_sum(q * dq)
    k_dot_row = _row_sum(k * dk_as_row)
    k_dot_column = _row_sum(k * dk_as_column)
    k_dot_end = _row_sum(k * dk_to_end)
    write(g_terms.at[G_UP_TO, tile], q_dot_dq + (k_dot_row - k_dot_column))
    write(g_terms.at[G_AFTER, tile], k_dot_end)
    # The diagonal of W_q, which no decay multiplies.
    diag_w_q = load_with_layout(ctx.smem.diagonals.at[Q], ROWS)
    diag_w_q = diag_w_q * options.scale
    if options.qk_norm:
        diag_w_q = diag_w_q * ctx.inv_norm(Q) * ctx.inv_norm(K)
        # q . dq and k . dk with all that dq and dk are made of below, from the sums that dg has needed.
        of_diagonal = diag_w_q * _row_sum(q * k)
        k_dot_dk = k_dot_row + k_dot_column + k_dot_end
        write(ctx.smem.norm_dots.at[Q, tile], q_dot_dq + of_diagonal)
        write(ctx.smem.norm_dots.at[K, tile], k_dot_dk + of_diagonal)
    diag_w_q = per_row(diag_w_q, TILE_K)
    dq = dq + diag_w_q * k
    dk = dk_as_row + dk_as_column + dk_to_end + diag_w_q * q
    return dq, dk


def store_dq_dk(
    ctx: GradsGdnWarpgroup, out_gmem: KernelGrads, grads: tuple[Reg, Reg]
) -> None:
    """The VJP of the norms, and the stores of dq and dk.

    With x normalised to f x, f = 1 / norm, and dx' the cotangent while f is held constant,

        dx = dx' - f^2 x (x . dx')

    x . dx', of `norm_dots`, takes all channels, so with more than one channel block what is stored is dx' / f, the
    cotangent of f x. `g_terms` of both consumers can be read afterwards.
    """
    qk_norm = ctx.spec.options.qk_norm
    all_channels = ctx.spec.channel_blocks == 1
    own_tile = ctx.own_tile
    outputs = (out_gmem.dq, out_gmem.dk)
    tiles = [ctx.smem.qk.at[which, own_tile] for which in (Q, K)]
    # Behind this no warp has a product in flight any more that reads the tiles of q and k, over which dq and dk go.
    if ctx.spec.num_tiles == NUM_CONSUMERS:
        ctx.pipeline.sync_consumers()
    else:
        commit_smem()  # only consumer 0 is here
    for which, tile, dx, dx_gmem in zip((Q, K), tiles, grads, outputs):
        if qk_norm and all_channels:
            inv_norm = ctx.inv_norm(which)
            norm_dot = _sum_over_tiles(ctx, ctx.smem.norm_dots.at[which], ROWS)
            x = _load_f32(tile)
            along_x = inv_norm * inv_norm * norm_dot
            dx = dx - x * per_row(along_x, TILE_K)
        elif qk_norm:
            norm = 1.0 / ctx.inv_norm(which)
            dx = dx * per_row(norm, TILE_K)
        columns = ctx.columns(own_tile)
        index = ctx.global_chunk
        store = functools.partial(_store_tile, dx, tile)
        index.for_rows(dx_gmem, ctx.spec.heads, columns, store)


def store_dg(ctx: GradsGdnWarpgroup, out_gmem: KernelGrads) -> None:
    """dg of the chunk, from this channel block; and dv . v_new, by the first block."""
    g_terms = ctx.smem.g_terms

    def columns(term: int) -> Reg:
        total = _sum_over_tiles(ctx, g_terms.at[term], COLS)
        return per_column(total, CHUNK)

    up_to = columns(G_UP_TO)
    after = columns(G_AFTER)
    of_chunk = columns(G_CHUNK)
    # The decay of token i is in the sums up to tokens j >= i, and in those after tokens j < i.
    terms = below_diagonal(after, up_to)
    terms = terms + of_chunk * ctx.smem.factors[CHUNK_DECAY, 0]
    dg = _row_sum(terms)
    index = ctx.global_chunk._replace(head=ctx.grid_index.head)
    dg_gmem = index.tile(out_gmem.dg)
    dg_gmem[...] = dg

    @when(ctx.channel_block == 0)
    def _():
        diagonal_smem = ctx.smem.diagonals.at[K]
        v_new_dot_dv = load_with_layout(diagonal_smem, ROWS)
        v_new_dot_dv_gmem = ctx.global_chunk.tile(out_gmem.v_new_dot_dv)
        v_new_dot_dv_gmem[...] = v_new_dot_dv


def _store_tile(x: Reg, staging_smem: Smem, x_gmem: Gmem) -> None:
    """Starts a tile's store through shared memory; float32, which does not fit, goes direct."""
    if x_gmem.dtype == F32:
        x_gmem[...] = x
    else:
        # Without a barrier: since the last one a warp has read the rows that it writes, and no others.
        write(staging_smem, x.astype(staging_smem.dtype))
        commit_smem()
        plgpu.copy_smem_to_gmem(staging_smem, x_gmem)


def _sum_over_tiles(ctx: GradsGdnWarpgroup, vectors_smem: Smem, layout: Layout) -> Reg:
    """[C]: the sum of a vector of every tile."""
    lines = [vectors_smem.at[tile] for tile in range(ctx.spec.num_tiles)]
    vectors = [load_with_layout(line, layout) for line in lines]
    return functools.reduce(jnp.add, vectors)


def _load_f32(tile_smem: Smem) -> Reg:
    return widened(load_matrix(tile_smem))


def _row_sum(x: Reg) -> Reg:
    return jnp.sum(x, axis=1)

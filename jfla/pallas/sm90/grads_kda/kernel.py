"""The gradient kernel of KDA: q, k, g and `ScanResults` of a chunk to dq, dk, dg, v_new . dv.

A CTA takes one chunk of one value head, and 128 channels of K and of V. Its two warpgroups have 64
channels of K each, from the loads to the stores. The equations of dq, dk and dg are in `dqkg.py`;
dbeta = (v_new . dv) / beta^2 is docs/math.md, equation (14).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jfla.pallas.common.chunk_index import CHANNEL_BLOCK, TILE_K, TILE_V, ChunkIndex
from jfla.pallas.common.decay_sums import stack_matrices
from jfla.pallas.common.qk_tiles import K, Q, QkgOperands, QkOptions, QkTiles
from jfla.pallas.common.results import KernelGrads
from jfla.pallas.mgpu.copies import Copies
from jfla.pallas.mgpu.iota import iota2d, per_column, per_row
from jfla.pallas.mgpu.launch import launch
from jfla.pallas.mgpu.layouts import ROWS
from jfla.pallas.mgpu.mma import dot, zeros
from jfla.pallas.mgpu.opaque import opaque_zero
from jfla.pallas.mgpu.smem import BF16, F16, F32, transposed
from jfla.pallas.mgpu.types import Gmem, Index, Reg, Smem
from jfla.pallas.sm90.grads_kda.dqkg import Grads, dq_dk_dg
from jfla.pallas.sm90.grads_kda.smem import (
    GRAD_MATRICES,
    Barriers,
    GradsKdaOperands,
    GradsKdaWarpgroup,
    Salt,
    SharedStorage,
)
from jfla.stages import ScanResults
from jfla.types import CHUNK


def grads_kda(
    gmem: QkgOperands,
    scans: ScanResults,
    options: QkOptions,
    out_dtype: DTypeLike,
) -> KernelGrads:
    """On the host: launches the kernel.

    dq and dk come in `out_dtype`, or in float32 where the caller has something left to do.
    """
    batch, heads, n_chunks, value_dim, key_dim = scans.states.shape
    k_block = min(key_dim, CHANNEL_BLOCK)
    v_blocks = max(value_dim // CHANNEL_BLOCK, 1)
    num_tiles = k_block // TILE_K
    num_v_tiles = value_dim // v_blocks // TILE_V
    kernel_heads = heads * v_blocks
    if v_blocks > 1 or (k_block < key_dim and options.qk_norm):
        out_dtype = F32
    gmem, scans = _with_v_blocks_as_heads(gmem, scans, v_blocks)

    def body(
        gmem: GradsKdaOperands,
        grads: KernelGrads,
        smem: SharedStorage,
        barriers: Barriers,
    ) -> None:
        wg = lax.axis_index("wg")
        k_block_index = lax.axis_index("channels")
        index = ChunkIndex(*map(lax.axis_index, ("sequence", "head", "chunk")))
        first_tile = k_block_index * num_tiles
        qk = QkTiles(
            options, index, kernel_heads, num_tiles, smem.q, smem.k, smem.square_norms, first_tile
        )
        zero = gmem.zero[0]
        ctx = GradsKdaWarpgroup(wg, zero, zero, qk, gmem, smem, barriers, num_v_tiles)
        _run_chunk(ctx, grads)

        @pl.when((wg == 0) & (k_block_index == 0))
        def _():
            index.tile(grads.v_new_dot_dv)[...] = plgpu.load(smem.v_new_dot_dv, layout=ROWS)

        plgpu.wait_smem_to_gmem(0)

    grads: KernelGrads = launch(
        body,
        GradsKdaOperands(
            gmem,
            scans,
            stack_matrices(F16, *GRAD_MATRICES),
            stack_matrices(BF16, *GRAD_MATRICES),
            opaque_zero(),
        ),
        _grad_shapes(scans, key_dim, n_chunks, out_dtype),
        grid={
            "chunk": n_chunks,
            "channels": key_dim // k_block,
            "head": kernel_heads,
            "sequence": batch,
        },
        num_warpgroups=2,
        smem=SharedStorage.specs(gmem, options, num_tiles, num_v_tiles),
        barriers=Barriers.specs(gmem, options, num_tiles, num_v_tiles),
        name="jfla_grads_kda",
    )
    return _sum_v_blocks(grads, heads, v_blocks)


def _sum_v_blocks(grads: KernelGrads, heads: int, v_blocks: int) -> KernelGrads:
    """On the host: dg and v_new . dv over blocks of V; dq and dk are left to the caller."""
    batch, time = grads.dg.shape[:2]
    dg = grads.dg.reshape(batch, time, heads, v_blocks, -1)
    n_chunks = grads.v_new_dot_dv.shape[2]
    v_new_dot_dv = grads.v_new_dot_dv.reshape(batch, heads, v_blocks, n_chunks, CHUNK)
    return grads._replace(dg=jnp.sum(dg, axis=3), v_new_dot_dv=jnp.sum(v_new_dot_dv, axis=2))


def _grad_shapes(
    scans: ScanResults,
    key_dim: int,
    n_chunks: int,
    out_dtype: DTypeLike,
) -> KernelGrads:
    """On the host: a `jax.ShapeDtypeStruct` for each; blocks of V are heads already."""
    batch, time, heads, _ = scans.v_new.shape
    per_head = (batch, time, heads, key_dim)
    return KernelGrads(
        dq=jax.ShapeDtypeStruct(per_head, out_dtype),
        dk=jax.ShapeDtypeStruct(per_head, out_dtype),
        dg=jax.ShapeDtypeStruct(per_head, F32),
        v_new_dot_dv=jax.ShapeDtypeStruct((batch, heads, n_chunks, CHUNK), F32),
    )


def _with_v_blocks_as_heads(
    gmem: QkgOperands,
    scans: ScanResults,
    v_blocks: int,
) -> tuple[QkgOperands, ScanResults]:
    """On the host: every block of V is a value head of its own.

    The states stay as they are: see `GradsKdaWarpgroup.state_view`.
    """
    if v_blocks == 1:
        return gmem, scans

    def repeat(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else jnp.repeat(x, v_blocks, 0)

    def split_heads(x: jax.Array) -> jax.Array:
        batch, time, heads, _ = x.shape
        return x.reshape(batch, time, heads * v_blocks, -1)

    gmem = gmem._replace(rates=repeat(gmem.rates), bias=repeat(gmem.bias))
    scans = scans._replace(
        v_new=split_heads(scans.v_new), do=split_heads(scans.do), dv=split_heads(scans.dv)
    )
    return gmem, scans


def _run_chunk(ctx: GradsKdaWarpgroup, grads: KernelGrads) -> None:
    """All stages of a chunk, up to the stores of dq, dk and dg."""
    _load_chunk(ctx.recompute_addresses(Salt.LOAD))
    ctx.sync_warpgroups()
    _build_weights(ctx.recompute_addresses(Salt.WEIGHTS))
    ctx.sync_warpgroups()
    # With one tile of channels only warpgroup 0 goes on, and its number is known.
    own = ctx if ctx.qk.num_tiles == 2 else ctx._replace(wg=ctx.zero)

    @pl.when(ctx.owns_channels)
    def _():
        _epilogue(own.recompute_addresses(Salt.EPILOGUE), grads, dq_dk_dg(own))


def _load_chunk(ctx: GradsKdaWarpgroup) -> None:
    """Copies everything in; then this warpgroup's log2 decays, and square norms of q and k."""
    _prefetch_chunk(ctx)
    qk = ctx.qk
    qkg = ctx.gmem.qkg
    smem = ctx.smem
    barriers = ctx.barriers
    wg = ctx.wg

    @pl.when(ctx.owns_channels)
    def _():
        raw = qk.load_raw_gate(qkg, wg)  # under way while the copies are
        plgpu.barrier_wait(barriers.qk_full)
        if qk.options.qk_norm:
            qk.write_square_norms(wg, None if ctx.has_all_channels else qkg)
        bias = None if qk.options.no_gate else smem.bias.at[wg]
        smem.log2_decay.at[wg][...] = qk.scaled_log2_decay(raw, qkg, bias, smem.resets)

    @pl.when(wg >= qk.num_tiles)
    def _():
        plgpu.barrier_wait(barriers.qk_full)

    plgpu.barrier_wait(barriers.v_full)
    plgpu.barrier_wait(barriers.states_full)


def _prefetch_chunk(ctx: GradsKdaWarpgroup) -> None:
    """Starts this warpgroup's share of the copies, in the order in which they are needed."""
    qk = ctx.qk
    index = qk.index
    qkg = ctx.gmem.qkg
    scans = ctx.gmem.scans
    smem = ctx.smem
    barriers = ctx.barriers
    wg = ctx.wg

    def prefetch_values(*copies: tuple[Gmem, Smem]) -> None:
        @pl.loop(0, ctx.num_v_tiles)
        def _(n: Index) -> None:
            for source, target in copies:
                view = index.rows(source, qk.value_heads, pl.ds(n * TILE_V, TILE_V))
                plgpu.copy_gmem_to_smem(view, target.at[n], barriers.v_full)

    @pl.when(ctx.owns_channels)
    def _():
        qk.prefetch(wg, qkg.q, qkg.k, Copies(barriers.qk_full))
        if smem.bias is not None:
            bias = qkg.bias.at[index.head, qk.columns(wg)]
            plgpu.copy_gmem_to_smem(bias, smem.bias.at[wg], barriers.qk_full)
        ctx.sum_matrix.prefetch(0)

    @pl.when(wg == 0)
    def _():
        prefetch_values((scans.do, smem.do), (scans.v_new, smem.v_new))

    @pl.when(wg == 1)
    def _():
        if smem.resets is not None:
            resets = qkg.resets.at[index.batch, index.tokens]
            plgpu.copy_gmem_to_smem(resets, smem.resets, barriers.qk_full)
        prefetch_values((scans.dv, smem.dv))

    @pl.when(ctx.owns_channels)
    def _():
        ctx.adjoint_matrix.prefetch(0)

        @pl.loop(0, ctx.num_v_tiles)
        def _(n: Index) -> None:
            for first, source in ((0, scans.states), (2, scans.dstates)):
                view = ctx.state_view(source, n)
                plgpu.copy_gmem_to_smem(view, ctx.state(first + n), barriers.states_full)


def _build_weights(ctx: GradsKdaWarpgroup) -> None:
    """W_q by warpgroup 0; W_k, and v_new . dv, by warpgroup 1: docs/math.md, equation (13).

    Both are strictly lower; the diagonal of W_q goes to `diag_w_q`.
    """
    smem = ctx.smem

    def build(values_smem: Smem, diagonal_smem: Smem, sign: int) -> None:
        none = zeros(CHUNK, CHUNK)
        row = iota2d(0, CHUNK)
        column = iota2d(1, CHUNK)
        w = dot(none, *[(values_smem.at[n], transposed(smem.v_new.at[n])) for n in ctx.v_tiles()])
        diagonal_smem[...] = jnp.sum(jnp.where(row == column, w, none), axis=1)
        smem.weights.at[ctx.wg][...] = jnp.where(column < row, sign * w, none).astype(BF16)

    @pl.when(ctx.wg == 0)
    def _():
        build(smem.do, smem.diag_w_q, 1)

    @pl.when(ctx.wg == 1)
    def _():
        build(smem.dv, smem.v_new_dot_dv, -1)


def _epilogue(ctx: GradsKdaWarpgroup, grads_gmem: KernelGrads, grads: Grads) -> None:
    """Adds pairs i = j and `dg_chunk`; VJPs of the scale and the l2norm; stores dq, dk, dg."""
    dq, dk, dg = grads
    qk = ctx.qk.with_inv_norms()
    diag_w_q = per_row(ctx.smem.diag_w_q[...], TILE_K)
    dq = dq + diag_w_q * qk.scaled(K, ctx.wg)
    dk = dk + diag_w_q * qk.scaled(Q, ctx.wg)
    dg_chunk = per_column(ctx.smem.dg_chunk[ctx.wg], CHUNK)
    qk.view(grads_gmem.dg, ctx.wg)[...] = dg + dg_chunk
    for which, dx in ((Q, dq), (K, dk)):
        dx = dx * qk.scale(which)
        if qk.options.qk_norm and ctx.has_all_channels:
            dx = _norm_vjp(ctx, qk, which, dx)
        target = qk.view((grads_gmem.dq, grads_gmem.dk)[which], ctx.wg)
        if target.dtype == F32:
            target[...] = dx
        else:
            tile = ctx.scratch(which)
            tile[...] = dx.astype(BF16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, target)


def _norm_vjp(ctx: GradsKdaWarpgroup, qk: QkTiles, which: int, dx: Reg) -> Reg:
    """x = y / |y|, so dy = (dx - x (x . dx)) / |y|, and x . dx takes all channels."""
    norm_dot = ctx.smem.norm_dot
    norm_dot.at[which, ctx.wg][...] = jnp.sum(qk.normalized(which, ctx.wg) * dx, axis=1)
    ctx.sync_channel_owners()
    total: Any = sum(norm_dot[which, tile] for tile in range(qk.num_tiles))
    dx = dx - qk.normalized(which, ctx.wg) * per_row(total, TILE_K)
    return dx * per_row(qk.inv_norm(which), TILE_K)

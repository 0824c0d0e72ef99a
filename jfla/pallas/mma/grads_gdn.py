"""Kernel jfla_grads_gdn_mma: `FactoredQK`, token scalars and `ScanResults` to `KernelGrads`; a CTA a chunk.

D_ij is the decay from token j to token i; f_q and f_k are 1 / norm of q and k, f_q with the scale; q, k are as the
caller passed them; dv comes from the reverse scan and has the factor beta already. With

    W_q = tril(f_q D f_k do v_new^T)        W_k = -stril(f_k D f_k dv v_new^T)

the cotangents of q and k while the norms are held constant are

    dq = W_q k + q_from_start (do S^T)
    dk = (W_k + W_k^T) k + W_q^T q - k_from_start (dv S^T) + k_to_end (v_new dS^T)

with the rows of `FactoredQK.factors`. Where x meets exp(a sum of log decays), the cotangent of that sum is x . dx,
which gives dg; and dbeta = (dv . v_new) / beta^2. The one warpgroup takes 64 columns of V, or channels, at a time. Of
q and k under qk_norm it leaves the cotangents after the norm, because the adjoint of the norm needs all channels.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jfla.pallas.common.chunk_index import TILE_K, TILE_V, ChunkGrid, ChunkIndex
from jfla.pallas.common.grads_tiles import (
    DO,
    DSTATE,
    DV,
    G_AFTER,
    G_CHUNK,
    G_UP_TO,
    STATE,
    V_NEW,
    load_values,
)
from jfla.pallas.common.intra_gdn.smem import INV_NORMS
from jfla.pallas.common.packed_rows import places_of, rows_like
from jfla.pallas.common.pair_weights import pair_weights
from jfla.pallas.common.qk_tiles import K, Q, QkOptions
from jfla.pallas.common.results import KernelGrads
from jfla.pallas.mgpu.copies import (
    Copies,
    commit_smem,
    load_with_layout,
    store_from_layout,
)
from jfla.pallas.mgpu.diagonal import below_diagonal, diagonal
from jfla.pallas.mgpu.iota import per_column, per_row
from jfla.pallas.mgpu.launch import launch
from jfla.pallas.mgpu.layouts import COLS, ROWS
from jfla.pallas.mgpu.mma import dot, dots, load, zeros
from jfla.pallas.mgpu.opaque import zero_operand
from jfla.pallas.mgpu.scheduler import TileScheduler
from jfla.pallas.mgpu.smem import F32, tile_smem, transposed
from jfla.pallas.mgpu.types import Gmem, Index, MemorySpec, Reg, Smem
from jfla.pallas.mma.value_products import value_products
from jfla.stages import (
    CHUNK_DECAY,
    K_FROM_START,
    K_TO_END,
    Q_FROM_START,
    FactoredQK,
    ScanResults,
)
from jfla.types import CHUNK


class GradsGdnInputs(NamedTuple):
    """Global memory that the kernel reads."""

    qk: FactoredQK
    token_scalars: Gmem  # [B, HV, N, 1 or 3, C] float32: see `intra_gdn.LOG2_CUM`
    scans: ScanResults
    zero: Gmem  # of `zero_operand`


class SharedStorage(NamedTuple):
    """Shared memory of a CTA: tiles [C, 64] of 16 bits, vectors [C] float32."""

    values: Smem  # [3] tiles: 64 columns of V of do, dv, v_new
    states: Smem  # [2] tiles: 64 rows, of V, of S^T and dS^T, and 64 channels
    qk: Smem  # [2] tiles: 64 channels of q and k
    weights: Smem  # [2] tiles: W_q without its diagonal, and W_k
    factors: Smem  # [4] vectors
    token_scalars: Smem  # [1 or 3] vectors
    diagonals: Smem  # [2] vectors: do . v_new and dv . v_new of every token
    g_terms: Smem  # [3] vectors: x . dx by the span of the decay that x meets


class GradsGdnCta(NamedTuple):
    """What the warpgroup of a CTA sees of its chunk."""

    options: QkOptions
    index: ChunkIndex
    heads: int  # HV
    gmem: GradsGdnInputs
    smem: SharedStorage
    zero: Index

    def row_factor(self, row: int) -> Reg:
        """[C, 64]: a factor of `FactoredQK` for every token."""
        return per_row(load_with_layout(self.smem.factors.at[row], ROWS), TILE_K)

    def inv_norm(self, which: int) -> Reg:
        """[C]: 1 / norm of each row of q or k, under qk_norm."""
        return load_with_layout(self.smem.token_scalars.at[INV_NORMS + which], ROWS)


def load_states(ctx: GradsGdnCta, v_tile: Index, tile: Index, copies: Copies) -> None:
    """Starts the copies of a tile of the states at both ends of the chunk."""
    rows = pl.ds(v_tile * TILE_V, TILE_V)
    columns = pl.ds(tile * TILE_K, TILE_K)
    scans = ctx.gmem.scans
    for which, source in ((STATE, scans.states), (DSTATE, scans.dstates)):
        copies.start(
            ctx.index.tile(source).at[rows, columns], ctx.smem.states.at[which]
        )


def write_pair_weights(ctx: GradsGdnCta, num_v_tiles: int) -> None:
    """W_q and W_k, strictly lower, and their diagonals unscaled."""
    products = value_products(
        ctx.gmem.scans, ctx.index, ctx.heads, num_v_tiles, ctx.smem.values
    )
    for which, weights in enumerate(products):
        write_weights(ctx, which, weights)
    commit_smem()


def write_weights(ctx: GradsGdnCta, which: int, weights: Reg) -> None:
    """W_q or W_k with decays and norms, from the products of values."""
    ctx.smem.diagonals.at[which][...] = diagonal(weights)
    scale = ctx.options.scale if which == Q else -1.0
    qk_norm = ctx.options.qk_norm
    weights = pair_weights(weights, ctx.smem.token_scalars, which, scale, qk_norm)
    weights_smem = ctx.smem.weights.at[which]
    weights_smem[...] = weights.astype(weights_smem.dtype)


class SumsOverV(NamedTuple):
    """Sums over the columns of V, for 64 channels."""

    dq: Reg  # [C, 64]: do S^T
    dk: Reg  # [C, 64]: dv S^T
    dk_to_end: Reg  # [C, 64]: v_new dS^T
    # [64]: sums of S * dS; all of them together belong to the chunk
    state_dot_dstate: Reg


def sums_over_v(ctx: GradsGdnCta, tile: Index, num_v_tiles: int) -> SumsOverV:
    """What the states give to 64 channels."""

    def add(v_tile: Index, sums: SumsOverV) -> SumsOverV:
        commit_smem()  # the tiles before have been read
        copies = Copies(None)
        load_values(
            copies, ctx.gmem.scans, ctx.index, ctx.heads, v_tile, ctx.smem.values
        )
        load_states(ctx, v_tile, tile, copies)
        copies.wait()
        state = ctx.smem.states.at[STATE]
        dstate = ctx.smem.states.at[DSTATE]
        product = _load_f32(state) * _load_f32(dstate)
        dq, dk, dk_to_end = dots(
            (sums.dq, (ctx.smem.values.at[DO], state)),
            (sums.dk, (ctx.smem.values.at[DV], state)),
            (sums.dk_to_end, (ctx.smem.values.at[V_NEW], dstate)),
        )
        return SumsOverV(
            dq, dk, dk_to_end, sums.state_dot_dstate + jnp.sum(product, axis=1)
        )

    zero = zeros(CHUNK, TILE_K)
    zero_rows = plgpu.layout_cast(jnp.zeros(TILE_K, F32), ROWS)
    sums = SumsOverV(zero, zero, zero, zero_rows)
    # A loop also where there is one tile: beside what follows, its sums would be spilled. Several tiles are a loop
    # anyway; with a number that LLVM does not know that one spills.
    count = 1 + ctx.zero if num_v_tiles == 1 else num_v_tiles
    return lax.fori_loop(0, count, add, sums)


def store_tile_grads(
    ctx: GradsGdnCta, tile: Index, sums: SumsOverV, out_gmem: KernelGrads
) -> None:
    """dq and dk of 64 channels, and what they add to `g_terms`."""
    q_smem = ctx.smem.qk.at[Q]
    k_smem = ctx.smem.qk.at[K]
    w_q = ctx.smem.weights.at[Q]
    w_k = ctx.smem.weights.at[K]
    dq = dot(ctx.row_factor(Q_FROM_START) * sums.dq, (w_q, k_smem))
    dk_as_row = dot(-ctx.row_factor(K_FROM_START) * sums.dk, (w_k, k_smem))
    dk_as_column = dot(
        zeros(CHUNK, TILE_K), (transposed(w_q), q_smem), (transposed(w_k), k_smem)
    )
    dk_to_end = ctx.row_factor(K_TO_END) * sums.dk_to_end
    q = _load_f32(q_smem)
    k = _load_f32(k_smem)
    # The decay of a pair (i, j) spans the tokens j + 1 .. i. What the pair gives to i counts with a
    # plus for all tokens up to i, what it gives to j with a minus for all tokens up to j, where the
    # two cancel.
    up_to = jnp.sum(q * dq + k * (dk_as_row - dk_as_column), axis=1)
    after = jnp.sum(k * dk_to_end, axis=1)
    for term, x in (
        (G_UP_TO, up_to),
        (G_AFTER, after),
        (G_CHUNK, sums.state_dot_dstate),
    ):
        line = ctx.smem.g_terms.at[term]
        line[...] = load_with_layout(line, ROWS) + x
    # The diagonal of W_q, which no decay multiplies.
    diag_w_q = load_with_layout(ctx.smem.diagonals.at[Q], ROWS) * ctx.options.scale
    if ctx.options.qk_norm:
        diag_w_q = diag_w_q * ctx.inv_norm(Q) * ctx.inv_norm(K)
    diag_w_q = per_row(diag_w_q, TILE_K)
    dq = dq + diag_w_q * k
    dk = dk_as_row + dk_as_column + dk_to_end + diag_w_q * q
    for which, dx, target in ((Q, dq, out_gmem.dq), (K, dk, out_gmem.dk)):
        if ctx.options.qk_norm:
            dx = dx * per_row(1.0 / ctx.inv_norm(which), TILE_K)
        columns = pl.ds(tile * TILE_K, TILE_K)
        dx = dx.astype(target.dtype)
        store = lambda rows, dx=dx: store_from_layout(rows, dx)
        ctx.index.for_rows(target, ctx.heads, columns, store)


def store_dg(ctx: GradsGdnCta, out_gmem: KernelGrads) -> None:
    """dg of the chunk, and dv . v_new."""

    def columns(term: int) -> Reg:
        return per_column(load_with_layout(ctx.smem.g_terms.at[term], COLS), CHUNK)

    # The decay of token i is in the sums up to tokens j >= i, and in those after tokens j < i.
    terms = below_diagonal(columns(G_AFTER), columns(G_UP_TO))
    terms = terms + columns(G_CHUNK) * ctx.smem.factors[CHUNK_DECAY, 0]
    store_from_layout(ctx.index.tile(out_gmem.dg), jnp.sum(terms, axis=1))
    v_new_dot_dv = load_with_layout(ctx.smem.diagonals.at[K], ROWS)
    store_from_layout(ctx.index.tile(out_gmem.v_new_dot_dv), v_new_dot_dv)


def run_chunk(ctx: GradsGdnCta, out_gmem: KernelGrads) -> None:
    """Everything of a chunk."""
    copies = Copies(None)
    copies.start(ctx.index.tile(ctx.gmem.qk.factors), ctx.smem.factors)
    copies.start(ctx.index.tile(ctx.gmem.token_scalars), ctx.smem.token_scalars)
    copies.wait()
    num_v_tiles = ctx.gmem.scans.v_new.shape[-1] // TILE_V
    write_pair_weights(ctx, num_v_tiles)
    for term in (G_UP_TO, G_AFTER, G_CHUNK):
        ctx.smem.g_terms.at[term][...] = plgpu.layout_cast(jnp.zeros(CHUNK, F32), ROWS)

    @pl.loop(0, ctx.gmem.qk.key_dim // TILE_K)
    def _(tile: Index) -> None:
        commit_smem()  # the tiles of the channels before have been read
        copies = Copies(None)
        columns = pl.ds(tile * TILE_K, TILE_K)
        for which, source in ((Q, ctx.gmem.qk.q), (K, ctx.gmem.qk.k)):
            start = functools.partial(copies.start, target_smem=ctx.smem.qk.at[which])
            ctx.index.for_rows(source, ctx.heads, columns, start)
        sums = sums_over_v(ctx, tile, num_v_tiles)  # waits for these copies, too
        store_tile_grads(ctx, tile, sums, out_gmem)

    commit_smem()
    store_dg(ctx, out_gmem)


def grads_gdn(
    qk: FactoredQK,
    token_scalars: jax.Array,
    scans: ScanResults,
    options: QkOptions,
    out_dtype: DTypeLike,
) -> KernelGrads:
    """On the host: launches the kernel. `qk` and `token_scalars` are those of `intra_gdn`."""
    batch, heads, n_chunks, _, key_dim = scans.states.shape
    grid = ChunkGrid(batch, heads, n_chunks)

    def body(
        gmem: GradsGdnInputs,
        out_gmem: KernelGrads,
        smem: SharedStorage,
        barriers: tuple,
    ) -> None:
        del barriers
        cta = lax.axis_index("cta")
        index = grid(cta, places_of(gmem.qk.q))
        ctx = GradsGdnCta(options, index, heads, gmem, smem, gmem.zero[0])
        tiles = TileScheduler.one_for_each_cta(grid.num_tiles)
        tiles = tiles.up_to(grid.used_tiles(gmem.qk.q))
        tiles.if_any(cta, 0, lambda: run_chunk(ctx, out_gmem))

    per_channel = (batch, n_chunks * CHUNK, heads, key_dim)
    dx = rows_like(qk.q, per_channel, F32 if options.qk_norm else out_dtype)
    of_tokens = jax.ShapeDtypeStruct((*grid.shape, CHUNK), F32)
    return launch(
        body,
        GradsGdnInputs(qk, token_scalars, scans, zero_operand()),
        KernelGrads(dx, dx, of_tokens, of_tokens),
        grid={"cta": grid.num_tiles},
        num_warpgroups=1,
        smem=_shared_storage(token_scalars.shape[3], scans.v_new.dtype),
        name="jfla_grads_gdn_mma",
    )


def _shared_storage(num_token_scalars: int, dtype: DTypeLike) -> SharedStorage:
    def tiles(number: int) -> MemorySpec:
        return tile_smem(number, CHUNK, TILE_K, dtype=dtype)

    def vectors(number: int) -> MemorySpec:
        return plgpu.SMEM((number, CHUNK), F32)

    return SharedStorage(
        values=tiles(3),
        states=tiles(2),
        qk=tiles(2),
        weights=tiles(2),
        factors=vectors(4),
        token_scalars=vectors(num_token_scalars),
        diagonals=vectors(2),
        g_terms=vectors(3),
    )


def _load_f32(tile_smem: Smem) -> Reg:
    return load(tile_smem).astype(F32)

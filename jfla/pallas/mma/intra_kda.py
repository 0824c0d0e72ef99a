"""Kernel jfla_intra_kda_mma: `QkgOperands` and beta to `JoinedQK` and `IntraChunk`; a CTA, of one warpgroup, a chunk.

Tiles of 64 channels follow each other: gate, sums of decays, q and k as they meet the state; then what the tile adds to
the pairs of tokens, in the blocks of `kda_blocks.py`. The pairs are kept transposed, A^T: k, the columns, is the left
operand, in registers.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jfla.pallas.common.beta_scaling import write_a_inv, write_beta_scaling
from jfla.pallas.common.chunk_index import (
    TILE_K,
    ChunkGrid,
    ChunkIndex,
    joined_k_columns,
)
from jfla.pallas.common.packed_rows import Rows, places_of
from jfla.pallas.common.pair_passes import BLOCK, NUM_BLOCKS, RANGE, SHIFT, row_factor
from jfla.pallas.common.qk_tiles import K, Q, QkgOperands, QkOptions, QkTiles
from jfla.pallas.common.results import IntraResults
from jfla.pallas.mgpu.branches import when
from jfla.pallas.mgpu.copies import (
    Copies,
    commit_smem,
    load_with_layout,
    store_from_layout,
    store_tile,
    write_transposed,
)
from jfla.pallas.mgpu.iota import iota_smem, per_column, per_row, write_iota
from jfla.pallas.mgpu.layouts import COLS, ROWS
from jfla.pallas.mgpu.mma import dot, zeros
from jfla.pallas.mgpu.opaque import zero_operand
from jfla.pallas.mgpu.overlap import Kernel, PendingResults, ReadyFlags
from jfla.pallas.mgpu.scheduler import TileScheduler
from jfla.pallas.mgpu.smem import (
    BF16,
    F16,
    F32,
    in_one_place,
    tile_smem,
    transposed,
)
from jfla.pallas.mgpu.triangular import TriangularInverse
from jfla.pallas.mgpu.types import Gmem, Index, MemorySpec, Reg, Smem
from jfla.pallas.mgpu.warp_blocks import with_diagonal
from jfla.pallas.mma import kda_blocks
from jfla.pallas.mma.kda_blocks import ChunkDecays
from jfla.stages import IntraChunk, JoinedQK
from jfla.types import CHUNK


class IntraKdaInputs(NamedTuple):
    """Global memory that the kernel reads."""

    qkg: QkgOperands
    beta: Gmem  # [B, HV, N, 1, C], or None where the caller has the A matrices
    qk_dots: Gmem  # the same of the diagonal of a_qk, where the caller has it
    zero: Gmem  # of `zero_operand`


class IntraKdaOutputs(NamedTuple):
    """Global memory that the kernel writes."""

    qk: JoinedQK
    intra: IntraChunk | None


class SharedStorage(NamedTuple):
    """Shared memory of a CTA: tiles [C, 64] in the dtype of q unless said otherwise, vectors float32."""

    q: Smem  # [tiles] tiles
    k: Smem  # [tiles] tiles
    decay: Smem  # float16 tile: log2 decays of the tile of channels, times GATE_SCALE
    rows_or_a: Smem  # a pair in one place, see the properties `rows` and `a`
    square_norms: Smem  # [2, 1, C]
    log2_bias: Smem  # [tiles, 64], where there is a gate
    resets: Smem  # [C], where sequences are packed
    iota: Smem  # [1, C] int32
    # None of these where the caller has the A matrices.
    least: Smem  # [C]: of a row the least sum of log2 decays since its block began
    beta: Smem  # [1, C]
    qk_dots: Smem  # [1, C], where the caller has them
    beta_scaling: Smem  # [2, C]
    lower: Smem  # float16 tile: what is inverted
    inverse_work: Smem  # float16 tile

    @property
    def rows(self) -> Smem:
        """[2, 2] bf16 tiles: q and k with the factors of rows, of the first pass and of another."""
        return self.rows_or_a[0]

    @property
    def a(self) -> Smem:
        """[2] tiles, of Q and K: a_qk and a_inv."""
        return self.rows_or_a[1]


class IntraKdaCta(NamedTuple):
    """What the warpgroup of a CTA sees of its chunk."""

    qk: QkTiles
    gmem: IntraKdaInputs
    smem: SharedStorage
    zero: Index

    @property
    def index(self) -> ChunkIndex:
        return self.qk.index

    @property
    def decays(self) -> ChunkDecays:
        return ChunkDecays(self.smem.decay, self.smem.iota.at[0], self.zero)


def load_chunk(ctx: IntraKdaCta) -> None:
    """Copies what the chunk needs to shared memory, but the gate, and waits for it."""
    qkg = ctx.gmem.qkg
    smem = ctx.smem
    copies = Copies(None)
    for tile in range(ctx.qk.num_tiles):
        ctx.qk.prefetch(tile, qkg.q, qkg.k, copies)
        if smem.log2_bias is not None:
            log2_bias = qkg.log2_bias.at[ctx.index.head, ctx.qk.columns(tile)]
            copies.start(log2_bias, smem.log2_bias.at[tile])
    if smem.resets is not None:
        copies.start(qkg.resets.at[ctx.index.batch, ctx.index.tokens], smem.resets)
    if smem.beta is not None:
        copies.start(ctx.index.tile(ctx.gmem.beta), smem.beta)
    if smem.qk_dots is not None:
        copies.start(ctx.index.tile(ctx.gmem.qk_dots), smem.qk_dots)
    copies.wait()


def store_joined_qk(ctx: IntraKdaCta, tile: Index, out_gmem: JoinedQK) -> None:
    """q and k of a tile as they meet the state, and the chunk's decay."""
    columns = ctx.qk.columns(tile)
    k_columns = joined_k_columns(columns, out_gmem.key_dim)
    decays = ctx.decays

    def store(x: Reg, target: Gmem, target_columns: Index) -> None:
        tile_gmem = ctx.index.tile(target).at[:, target_columns]
        store_from_layout(tile_gmem, x.astype(target.dtype))

    from_start = jnp.exp2(decays.from_start())
    store(ctx.qk.scaled(Q, tile) * from_start, out_gmem.qk_from_start, columns)
    store(ctx.qk.scaled(K, tile) * from_start, out_gmem.qk_from_start, k_columns)
    to_end = jnp.exp2(decays.to_end())
    store(ctx.qk.scaled(K, tile) * to_end, out_gmem.k_to_end, columns)
    total = decays.whole_chunk()
    store_from_layout(ctx.index.tile(out_gmem.chunk_decay).at[columns], jnp.exp2(total))


def write_rows(
    ctx: IntraKdaCta, tile: Index, rows: Reg, which_pass: Index, rows_smem: Smem
) -> None:
    """q and k with the factors of rows in a pass of their blocks."""
    factor = row_factor(rows + SHIFT, RANGE * which_pass)
    for which in (Q, K):
        rows_smem.at[which][...] = (ctx.qk.scaled(which, tile) * factor).astype(BF16)
    commit_smem()


Pairs = tuple[Reg, Reg]  # of a block, transposed: [C, BLOCK] of q D k^T and of k D k^T


def add_pairs(ctx: IntraKdaCta, tile: Index, pairs: list[Pairs]) -> list[Pairs]:
    """What a tile of channels adds to the pairs of every block."""
    rows = ctx.decays.rows_in_block()
    ctx.smem.least[...] = jnp.min(rows, axis=1)
    write_rows(ctx, tile, rows, 0.0, ctx.smem.rows.at[0])
    return [add_block(ctx, tile, block, pair) for block, pair in enumerate(pairs)]


def add_block(ctx: IntraKdaCta, tile: Index, block: int, pairs: Pairs) -> Pairs:
    """What a tile adds to the pairs of a block, in as many passes as it takes.

    The rows of the first pass are there, of all blocks; those of others, which few gates need, are made for the pass.
    """

    def one_pass(which_pass: Index, pairs: Pairs) -> Pairs:
        bits = which_pass.astype(F32)

        @when(which_pass > 0)
        def _():
            commit_smem()  # the pass before has read its rows
            write_rows(ctx, tile, ctx.decays.rows_in_block(), bits, ctx.smem.rows.at[1])

        factor = kda_blocks.column_factor(ctx.decays.columns_to_block(block), bits)
        columns = (ctx.qk.scaled(K, tile) * factor).astype(BF16)
        rows_smem = ctx.smem.rows.at[jnp.minimum(which_pass, 1)]
        q_rows, k_rows = (
            kda_blocks.block_rows(rows_smem.at[which], block) for which in (Q, K)
        )
        qk, kk = pairs
        return dot(qk, (columns, transposed(q_rows))), dot(
            kk, (columns, transposed(k_rows))
        )

    return lax.fori_loop(
        0, kda_blocks.num_passes(ctx.smem.least, block), one_pass, pairs
    )


def store_a(ctx: IntraKdaCta, pairs: list[Pairs], out_gmem: IntraChunk) -> None:
    """a_qk, and a_inv through the inverse."""
    smem = ctx.smem
    commit_smem()  # the last pass has read its rows
    a_qk_smem = smem.a.at[Q]
    a_inv_smem = smem.a.at[K]
    for block, (qk, kk) in enumerate(pairs):
        zero = zeros(CHUNK, BLOCK)
        qk = jnp.where(kda_blocks.causal_columns(block, strictly=False), qk, zero)
        if smem.qk_dots is not None:
            diagonal = load_with_layout(smem.qk_dots.at[0], ROWS)
            qk = with_diagonal(qk, diagonal, block)
        a_qk_rows = kda_blocks.block_rows(a_qk_smem, block)
        write_transposed(a_qk_rows, qk.astype(a_qk_smem.dtype))
        kk = jnp.where(kda_blocks.causal_columns(block, strictly=True), kk, zero)
        kk = scaled_block(ctx, block, -kk)
        write_transposed(kda_blocks.block_rows(smem.lower, block), kk.astype(F16))
    commit_smem()
    store_tile(a_qk_smem, ctx.index.tile(out_gmem.a_qk))
    inverse = TriangularInverse(smem.lower, smem.inverse_work)
    write_a_inv(inverse, smem.beta_scaling, a_inv_smem, ctx.zero)
    store_tile(a_inv_smem, ctx.index.tile(out_gmem.a_inv))


def scaled_block(ctx: IntraKdaCta, block: int, x: Reg) -> Reg:
    """x [C, BLOCK] of L^T with the scaling of beta on its rows and columns: see `beta_scaling.py`."""
    scaling = ctx.smem.beta_scaling
    of_rows = load_with_layout(scaling.at[0, pl.ds(block * BLOCK, BLOCK)], COLS)
    of_columns = load_with_layout(scaling.at[1], ROWS)
    x = x * per_column(of_rows, CHUNK)
    return x * per_row(of_columns, BLOCK)


def run_chunk(ctx: IntraKdaCta, out_gmem: IntraKdaOutputs) -> None:
    """Everything of a chunk."""
    load_chunk(ctx)
    options = ctx.qk.options
    if options.qk_norm:
        ctx.qk.write_square_norms(0)
        commit_smem()
    pairs = [(zeros(CHUNK, BLOCK), zeros(CHUNK, BLOCK)) for _ in range(NUM_BLOCKS)]
    write_iota(ctx.smem.iota.at[0])
    if out_gmem.intra is not None:
        write_beta_scaling(ctx.smem.beta.at[0], ctx.smem.beta_scaling)

    def with_tile(
        tile: Index, carry: tuple[list[Pairs], Index]
    ) -> tuple[list[Pairs], Index]:
        pairs, zero = carry
        of_tile = ctx._replace(zero=zero)
        smem = ctx.smem
        log2_bias = None if smem.log2_bias is None else smem.log2_bias.at[tile]
        of_tile.qk.write_decays(tile, ctx.gmem.qkg, log2_bias, smem.resets, smem.decay)
        store_joined_qk(of_tile, tile, out_gmem.qk)
        if out_gmem.intra is not None:
            pairs = add_pairs(of_tile, tile, pairs)
        commit_smem()  # the next tile's decays and rows replace these
        return pairs, zero & tile

    pairs, _ = lax.fori_loop(0, ctx.qk.num_tiles, with_tile, (pairs, ctx.zero))
    if out_gmem.intra is not None:
        store_a(ctx, pairs, out_gmem.intra)


def intra_kda(
    operands: QkgOperands,
    beta: jax.Array | None,
    qk_dots: jax.Array | None,
    value_heads: int,
    options: QkOptions,
) -> PendingResults:
    """On the host: the kernel, not launched yet, which resolves to `IntraResults`. Without `beta` no A matrices."""
    batch, time, _, key_dim = operands.q.shape
    grid = ChunkGrid(batch, value_heads, time // CHUNK)
    num_tiles = key_dim // TILE_K

    def body(
        gmem: IntraKdaInputs,
        out_gmem: IntraKdaOutputs,
        smem: SharedStorage,
        barriers: None,
        cta: Index,
        ready_flags: ReadyFlags,
    ) -> None:
        del barriers, ready_flags
        index = grid(cta, places_of(gmem.qkg.q))
        qk = QkTiles(
            options, index, value_heads, num_tiles, smem.q, smem.k, smem.square_norms
        )
        ctx = IntraKdaCta(qk, gmem, smem, gmem.zero[0])
        tiles = TileScheduler.one_for_each_cta(grid.num_tiles)
        tiles = tiles.up_to(grid.used_tiles(gmem.qkg.q))
        tiles.if_any(cta, 0, lambda: run_chunk(ctx, out_gmem))

    inputs = IntraKdaInputs(operands, beta, qk_dots, zero_operand())
    kernel = Kernel(
        name="jfla_intra_kda_mma",
        inputs=inputs,
        outputs=_output_shapes(operands.q, grid, beta is not None),
        num_ctas=grid.num_tiles,
        num_warpgroups=1,
        registers=(),
        smem=_shared_storage(inputs, options, num_tiles),
        barriers=None,
        body=body,
    )
    return PendingResults(
        kernel, lambda outputs: IntraResults(outputs.qk, outputs.intra, None)
    )


def _output_shapes(q: Rows, grid: ChunkGrid, with_a: bool) -> IntraKdaOutputs:
    key_dim = q.shape[-1]

    def of_chunk(*shape: int, dtype: DTypeLike = q.dtype) -> Gmem:
        return jax.ShapeDtypeStruct((*grid.shape, *shape), dtype)

    qk_from_start = of_chunk(CHUNK, 2 * key_dim)
    k_to_end = of_chunk(CHUNK, key_dim)
    chunk_decay = of_chunk(key_dim, dtype=F32)
    square = of_chunk(CHUNK, CHUNK)
    intra = IntraChunk(square, square) if with_a else None
    return IntraKdaOutputs(JoinedQK(qk_from_start, k_to_end, chunk_decay), intra)


def _shared_storage(
    inputs: IntraKdaInputs, options: QkOptions, num_tiles: int
) -> SharedStorage:
    own = inputs.qkg.q.dtype
    with_a = inputs.beta is not None

    def tiles(*lead: int, dtype: DTypeLike = own) -> MemorySpec:
        return tile_smem(*lead, CHUNK, TILE_K, dtype=dtype)

    def vectors(*shape: int) -> MemorySpec:
        return plgpu.SMEM(shape, F32)

    return SharedStorage(
        q=tiles(num_tiles),
        k=tiles(num_tiles),
        decay=tiles(dtype=F16),
        rows_or_a=in_one_place(tiles(2, 2, dtype=BF16), tiles(2)) if with_a else None,
        square_norms=vectors(2, 1, CHUNK) if options.qk_norm else None,
        log2_bias=None if options.no_gate else vectors(num_tiles, TILE_K),
        resets=None if inputs.qkg.resets is None else vectors(CHUNK),
        least=vectors(CHUNK) if with_a else None,
        beta=vectors(1, CHUNK) if with_a else None,
        qk_dots=None if inputs.qk_dots is None else vectors(1, CHUNK),
        beta_scaling=vectors(2, CHUNK) if with_a else None,
        lower=tiles(dtype=F16) if with_a else None,
        inverse_work=tiles(dtype=F16) if with_a else None,
        iota=iota_smem(1, CHUNK),
    )

"""Kernel jfla_intra_gdn: q, k, log2 decay, beta to row factors, `IntraChunk` and token scalars.

With a decay per head, one number per pair of tokens multiplies an ordinary dot product, and one
number per token multiplies its row of q or k. So the scans read q and k as the caller passed them
(`FactoredQK`), and no decayed copies are stored.

The kernel is persistent. Every warpgroup is on its own: it loads a chunk, computes and stores it,
and takes the next.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jfla.pallas.common.beta_scaling import write_a_inv, write_beta_scaling, write_lower
from jfla.pallas.common.chunk_index import TILE_K, ChunkGrid, ChunkIndex
from jfla.pallas.common.packed_rows import Rows, places_of
from jfla.pallas.common.qk_tiles import K, Q, QkOptions, QkTiles
from jfla.pallas.common.results import IntraResults
from jfla.pallas.common.token_decay import pair_decay
from jfla.pallas.context import interpreting
from jfla.pallas.machine import on_hopper
from jfla.pallas.mgpu.copies import (
    Copies,
    commit_smem,
    store_tile,
    wait_for_stores,
    write,
)
from jfla.pallas.mgpu.iota import iota2d, iota_smem, per_column, per_row, write_iota
from jfla.pallas.mgpu.layouts import COLS, ROWS
from jfla.pallas.mgpu.mma import dot, zeros
from jfla.pallas.mgpu.opaque import pin
from jfla.pallas.mgpu.overlap import Kernel, PendingResults, ReadyFlags
from jfla.pallas.mgpu.scheduler import TileScheduler, WorkTile
from jfla.pallas.mgpu.smem import F16, F32, tile_smem, transposed
from jfla.pallas.mgpu.triangular import TriangularInverse
from jfla.pallas.mgpu.types import Barrier, Gmem, Index, MemorySpec, Reg, Smem
from jfla.stages import (
    CHUNK_DECAY,
    K_FROM_START,
    K_TO_END,
    Q_FROM_START,
    FactoredQK,
    IntraChunk,
)
from jfla.types import CHUNK

# Rows of token_inputs.
LOG2_DECAY = 0
BETA = 1  # only where the kernel is to make the `IntraChunk`s

# Rows of token_scalars.
LOG2_CUM = 0  # sum of log2 decay from the chunk's start to the token
INV_NORMS = 1  # 1 / norm of q, and in the next row of k; only under qk_norm


class IntraGdnConfig(NamedTuple):
    """How the chunks are spread: persistent warpgroups of a CTA, and CTAs at most."""

    wgs_per_cta: int
    max_ctas: int


class IntraGdnSpec(NamedTuple):
    """Static. Without `with_intra` the caller has the `IntraChunk`s."""

    options: QkOptions
    grid: ChunkGrid
    num_tiles: int  # of 64 channels of K
    wgs_per_cta: int
    with_intra: bool
    dtype: DTypeLike  # of q, k and the A matrices: bfloat16 or float16

    @property
    def loads_qk(self) -> bool:
        return self.with_intra or self.options.qk_norm

    @property
    def num_token_inputs(self) -> int:
        return 1 + self.with_intra

    @property
    def num_token_scalars(self) -> int:
        return 1 + 2 * self.options.qk_norm


class IntraGdnInputs(NamedTuple):
    """Global memory that the kernel reads."""

    q: Gmem  # [B, T, H, K] bfloat16 or float16
    k: Gmem  # [B, T, H, K] the same
    token_inputs: Gmem  # [B, HV, N, 1 or 2, C] float32: see LOG2_DECAY


class IntraGdnOutputs(NamedTuple):
    """Global memory that the kernel writes."""

    factors: Gmem  # [B, HV, N, 4, C] float32: see `FactoredQK`
    token_scalars: Gmem  # [B, HV, N, 1 or 3, C] float32: see LOG2_CUM
    intra: IntraChunk | None


class TokenVectors(NamedTuple):
    """Shared memory: vectors [C] float32, but for `iota`. All warpgroups' have a leading axis."""

    square_norms: Smem  # [2, 1, C]
    token_inputs: Smem  # [1 or 2, C]
    token_scalars: Smem  # [1 or 3, C]
    beta_scaling: Smem  # [2, C], or None without `with_intra`
    factors: Smem  # [4, C]
    iota: Smem  # [C] int32


class SharedStorage(NamedTuple):
    """Shared memory of a CTA. `q` and `k` are pairs (tiles in their dtype, float16 tiles): see `_qk_smem`."""

    q: Smem
    k: Smem
    vectors: TokenVectors


class Barriers(NamedTuple):
    """Mbarriers of a CTA."""

    loaded: Barrier  # [wgs]: the chunk of that warpgroup is in shared memory


class IntraGdnWarpgroup(NamedTuple):
    """What one warpgroup sees of the chunk that it works on: its own parts of shared memory."""

    spec: IntraGdnSpec
    wg: Index
    work: WorkTile
    qk: QkTiles
    lower: Smem  # [C, C] float16: the matrix to invert
    scratch: Smem  # [C, C] float16: of the inverse
    vectors: TokenVectors
    barriers: Barrier  # Barriers, or None without TMA

    def opaque_index(self, n: int) -> Index:
        """n, as a traced value: `dot` cannot close over a reference that a Python int indexed."""
        return self.work.zero + n

    def lower_mask(self) -> Reg:
        """[C, C]: True up to the diagonal."""
        return iota2d(1, CHUNK, self.vectors.iota) <= iota2d(0, CHUNK)


def load_tokens(ctx: IntraGdnWarpgroup, gmem: IntraGdnInputs) -> None:
    """Copies the chunk's q, k and token inputs to shared memory and waits for them."""
    loaded = Copies(None if ctx.barriers is None else ctx.barriers.loaded.at[ctx.wg])
    if ctx.spec.loads_qk:
        for tile in range(ctx.spec.num_tiles):
            ctx.qk.prefetch(tile, gmem.q, gmem.k, loaded)
    source = ctx.qk.index.tile(gmem.token_inputs)
    loaded.start(source, ctx.vectors.token_inputs)
    loaded.wait()


def write_row_factors(ctx: IntraGdnWarpgroup) -> None:
    """Writes token scalars, beta scaling and the factors of `FactoredQK` to shared memory."""
    vectors = ctx.vectors
    qk_norm = ctx.spec.options.qk_norm
    log2_decay = plgpu.load(vectors.token_inputs.at[LOG2_DECAY], layout=COLS)
    columns = pin(per_column(log2_decay, CHUNK))
    log2_cum = jnp.sum(
        jnp.where(ctx.lower_mask(), columns, zeros(CHUNK, CHUNK)), axis=1
    )
    write(vectors.token_scalars.at[LOG2_CUM], log2_cum)
    if qk_norm:
        ctx.qk.write_square_norms(0)
    if vectors.beta_scaling is not None:
        write_beta_scaling(vectors.token_inputs.at[BETA], vectors.beta_scaling)
    commit_smem()
    last = vectors.token_scalars[LOG2_CUM, CHUNK - 1]
    last = plgpu.layout_cast(lax.broadcast_in_dim(last, (CHUNK,), []), ROWS)
    q_from_start = jnp.exp2(log2_cum) * ctx.spec.options.scale
    k_from_start = jnp.exp2(log2_cum)
    k_to_end = jnp.exp2(last - log2_cum)
    if qk_norm:
        inv_norm_q = ctx.qk.inv_norm(Q)
        inv_norm_k = ctx.qk.inv_norm(K)
        write(vectors.token_scalars.at[INV_NORMS + Q], inv_norm_q)
        write(vectors.token_scalars.at[INV_NORMS + K], inv_norm_k)
        q_from_start = q_from_start * inv_norm_q
        k_from_start = k_from_start * inv_norm_k
        k_to_end = k_to_end * inv_norm_k
    chunk_decay = jnp.exp2(last)
    write(vectors.factors.at[Q_FROM_START], q_from_start)
    write(vectors.factors.at[K_FROM_START], k_from_start)
    write(vectors.factors.at[K_TO_END], k_to_end)
    write(vectors.factors.at[CHUNK_DECAY], chunk_decay)


def decayed_dots(ctx: IntraGdnWarpgroup, which: int) -> Reg:
    """[C, C] float32: scale * q D k^T, or k D k^T; above the diagonal D is 1."""
    qk = ctx.qk
    left = (qk.q, qk.k)[which]
    tiles = [ctx.opaque_index(tile) for tile in range(ctx.spec.num_tiles)]
    products = [(left.at[tile], transposed(qk.k.at[tile])) for tile in tiles]
    x = dot(zeros(CHUNK, CHUNK), *products)
    if ctx.spec.options.qk_norm:
        # Pinned, so that layout inference does not try every pair of layouts of one buffer.
        x = x * pin(per_row(qk.inv_norm(which), CHUNK))
        x = x * pin(per_column(qk.inv_norm(K), CHUNK))
    return x * pair_decay(ctx.vectors.token_scalars.at[LOG2_CUM], qk.scale(which))


def compute_a(ctx: IntraGdnWarpgroup, intra_gmem: IntraChunk) -> None:
    """Computes a_qk and a_inv and starts their stores.

    Each is staged in a tile that the dots have read: a_qk in the first of q, which k D k^T does not
    read, and a_inv in the first of k. With more than one tile, `ctx.lower` and `ctx.scratch` take
    the place of the last of q and of k.
    """
    index = ctx.qk.index
    beta_scaling = ctx.vectors.beta_scaling
    a_qk_smem = ctx.qk.q.at[ctx.opaque_index(0)]
    a_inv_smem = ctx.qk.k.at[ctx.opaque_index(0)]
    qk_dots = decayed_dots(
        ctx, Q
    )  # before the mask, which would be live across the dots
    a_qk = jnp.where(ctx.lower_mask(), qk_dots, zeros(CHUNK, CHUNK))
    a_qk_smem[...] = a_qk.astype(a_qk_smem.dtype)
    commit_smem()
    store_tile(a_qk_smem, index.tile(intra_gmem.a_qk))
    kk_dots = decayed_dots(ctx, K)
    write_lower(kk_dots, beta_scaling, ctx.lower, ctx.work.zero)
    inverse = TriangularInverse(ctx.lower, ctx.scratch)
    write_a_inv(inverse, beta_scaling, a_inv_smem, ctx.work.zero)
    store_tile(a_inv_smem, index.tile(intra_gmem.a_inv))


def intra_of_chunk(
    ctx: IntraGdnWarpgroup,
    gmem: IntraGdnInputs,
    out_gmem: IntraGdnOutputs,
    ready_flags: ReadyFlags,
) -> None:
    """Everything that a warpgroup does with a chunk."""
    index = ctx.qk.index
    load_tokens(ctx, gmem)
    write_row_factors(ctx)
    commit_smem()
    store_tile(ctx.vectors.factors, index.tile(out_gmem.factors))
    store_tile(ctx.vectors.token_scalars, index.tile(out_gmem.token_scalars))
    if out_gmem.intra is not None:
        compute_a(ctx, out_gmem.intra)
    ready_flags.signal(index.number)
    # The next chunk is loaded over what these stores read.
    wait_for_stores(read_only=True)


def intra_gdn(
    q: Rows,
    k: Rows,
    token_inputs: jax.Array,
    options: QkOptions,
    config: IntraGdnConfig,
) -> PendingResults:
    """On the host: the kernel, not launched yet, which resolves to `IntraResults`.

    `token_inputs` [B, HV, N, 1 or 2, C] float32: log2 decay; and beta, unless the caller has the
    `IntraChunk`s, which are then None in the results.
    """
    spec = _intra_spec(q, token_inputs.shape, options, config.wgs_per_cta)
    scheduler = TileScheduler(spec.grid.num_tiles, config.max_ctas, config.wgs_per_cta)

    def body(
        gmem: IntraGdnInputs,
        out_gmem: IntraGdnOutputs,
        smem: SharedStorage,
        barriers: Barriers | None,
        cta: Index,
        ready_flags: ReadyFlags,
    ) -> None:
        wg = lax.axis_index("wg")

        def work_on(work: WorkTile) -> None:
            index = spec.grid(work.tile_index, places_of(gmem.q))
            ctx = _warpgroup(spec, smem, barriers, wg, work, index)
            intra_of_chunk(ctx, gmem, out_gmem, ready_flags)

        # Beside a consumer with more warpgroups, some have no part in this kernel.
        @pl.when(wg < spec.wgs_per_cta)
        def _():
            write_iota(smem.vectors.iota.at[wg])
            tiles = scheduler.up_to(spec.grid.used_tiles(gmem.q))
            tiles.for_each_tile(work_on, cta, wg)

        wait_for_stores()

    def resolve(outputs: IntraGdnOutputs) -> IntraResults:
        qk = FactoredQK(q, k, outputs.factors)
        return IntraResults(qk, outputs.intra, outputs.token_scalars)

    kernel = Kernel(
        name="jfla_intra_gdn",
        inputs=IntraGdnInputs(q, k, token_inputs),
        outputs=_output_shapes(spec),
        num_ctas=scheduler.num_ctas,
        num_warpgroups=spec.wgs_per_cta,
        registers=(),
        smem=_shared_storage(spec),
        barriers=_barriers(spec),
        body=body,
    )
    return PendingResults(kernel, resolve)


def _intra_spec(
    q: Rows, inputs_shape: tuple[int, ...], options: QkOptions, wgs_per_cta: int
) -> IntraGdnSpec:
    batch, heads, n_chunks, num_token_inputs, _ = inputs_shape
    return IntraGdnSpec(
        options=options,
        grid=ChunkGrid(batch, heads, n_chunks),
        num_tiles=q.shape[-1] // TILE_K,
        wgs_per_cta=wgs_per_cta,
        with_intra=num_token_inputs > BETA,
        dtype=q.dtype,
    )


def _warpgroup(
    spec: IntraGdnSpec,
    smem: SharedStorage,
    barriers: Barriers | None,
    wg: Index,
    work: WorkTile,
    index: ChunkIndex,
) -> IntraGdnWarpgroup:
    """In the kernel: a warpgroup's view of shared memory and of its chunk."""
    row = wg + work.zero
    last_tile = work.zero + spec.num_tiles - 1
    q_smem, lower_smem = _own_tiles(smem.q, row, last_tile)
    k_smem, scratch_smem = _own_tiles(smem.k, row, last_tile)
    vectors = TokenVectors(*[None if x is None else x.at[row] for x in smem.vectors])
    qk = QkTiles(
        options=spec.options,
        index=index,
        value_heads=spec.grid.heads,
        num_tiles=spec.num_tiles,
        q=q_smem,
        k=k_smem,
        square_norms=vectors.square_norms,
    )
    return IntraGdnWarpgroup(
        spec, wg, work, qk, lower_smem, scratch_smem, vectors, barriers
    )


def _own_tiles(tiles_smem: Smem, row: Index, last_tile: Index) -> tuple[Smem, Smem]:
    """In the kernel: a warpgroup's tiles of q or of k, and its last float16 tile."""
    if tiles_smem is None:
        return None, None
    own_tiles, f16_tiles = tiles_smem
    return own_tiles.at[row], f16_tiles.at[row, last_tile]


def _output_shapes(spec: IntraGdnSpec) -> IntraGdnOutputs:
    def per_chunk(rows: int, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*spec.grid, rows, CHUNK), dtype)

    square: Gmem = per_chunk(CHUNK, spec.dtype)
    return IntraGdnOutputs(
        factors=per_chunk(4, F32),
        token_scalars=per_chunk(spec.num_token_scalars, F32),
        intra=IntraChunk(square, square) if spec.with_intra else None,
    )


def _shared_storage(spec: IntraGdnSpec) -> SharedStorage:
    def vectors(*rows: int) -> MemorySpec:
        return plgpu.SMEM((spec.wgs_per_cta, *rows, CHUNK), F32)

    return SharedStorage(
        q=_qk_smem(spec) if spec.loads_qk else None,
        k=_qk_smem(spec) if spec.loads_qk else None,
        vectors=TokenVectors(
            square_norms=vectors(2, 1),
            token_inputs=vectors(spec.num_token_inputs),
            token_scalars=vectors(spec.num_token_scalars),
            beta_scaling=vectors(2) if spec.with_intra else None,
            factors=vectors(4),
            iota=iota_smem(spec.wgs_per_cta, CHUNK),
        ),
    )


def _qk_smem(spec: IntraGdnSpec) -> MemorySpec:
    """All warpgroups' tiles of q or of k, and as many float16 ones; each uses its last.

    With more than one tile the two share their memory: the inverse is computed when the dots have
    read q and k. With one tile they lie apart, because a_qk and a_inv are staged in it. The race
    detector of interpret mode takes the tiles of all warpgroups for one buffer, so there they lie
    apart too.
    """
    shape = (spec.wgs_per_cta, spec.num_tiles, CHUNK, TILE_K)
    own_tiles = tile_smem(*shape, dtype=spec.dtype)
    f16_tiles = tile_smem(*shape, dtype=F16)
    if spec.num_tiles > 1 and not interpreting():
        return plgpu.RefUnion(own_tiles, f16_tiles)
    return own_tiles, f16_tiles


def _barriers(spec: IntraGdnSpec) -> Barriers | None:
    if not on_hopper():
        return None
    copies_of_qk = 2 * spec.num_tiles * spec.loads_qk
    return Barriers(
        loaded=plgpu.Barrier(
            num_arrivals=1 + copies_of_qk, num_barriers=spec.wgs_per_cta
        ),
    )

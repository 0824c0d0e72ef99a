"""Kernel jfla_intra_gdn: q, k, log2 decay, beta to row factors, `IntraChunk` and token scalars.

With a decay per head, one number per pair of tokens multiplies an ordinary dot product, and one
number per token multiplies its row of q or k. So the scans read q and k as the caller passed them
(`FactoredQK`), and no decayed copies are stored.

The kernel is persistent. Every warpgroup is on its own: it loads a chunk, computes and stores it,
and takes the next.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla.gates import NORM_EPSILON
from jfla.pallas.common.beta_scaling import write_a_inv, write_beta_scaling, write_lower
from jfla.pallas.common.intra_gdn.smem import (
    BETA,
    INV_NORMS,
    LOG2_CUM,
    LOG2_DECAY,
    Barriers,
    IntraGdnConfig,
    IntraGdnInputs,
    IntraGdnOutputs,
    IntraGdnWarpgroup,
    SharedStorage,
    intra_gdn_barriers,
    intra_gdn_spec,
    intra_gdn_storage,
    output_shapes,
)
from jfla.pallas.common.packed_rows import INPUTS, Rows, places_of
from jfla.pallas.common.qk_tiles import K, Q, QkOptions
from jfla.pallas.common.results import IntraResults
from jfla.pallas.common.token_decay import pair_decay
from jfla.pallas.mgpu.branches import when
from jfla.pallas.mgpu.copies import (
    Copies,
    commit_smem,
    load_with_layout,
    store_tile,
    wait_for_stores,
    write,
)
from jfla.pallas.mgpu.diagonal import below_diagonal
from jfla.pallas.mgpu.iota import per_column
from jfla.pallas.mgpu.layouts import COLS, ROWS
from jfla.pallas.mgpu.mma import dot, zeros
from jfla.pallas.mgpu.opaque import pin
from jfla.pallas.mgpu.overlap import Kernel, PendingResults, ReadyFlags
from jfla.pallas.mgpu.row_dots import row_squares
from jfla.pallas.mgpu.scheduler import TileScheduler, WorkTile
from jfla.pallas.mgpu.smem import transposed
from jfla.pallas.mgpu.triangular import TriangularInverse
from jfla.pallas.mgpu.types import Gmem, Index, Reg
from jfla.stages import (
    CHUNK_DECAY,
    K_FROM_START,
    K_TO_END,
    Q_FROM_START,
    FactoredQK,
)
from jfla.types import CHUNK


def load_tokens(
    ctx: IntraGdnWarpgroup, gmem: IntraGdnInputs, ready_flags: ReadyFlags
) -> None:
    """Copies the chunk's q, k and token inputs to shared memory and waits for them; and for room for its results."""
    loaded = Copies(None if ctx.barriers is None else ctx.barriers.loaded.at[ctx.wg])
    for tile in range(ctx.spec.num_tiles):
        ctx.qk.prefetch(tile, gmem.q, gmem.k, loaded)
    source = ctx.index.tile(gmem.token_inputs)
    loaded.start(source, ctx.vectors.token_inputs)
    ready_flags.wait_for_room(ctx.anew().index.flag)
    loaded.wait()


def write_row_factors(ctx: IntraGdnWarpgroup) -> None:
    """Writes token scalars, beta scaling and the factors of `FactoredQK` to shared memory."""
    vectors = ctx.vectors
    log2_decay = load_with_layout(vectors.token_inputs.at[LOG2_DECAY], COLS)
    columns = per_column(log2_decay, CHUNK)
    log2_cum = jnp.sum(below_diagonal(columns, with_diagonal=True), axis=1)
    write(vectors.token_scalars.at[LOG2_CUM], log2_cum)
    write_beta_scaling(vectors.token_inputs.at[BETA], vectors.beta_scaling)
    commit_smem()
    last = vectors.token_scalars[LOG2_CUM, CHUNK - 1]
    last = plgpu.layout_cast(lax.broadcast_in_dim(last, (CHUNK,), []), ROWS)
    q_from_start = jnp.exp2(log2_cum) * ctx.spec.options.scale
    k_from_start = jnp.exp2(log2_cum)
    k_to_end = jnp.exp2(last - log2_cum)
    if ctx.spec.options.qk_norm:
        inv_norm_q, inv_norm_k = [
            lax.rsqrt(squares + NORM_EPSILON)
            for squares in row_squares(ctx.tiles(Q), ctx.tiles(K))
        ]
        write(vectors.token_scalars.at[INV_NORMS + Q], inv_norm_q)
        write(vectors.token_scalars.at[INV_NORMS + K], inv_norm_k)
        for line in range(2):
            scaling = load_with_layout(vectors.beta_scaling.at[line], ROWS)
            write(vectors.norm_scaling.at[line], scaling * inv_norm_k)
        q_from_start = q_from_start * inv_norm_q
        k_from_start = k_from_start * inv_norm_k
        k_to_end = k_to_end * inv_norm_k
    chunk_decay = jnp.exp2(last)
    write(vectors.factors.at[Q_FROM_START], q_from_start)
    write(vectors.factors.at[K_FROM_START], k_from_start)
    write(vectors.factors.at[K_TO_END], k_to_end)
    write(vectors.factors.at[CHUNK_DECAY], chunk_decay)


def decayed_dots(ctx: IntraGdnWarpgroup, which: int) -> Reg:
    """[C, C] float32: q D k^T with scale and norms, or k D k^T without norms; above the diagonal anything."""
    products = [(x, transposed(k)) for x, k in zip(ctx.tiles(which), ctx.tiles(K))]
    x = dot(zeros(CHUNK, CHUNK), *products)
    scalars = ctx.vectors.token_scalars
    factor = ctx.spec.options.factor(which)
    log2_factor: Any = 0.0
    if factor > 0:
        log2_factor = math.log2(factor)
    else:  # no logarithm
        x = x * factor
    if which == Q and ctx.spec.options.qk_norm:
        inv_norm_k = load_with_layout(scalars.at[INV_NORMS + K], COLS)
        x = x * per_column(inv_norm_k, CHUNK)
        inv_norm_q = load_with_layout(scalars.at[INV_NORMS + Q], ROWS)
        log2_factor = log2_factor + jnp.log2(inv_norm_q)
    x = x * pair_decay(scalars.at[LOG2_CUM], log2_factor)
    # Pinned: ptxas would mix these products with the store of their result, and spill registers.
    return pin(x)


def compute_a_qk(ctx: IntraGdnWarpgroup, a_qk_gmem: Gmem) -> None:
    """Computes a_qk and starts its store from the first tile of q, which k D k^T does not read."""
    staging = ctx.qk.q.at[ctx.opaque_index(0)]
    a_qk = below_diagonal(decayed_dots(ctx, Q), with_diagonal=True)
    staging[...] = a_qk.astype(staging.dtype)
    commit_smem()
    store_tile(staging, ctx.index.tile(a_qk_gmem))


def compute_a_inv(ctx: IntraGdnWarpgroup, a_inv_gmem: Gmem) -> None:
    """Computes a_inv and starts its store from the first tile of k.

    With more than one tile, `ctx.lower` and `ctx.scratch` take the place of the last of q and of k.
    """
    staging = ctx.qk.k.at[ctx.opaque_index(0)]
    beta_scaling = ctx.vectors.beta_scaling
    dots = decayed_dots(ctx, K)
    # The norms of k in its rows and columns come with beta.
    lower_scaling = beta_scaling
    if ctx.spec.options.qk_norm:
        lower_scaling = ctx.vectors.norm_scaling
    write_lower(dots, lower_scaling, ctx.lower, ctx.work.zero)
    inverse = TriangularInverse(ctx.lower, ctx.scratch)
    write_a_inv(inverse, beta_scaling, staging, ctx.work.zero)
    store_tile(staging, ctx.index.tile(a_inv_gmem))


def intra_of_chunk(
    ctx: IntraGdnWarpgroup,
    gmem: IntraGdnInputs,
    out_gmem: IntraGdnOutputs,
    ready_flags: ReadyFlags,
) -> None:
    """Everything that a warpgroup does with a chunk, each part with addresses of its own."""
    index = ctx.index
    # Read here, the place of the next chunk has arrived when this chunk has.
    next_place = ctx.next_place()
    load_tokens(ctx, gmem, ready_flags)
    ctx.keep_place(next_place)
    write_row_factors(ctx)
    commit_smem()
    store_tile(ctx.vectors.factors, index.tile(out_gmem.factors))
    store_tile(ctx.vectors.token_scalars, index.tile(out_gmem.token_scalars))
    compute_a_qk(ctx.anew(), out_gmem.intra.a_qk)
    compute_a_inv(ctx.anew(), out_gmem.intra.a_inv)
    ready_flags.signal(ctx.anew().index.flag)
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

    `token_inputs` [B, HV, N, NUM_TOKEN_INPUTS, C] float32: log2 decay and beta.
    """
    spec = intra_gdn_spec(q, token_inputs.shape, options, config)
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
            places = places_of(gmem.q)
            ctx = IntraGdnWarpgroup(spec, smem, barriers, wg, work, places)
            intra_of_chunk(ctx, gmem, out_gmem, ready_flags)

        # Beside a consumer with more warpgroups, some have no part in this kernel.
        @when(wg < spec.wgs_per_cta)
        def _():
            tiles = scheduler.up_to(spec.grid.used_tiles(gmem.q))
            if smem.places is not None:
                first = scheduler.first(cta, wg).tile_index
                first = jnp.minimum(first, spec.grid.num_tiles - 1)
                smem.places[wg] = spec.grid(first, places_of(gmem.q)).place(INPUTS)
            tiles.for_each_tile(work_on, cta, wg)

        wait_for_stores()

    def resolve(outputs: IntraGdnOutputs) -> IntraResults:
        qk = FactoredQK(q, k, outputs.factors)
        return IntraResults(qk, outputs.intra, outputs.token_scalars)

    kernel = Kernel(
        name="jfla_intra_gdn",
        inputs=IntraGdnInputs(q, k, token_inputs),
        outputs=output_shapes(spec, config.ring),
        num_ctas=scheduler.num_ctas,
        num_warpgroups=spec.wgs_per_cta,
        registers=(),
        smem=intra_gdn_storage(spec, q),
        barriers=intra_gdn_barriers(spec),
        body=body,
    )
    return PendingResults(kernel, resolve)

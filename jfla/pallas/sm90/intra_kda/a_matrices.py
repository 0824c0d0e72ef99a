"""The A matrices of a chunk of KDA in a kernel, from q, k, beta and log decays of any strength.

    a_qk = tril(q D k^T)                     docs/math.md, equation (4); q is scaled
    a_inv = (I + L)^-1 diag(beta)            equation (5), L = stril(diag(beta) k D k^T)

D has a decay per channel, so it is split between the two factors of a matmul (docs/math.md, KDA's
factorings). From the chunk's start that takes one factor > 1, and is done in the rows where the
gates allow it; what a row becomes depends on no later token. In the other rows tokens decay from
the block's start inside blocks of 16, and between blocks of s tokens through their boundary, where
both factors are <= 1, for s = 32, 16; and where not even 16 tokens are in range, for s = 8 .. 1
too, and last a token with itself.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jfla.pallas.common.beta_scaling import write_a_inv, write_lower
from jfla.pallas.common.chunk_index import TILE_K
from jfla.pallas.common.decay_sums import FAST_RANGE, NEAR_STEPS, step_pairs_in_rows
from jfla.pallas.common.qk_tiles import K, Q
from jfla.pallas.mgpu.iota import iota2d
from jfla.pallas.mgpu.layouts import COLS
from jfla.pallas.mgpu.mma import dot, zeros
from jfla.pallas.mgpu.smem import BF16
from jfla.pallas.mgpu.triangular import TriangularInverse
from jfla.pallas.mgpu.types import Gmem, Index, Reg, Smem
from jfla.pallas.sm90.intra_kda.smem import STEP_MATRICES, IntraKdaWarpgroup
from jfla.types import CHUNK


def compute_a_kda(ctx: IntraKdaWarpgroup) -> Reg:
    """[C, C]: q_i . k_j (k_i . k_j in warpgroup 1) with the decay from j to i; 0 for j > i."""
    causal = _causal(ctx)
    a = ctx.dot_over_channels(ctx.rows, ctx.columns)
    a = jnp.where(causal, a, zeros(CHUNK, CHUNK))

    def recompute(a: Reg) -> Reg:
        return _recompute_strong_rows(ctx, a)

    def keep(a: Reg) -> Reg:
        return a

    too_strong = _any_row_too_strong(ctx, ctx.smem.min_from_start)
    return lax.cond(too_strong, recompute, keep, a)


def _causal(ctx: IntraKdaWarpgroup) -> Reg:
    """[C, C]: j <= i."""
    column = iota2d(1, CHUNK, ctx.iota)
    return column <= iota2d(0, CHUNK)


def _any_row_too_strong(ctx: IntraKdaWarpgroup, min_sums_smem: Smem) -> Reg:
    """Whether a sum is below -FAST_RANGE, so that k * 2^-sum would overflow bfloat16."""
    lines_smem = ctx.tiles_of(min_sums_smem)
    lines = [plgpu.load(line, layout=COLS) for line in lines_smem]
    return jnp.min(_min_over_tiles(lines)) <= -FAST_RANGE


def _strong_rows(ctx: IntraKdaWarpgroup, min_sums_smem: Smem) -> Reg:
    """[C]: mask of the rows where it is."""
    lines_smem = ctx.tiles_of(min_sums_smem)
    lines = [line[...] for line in lines_smem]
    return _min_over_tiles(lines) <= -FAST_RANGE


def _min_over_tiles(lines: list[Reg]) -> Reg:
    """Of one line, or of two."""
    if len(lines) == 1:
        return lines[0]
    return jnp.minimum(*lines)


def _recompute_strong_rows(ctx: IntraKdaWarpgroup, a: Reg) -> Reg:
    """a, with the rows replaced whose decay from the chunk's start is out of range.

    Hierarchically: blocks of 16 tokens first, then squares of halving size.
    """
    zero = ctx.work_tile.iteration & ctx.zero
    ctx = ctx.recompute_addresses(zero)
    ctx.reload_qk()
    a = _block_step(ctx, a)
    too_strong = _any_row_too_strong(ctx, ctx.smem.min_from_block)
    num_steps = jnp.where(too_strong, len(STEP_MATRICES), NEAR_STEPS)

    def step(i: Index, a: Reg) -> Reg:
        step_ctx = ctx.recompute_addresses(i & ctx.zero)
        return _halving_step(step_ctx, i, num_steps, a)

    return lax.fori_loop(1, num_steps, step, a)


def _block_step(ctx: IntraKdaWarpgroup, a: Reg) -> Reg:
    """Pairs inside blocks of 16 tokens decay from the block's start, which takes one factor > 1."""
    plgpu.barrier_wait(ctx.barriers.step_matrix_full)
    smem = ctx.smem

    def write_decayed(which: int, x: Reg) -> None:
        target = smem.decayed.at[ctx.zero + which, ctx.wg]
        target[...] = x.astype(BF16)

    @ctx.if_owns_channels
    def _():
        tile = ctx.wg
        qk = ctx.qk.with_inv_norms()
        sums = _step_sums(ctx)
        min_sums = smem.min_from_block.at[tile]
        min_sums[...] = jnp.min(sums, axis=1)
        growth = jnp.minimum(-sums, FAST_RANGE)
        growth = jnp.exp2(growth)
        k_columns = qk.scaled(K, tile) * growth
        write_decayed(1, k_columns)
        decay = jnp.exp2(sums)
        q = qk.scaled(Q, tile) * decay
        write_decayed(0, q)
        k = qk.scaled(K, tile) * decay
        write_decayed(2, k)

    ctx.sync_warpgroups()

    @pl.when(ctx.wg == 1)
    def _():
        ctx.prefetch_step_matrix(1)

    rows = smem.decayed.at[2 * ctx.wg]
    new = ctx.dot_over_channels(rows, ctx.columns)
    strong = _strong_rows(ctx, smem.min_from_start)
    replaced = step_pairs_in_rows(0, strong, ctx.iota)
    replaced = replaced & _causal(ctx)
    ctx.sync_warpgroups()
    return jnp.where(replaced, new, a)


def _step_sums(ctx: IntraKdaWarpgroup) -> Reg:
    """[C, 64]: every token's sum of log2 decays by the step matrix that is in shared memory."""
    matrix = ctx.smem.step_matrix.at[ctx.zero]
    log2_decay = ctx.smem.log2_decay.at[ctx.wg]
    return dot(zeros(CHUNK, TILE_K), (matrix, log2_decay))


def _halving_step(ctx: IntraKdaWarpgroup, i: Index, num_steps: Index, a: Reg) -> Reg:
    """Pairs in the squares of step i decay through the middle, both factors <= 1.

    The last step is a token with itself. Pairs inside blocks of 16 are replaced only in rows
    that are too strong even from the block's start.
    """
    plgpu.barrier_wait(ctx.barriers.step_matrix_full)
    smem = ctx.smem

    @ctx.if_owns_channels
    def _():
        tile = ctx.wg
        qk = ctx.qk.with_inv_norms()
        decay = jnp.exp2(_step_sums(ctx))
        for which in (Q, K):
            x = qk.scaled(which, tile) * decay
            target = smem.decayed.at[ctx.zero + which, tile]
            target[...] = x.astype(BF16)

    ctx.sync_warpgroups()

    has_next = i + 1 < num_steps

    @pl.when((ctx.wg == 1) & has_next)
    def _():
        ctx.prefetch_step_matrix(i + 1)

    rows = smem.decayed.at[ctx.wg]
    new = ctx.dot_over_channels(rows, ctx.columns)
    strong = _strong_rows(ctx, smem.min_from_start)
    strong_in_block = _strong_rows(ctx, smem.min_from_block)
    rows = strong & ((i < NEAR_STEPS) | strong_in_block)
    replaced = step_pairs_in_rows(i, rows, ctx.iota)
    ctx.sync_warpgroups()
    return jnp.where(replaced, new, a)


def store_block_sum(ctx: IntraKdaWarpgroup, a: Reg, block_sums_gmem: Gmem) -> None:
    """What this channel block adds to q D k^T (warpgroup 0) or k D k^T (1), to global memory."""
    block = lax.div(ctx.part.first_tile, jnp.int32(ctx.qk.num_tiles))
    target = ctx.qk.index.tile(block_sums_gmem).at[block, ctx.wg]
    target[...] = a


def store_a_qk(ctx: IntraKdaWarpgroup, a: Reg, a_qk_gmem: Gmem) -> None:
    """Warpgroup 0: a_qk to global memory, through a tile that no matmul reads any more."""
    zero = ctx.zero
    a_qk = ctx.smem.decayed.at[zero + 2, zero]
    a_qk[...] = a.astype(BF16)
    plgpu.commit_smem()
    target = ctx.qk.index.tile(a_qk_gmem)
    plgpu.copy_smem_to_gmem(a_qk, target)


def pass_lower(ctx: IntraKdaWarpgroup, a: Reg) -> None:
    """Warpgroup 1: k D k^T with beta around it into `lower`, for warpgroup 2 to invert."""
    scaling_smem = ctx.wait_beta_scaling(0)
    plgpu.barrier_wait(ctx.barriers.lower_empty)
    lower = ctx.smem.lower.at[ctx.zero]
    write_lower(a, scaling_smem, lower, ctx.zero)
    plgpu.barrier_arrive(ctx.barriers.lower_full)


def inverse_warpgroup(ctx: IntraKdaWarpgroup, a_inv_gmem: Gmem) -> None:
    """Warpgroup 2: a_inv of a chunk from `lower`, while the q/k warpgroups are at the next."""
    ctx.prefetch_beta()
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    scaling_smem = ctx.wait_beta_scaling(1)
    plgpu.barrier_wait(ctx.barriers.lower_full)
    zero = ctx.zero
    smem = ctx.smem
    lower = smem.lower.at[zero]
    work = smem.inverse_work.at[zero]
    a_inv = smem.a_inv.at[zero]
    inverse = TriangularInverse(lower, work, zero, ctx.iota)
    write_a_inv(inverse, scaling_smem, a_inv)
    plgpu.barrier_arrive(ctx.barriers.lower_empty)

    # Warpgroups 0 and 1 waited for their TMA stores of the previous chunk before warpgroup 1
    # arrived on `lower_full`, so that with this warpgroup's own stores all of that chunk is in
    # global memory.
    @pl.when(ctx.work_tile.has_previous)
    def _():
        ctx.ready_flags.signal(ctx.previous_index)

    target = ctx.qk.index.tile(a_inv_gmem)
    plgpu.copy_smem_to_gmem(a_inv, target)
